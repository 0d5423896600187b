"""Unequal shares of a weight that sum back to it bit for bit, in any dtype.

With a_1 >= a_2 >= ... >= a_C the shares of one source unit's copies, largest first, and rn the
rounding to the target's dtype,

    u_k = rn(A_k w) - rn(A_(k-1) w),   A_k = a_1 + ... + a_k                               (1)

The sum over the copies telescopes to rn(A_C w), which is w where shares sum to 1 and w is a number
of the target's dtype. Every difference is exact by Sterbenz's lemma (y/2 <= x <= 2y), because
neighbours among the A_k are within a factor of 2: on the way up a share is at most the mean of the
larger ones before it, so A_k <= 2 A_(k-1); on the way down A_k >= 1, and no share of
`growkern.growth.space.spaces.signed_split` is below -1/C. Weighted copies (`space.spaces`)
have shares that sum to 1/a: theirs add up to rn(w / a).
"""

from __future__ import annotations

import torch
from torch import Tensor

from growkern.growth.space import maps

# numbers that are split at a time: their float32 products stay in the cache
NUMBERS_AT_ONCE = 1 << 18


def partial_sums(index: Tensor, share: Tensor, is_copy: Tensor) -> tuple[Tensor, Tensor]:
    """A_k and A_(k-1) of (1) for every target unit, (target,) float64 each.

    Args:
        index: source unit of each target unit, (target,) int64.
        share: of each, (target,) float64.
        is_copy: (target,) bool; the others are scaled by their share alone.
    """
    upto, before = share.clone(), torch.zeros_like(share)
    order = torch.argsort(share, descending=True, stable=True)
    order = order[is_copy[order]]
    group = index[order]
    if not len(group):
        return upto, before
    rank = maps.rank_in_group(group)
    table = torch.zeros(int(group.max()) + 1, int(rank.max()) + 1, dtype=torch.float64)
    table[group, rank] = share[order]
    sums = table.cumsum(1)
    # shares of 1/3 sum to 1 up to rounding
    sums = torch.where((sums - 1).abs() < 1e-12, 1.0, sums)
    upto[order] = sums[group, rank]
    before[order] = torch.where(rank > 0, sums[group, (rank - 1).clamp(min=0)], 0.0)
    return upto, before


def take_shares(weights: Tensor, dim: int, upto: Tensor, before: Tensor) -> None:
    """(1) in place: along `dim`, copies of the source's weights become their shares.

    Elementwise, so a part of a tensor gets the bits of the same place in the whole. Weights above
    2/3 of the dtype's largest number may overflow.
    """
    wide = torch.float64 if weights.dtype == torch.float64 else torch.float32
    shape = [1] * weights.ndim
    shape[dim] = -1
    factors = (x.to(weights.device, wide).reshape(shape) for x in (upto, before))
    rows = max(1, NUMBERS_AT_ONCE // max(1, weights[:1].numel()))
    blocks = (x.expand(weights.shape).split(rows) for x in (weights, *factors))
    for w, a, b in zip(*blocks, strict=True):
        x = w.to(wide)
        w.copy_((x * a).to(w.dtype) - (x * b).to(w.dtype))
