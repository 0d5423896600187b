"""Computes the rows of a weight that copy no row of the source: extra coordinates and new tokens.

New tokens start with the mean of the old tokens' rows. Their logits are then the mean z of the
old logits z_j, whatever the input, so that by Jensen's inequality n of them add little:

    n exp(z) / sum_j exp(z_j) <= n / V                                                     (1)

A bias per token starts `NEW_TOKEN_MARGIN` below its mean, which divides that by exp(margin).

Extra coordinates belong to LayerNorm at uneven widths. LayerNorm subtracts the mean. Extra
coordinates of the stream carry the mean of the source's vector, so that the target's norm computes
what the source's did. The weights that write these coordinates have no counterpart in the source.
They are computed from its rows:

    written axis       one sum f_t over the rows per sign e_t:
                       f_t = (1/n) 1 + delta e_t w,   w = (gamma - mean(gamma)) / n        (2)
                       Where the model multiplies what is written by a vector, f_t takes it
                       entry by entry, and the vector is 1 at the extra coordinates
    first FFN matrix   the rows 1/n and w, one for each pair of carry units                (3)
    second FFN matrix  the columns that add both to the extra coordinates                  (4)

gamma belongs to the norm that the vector enters, n is the source's hidden size, and delta is the
option `carry`. A norm that carries the mean multiplies extra coordinate k by 1 / (delta e_k)
(`growth.plan.tensors.norm`). The coordinate then leaves as the mean of the norm's output.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from growkern.growth.plan.blueprint import Blueprint, Task
from growkern.growth.plan.bounds import NEW_TOKEN_MARGIN
from growkern.growth.plan.pieces import SUMMED_BYTES
from growkern.growth.stored import Read, row_blocks

RowsOf = Callable[[int, int], Tensor]


def extra_rows(
    plan: Blueprint,
    task: Task,
    name: str,
    weight: Tensor,
    read: Read,
    extra: Sequence[bool],
    rows: Tensor,
) -> Tensor:
    """The rows that a block of extra coordinates or new tokens gathers, from a source tensor.

    Args:
        weight: the source tensor `name`.
        extra: per axis, True if the block's target entries are extra ones or new tokens.
        rows: source entries of the first axis that the block gathers, int64. Other rows of the
            result may be undefined.
    """
    dtype, layout, size = plan.sum_dtype(weight), plan.layout, plan.layout.stream_sizes[0]
    signs = torch.tensor(layout.space("stream").signs, dtype=torch.float64)
    delta, mean = plan.options.carry, torch.full((size,), 1 / size, dtype=torch.float64)

    def functionals() -> Tensor:
        sums = mean + delta * signs[:, None] * _carried_weight(plan, task, read)
        return sums if task.factor is None else sums * read(task.factor).double()

    result = weight
    for dim, axis in enumerate(task.tensor.axes):
        role, _, space = axis.partition(":")
        if not extra[dim]:
            continue
        if "|" in space or not space:
            result = _new_token(plan, task, name, weight, dim)
            continue
        if role == "read":
            # by (3) the carry units write only extra coordinates; their entries in all other rows
            # are 0
            ones, carried = torch.ones(len(signs), dtype=torch.float64), delta * signs
            zeros = torch.zeros(weight.shape[0], 2, dtype=torch.float64)
            return (zeros if extra == (False, True) else torch.stack([ones, carried], 1)).to(dtype)
        if role == "factor":
            result = weight.new_ones(len(signs), dtype=dtype)
        elif layout.family.spaces[space].kind == "stream" and result is weight:
            result = _weighted_sums(plan, task, name, weight, dim, functionals, rows)
        elif layout.family.spaces[space].kind == "stream":
            result = (_wide(result) @ functionals().t()).to(dtype)
        elif weight.ndim == 1:
            result = weight.new_zeros(2, dtype=dtype)
        else:
            result = torch.stack([mean, _carried_weight(plan, task, read)]).to(dtype)
    return result


def _new_token(plan: Blueprint, task: Task, name: str, weight: Tensor, dim: int) -> Tensor:
    """The entry along axis `dim` that new tokens start with, see (1); that axis has length 1."""
    if dim:
        return weight.double().mean(dim, keepdim=True).to(plan.sum_dtype(weight))
    mean = torch.full((1, len(weight)), 1 / len(weight), dtype=torch.float64)
    result = plan.cache.get(("mean", task.name, name), lambda: _sum_rows(plan, name, weight, mean))
    return result - NEW_TOKEN_MARGIN if weight.ndim == 1 else result


def _blocks(weight: Tensor) -> Sequence[tuple[int, int]]:
    return row_blocks(tuple(weight.shape), weight.itemsize, SUMMED_BYTES)


def _rows_of(plan: Blueprint, name: str, weight: Tensor) -> RowsOf:
    stored = plan.source.headers.get(name)
    if stored is None or not stored.is_mapped or stored.shape != weight.shape:
        return lambda a, b: weight[a:b]
    # a mapped file is mapped again for every block, so that summed rows can leave memory
    return stored.rows


def _weighted_sums(
    plan: Blueprint,
    task: Task,
    name: str,
    weight: Tensor,
    dim: int,
    functionals: Callable[[], Tensor],
    wanted: Tensor,
) -> Tensor:
    """(2): weighted sums over axis `dim` of a tensor, by functionals of (signs, n) float64.

    Every row of the tensor is read only once, even if the target tensor is built in many pieces. If
    `dim` is 1, only the wanted rows of the result are defined.
    """
    key = ("sums", task.name, name)
    if dim == 0:
        return plan.cache.get(key, lambda: _sum_rows(plan, name, weight, functionals()))
    sums = plan.cache.get(
        key, lambda: _ColumnSums(functionals(), len(weight), plan.sum_dtype(weight))
    )
    blocks = _blocks(weight)
    some = [blocks[i] for i in (wanted // blocks[0][1]).unique().tolist()]
    sums.add(_rows_of(plan, name, weight), some)
    return sums.result


def _sum_rows(plan: Blueprint, name: str, weight: Tensor, functionals: Tensor) -> Tensor:
    """Weighted sums over the rows of a tensor, in the dtype of `Blueprint.sum_dtype`."""
    total = torch.zeros(len(functionals), *weight.shape[1:], dtype=torch.float64)
    rows_of = _rows_of(plan, name, weight)
    for first, stop in _blocks(weight):
        total += torch.tensordot(functionals[:, first:stop], _wide(rows_of(first, stop)), dims=1)
    return total.to(plan.sum_dtype(weight))


class _ColumnSums:
    """Sums over the columns, computed row block by row block on demand; threads may share it."""

    def __init__(self, functionals: Tensor, rows: int, dtype: torch.dtype) -> None:
        self.result = torch.empty(rows, len(functionals), dtype=dtype)
        self._columns, self._done = functionals.t().contiguous(), set[tuple[int, int]]()

    def add(self, rows_of: RowsOf, blocks: Sequence[tuple[int, int]]) -> None:
        for block in blocks:
            # no lock: two threads that sum the same block write the same values
            if block not in self._done:
                sums = _wide(rows_of(*block)) @ self._columns
                self.result[slice(*block)] = sums.to(self.result.dtype)
                self._done.add(block)


def _wide(rows: Tensor) -> Tensor:
    # copy float64 too: summation order depends on the memory alignment of the input
    return rows.to(torch.float64, copy=True)


def _carried_weight(plan: Blueprint, task: Task, read: Read) -> Tensor:
    """w of (2) for the norm that this output enters, (n,) float64; 0 if none carries the mean."""
    size = plan.layout.stream_sizes[0]
    if task.into is None or not plan.layout.is_carried:
        return torch.zeros(size, dtype=torch.float64)
    gamma = read(f"{task.into}.weight").double()
    return (gamma - gamma.mean()) / size
