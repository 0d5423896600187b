"""What extra coordinates copy: rows made from the source where a LayerNorm's width is uneven.

    written axis     the functional f_t = (1/n) 1 + delta e_t w of its rows, one per sign e_t, where
                     w = (gamma - mean(gamma)) / n belongs to the norm the vector enters  (1)
    first FFN matrix the rows 1/n and w, read by the carry units                          (2)
    second FFN matrix the columns that add them to the extra coordinates                  (3)

A carrying norm then multiplies extra coordinate k by 1 / (delta e_k): it leaves as the mean of the
norm's output.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from growkern.growth.plan.blueprint import Blueprint, Task
from growkern.growth.plan.pieces import SUMMED_BYTES
from growkern.growth.source.files import row_blocks


def made_rows(
    plan: Blueprint,
    task: Task,
    name: str,
    read: Callable[[str], Tensor],
    extra: Sequence[bool],
    rows: Tensor,
) -> Tensor:
    """What a block is gathered from: the source tensor `name`, or what is made from it.

    Args:
        extra: per axis, whether the block's target entries are extra ones.
        rows: entries of the first axis that the block gathers; others may be undefined.
    """
    weight = read_or_make(plan, task, name, read)
    if not any(extra):
        return weight
    kinds = []
    for axis in task.tensor.axes:
        role, _, space = axis.partition(":")
        kinds.append((role, "" if "|" in space or not space else space))
    layout, size = plan.layout, plan.layout.stream_sizes[0]
    signs = torch.tensor(layout.space("stream").signs, dtype=torch.float64)
    delta, mean = plan.options.carry, torch.full((size,), 1 / size, dtype=torch.float64)

    def functionals() -> Tensor:
        return mean + delta * signs[:, None] * _carried_weight(plan, task, read)

    result = weight
    for dim, (role, space) in enumerate(kinds):
        if not extra[dim]:
            continue
        if role == "read":
            # (3), for the copies and for the extra rows
            copied = extra == (False, True)
            ones, carried = torch.ones(len(signs), dtype=torch.float64), delta * signs
            columns = torch.stack([ones, carried], 1)
            made = torch.zeros(weight.shape[0], 2, dtype=torch.float64) if copied else columns
            return made.to(weight.dtype)
        if layout.family.spaces[space].kind == "stream":
            result = _weighted_sums(plan, task, name, weight, dim, functionals, rows)
        elif weight.ndim == 1:
            result = weight.new_zeros(2)
        else:
            result = torch.stack([mean, _carried_weight(plan, task, read)]).to(weight.dtype)
    return result


def read_or_make(plan: Blueprint, task: Task, name: str, read: Callable[[str], Tensor]) -> Tensor:
    """A source tensor, or the identity it stands for where the source has none."""
    if name != "identity":
        return read(name)
    sizes = [plan.small.axis_size(axis) for axis in task.tensor.axes]
    return torch.eye(*sizes, dtype=plan.source.dtype)


# --------------------------------------------------------------------- sums


def _weighted_sums(
    plan: Blueprint,
    task: Task,
    name: str,
    weight: Tensor,
    dim: int,
    functionals: Callable[[], Tensor],
    wanted: Tensor,
) -> Tensor:
    """(1): weighted sums over axis `dim` of a tensor, one per functional, in its dtype.

    Every row of the tensor is read once, whatever the number of pieces. Sums over columns are
    undefined outside the `wanted` rows.
    """
    stored = plan.source.headers.get(name)
    # a mapped tensor is mapped anew for every block, so that summed rows need not stay in memory
    rows_of = stored.rows if stored is not None and stored.is_mapped else lambda a, b: weight[a:b]
    blocks = row_blocks(tuple(weight.shape), weight.itemsize, SUMMED_BYTES)
    key = ("sums", task.name, name)
    if dim == 0:
        return plan.kept.get(key, lambda: _sum_rows(functionals(), rows_of, blocks, weight))
    sums = plan.kept.get(key, lambda: _ColumnSums(functionals(), weight))
    sums.add(rows_of, [blocks[i] for i in (wanted // blocks[0][1]).unique().tolist()])
    return sums.result


RowsOf = Callable[[int, int], Tensor]


def _sum_rows(
    functionals: Tensor, rows_of: RowsOf, blocks: Sequence[tuple[int, int]], like: Tensor
) -> Tensor:
    total = torch.zeros(len(functionals), *like.shape[1:], dtype=torch.float64)
    for first, stop in blocks:
        total += torch.tensordot(functionals[:, first:stop], _wide(rows_of(first, stop)), dims=1)
    return total.to(like.dtype)


class _ColumnSums:
    """Sums over the columns, for the rows that somebody asked for; threads may share it."""

    def __init__(self, functionals: Tensor, like: Tensor) -> None:
        self.result = torch.empty(len(like), len(functionals), dtype=like.dtype)
        self._columns, self._done = functionals.t().contiguous(), set[tuple[int, int]]()

    def add(self, rows_of: RowsOf, blocks: Sequence[tuple[int, int]]) -> None:
        for block in blocks:
            # two threads may sum the same block: they write the same
            if block not in self._done:
                self.result[slice(*block)] = (_wide(rows_of(*block)) @ self._columns).to(
                    self.result.dtype
                )
                self._done.add(block)


def _wide(rows: Tensor) -> Tensor:
    # a copy of float64 too: the order of a sum hangs on the alignment of its summands
    return rows.to(torch.float64, copy=True)


def _carried_weight(plan: Blueprint, task: Task, read: Callable[[str], Tensor]) -> Tensor:
    """w of (1) for the norm this tensor's vector enters, (n,) float64; 0 where none carries."""
    size = plan.layout.stream_sizes[0]
    if task.into is None or not plan.layout.is_carried:
        return torch.zeros(size, dtype=torch.float64)
    gamma = read(f"{task.into}.weight").double()
    return (gamma - gamma.mean()) / size
