"""Estimates what a growth costs: bytes, memory and time, and the FLOPs of training its target."""

from __future__ import annotations

from typing import Any

from growkern.growth.options import parse_size
from growkern.growth.plan.blueprint import Blueprint
from growkern.growth.plan.pieces import MEMORY_LIMIT, part_bytes, stream_bytes
from growkern.ops.expand.speed import cpu_bytes_per_second

# bytes per parameter in float32: weight, gradient and two moments
TRAINING_BYTES = 16


def estimate(plan: Blueprint, ranks: int = 1) -> dict[str, Any]:
    """The cost of a growth and of training its target.

    Both peaks come on top of the 300 to 450 MB that Python, PyTorch and transformers need.

    Args:
        ranks: number of processes that the target is sharded over.

    Returns:
        read_bytes: size of the source's weights.
        disk_bytes: size of the grown weights.
        stream_peak_bytes: peak memory of `grow_checkpoint` at its default limit.
        rank_bytes: size of one rank's shard of the grown weights.
        rank_peak_bytes: peak memory of `grow_into` on one rank, from files, with its shard.
        training_bytes_per_rank: float32 weights, gradients and AdamW moments of one rank, without
            activations.
        flops_per_token: training FLOPs per token of the target.
        expand_seconds: time to expand the weights on this machine's CPU, from a short probe.
            Growth onto disk takes longer by the time to read and write the bytes above.
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
        "expand_seconds": size / cpu_bytes_per_second(plan.dtype),
    }
