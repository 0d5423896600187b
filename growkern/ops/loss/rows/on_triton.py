"""The rows of the KL + MLM loss in Triton: launches the row kernel.

Shape letters used in this file: N rows, V vocabulary, K teachers, S numbers of a row.
"""

import os
from typing import Any

from torch import Tensor

from growkern.ops.backend import acc_dtype, next_power_of_2, tl
from growkern.ops.backend.launch import launch
from growkern.ops.loss.rows.once_on_triton import VARIABLE, may_read_once, read_rows_once
from growkern.ops.loss.rows.state import Rows, Steps, clear
from growkern.ops.loss.rows.triton_kernel import kl_mlm_rows_kernel

# 16 elements per thread of 8 warps: enough loads in flight, and two blocks fit a multiprocessor
MAX_BLOCK_V = 4096
# left to itself ptxas aims at 80 registers on sm_80 and spills
MAX_REGISTERS = 128


def most_columns(ACC: Any) -> int:
    """Columns of a block. In float64 exp takes twenty registers beside the two per element."""
    return MAX_BLOCK_V // (4 if ACC is tl.float64 else 1)


def lanes_of(block: int, warps: int, wide: int) -> tuple[int, int]:
    """LANES of the kernel: threads of a program, and columns that each reads at once.

    `block` counts columns, and `wide` those in 16 bytes, or 1 where rows are not aligned.
    """
    wide = min(wide, block)
    return min(32 * warps, block // wide), wide


def _columns_at_once(*rows_NV: Tensor) -> int:
    """Columns that a thread takes of each of these tensors: what 16 bytes of the narrowest hold.

    Where a row may begin at any address, Triton reads it column by column.
    """
    if any(x.data_ptr() % 16 or x.stride(0) % 16 for x in rows_NV if x.ndim > 1):
        return 1
    return 16 // min(x.itemsize for x in rows_NV)


def rows_on_triton(
    rows: Rows,
    state_SN: Tensor,
    steps: Steps,
    drows_SN: Tensor | None = None,
    dstudent_NV: Tensor | None = None,
) -> None:
    """Fill `state_SN` and, given the gradient of the terms, `dstudent_NV`, as `steps` says.

    Arguments as in `rows_on_cpu`.
    """
    _, _, labels_N, kind_N, vocab, maths, parts, _ = rows
    student_NV, *teachers_NV = (
        x if x.stride(-1) == 1 else x.contiguous() for x in (rows.student_NV, *rows.teachers_NV)
    )
    N = student_NV.shape[0]
    if N == 0 or vocab == 0:
        if steps.sums:
            clear(state_SN)
        return
    grad_NV = student_NV if dstudent_NV is None else dstudent_NV
    # those of a chunk are some columns of those of a batch
    drows_WN = state_SN if drows_SN is None else drows_SN
    drows_WN = drows_WN if drows_WN.stride(1) == 1 else drows_WN.contiguous()
    if dstudent_NV is not None and dstudent_NV.shape[1] > vocab:
        dstudent_NV[:, vocab:] = 0
    if os.environ.get(VARIABLE) == "1" and may_read_once(rows, steps, dstudent_NV):
        here = rows._replace(student_NV=student_NV, teachers_NV=teachers_NV)
        if read_rows_once(here, state_SN, drows_WN, grad_NV):
            return
    ACC = acc_dtype(student_NV)[1]
    block = min(most_columns(ACC), next_power_of_2(vocab))
    choice = {"BLOCK_V": block, "num_warps": 8, "maxnreg": MAX_REGISTERS}
    biases = [bias for bias in rows.biases if bias is not None]
    wide = _columns_at_once(student_NV, *teachers_NV, *biases, *[grad_NV] * steps.grad)
    launch(
        kl_mlm_rows_kernel,
        N,
        student_NV,
        (student_NV, *teachers_NV),
        tuple(rows.biases) or (None,) * (1 + len(teachers_NV)),
        labels_N,
        kind_N,
        drows_WN,
        state_SN,
        grad_NV,
        tuple(x.stride(0) for x in (student_NV, grad_NV, drows_WN, *teachers_NV)),
        vocab,
        MATHS=maths.of_kernels(),
        STEPS=(*steps, parts),
        ACC=ACC,
        LANES=lanes_of(choice["BLOCK_V"], choice["num_warps"], wide),
        **choice,
    )
