"""What a growth will cost, and what published evidence says of a growth like it.

Every piece of advice names where it comes from. None of it stops a growth.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Iterator
from typing import Any

import torch

from growkern.errors import GrowthError
from growkern.growth.options import parse_size
from growkern.growth.plan.blueprint import Blueprint
from growkern.growth.plan.pieces import MEMORY_LIMIT, part_bytes, stream_bytes
from growkern.growth.plan.target import PAD_VOCAB
from growkern.ops.expand.op import expand

# tokens per parameter a compute-optimal run sees (Hoffmann et al., 2022)
CHINCHILLA = 20
# GEMM tiles are this wide: sizes that are no multiple leave part of one idle
TILE = 64
# float32 weights, gradients and two moments, per parameter
TRAINING_BYTES = 16
# half of it fits into caches: 0.09 to 1.9 s were estimated for the same growth
PROBE_SIZE = 2048
PROBES = 6


def estimate(plan: Blueprint, ranks: int = 1) -> dict[str, Any]:
    """Costs of carrying a plan out and of training its target.

    Args:
        ranks: processes the target is sharded over.

    Returns:
        "read_bytes", "disk_bytes": of the source's weights and of the grown ones.
        "stream_peak_bytes": most memory of `grow_checkpoint` at its default limit.
        "rank_bytes": of one rank's shard of the grown weights. "rank_peak_bytes": most memory of
        `grow_into` on one rank from files, its shard included. Both peaks are over what Python,
        PyTorch and transformers take themselves (300 to 450 MB).
        "training_bytes_per_rank": float32 weights, gradients and AdamW moments, without
        activations. "flops_per_token": of training.
        "expand_seconds": of expanding alone on this machine's CPU, from a probe of it. Growth onto
        disk takes longer: add what reading and writing the bytes above take your disk.
    """
    parameters = plan.parameters()
    size = parameters * plan.dtype.itemsize
    shard = -(-size // ranks)
    return {
        "read_bytes": plan.parameters("source") * plan.source.dtype.itemsize,
        "disk_bytes": size,
        "stream_peak_bytes": stream_bytes(plan, parse_size("memory_limit", MEMORY_LIMIT)),
        "rank_bytes": shard,
        "rank_peak_bytes": shard + part_bytes(plan, ranks),
        "training_bytes_per_rank": -(-TRAINING_BYTES * parameters // ranks),
        "flops_per_token": plan.flops_per_token(),
        "expand_seconds": size / _bytes_per_second(plan.dtype),
    }


def _bytes_per_second(dtype: torch.dtype) -> float:
    """Output of `expand` per second here, for the plain map of doubling."""
    weight = torch.ones(PROBE_SIZE, PROBE_SIZE, dtype=dtype)
    index = torch.arange(2 * PROBE_SIZE) % PROBE_SIZE
    scale = torch.full((2 * PROBE_SIZE,), 0.5)
    out = torch.empty(2 * PROBE_SIZE, 2 * PROBE_SIZE, dtype=dtype)
    times = []
    for _ in range(PROBES):
        start = time.perf_counter()
        expand(weight, rows=index, cols=index, col_scale=scale, out=out)
        times.append(time.perf_counter() - start)
    # the first one also loads libraries
    return out.nbytes / statistics.median(times[1:])


def advice(plan: Blueprint, tokens: float | None = None) -> tuple[str, ...]:
    """What to think about before this growth, a sentence each.

    Args:
        tokens: how many the source was trained on, if known: with it, a deeper target is told
            which depth method the evidence favours, the one it has or the other.

    Raises:
        GrowthError: a number of tokens that is not positive.
    """
    if tokens is not None and not 0 < tokens < math.inf:
        raise GrowthError(f"tokens={tokens:g}: give how many the source was trained on")
    parts = (_aki, _width, _depth, _symmetry, _heads, _tiles)
    return tuple(line for part in parts for line in part(plan, tokens))


def _is_decoder(plan: Blueprint) -> bool:
    return "CausalLM" in plan.small.class_name or plan.small.class_name.endswith("LMHeadModel")


def _grows(plan: Blueprint, key: str) -> bool:
    return plan.small.size(key) != plan.large.size(key)


def _aki(plan: Blueprint, _tokens: float | None) -> Iterator[str]:
    if plan.options.method == "aki" and _is_decoder(plan) and any(t.upper for t in plan.tasks):
        yield (
            "aki starts decoders far above their source: 7.81 against 2.97 for 1.3B -> 7B, where "
            "fpi kept 2.97 (AquilaMoE, 2024); measure with --text before you train"
        )


def _width(plan: Blueprint, _tokens: float | None) -> Iterator[str]:
    old, new = plan.layout.stream_sizes
    if new > 2 * old:
        yield (
            f"the hidden size grows {new / old:.1f} times; published gains are for up to 2: "
            "consider two steps"
        )
    if new > old and _is_decoder(plan) and plan.parameters() > 1e9:
        yield (
            "evidence for width on large decoders is mixed: -0.7 % to -17.9 % speed-up where "
            "stacking gave 49 % (Du et al., 2024); gains came with a learning rate warmed up anew "
            "for the new rows and columns"
        )


def _depth(plan: Blueprint, tokens: float | None) -> Iterator[str]:
    family = plan.small.family
    deeper = [key for key in family.stacks.values() if _grows(plan, key)]
    if not deeper:
        return
    for key in deeper:
        factor = plan.large.size(key) / plan.small.size(key)
        if plan.options.depth == "stack" and factor > 4:
            yield (
                f"{family.config_field(key)} grows {factor:.1f} times; stacking was best at 2 to 4 "
                "(Du et al., 2024)"
            )
    if tokens is None:
        return
    optimum = CHINCHILLA * plan.parameters("source")
    better, other = ("interleave", "stack") if tokens > optimum else ("stack", "interleave")
    side = "past" if tokens > optimum else "below"
    yours = ", as you have it" if plan.options.depth == better else ""
    yield (
        f"the source's {tokens:.3g} tokens are {side} {CHINCHILLA} per parameter "
        f"({optimum:.3g}): there depth={better!r} was better than {other!r}{yours}"
    )


def _symmetry(plan: Blueprint, _tokens: float | None) -> Iterator[str]:
    copied = any(row["most"] > 1 for row in plan.maps().values())
    if plan.options.symmetry == "none" and plan.options.method == "fpi" and copied:
        yield "symmetry='none': copies get equal gradients for ever; to train, use 'noise'"


def _heads(plan: Blueprint, _tokens: float | None) -> Iterator[str]:
    pre = [s for s in plan.small.family.spaces.values() if s.part == "before_norm"]
    if pre and plan.small.head_dim() != plan.large.head_dim():
        yield (
            "new entries of queries and keys are both zero, as the norm over them would see "
            "anything else: they get no gradient until something else moves them"
        )


def _tiles(plan: Blueprint, _tokens: float | None) -> Iterator[str]:
    family = plan.small.family
    for key in ("stream", "vocab", *family.unit_sizes):
        old, new = plan.layout.sizes(key)
        if new != old and new >= 16 * TILE and new % TILE:
            field, better = family.config_field(key), -(-new // TILE) * TILE
            yield f"{field}={new} is no multiple of {TILE}: {better} should run as fast"
    vocab = plan.large.size("vocab")
    if vocab % TILE and vocab >= 16 * TILE and not _grows(plan, "vocab"):
        field, better = family.config_field("vocab"), -(-vocab // TILE) * TILE
        yield (
            f"{field}={vocab} is no multiple of {TILE}: {field}={better} pads it, and so does "
            f"{PAD_VOCAB}={TILE}"
        )
