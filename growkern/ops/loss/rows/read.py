"""Reading rows once where that is enough, and as often as slices of the vocabulary need.

Shape letters used in this file: N rows, V columns of a slice, S numbers of a row.
"""

from collections.abc import Callable, Iterable
from typing import TypeAlias

import torch
from torch import Tensor

from growkern.ops.backend.launch import acc_torch_dtype
from growkern.ops.loss.rows.on_cpu import rows_on_cpu
from growkern.ops.loss.rows.on_cuda import rows_on_cuda
from growkern.ops.loss.rows.on_triton import rows_on_triton
from growkern.ops.loss.rows.options import Rows
from growkern.ops.loss.rows.state import (
    Steps,
    add_second_reading,
    clear,
    merge,
    needs_second_reading,
)
from growkern.ops.loss.rows.vocab_parallel import add_up, gather

ROW_FUNCTIONS = {"cpu": rows_on_cpu, "triton": rows_on_triton, "cuda": rows_on_cuda}
RowFunction: TypeAlias = Callable[..., None]


def state_dtype(student_NV: Tensor, backend: str) -> torch.dtype:
    """What rows of ready logits are summed in.

    Of float32 ones a CPU takes the sums and differences in float64: q - p of (5) would lose, at 1 %
    drift, all but five digits. A GPU has other ways (`rows/triton_kernel.py`).
    """
    is_wide = backend == "cpu" and student_NV.dtype == torch.float32
    return torch.float64 if is_wide else acc_torch_dtype(student_NV)


def read_rows(run: RowFunction, rows: Rows, group: str, state_SN: Tensor) -> None:
    """Fill the state from logits that are all here, or all of one rank's."""
    second = needs_second_reading(len(rows.teachers_NV), rows.maths)
    if group:
        read_slices(run, lambda: (rows,), group, state_SN)
    else:
        run(rows, state_SN, Steps(sums=True, diverge=second))


def read_slices(
    run: RowFunction, slices: Callable[[], Iterable[Rows]], group: str, state_SN: Tensor
) -> None:
    """Fill the state from slices that come by one at a time, here and on the ranks of `group`."""
    merged_SN = state_SN.clone()
    clear(merged_SN)
    for rows in slices():
        run(rows, state_SN, Steps(sums=True))
        merged_SN = merge(torch.stack([merged_SN, state_SN]), rows.maths)
    if group:
        merged_SN = merge(gather(merged_SN, group), rows.maths)
    if needs_second_reading(len(rows.teachers_NV), rows.maths):
        second_SN = torch.zeros_like(merged_SN)
        for rows in slices():
            state_SN.copy_(merged_SN)
            run(rows, state_SN, Steps(diverge=True))
            add_second_reading(second_SN, state_SN)
        if group:
            add_up(second_SN, group)
        add_second_reading(merged_SN, second_SN)
    state_SN.copy_(merged_SN)
