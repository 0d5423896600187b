"""Grows an optimizer file into another file within a memory limit (`grow_checkpoint`).

The source's moments are memory-mapped. The target's are built, written and freed a few rows at a
time. `growkern.growth.grow` publishes the file together with the weights. It is not resumed: a run
that is killed while it writes this file writes it again from the start.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor

from growkern.errors import GrowthError
from growkern.growth.optimizer.checks import check_moments, check_values
from growkern.growth.optimizer.file import (
    archive_size,
    check_archive,
    optimizer_file,
    read_optimizer,
    release_pages,
    write_archive,
)
from growkern.growth.optimizer.moments import grow_moment
from growkern.growth.optimizer.state import (
    ShownMoment,
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
from growkern.growth.source.stamps import Stamps

# bytes of the target per piece: half the size of the pieces of weights, and as fast
PIECE_BYTES = 8 << 20


class OptimizerStream:
    """One optimizer file that is checked and ready to be grown.

    Attributes:
        nbytes: upper bound of the grown file's size, bytes.
    """

    def __init__(self, plan: GrowthPlan, path: Path, moments: str, memory_limit: int) -> None:
        """Read the whole file once to check it; nothing is written.

        Args:
            path: the optimizer file, or a directory with an optimizer.pt.
            moments: "grow", "old_slices" or "reset", as in `growkern.grow_optimizer`.

        Raises:
            GrowthError: the file is damaged, does not fit the model, or holds values that no
                optimizer writes; or the limit is too small.
        """
        check_moments(moments)
        self._stamps = Stamps.of(optimizer_file(path))
        self._plan, self._moments = plan, moments
        state_dict = read_optimizer(path)
        check_archive(optimizer_file(path))
        _, self._source = state_by_name(plan, state_dict)
        self._placeholders: dict[int, tuple[Task, str, bool]] = {}
        self._state = grown_state(plan, state_dict, moments, self._lay_out)
        self._check_limit(memory_limit)
        self._scan()
        self.nbytes = archive_size(self._state)

    def write(self, file: Path) -> None:
        """Build the grown state into a new file."""
        write_archive(self._state, file, self._pieces)
        self._stamps.check()

    def _lay_out(self, state: State, task: Task, key: str, is_zero: bool) -> Tensor:
        """A meta tensor in place of a grown moment; `_pieces` builds its values later."""
        dtype = source_entry(task, state)[key].dtype
        moment = torch.empty(task.shape, dtype=dtype, device="meta")
        self._placeholders[id(moment)] = task, key, is_zero
        return moment

    def _check_limit(self, memory_limit: int) -> None:
        pieces = [
            (stop - start) * math.prod(task.shape[1:]) * itemsize
            for task, key, _ in self._placeholders.values()
            for itemsize in [source_entry(task, self._source)[key].dtype.itemsize]
            for start, stop in row_blocks(task.shape, itemsize, PIECE_BYTES)
        ]
        # a piece, the piece before it, and the mapped rows of up to two source tensors
        least = FIXED_BYTES + 4 * max(pieces, default=0)
        if memory_limit < least:
            raise GrowthError(
                f"memory_limit={memory_limit / 1e6:g}MB is too small: growing this optimizer needs "
                f"at least {math.ceil(least / 1e6)}MB"
            )

    def _scan(self) -> None:
        """Refuse values that Adam never writes. The pages that were read are freed."""
        for name, entry in self._source.items():
            for key in moments_in(entry) if self._moments != "reset" else ():
                moment = entry[key]
                if isinstance(moment, ShownMoment):
                    # its parts have entries of their own
                    continue
                for block in row_blocks(moment.shape, moment.dtype.itemsize, PIECE_BYTES):
                    rows = moment[slice(*block)]
                    check_values(name, key, rows)
                    release_pages(rows)
            for value in entry.values():
                if isinstance(value, Tensor):
                    release_pages(value)

    def _pieces(self, moment: Tensor) -> Iterator[Tensor]:
        """The values of one grown moment, a few rows at a time."""
        task, key, is_zero = self._placeholders[id(moment)]
        read = reader_of(self._source, key)
        for start, stop in row_blocks(task.shape, moment.dtype.itemsize, PIECE_BYTES):
            # a mapped file that was cut would end the process
            self._stamps.check()
            if is_zero:
                yield torch.zeros(stop - start, *task.shape[1:], dtype=moment.dtype)
                continue
            part = Piece(task, (start, stop)).part
            yield grow_moment(self._plan, task, read, key=key, moments=self._moments, part=part)
            for name in filter(None, (task.source, task.upper)):
                release_pages(self._source[name][key])
