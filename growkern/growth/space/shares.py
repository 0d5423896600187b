"""Splits a weight into unequal shares that add up to it bit for bit (`symmetry="split"`).

Rounding each share by itself would leave a sum that is slightly off. Let a_1 >= a_2 >= ... >= a_C
be the shares of one source unit's copies, and let rn round to the target's dtype. Copy k gets

    u_k = rn(A_k w) - rn(A_(k-1) w),   A_k = a_1 + ... + a_k                               (1)

The sum over the copies telescopes to rn(A_C w). It is w if the shares sum to 1 and the target's
dtype can represent w. The shares of weighted copies (`space.spaces`) sum to 1/a, so their weights
add up to rn(w / a).

Each difference in (1) is exact by Sterbenz's lemma (y/2 <= x <= 2y). Consecutive A_k are within a
factor of 2. While they rise, a share is at most the mean of the larger shares before it, so
A_k <= 2 A_(k-1). While they fall, A_k >= 1, and no share is below -1/C. That bound comes from
`growkern.growth.space.spaces.signed_split` and must hold there.
"""

from __future__ import annotations

import torch
from torch import Tensor

from growkern.growth.space import maps

# elements that are split at a time: their float32 products then stay in the CPU's cache
NUMBERS_AT_ONCE = 1 << 18


def partial_sums(index: Tensor, share: Tensor, is_copy: Tensor) -> tuple[Tensor, Tensor]:
    """A_k and A_(k-1) of (1) for every target unit.

    Args:
        index: source unit of each target unit, (target,) int64.
        share: share of each target unit, (target,) float64.
        is_copy: which target units are copies, (target,) bool. The others keep their share: their
            A_k is the share and their A_(k-1) is 0.

    Returns:
        Two vectors, (target,) float64 each.
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
    # shares such as 1/3 sum to 1 only up to rounding
    sums = torch.where((sums - 1).abs() < 1e-12, 1.0, sums)
    upto[order] = sums[group, rank]
    before[order] = torch.where(rank > 0, sums[group, (rank - 1).clamp(min=0)], 0.0)
    return upto, before


def take_shares(weights: Tensor, dim: int, upto: Tensor, before: Tensor) -> None:
    """Apply (1) in place: along `dim`, turn copies of the source's weights into their shares.

    The operation is elementwise, so a part of a tensor gets the same bits as in the whole tensor.
    Weights above 2/3 of the dtype's largest number may overflow.

    Args:
        weights: copies of the source's weights, any shape and floating-point dtype.
        upto, before: A_k and A_(k-1) from `partial_sums`, one per entry along `dim`.
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
