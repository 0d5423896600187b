"""Cuts a growth into pieces that fit the memory limit, and estimates what it all costs.

The estimates must cover every buffer that `growth.disk.stream` and `growth.plan.tensors` allocate
per piece. Whoever adds a buffer there adds it here.
"""

from __future__ import annotations

import math
import os
from dataclasses import dataclass
from typing import Any

from growkern.errors import GrowthError
from growkern.growth.options import check_tokens, parse_size
from growkern.growth.plan.blueprint import Blueprint, Task
from growkern.growth.stored import PIECE_BYTES, row_blocks

# more workers than this only wait for the disk; further cores share the rows of a piece
MOST_WORKERS = 8
# default limit of growth onto disk
MEMORY_LIMIT = "1GiB"
# bytes of a source tensor that are read at once to compute row sums. Each such block also has a
# float64 copy
SUMMED_BYTES = 1 << 20
# index maps, names, row sums and the allocator's overhead
FIXED_BYTES = 32 << 20
# bytes of a number in float32
TRAINED_BYTES = 4


@dataclass(frozen=True)
class Piece:
    """Rows [start, stop) of a target tensor, built in one step."""

    task: Task
    rows: tuple[int, int]

    @property
    def mark(self) -> tuple[str, int, int]:
        """Its key in the resume journal."""
        return self.task.name, *self.rows

    @property
    def part(self) -> tuple[slice, ...] | None:
        """The `part` argument of `build_tensor`; None for a tensor without axes."""
        sizes = self.task.shape[1:]
        return (slice(*self.rows), *(slice(0, n) for n in sizes)) if self.task.shape else None


def pieces_of(plan: Blueprint) -> list[Piece]:
    """All pieces of a growth."""
    return [
        Piece(task, rows)
        for task in plan.tasks
        for rows in row_blocks(task.shape, plan.dtype_of(task).itemsize)
    ]


def workers_within(plan: Blueprint, memory_limit: int) -> int:
    """How many workers fit into a memory limit."""
    each = _most_in_work(plan)
    least = FIXED_BYTES + each
    if memory_limit < least:
        raise GrowthError(
            f"memory_limit={memory_limit / 1e6:g}MB is too small: growing this model needs at "
            f"least {math.ceil(least / 1e6)}MB"
        )
    return min(usable_cores(), MOST_WORKERS, (memory_limit - FIXED_BYTES) // max(1, each))


def usable_cores() -> int:
    """The cores that this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def part_bytes(plan: Blueprint, ranks: int) -> int:
    """Bytes that one rank on CPUs needs for source data, besides its shard of the target.

    `grow_into` cuts a part into pieces too.
    """
    piece = PIECE_BYTES // plan.dtype.itemsize

    def numbers(task: Task) -> int:
        return min(-(-math.prod(task.shape) // ranks), max(piece, math.prod(task.shape[1:])))

    def whole(task: Task) -> int:
        # the mean and the deviation of an expert that is cut
        return math.prod(task.shape[1:]) * plan.dtype.itemsize if plan.options.drop else 0

    most = (_mapped_bytes(plan, task, numbers(task)) + whole(task) for task in plan.tasks)
    return FIXED_BYTES + _summed_bytes(plan) + max(most, default=0)


def _most_in_work(plan: Blueprint) -> int:
    """Most bytes of a piece: its buffer, its temporaries and the source rows mapped for it."""
    most, summed = 0, _summed_bytes(plan)
    for task in plan.tasks:
        # the first piece of a tensor is the largest
        itemsize = plan.dtype_of(task).itemsize
        start, stop = next(iter(row_blocks(task.shape, itemsize)))
        numbers = (stop - start) * math.prod(task.shape[1:])
        # what files hold in another order is written from a copy
        buffer = numbers * itemsize * (2 if task.tensor.row.transposed else 1)
        most = max(most, buffer + _mapped_bytes(plan, task, numbers) + summed)
    return most


def _mapped_bytes(plan: Blueprint, task: Task, numbers: int) -> int:
    """Bytes of source files mapped while this many elements of a target tensor are built."""
    if part := plan.source.parts.get(task.source):
        # the matrix of an expert is assembled
        stored = [plan.source.headers[n] for n in part.names if n in plan.source.headers]
        return sum(header.nbytes for header in stored) // max(1, part.experts)
    names = [n for n in (task.source, task.upper) if n is not None]
    # every target row is gathered from one source row, so no more is mapped than is built; what
    # stands for quantised weights is made in memory, from half as many bytes
    return sum(
        min(header.nbytes, numbers * header.dtype.itemsize) * (1 if header.is_mapped else 2)
        for header in [plan.source.headers[n] for n in names if n in plan.source.headers]
    )


def _summed_bytes(plan: Blueprint) -> int:
    """Bytes of a summed block: bfloat16 and its float64 copy, which is 4 times as large."""
    old, new = plan.layout.sizes("vocab")
    sums_stream = plan.layout.is_extended and plan.layout.family.norm.centres
    return 5 * SUMMED_BYTES if sums_stream or new > old else 0


def estimate(
    plan: Blueprint,
    ranks: int = 1,
    tokens: float | None = None,
    source_tokens: float | None = None,
) -> dict[str, Any]:
    """The cost of a growth and of training its target.

    Both peaks come on top of the 300 to 450 MB that Python, PyTorch and transformers need.

    Args:
        ranks: number of processes that the target is sharded over.
        tokens: those that the target will be trained on.
        source_tokens: those that the source was trained on.

    Returns:
        read_bytes: size of the source's weights, as they are stored.
        disk_bytes: size of the grown weights.
        stream_peak_bytes: peak memory of `grow_checkpoint` at its default limit.
        rank_bytes: size of one rank's shard of the grown weights.
        rank_peak_bytes: peak memory of `grow_into` on one rank, from files, with its shard.
        training_bytes_per_rank: in float32, without activations: the "weights" of one rank, their
            "gradients", the "optimizer" (AdamW) and the source as a "teacher", sharded too.
        activation_bytes_per_token: in float32, what training keeps for each token of a process's
            batch, at least; without checkpointing, and without logits, which the loss of the
            trainer never holds.
        flops_per_token: training FLOPs per token of the target.
        flops, source_flops: of training target and source on their tokens; None without tokens.
    """
    check_tokens(tokens, source_tokens)
    each = _most_in_work(plan)
    limit = max(parse_size("memory_limit", MEMORY_LIMIT), FIXED_BYTES + each)
    size = plan.parameters() * plan.dtype.itemsize
    shard = -(-size // ranks)
    weights, teacher = (
        -(-TRAINED_BYTES * plan.parameters(which) // ranks) for which in ("target", "source")
    )
    in_files = sum(tensor.file_bytes for tensor in plan.source.stored.headers.values())
    return {
        "read_bytes": in_files or plan.parameters("source") * plan.source.dtype.itemsize,
        "disk_bytes": size,
        "stream_peak_bytes": FIXED_BYTES + each * workers_within(plan, limit),
        "rank_bytes": shard,
        "rank_peak_bytes": shard + part_bytes(plan, ranks),
        "training_bytes_per_rank": {
            "weights": weights,
            "gradients": weights,
            "optimizer": 2 * weights,
            "teacher": teacher,
        },
        "activation_bytes_per_token": TRAINED_BYTES * plan.activations_per_token(),
        "flops_per_token": plan.flops_per_token(),
        "flops": tokens and plan.flops_per_token() * tokens,
        "source_flops": source_tokens and plan.flops_per_token("source") * source_tokens,
    }
