"""Index maps: the source unit that each target unit is a copy of, and the shares of the copies.

A map over units is (target,) int64 with values in [0, source). Its first `source` entries are the
identity, so the old model is the leading block of the new one. The head maps of grouped queries
are the exception: they follow their key heads. Maps over layers are lists of source layers.

Rotary positions rotate the first R entries of a head in pairs. Pair i rotates by
theta ** (-2 i / R) per position, so pairs of different heads may be compared by their speed.

`symmetry="split"` splits a weight into unequal shares that add up to it bit for bit. Rounding each
share by itself would leave a sum that is slightly off. Let a_1 >= a_2 >= ... >= a_C be the shares
of one source unit's copies, and let rn round to the target's dtype. Copy k gets

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

import hashlib

import torch
from torch import Tensor

from growkern.errors import UnfitError


def generator(seed: int, *key: object) -> torch.Generator:
    """A separate random generator for each purpose; the order of calls does not matter.

    Args:
        key: names what is drawn, such as ("noise", tensor name). A changed key changes the grown
            weights, so replaying an older lineage would give other bytes.
    """
    digest = hashlib.sha256(repr((seed, *key)).encode()).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest[:7], "little"))


def cyclic(source: int, target: int, parts: int = 1) -> Tensor:
    """0 .. source-1 repeated. Numbers of copies differ by one at most.

    `parts`: how many equal parts lie side by side; each repeats entries of its own.
    """
    each = source // parts
    part = torch.arange(target // parts) % each
    return (part + torch.arange(parts)[:, None] * each).flatten()


def balanced(source: int, target: int, rng: torch.Generator) -> Tensor:
    """The identity, then random permutations. Numbers of copies differ by one at most."""
    rounds = [torch.arange(source)]
    while sum(map(len, rounds)) < target:
        rounds.append(torch.randperm(source, generator=rng))
    return torch.cat(rounds)[:target]


def uniform(source: int, target: int, rng: torch.Generator) -> Tensor:
    """The identity, then random units with replacement (bert2BERT, Eq. 5)."""
    drawn = torch.randint(source, (target - source,), generator=rng)
    return torch.cat([torch.arange(source), drawn])


def grouped_heads(
    q_source: int, kv_source: int, q_target: int, kv_target: int
) -> tuple[Tensor, Tensor]:
    """Maps of query heads and of key-value heads, int64, for grouped-query attention.

    Query head h reads key head h // group, so the maps must agree:
    q_map[h] // group_source == kv_map[h // group_target]. Key heads repeat cyclically. The query
    heads of a target group cycle through the source group of its key head.
    """
    group_source, group_target = q_source // kv_source, q_target // kv_target
    kv_map = cyclic(kv_source, kv_target)
    used = [0] * kv_source
    q_map = []
    for kv in kv_map.tolist():
        for _ in range(group_target):
            q_map.append(kv * group_source + used[kv] % group_source)
            used[kv] += 1
    lost = sorted(set(range(q_source)) - set(q_map))
    if lost:
        raise UnfitError(
            f"{q_source} query / {kv_source} key-value heads cannot become {q_target} / "
            f"{kv_target}: query heads {lost} would have no copy: raise num_attention_heads or "
            f"lower num_key_value_heads so that every group keeps {group_source} query heads"
        )
    return torch.tensor(q_map), kv_map


def counts(index: Tensor, source: int) -> Tensor:
    """Per target unit, how many target units copy its source unit, (target,) float64."""
    return torch.bincount(index, minlength=source).double()[index]


def rank_in_group(index: Tensor) -> Tensor:
    """Per target unit, 0 if it is the first copy of its source unit, 1 if the second, and so on."""
    order = torch.argsort(index, stable=True)
    grouped = index[order]
    starts = torch.cat([torch.ones(1, dtype=torch.bool), grouped[1:] != grouped[:-1]])
    position = torch.arange(len(index))
    first = torch.cummax(torch.where(starts, position, torch.zeros_like(position)), 0).values
    return torch.empty_like(index).scatter_(0, order, position - first)


def stack(source: int, target: int) -> list[int]:
    """Source layer of every target layer: whole copies, then the top layers again.

    Source: bert2BERT, Algorithm 1.
    """
    whole, rest = divmod(target, source)
    return list(range(source)) * whole + list(range(source - rest, source))


def interleave(source: int, target: int) -> list[int]:
    """Source layer of every target layer, copies side by side: floor(i source / target)."""
    return [layer * source // target for layer in range(target)]


def rotary_entries(turning: int) -> int:
    """The number of rotated entries: `turning`, rounded up to whole pairs."""
    return turning + turning % 2


def pair_step(source: int, target: int) -> int | None:
    """The step with which pair step * i of the target rotates as fast as pair i of the source.

    `source` and `target` are R of both. None: there is no step. Pair i then stays pair i, and
    `growth.plan.target` changes rope_theta instead.
    """
    # a single pair rotates by theta ** 0 in any head, so any step will do
    return None if source > 2 and target % source else target // max(source, 1)


# elements that are split at a time: their float32 products then stay in the CPU's cache
NUMBERS_AT_ONCE = 1 << 18


def partial_sums(index: Tensor, share: Tensor, is_copy: Tensor) -> tuple[Tensor, Tensor]:
    """A_k and A_(k-1) of (1) for every target unit, (target,) float64 each.

    Args:
        index: source unit of each target unit, (target,) int64.
        share: share of each target unit, (target,) float64.
        is_copy: which target units are copies, (target,) bool. The others keep their share: their
            A_k is the share and their A_(k-1) is 0.
    """
    upto, before = share.clone(), torch.zeros_like(share)
    order = torch.argsort(share, descending=True, stable=True)
    order = order[is_copy[order]]
    group = index[order]
    if not len(group):
        return upto, before
    rank = rank_in_group(group)
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
