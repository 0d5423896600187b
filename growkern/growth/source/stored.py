"""The interface of a tensor in files.

`BareTensor` has no values. `growkern.growth.source.files.Header` is a tensor of a safetensors file,
`growkern.growth.source.distributed.DistributedTensor` one of a distributed checkpoint, and
`growkern.growth.source.parts` has those that files hold in parts.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from growkern.families.model import ModelSpec

# a source tensor by name; with numbers, those entries of its first axis alone
Read = Callable[..., Tensor]


class StoredTensor:
    """A tensor in the files of a checkpoint: its shape is known at once, its values on demand.

    Attributes:
        file: the file that holds it; of a distributed checkpoint, the metadata file.
        is_mapped: True if reading only maps the file, so that reading again costs nothing.
    """

    __slots__ = ()
    is_mapped = False
    if TYPE_CHECKING:
        # a dataclass would take a property of its base for the default of a field

        @property
        def file(self) -> str: ...

        @property
        def shape(self) -> tuple[int, ...]: ...

        @property
        def dtype(self) -> torch.dtype: ...

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize

    def read(self) -> Tensor:
        """The whole tensor."""
        return self.rows(0, self.shape[0])

    def rows(self, start: int, stop: int) -> Tensor:
        """Rows [start, stop) of the first axis."""
        return self.read()[start:stop]

    def read_entries(self, index: Sequence[Tensor]) -> Tensor:
        """A tensor of the whole shape, in which only the wanted entries have to be right.

        Args:
            index: per axis the wanted entries, (k,) int64, in any order and with repetitions.
        """
        return self.read()


@dataclass(frozen=True)
class BareTensor(StoredTensor):
    """A tensor that a config describes, without a file: its values are on the meta device."""

    file: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    is_mapped = True

    def read(self) -> Tensor:
        return torch.empty(self.shape, dtype=self.dtype, device="meta")


@dataclass(frozen=True)
class Filled(StoredTensor):
    """A tensor that is put together when it is read: `fill` writes its rows."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    def fill(self, out: Tensor, start: int, stop: int) -> None:
        """Write rows [start, stop) into `out`."""
        raise NotImplementedError

    def rows(self, start: int, stop: int) -> Tensor:
        out = torch.empty(stop - start, *self.shape[1:], dtype=self.dtype)
        self.fill(out, start, stop)
        return out

    def read_entries(self, index: Sequence[Tensor]) -> Tensor:
        # memory that is not written takes no room
        out = torch.empty(self.shape, dtype=self.dtype)
        for start, stop in consecutive(index[0].unique()):
            self.fill(out[start:stop], start, stop)
        return out


# processor time to grow to 4.6 GB, without writing: 7.1 s in pieces of 1 MB, 3.5 s in 4 MB, 2.4 s
# in these 16 MB, 2.2 s in 32 MB
PIECE_BYTES = 16 << 20


def row_blocks(
    shape: tuple[int, ...], itemsize: int, piece_bytes: int = PIECE_BYTES
) -> list[tuple[int, int]]:
    """Rows [start, stop) of pieces of about `piece_bytes`, with at least one row each."""
    count = shape[0] if shape else 1
    rows = max(1, piece_bytes // max(1, math.prod(shape[1:]) * itemsize))
    return [(start, min(start + rows, count)) for start in range(0, count, rows)]


def consecutive(entries: Sequence[int] | Tensor) -> list[tuple[int, int]]:
    """The runs [start, stop) of rising numbers."""
    entries = torch.as_tensor(entries)
    breaks = (entries.diff() != 1).nonzero().flatten() + 1
    ends, numbers = [0, *breaks.tolist(), len(entries)], entries.tolist()
    return [(numbers[a], numbers[b - 1] + 1) for a, b in pairwise(ends) if a < b]


def joined_rows(rows: Callable[[int, int], Tensor], entries: Sequence[int]) -> Tensor:
    """Some entries of a tensor's first axis, in rising order; `rows` returns a run of them."""
    runs = [rows(*run) for run in consecutive(entries)]
    return runs[0] if len(runs) == 1 else torch.cat(runs)


def read_entries(tensor: StoredTensor, entries: Sequence[int] | None) -> Tensor:
    """Some entries of the first axis of a stored tensor; None: the whole tensor."""
    return tensor.read() if entries is None else joined_rows(tensor.rows, entries)


def entries_of(tensor: Tensor, entries: Sequence[int] | None) -> Tensor:
    """`read_entries` of a tensor in memory."""
    return tensor if entries is None else joined_rows(lambda a, b: tensor[a:b], entries)


def spellings(model: ModelSpec, name: str) -> list[str]:
    """The names that a tensor in a file may have in the model.

    A head class may have been saved without the prefix of its body, or a body with it. The table
    may say that names of the class begin otherwise in files.
    """
    classes = model.family.classes
    prefix = classes[model.class_name].prefix
    prefixes = {c.prefix for c in classes.values() if c.prefix and not prefix}
    begins = classes[model.class_name].files.items()
    renamed = (own + name.removeprefix(file) for file, own in begins if name.startswith(file))
    return [name, *renamed, prefix + name, *(name.removeprefix(p) for p in prefixes)]
