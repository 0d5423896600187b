"""The state of Adam from file to file, within a memory limit, as the weights go.

A moment of the source is mapped; rows of the target's are built, written and let go of. The file is
part of what `growkern.growth.grow` publishes, so it appears with the weights or not at all; a run
that was killed while it was written writes it anew.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor

from growkern.errors import GrowthError
from growkern.growth.optimizer.archive import archive_size, write_archive
from growkern.growth.optimizer.checks import check_moments
from growkern.growth.optimizer.file import check_archive, let_go, optimizer_file, read_optimizer
from growkern.growth.optimizer.moments import check_values, grow_moment
from growkern.growth.optimizer.state import (
    State,
    grown_state,
    moments_in,
    reader_of,
    source_entry,
    state_by_name,
)
from growkern.growth.plan.blueprint import Task
from growkern.growth.plan.growth_plan import GrowthPlan
from growkern.growth.plan.pieces import FIXED_BYTES, Piece
from growkern.growth.source.files import row_blocks

# one at a time: half of what a worker that grows weights takes, and as fast
PIECE_BYTES = 8 << 20


class OptimizerStream:
    """One optimizer file, checked and laid out.

    Attributes:
        nbytes: of the grown file, at most.
    """

    def __init__(self, plan: GrowthPlan, path: Path, moments: str, memory_limit: int) -> None:
        """Reads the file once, from its first byte to its last; nothing is written.

        Raises:
            GrowthError: a file that cannot be used, is damaged or holds what no optimizer leaves;
                a limit that one piece does not fit into.
        """
        check_moments(moments)
        self._plan, self._moments = plan, moments
        state_dict = read_optimizer(path)
        check_archive(optimizer_file(path))
        _, self._source = state_by_name(plan, state_dict)
        self._made: dict[int, tuple[Task, str, bool]] = {}
        self._state = grown_state(plan, state_dict, moments, self._lay_out)
        self._check_limit(memory_limit)
        self._scan()
        self.nbytes = archive_size(self._state)

    def write(self, file: Path) -> None:
        """Build the grown state into a new file."""
        write_archive(self._state, file, self._pieces)

    def _lay_out(self, state: State, task: Task, key: str, is_zero: bool) -> Tensor:
        dtype = source_entry(task, state)[key].dtype
        moment = torch.empty(task.shape, dtype=dtype, device="meta")
        self._made[id(moment)] = task, key, is_zero
        return moment

    def _check_limit(self, memory_limit: int) -> None:
        pieces = [
            (stop - start) * math.prod(task.shape[1:]) * itemsize
            for task, key, _ in self._made.values()
            for itemsize in [source_entry(task, self._source)[key].dtype.itemsize]
            for start, stop in row_blocks(task.shape, itemsize, PIECE_BYTES)
        ]
        # a piece, the one before it, and the rows of up to two sources that are mapped for it
        least = FIXED_BYTES + 4 * max(pieces, default=0)
        if memory_limit < least:
            raise GrowthError(
                f"memory_limit={memory_limit / 1e6:g}MB: growing this optimizer takes at least "
                f"{math.ceil(least / 1e6)}MB"
            )

    def _scan(self) -> None:
        """GrowthError for values that no step of Adam leaves; nothing stays in memory."""
        for name, entry in self._source.items():
            for key in moments_in(entry) if self._moments != "reset" else ():
                moment = entry[key]
                for block in row_blocks(moment.shape, moment.dtype.itemsize, PIECE_BYTES):
                    rows = moment[slice(*block)]
                    check_values(name, key, rows)
                    let_go(rows)
            for value in entry.values():
                if isinstance(value, Tensor):
                    let_go(value)

    def _pieces(self, moment: Tensor) -> Iterator[Tensor]:
        task, key, is_zero = self._made[id(moment)]
        read = reader_of(self._source, key)
        for start, stop in row_blocks(task.shape, moment.dtype.itemsize, PIECE_BYTES):
            if is_zero:
                yield torch.zeros(stop - start, *task.shape[1:], dtype=moment.dtype)
                continue
            part = Piece(task, (start, stop)).part
            yield grow_moment(self._plan, task, read, key=key, moments=self._moments, part=part)
            for name in filter(None, (task.source, task.upper)):
                let_go(self._source[name][key])
