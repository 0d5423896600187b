"""Index maps: which source unit every target unit is a copy of.

All maps keep the first `source` units in place, so the old model is the top-left block of the new
one. Shapes: a map is (target,) int64 with values in [0, source).
"""

from __future__ import annotations

import hashlib

import torch
from torch import Tensor

from growkern.errors import GrowthError


def generator(seed: int, *key: object) -> torch.Generator:
    """A random generator that depends on the seed and on what is drawn, not on the order."""
    digest = hashlib.sha256(repr((seed, *key)).encode()).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest[:7], "little"))


def cyclic(source: int, target: int) -> Tensor:
    """0 .. source-1 over and over: counts differ by at most one and copies are contiguous runs."""
    return torch.arange(target) % source


def balanced(source: int, target: int, rng: torch.Generator) -> Tensor:
    """Whole permutations after the identity: counts differ by at most one."""
    rounds = [torch.arange(source)]
    while sum(map(len, rounds)) < target:
        rounds.append(torch.randperm(source, generator=rng))
    return torch.cat(rounds)[:target]


def uniform(source: int, target: int, rng: torch.Generator) -> Tensor:
    """Sampling with replacement beyond the source (bert2BERT, Eq. 5)."""
    drawn = torch.randint(source, (target - source,), generator=rng)
    return torch.cat([torch.arange(source), drawn])


def grouped_heads(
    q_source: int, kv_source: int, q_target: int, kv_target: int
) -> tuple[Tensor, Tensor]:
    """Head maps for grouped-query attention that keep every query head with its key head.

    A query head h reads key head h // group, so the maps must agree:
    q_map[h] // group_source == kv_map[h // group_target]. Key heads repeat cyclically; the query
    heads of each target group walk through the source group of its key head.

    Returns:
        (q_map, kv_map), (q_target,) and (kv_target,).
    Raises:
        GrowthError: some source query head would have no copy, which loses what it computes.
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
        raise GrowthError(
            f"{q_source} query / {kv_source} key-value heads cannot become {q_target} / "
            f"{kv_target}: query heads {lost} would have no copy; raise num_attention_heads or "
            f"lower num_key_value_heads so that every group keeps {group_source} query heads"
        )
    return torch.tensor(q_map), kv_map


def counts(index: Tensor, source: int) -> Tensor:
    """How many target units copy the same source unit, per target unit, (target,) float64."""
    return torch.bincount(index, minlength=source).double()[index]


def rank_in_group(index: Tensor) -> Tensor:
    """0 for the first copy of a source unit, 1 for the second, ..., (target,) int64."""
    order = torch.argsort(index, stable=True)
    grouped = index[order]
    starts = torch.cat([torch.ones(1, dtype=torch.bool), grouped[1:] != grouped[:-1]])
    position = torch.arange(len(index))
    first = torch.cummax(torch.where(starts, position, torch.zeros_like(position)), 0).values
    return torch.empty_like(index).scatter_(0, order, position - first)


def heads_to_units(head_map: Tensor, head_dim: int) -> Tensor:
    """A map over heads as a map over heads x head_dim units."""
    return (head_map[:, None] * head_dim + torch.arange(head_dim)).reshape(-1)


# -------------------------------------------------------------------- depth


def stack(source: int, target: int) -> list[int]:
    """Whole copies, then the top layers (bert2BERT, Algorithm 1)."""
    whole, rest = divmod(target, source)
    return list(range(source)) * whole + list(range(source - rest, source))


def interleave(source: int, target: int) -> list[int]:
    """Copies of a layer next to it: layer i comes from floor(i source / target)."""
    return [layer * source // target for layer in range(target)]
