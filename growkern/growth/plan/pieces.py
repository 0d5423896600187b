"""A growth cut into pieces that are built one at a time, and how much memory one takes."""

from __future__ import annotations

import math
import os
from dataclasses import dataclass

from growkern.errors import GrowthError
from growkern.growth.plan.blueprint import Blueprint, Task
from growkern.growth.source.files import row_blocks

# more workers than this only wait for the disk; further cores share out the rows of a piece
MOST_WORKERS = 8
# what growth onto disk takes where nothing else is said
MEMORY_LIMIT = "1GiB"
# of a source that is summed, at a time; float64 copies of that are made on the way
SUMMED_BYTES = 1 << 20
# index maps, names, sums and the allocator's slack
FIXED_BYTES = 32 << 20


@dataclass(frozen=True)
class Piece:
    """Rows [start, stop) of a target tensor, which are built at once."""

    task: Task
    rows: tuple[int, int]

    @property
    def mark(self) -> tuple[str, int, int]:
        """What the journal calls it."""
        return self.task.name, *self.rows

    @property
    def part(self) -> tuple[slice, ...] | None:
        """As `build_tensor` takes it; a tensor without axes has no part."""
        sizes = self.task.shape[1:]
        return (slice(*self.rows), *(slice(0, n) for n in sizes)) if self.task.shape else None


def pieces_of(plan: Blueprint) -> list[Piece]:
    """All work there is."""
    return [
        Piece(task, rows)
        for task in plan.tasks
        for rows in row_blocks(task.shape, plan.dtype.itemsize)
    ]


# ------------------------------------------------------------------- memory


def workers_within(plan: Blueprint, memory_limit: int) -> int:
    """How many workers fit into a limit, bytes.

    Raises:
        GrowthError: not even one does.
    """
    each = _most_in_work(plan)
    least = FIXED_BYTES + each
    if memory_limit < least:
        raise GrowthError(
            f"memory_limit={memory_limit / 1e6:g}MB: growing this model takes at least "
            f"{math.ceil(least / 1e6)}MB"
        )
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return min(cores or 1, MOST_WORKERS, (memory_limit - FIXED_BYTES) // max(1, each))


def stream_bytes(plan: Blueprint, memory_limit: int) -> int:
    """What streaming takes of a limit, at most; more than the limit where one piece is more."""
    each = _most_in_work(plan)
    return FIXED_BYTES + each * workers_within(plan, max(memory_limit, FIXED_BYTES + each))


def part_bytes(plan: Blueprint, ranks: int) -> int:
    """What one of several ranks takes beside its parts: what it maps of the source at a time."""
    return FIXED_BYTES + max(
        (
            _mapped_bytes(plan, task, -(-math.prod(task.shape) // ranks)) + _summed_bytes(plan)
            for task in plan.tasks
        ),
        default=0,
    )


def _most_in_work(plan: Blueprint) -> int:
    return max((_bytes_in_work(plan, piece) for piece in pieces_of(plan)), default=0)


def _bytes_in_work(plan: Blueprint, piece: Piece) -> int:
    """A piece's buffer and what is made on the way, and the source rows that are mapped for it."""
    start, stop = piece.rows
    numbers = (stop - start) * math.prod(piece.task.shape[1:])
    made = numbers * plan.dtype.itemsize
    return made + _mapped_bytes(plan, piece.task, numbers) + _summed_bytes(plan)


def _mapped_bytes(plan: Blueprint, task: Task, numbers: int) -> int:
    """What is mapped of files for so many numbers of a tensor."""
    names = [n for n in (task.source, task.upper) if n is not None]
    headers = [plan.source.headers[n] for n in names if n in plan.source.headers]
    # a row is copied from a row
    return sum(min(header.nbytes, numbers * header.dtype.itemsize) for header in headers)


def _summed_bytes(plan: Blueprint) -> int:
    """Of bfloat16, with a copy in float64."""
    return 5 * SUMMED_BYTES if plan.layout.is_extended else 0
