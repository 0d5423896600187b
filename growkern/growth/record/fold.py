"""A grown model read back into the source's shapes: W = P_out U E_in.

    written axis    copies are averaged with the shares that their readers take             (1)
    read axis       copies are summed, times what their writers put there
    norm            gamma = sum_i c_i gamma_t[i], c_i = read_i write_i / kappa over the copies i
                    (read of the space it leads to, write of the one it comes from); these undo
                    (3) of `growkern.growth.space.spaces`
    no copy         a leading block (vocabulary, DirectCopy)

Shares sum to 1, so a model that was not trained since gives the source's numbers: float64 sums are
rounded once, and noise and shares cancel in them. Extra coordinates hold nothing of their own.
Entries that AKI took from the next layer are left out of all sums; what is left is weighted so that
an entry's own copies give it back:

    c_i = s_i / sum s_j^2, s the factor each copy was written with                          (2)
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from growkern.errors import GrowthError
from growkern.growth.record.map_text import read_index
from growkern.growth.record.origins import Origin
from growkern.growth.space.spaces import Space
from growkern.ops.expand.op import folded

SpaceOf = Callable[[str], Space]
# an entry whose own copies are smaller than this part of it comes back as rounding
LEAST_SHARE = 2.0**-10


@dataclass(frozen=True)
class AxisFold:
    """One axis: source entry `index[k]` takes `coefficient[k]` times target entry `keep[k]`.

    Attributes:
        keep, index: (k,) int64.
        coefficient: (k,) float64.
        size: length of the source's axis.
    """

    keep: Tensor
    index: Tensor
    coefficient: Tensor
    size: int


def fold_tensor(origin: Origin, space_of: SpaceOf, grown: Tensor) -> Tensor:
    """A whole tensor of the target in the source's shape, float64.

    Raises:
        GrowthError: some entry of the source has no copy of its own there.
    """
    return fold_rows(origin, axis_folds(origin, space_of), grown, 0, origin.source_shape[0])


def fold_rows(
    origin: Origin, folds: Sequence[AxisFold], grown: Tensor, start: int, stop: int
) -> Tensor:
    """Rows [start, stop) of the source's tensor, float64; of `grown` their copies alone are read.

    Args:
        folds: of `axis_folds`.
        grown: the target's tensor, of the origin's shape, memory-mapped or not.
    """
    rows, *cols = folds
    wanted = (rows.index >= start) & (rows.index < stop)
    x = grown.index_select(0, rows.keep[wanted]).double() + origin.offset
    x = x.reshape(len(x), -1)
    if cols:
        x = x.index_select(1, cols[0].keep) * cols[0].coefficient
        x = folded(x, 1, cols[0].index, cols[0].size)
    x = x * rows.coefficient[wanted][:, None]
    x = folded(x, 0, rows.index[wanted] - start, stop - start)
    x = x / origin.factor - origin.offset
    return x if cols else x[:, 0]


def axis_folds(origin: Origin, space_of: SpaceOf) -> list[AxisFold]:
    """How to fold each axis of a tensor that holds the source's numbers."""
    nothing = ("",) * len(origin.axes)
    axes = zip(origin.axes, origin.source_shape, origin.next_layer or nothing, strict=True)
    return [_axis_fold(origin, space_of, *axis) for axis in axes]


@dataclass(frozen=True)
class _Copies:
    """Target entries of an axis, (target,) each: source entry, factor (s), weight (c), a copy?"""

    index: Tensor
    factor: Tensor
    weight: Tensor
    is_copy: Tensor


def _axis_fold(
    origin: Origin, space_of: SpaceOf, axis: str, size: int, next_layer: str
) -> AxisFold:
    role, _, names = axis.partition(":")
    if not names:
        return _joined(origin, [_leading(size, size)], size, next_layer)
    pieces, first = [], 0
    for name in names.split("|"):
        space = space_of(name)
        piece = _copies_of(origin, space_of, space, role)
        index = torch.where(piece.is_copy, piece.index + first, 0)
        pieces.append(_Copies(index, piece.factor, piece.weight, piece.is_copy))
        first += space.source
    return _joined(origin, pieces, size, next_layer)


def _leading(size: int, target: int) -> _Copies:
    ones = torch.ones(target, dtype=torch.float64)
    return _Copies(torch.arange(target), ones, ones, torch.arange(target) < size)


def _copies_of(origin: Origin, space_of: SpaceOf, space: Space, role: str) -> _Copies:
    if origin.holds == "block":
        return _leading(space.source, space.target)
    if origin.norm is None:
        pair = (space.write, space.read) if role == "write" else (space.read, space.write)
        return _Copies(space.read_index, *pair, ~space.is_extra)
    entering, leaving = map(space_of, origin.norm)
    factor, weight = leaving.write, leaving.read
    if origin.is_gain:
        # nothing enters where it is 0, and any number may stand there
        factor = entering.kappa * factor / torch.where(entering.write == 0, 1.0, entering.write)
        # up to kappa: weights are made to give 1 below
        weight = weight * entering.write
    return _Copies(entering.read_index, factor, weight, ~entering.is_extra & (weight != 0))


def _joined(origin: Origin, pieces: list[_Copies], size: int, next_layer: str) -> AxisFold:
    index = torch.cat([piece.index for piece in pieces])
    factor = torch.cat([piece.factor for piece in pieces])
    weight = torch.cat([piece.weight for piece in pieces])
    keep = torch.cat([piece.is_copy for piece in pieces])
    if next_layer:
        keep = keep.index_fill(0, read_index(next_layer), False)
        weight = factor
    keep = keep.nonzero().flatten()
    index, factor, weight = index[keep], factor[keep], weight[keep]
    total = torch.zeros(size, dtype=torch.float64).index_add_(0, index, factor * weight)
    if next_layer:
        _check_own(origin, total)
    return AxisFold(keep, index, weight / total[index], size)


def _check_own(origin: Origin, total: Tensor) -> None:
    lost = (total < LEAST_SHARE**2).nonzero().flatten().tolist()
    if lost:
        raise GrowthError(
            f"{origin.source}: {len(lost)} of {len(total)} entries, the first {lost[0]}, have no "
            "copy of their own, or next to nothing of one: AKI gave their places to the next "
            "layer; this growth cannot be folded"
        )
