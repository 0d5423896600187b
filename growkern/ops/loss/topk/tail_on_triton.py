"""The gradient of the tail in Triton.

Equations are numbered in `topk_kl_mlm_loss.py`. Shape letters used in this file: N rows, V
vocabulary.
"""

from torch import Tensor

from growkern.ops.backend import acc_dtype, jit, next_power_of_2, tl
from growkern.ops.backend.launch import launch
from growkern.ops.loss.rows.on_triton import MAX_REGISTERS, most_columns
from growkern.ops.loss.rows.state import Rows
from growkern.ops.loss.rows.triton_blocks import (
    exponentials,
    load_logits,
    store_gradient,
    zero_row,
)
from growkern.ops.loss.rows.triton_sums import INV_T, MLM_ROW, before_cap, smoothed

# `TailFactors` of `topk/buckets.py`; a test compares them
MAXIMUM, SOFTMAX, SOFTMAX_T, AT_LABEL, EVERYWHERE = map(tl.constexpr, range(5))
FACTORS = tl.constexpr(5)
# strides between rows
STUDENT, DSTUDENT = map(tl.constexpr, range(2))


@jit
def _write_block(
    student_ptr, dstudent_ptr, tail, label, v, V,
    MASKED: tl.constexpr, MATHS: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    """Write a block of the gradient; `tail` has the numbers of `TailFactors`."""
    s = load_logits(student_ptr, None, v, V, MASKED, 0, ACC)  # (BLOCK_V,)
    e, e_t = exponentials(s - tail[MAXIMUM], MATHS[INV_T])
    g = tl.where(v == label, tail[AT_LABEL], tail[SOFTMAX] * e)
    g += tail[SOFTMAX_T] * e_t
    g = before_cap(smoothed(g, tail[EVERYWHERE], MATHS), s, MATHS)
    store_gradient(dstudent_ptr, v, V, g, MASKED)


@jit
def tail_gradient_kernel(
    student_ptr,  # (N, V)  capped already
    labels_ptr,  # (N,)
    kind_ptr,  # (N,)
    tail_ptr,  # (5, N)  `TailFactors`
    dstudent_ptr,  # (N, V)  out, may be the memory of the logits
    strides,  # rows of student, dstudent
    N,
    V,
    MATHS: tl.constexpr,  # as in `rows/triton_sums.py`
    ACC: tl.constexpr,
    BLOCK_V: tl.constexpr,
):
    # int64: as in `kl_mlm_rows_kernel`
    n = tl.program_id(0).to(tl.int64)
    student_ptr += n * strides[STUDENT]
    dstudent_ptr += n * strides[DSTUDENT]
    tail_ptr += n
    kind = tl.load(kind_ptr + n)
    if kind == 0:
        zero_row(dstudent_ptr, V, BLOCK_V)
    else:
        label = tl.where((kind & MLM_ROW) != 0, tl.load(labels_ptr + n), -1)
        tail = ()
        for j in tl.static_range(FACTORS):
            tail += (tl.load(tail_ptr + N * j),)  # type: ignore[assignment]
        whole = V // BLOCK_V * BLOCK_V
        for start in range(0, whole, BLOCK_V):
            v = start + tl.arange(0, BLOCK_V)
            _write_block(student_ptr, dstudent_ptr, tail, label, v, V, False, MATHS, ACC)
        if whole < V:
            v = whole + tl.arange(0, BLOCK_V)
            _write_block(student_ptr, dstudent_ptr, tail, label, v, V, True, MATHS, ACC)


def tail_gradient_on_triton(rows: Rows, tail_5N: Tensor, dstudent_NV: Tensor) -> None:
    """As `tail_gradient_on_cpu`."""
    student_NV, _, labels_N, kind_N, V, maths, *_ = rows
    if V == 0:
        return
    ACC = acc_dtype(student_NV)[1]
    block = min(most_columns(ACC), next_power_of_2(V))
    choice = {"BLOCK_V": block, "num_warps": 8, "maxnreg": MAX_REGISTERS}
    launch(
        tail_gradient_kernel,
        len(student_NV),
        student_NV,
        student_NV,
        labels_N,
        kind_N,
        tail_5N.contiguous(),
        dstudent_NV,
        (student_NV.stride(0), dstudent_NV.stride(0)),
        len(student_NV),
        V,
        MATHS=maths.of_kernels(),
        ACC=ACC,
        **choice,
    )
