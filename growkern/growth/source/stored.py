"""The interface of a tensor in a file: its shape is known at once, its values are read on demand.

`BareTensor` has no values. `growkern.growth.source.files.Header` is a tensor of a safetensors file,
`growkern.growth.source.distributed.tensors.DistributedTensor` one of a distributed checkpoint.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor


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
