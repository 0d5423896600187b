"""Index maps: the source unit that each target unit is a copy of.

A map over units is (target,) int64 with values in [0, source). Its first `source` entries are the
identity, so the old model is the leading block of the new one. The head maps of grouped queries
are the exception: they follow their key heads. Maps over layers are lists of source layers.
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


def cyclic(source: int, target: int) -> Tensor:
    """0 .. source-1 repeated. Numbers of copies differ by one at most."""
    return torch.arange(target) % source


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
    """Head maps for grouped-query attention: every query head stays with its key head.

    Query head h reads key head h // group, so the maps must agree:
    q_map[h] // group_source == kv_map[h // group_target]. Key heads repeat cyclically. The query
    heads of a target group cycle through the source group of its key head.

    Returns:
        The maps of query heads (q_target,) and of key-value heads (kv_target,), int64.
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
    """Per target unit, 0 if it is the first copy of its source unit, 1 if the second, and so on.

    Args:
        index: (target,) int64.

    Returns:
        (target,) int64.
    """
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
