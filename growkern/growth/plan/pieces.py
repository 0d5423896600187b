"""Cuts a growth into pieces that fit the memory limit, and estimates the memory of a piece.

The estimates must cover every buffer that `growth.disk.stream` and `growth.tensors` allocate per
piece. Whoever adds a buffer there adds it here.
"""

from __future__ import annotations

import math
import os
from dataclasses import dataclass

from growkern.errors import GrowthError
from growkern.growth.plan.blueprint import Blueprint, Task
from growkern.growth.source.files import PIECE_BYTES, row_blocks

# more workers than this only wait for the disk; further cores share the rows of a piece
MOST_WORKERS = 8
# default limit of growth onto disk
MEMORY_LIMIT = "1GiB"
# bytes of a source tensor that are read at once to compute row sums. Each such block also has a
# float64 copy
SUMMED_BYTES = 1 << 20
# index maps, names, row sums and the allocator's overhead
FIXED_BYTES = 32 << 20


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
        for rows in row_blocks(task.shape, plan.dtype.itemsize)
    ]


# ------------------------------------------------------------------- memory


def workers_within(plan: Blueprint, memory_limit: int) -> int:
    """How many workers fit into a memory limit.

    Args:
        memory_limit: bytes.

    Raises:
        GrowthError: the limit is too small for a single worker.
    """
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
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def stream_bytes(plan: Blueprint, memory_limit: int) -> int:
    """Peak memory of growth onto disk, bytes; above the limit if one piece needs more."""
    each = _most_in_work(plan)
    return FIXED_BYTES + each * workers_within(plan, max(memory_limit, FIXED_BYTES + each))


def part_bytes(plan: Blueprint, ranks: int) -> int:
    """Memory that one rank on CPUs needs for source data, besides its shard of the target, bytes.

    `grow_into` cuts a part into pieces too.
    """
    piece = PIECE_BYTES // plan.dtype.itemsize

    def numbers(task: Task) -> int:
        row = math.prod(task.shape[1:])
        return min(-(-math.prod(task.shape) // ranks), max(piece, row))

    most = (_mapped_bytes(plan, task, numbers(task)) for task in plan.tasks)
    return FIXED_BYTES + _summed_bytes(plan) + max(most, default=0)


def _most_in_work(plan: Blueprint) -> int:
    return max((_bytes_in_work(plan, piece) for piece in pieces_of(plan)), default=0)


def _bytes_in_work(plan: Blueprint, piece: Piece) -> int:
    """Bytes of a piece: its buffer, its temporaries and the source rows mapped for it."""
    start, stop = piece.rows
    numbers = (stop - start) * math.prod(piece.task.shape[1:])
    buffer = numbers * plan.dtype.itemsize
    return buffer + _mapped_bytes(plan, piece.task, numbers) + _summed_bytes(plan)


def _mapped_bytes(plan: Blueprint, task: Task, numbers: int) -> int:
    """Bytes of source files mapped while this many elements of a target tensor are built."""
    names = [n for n in (task.source, task.upper) if n is not None]
    headers = [plan.source.headers[n] for n in names if n in plan.source.headers]
    # every target row is gathered from one source row, so no more is mapped than is built
    return sum(min(header.nbytes, numbers * header.dtype.itemsize) for header in headers)


def _summed_bytes(plan: Blueprint) -> int:
    """Bytes of a summed block: bfloat16 and its float64 copy, which is 4 times as large."""
    old, new = plan.layout.sizes("vocab")
    sums_stream = plan.layout.is_extended and plan.layout.family.norm.centres
    return 5 * SUMMED_BYTES if sums_stream or new > old else 0
