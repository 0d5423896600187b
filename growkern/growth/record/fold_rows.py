"""Folds a grown tensor back into the source's shape, W = P_out U E_in.

This is the inverse of growth for a model that was not trained since, and an average over the copies
after training. It works from `lineage.json` alone, without the source, and must follow every change
in how `growth.plan.tensors` builds tensors.

    written axis    copies are averaged, weighted with the shares of their readers          (1)
    read axis       copies are summed, weighted with the coefficients of their writers
    norm            gamma = sum_i c_i gamma_t[i], c_i = read_i write_i / kappa over the copies i,
                    with read of the space that the norm writes and write of the space that it
                    reads; this undoes (3) of `growkern.growth.space.spaces`
    no copies       the leading block is taken (vocabulary, DirectCopy)

Shares sum to 1, and noise cancels in the sums. Sums are float64 and rounded once at the end. Extra
coordinates are left out, as they hold nothing of their own.

Entries that AKI took from the next layer are left out too. The remaining copies get weights that
still add up to the source's entry, where s is the factor with which a copy was written:

    c_i = s_i / sum s_j^2                                                                   (2)
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from growkern.errors import GrowthError
from growkern.growth.record.lineage import Origin, read_index
from growkern.growth.source.stored import row_blocks
from growkern.growth.space.spaces import Space
from growkern.ops.expand.op import folded

SpaceOf = Callable[[str], Space]
# the matrix of an expert, by its number
MatrixOf = Callable[[int], Tensor]
# a copy with a smaller share than this is lost in rounding, so its entry cannot be folded back
LEAST_SHARE = 2.0**-10


class AxisFold(NamedTuple):
    """One axis of a fold, a weighted sum over k kept target entries.

    Source entry `entry[i]` gets `coefficient[i]` times target entry `keep[i]`.
    """

    keep: Tensor  # (k,) int64
    entry: Tensor  # (k,) int64
    coefficient: Tensor  # (k,) float64
    size: int  # of the source's axis


def fold_tensor(origin: Origin, space_of: SpaceOf, grown: Tensor) -> Tensor:
    """A whole target tensor folded into the source's shape, float64; spaces are of its layer."""
    return fold_rows(origin, axis_folds(origin, space_of), grown, 0, origin.source_shape[0])


def fold_rows(
    origin: Origin, folds: Sequence[AxisFold], grown: Tensor | MatrixOf, start: int, stop: int
) -> Tensor:
    """Rows [start, stop) of the folded tensor, float64. Only their copies in `grown` are read.

    `grown` is the target tensor, of the origin's shape, and may be memory-mapped. Or it reads the
    matrices of its experts: one at a time is in memory, however many copies there are.
    """
    return _sums(folds, grown, origin.offset, start, stop) / origin.factor - origin.offset


def _sums(
    folds: Sequence[AxisFold], grown: Tensor | MatrixOf, offset: float, start: int, stop: int
) -> Tensor:
    """The weighted sums over the copies of rows [start, stop), of a tensor plus `offset`."""
    rows, *others = folds
    wanted = (rows.entry >= start) & (rows.entry < stop)
    keep, index, coefficient = (x[wanted] for x in (rows.keep, rows.entry, rows.coefficient))
    if not isinstance(grown, Tensor):
        x = torch.zeros(stop - start, *(fold.size for fold in others), dtype=torch.float64)
        copies = zip(keep.tolist(), index.tolist(), coefficient.tolist(), strict=True)
        for number, place, factor in copies:
            matrix = grown(number)
            for first, last in row_blocks(x.shape[1:], x.itemsize):
                own = _sums(others, matrix, offset, first, last)
                x[place - start, first:last].add_(own, alpha=factor)
        return x
    x = grown.index_select(0, keep).double() + offset
    for dim, other in enumerate(others, 1):
        x = x.index_select(dim, other.keep).movedim(dim, -1) * other.coefficient
        shape = (*x.shape[:-1], other.size)
        x = folded(x.reshape(-1, len(other.keep)), 1, other.entry, other.size)
        x = x.view(shape).movedim(-1, dim)
    shape = x.shape[1:]
    x = x.reshape(len(x), -1) * coefficient[:, None]
    return folded(x, 0, index - start, stop - start).view(stop - start, *shape)


def axis_folds(origin: Origin, space_of: SpaceOf) -> list[AxisFold]:
    """How to fold each axis of a target tensor; args as in `fold_tensor`."""
    nothing = ("",) * len(origin.axes)
    axes = zip(origin.axes, origin.source_shape, origin.next_layer or nothing, strict=True)
    return [_axis_fold(origin, space_of, *axis) for axis in axes]


class _Copies(NamedTuple):
    """The target entries of an axis, (target,) each."""

    entry: Tensor  # of the source, int64
    factor: Tensor  # s of (2), float64
    weight: Tensor  # c before it is normalised, float64
    is_copy: Tensor  # False for entries to leave out


def _axis_fold(
    origin: Origin, space_of: SpaceOf, axis: str, size: int, next_layer: str
) -> AxisFold:
    role, _, names = axis.partition(":")
    if not names:
        return _joined(origin, [_leading(size, size)], size, next_layer)
    pieces, offset = [], 0
    for name in names.split("|"):
        space = space_of(name)
        piece = _copies_of(origin, space_of, space, role)
        entry = torch.where(piece.is_copy, piece.entry + offset, 0)
        pieces.append(piece._replace(entry=entry))
        offset += space.source
    return _joined(origin, pieces, size, next_layer)


def _leading(size: int, target: int) -> _Copies:
    """The first `size` target entries, as their own source entries."""
    ones = torch.ones(target, dtype=torch.float64)
    return _Copies(torch.arange(target), ones, ones, torch.arange(target) < size)


def _copies_of(origin: Origin, space_of: SpaceOf, space: Space, role: str) -> _Copies:
    if origin.holds == "block":
        return _leading(space.source, space.target)
    if origin.norm is None:
        pair = (space.scale(role), space.write if role == "read" else space.read)
        return _Copies(space.read_index, *pair, ~space.is_extra)
    entering, leaving = map(space_of, origin.norm)
    factor, weight = leaving.write, leaving.read
    if origin.is_gain:
        # where write is 0 the norm's input is 0 and its weight is free: avoid dividing by 0
        factor = entering.kappa * factor / torch.where(entering.write == 0, 1.0, entering.write)
        # kappa is left out here, as `_joined` normalises the weights
        weight = weight * entering.write
    return _Copies(entering.read_index, factor, weight, ~entering.is_extra & (weight != 0))


def _joined(origin: Origin, pieces: list[_Copies], size: int, next_layer: str) -> AxisFold:
    """The fold of an axis, with weights normalised so that copies give back their entry."""
    index, factor, weight, keep = (torch.cat(parts) for parts in zip(*pieces, strict=True))
    if next_layer:
        keep = keep.index_fill(0, read_index(next_layer), False)
        weight = factor
    keep = keep.nonzero().flatten()
    index, factor, weight = index[keep], factor[keep], weight[keep]
    total = torch.zeros(size, dtype=torch.float64).index_add_(0, index, factor * weight)
    if next_layer:
        lost = (total < LEAST_SHARE**2).nonzero().flatten().tolist()
        if lost:
            raise GrowthError(
                f"{origin.source}: {len(lost)} of {len(total)} entries, the first {lost[0]}, have "
                "no copy in the grown model, or one too small to recover: AKI replaced them by "
                "entries of the next layer, so this growth cannot be folded"
            )
    return AxisFold(keep, index, weight / total[index], size)
