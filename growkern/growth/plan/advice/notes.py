"""Warns about choices that are known to work badly.

A warning that rests on a publication names it. No warning stops a growth.
"""

from __future__ import annotations

from collections.abc import Iterator

from growkern.growth.plan.advice.evidence import MOST_STACKED
from growkern.growth.plan.advice.kind import (
    has_equal_copies,
    is_decoder,
    is_large_decoder,
)
from growkern.growth.plan.blueprint import Blueprint
from growkern.growth.plan.target import PAD_VOCAB

# width of GEMM tiles: unless a size is a multiple of it, part of a tile does no work
TILE = 64


def advice(plan: Blueprint) -> tuple[str, ...]:
    """Warnings about this growth, one sentence each."""
    parts = (_aki, _width, _depth, _symmetry, _heads, _cache, _tiles)
    return tuple(line for part in parts for line in part(plan))


def _grows(plan: Blueprint, key: str) -> bool:
    return plan.small.size(key) != plan.large.size(key)


def _aki(plan: Blueprint) -> Iterator[str]:
    if plan.options.method == "aki" and is_decoder(plan) and any(t.upper for t in plan.tasks):
        yield (
            "with aki, decoders start with a far higher loss than their source: 7.81 for a growth "
            "from 1.3B to 7B, where fpi kept the source's 2.97 (AquilaMoE, 2024); measure it with "
            "`growkern verify --text` before you train"
        )


def _width(plan: Blueprint) -> Iterator[str]:
    old, new = plan.layout.stream_sizes
    if new > 2 * old:
        yield (
            f"the hidden size grows {new / old:.1f} times; published gains are for growth up to 2 "
            "times: consider growing in two steps"
        )
    if new > old and is_large_decoder(plan):
        yield (
            "evidence for width on large decoders is mixed: the speed-up was -0.7 % to -17.9 %, "
            "where stacking gave 49 % (Du et al., 2024); it helped when the learning rate of the "
            "new rows and columns was warmed up again"
        )


def _depth(plan: Blueprint) -> Iterator[str]:
    family = plan.small.family
    for key in family.stacks.values():
        factor = plan.large.size(key) / plan.small.size(key)
        if plan.options.depth == "stack" and factor > MOST_STACKED:
            yield (
                f"{family.config_field(key)} grows {factor:.1f} times; stacking worked best at 2 "
                f"to {MOST_STACKED:g} times (Du et al., 2024)"
            )


def _symmetry(plan: Blueprint) -> Iterator[str]:
    if has_equal_copies(plan):
        yield (
            "symmetry='none': all copies get equal gradients and never become different; use "
            "symmetry='routing' or 'noise' to train the model"
        )


def _heads(plan: Blueprint) -> Iterator[str]:
    pre = [s for s in plan.small.family.spaces.values() if s.part == "before_norm"]
    if pre and plan.small.head_dim() != plan.large.head_dim():
        yield (
            "the new entries of queries and keys both start at 0, as any other value would change "
            "the norm over them; while both are 0 they get no gradient"
        )


def _cache(plan: Blueprint) -> Iterator[str]:
    if plan.large.short_cache:
        field, layers = plan.large.short_cache
        yield (
            f"transformers makes its cache of keys and values for {field}={layers} layers, too few "
            "for the decoder: the target gets use_cache=False, which makes generation slower; grow "
            f"{field} too to keep the cache"
        )


def _tiles(plan: Blueprint) -> Iterator[str]:
    family = plan.small.family
    for key in ("stream", "vocab", *family.unit_sizes):
        old, new = plan.layout.sizes(key)
        if new != old and new >= 16 * TILE and new % TILE:
            field, better = family.config_field(key), -(-new // TILE) * TILE
            yield f"{field}={new} is not a multiple of {TILE}: {better} should run as fast"
    vocab = plan.large.size("vocab")
    if vocab % TILE and vocab >= 16 * TILE and not _grows(plan, "vocab"):
        field, better = family.config_field("vocab"), -(-vocab // TILE) * TILE
        yield (
            f"{field}={vocab} is not a multiple of {TILE}: pad it with {field}={better} or "
            f"{PAD_VOCAB}={TILE}"
        )
