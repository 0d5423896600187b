"""The interface of a tensor in files: its shape is known at once, its values are read on demand.

`BareTensor` has no values. `growkern.growth.source.files.Header` is a tensor of a safetensors file,
`growkern.growth.source.distributed.DistributedTensor` one of a distributed checkpoint, and
`growkern.growth.source.parts` has those that files hold in parts.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import ClassVar, Protocol, runtime_checkable

import torch
from torch import Tensor

from growkern.families.model import ModelSpec

# a source tensor by name; with numbers, those entries of its first axis alone
Read = Callable[..., Tensor]


@runtime_checkable
class StoredTensor(Protocol):
    """A tensor in the files of a checkpoint."""

    @property
    def file(self) -> str:
        """The file that holds it; of a distributed checkpoint, the metadata file."""

    @property
    def shape(self) -> tuple[int, ...]: ...

    @property
    def dtype(self) -> torch.dtype: ...

    @property
    def nbytes(self) -> int: ...

    @property
    def is_mapped(self) -> bool:
        """True if reading only maps the file, so that reading again costs nothing."""

    def read(self) -> Tensor:
        """The whole tensor."""

    def rows(self, start: int, stop: int) -> Tensor:
        """Rows [start, stop) of the first axis."""

    def read_entries(self, index: Sequence[Tensor]) -> Tensor:
        """A tensor of the whole shape, in which only the wanted entries have to be right.

        Args:
            index: per axis the wanted entries, (k,) int64, in any order and with repetitions.
        """


@dataclass(frozen=True)
class BareTensor:
    """A tensor that a config describes, without a file: its values are on the meta device."""

    file: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    is_mapped: bool = True

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize

    def read(self) -> Tensor:
        return torch.empty(self.shape, dtype=self.dtype, device="meta")

    def rows(self, start: int, stop: int) -> Tensor:
        return self.read()[start:stop]

    def read_entries(self, index: Sequence[Tensor]) -> Tensor:
        return self.read()


@dataclass(frozen=True)
class Filled:
    """A tensor that is put together when it is read: `fill` writes its rows."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    is_mapped: ClassVar[bool] = False

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize

    def fill(self, out: Tensor, start: int, stop: int) -> None:
        """Write rows [start, stop) into `out`."""
        raise NotImplementedError

    def read(self) -> Tensor:
        return self.rows(0, self.shape[0])

    def rows(self, start: int, stop: int) -> Tensor:
        out = torch.empty(stop - start, *self.shape[1:], dtype=self.dtype)
        self.fill(out, start, stop)
        return out

    def read_entries(self, index: Sequence[Tensor]) -> Tensor:
        # memory that is not written takes no room
        out = torch.empty(self.shape, dtype=self.dtype)
        for start, stop in consecutive(index[0].unique().tolist()):
            self.fill(out[start:stop], start, stop)
        return out


def consecutive(entries: Sequence[int]) -> list[tuple[int, int]]:
    """The runs [start, stop) of rising numbers."""
    breaks = [i for i in range(1, len(entries)) if entries[i] != entries[i - 1] + 1]
    ends = pairwise([0, *breaks, len(entries)])
    return [(entries[a], entries[b - 1] + 1) for a, b in ends]


def joined_rows(rows: Callable[[int, int], Tensor], entries: Sequence[int]) -> Tensor:
    """Some entries of a tensor's first axis, in rising order; `rows` returns a run of them."""
    found = [rows(*run) for run in consecutive(entries)]
    return found[0] if len(found) == 1 else torch.cat(found)


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
