"""Reads checkpoints of `torch.distributed.checkpoint` without gathering them first.

Many ranks saved such a checkpoint in pieces. Its metadata lists where each piece lies. To build a
part of a target tensor, a process reads only the pieces with the source entries that it copies. It
does not communicate with other processes.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import product
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, TensorStorageMetadata
from torch.distributed.checkpoint.planner import LoadPlan, ReadItem
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

from growkern.errors import GrowthError
from growkern.growth.source.distributed.metadata import UNREADABLE, brief
from growkern.growth.source.distributed.reader import SafeReader, bounds_of
from growkern.growth.source.files import METADATA_FILE

# prefixes of the model's tensors in a larger state dict
PREFIXES = ("", "model.", "module.", "app.model.", "state_dict.")
# an axis with more runs of wanted entries than this is read from the first to the last of them
MOST_RUNS = 16
Run = tuple[int, int]


@dataclass(frozen=True)
class DistributedTensor:
    """One tensor of a distributed checkpoint, a `growkern.growth.source.stored.StoredTensor`."""

    reader: SafeReader
    raw_name: str
    stored: TensorStorageMetadata

    def __post_init__(self) -> None:
        self.reader.check_filled(self.raw_name)

    @cached_property
    def _bounds(self) -> tuple[np.ndarray, np.ndarray]:
        return bounds_of(self.stored.chunks, len(self.shape))

    @property
    def file(self) -> str:
        return str(Path(self.reader.path) / METADATA_FILE)

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.stored.size)

    @property
    def dtype(self) -> torch.dtype:
        return self.stored.properties.dtype

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize

    @property
    def is_mapped(self) -> bool:
        return False

    def read(self) -> Tensor:
        return self.read_runs([[(0, n)] for n in self.shape])

    def rows(self, start: int, stop: int) -> Tensor:
        """Rows [start, stop) of the first axis."""
        runs = [[(start, stop)], *([(0, n)] for n in self.shape[1:])]
        return self.read_runs(runs)[start:stop]

    def read_entries(self, index: Sequence[Tensor]) -> Tensor:
        """The tensor, undefined outside the wanted entries of every axis."""
        return self.read_runs([runs_of(entries) for entries in index])

    def read_runs(self, runs: Sequence[Sequence[Run]]) -> Tensor:
        """The tensor, undefined outside the wanted runs of every axis.

        It takes the memory of the wanted entries and of one saved piece: the system allocates
        memory when it is first written.

        Args:
            runs: per axis, runs [start, stop) of entries.
        """
        result = torch.empty(self.shape, dtype=self.dtype)
        items = [item for box in product(*runs) for item in self._items(box)]
        try:
            self.reader.read_data(LoadPlan(items), _Into(result))  # type: ignore[arg-type]
        except UNREADABLE as error:
            raise GrowthError(
                f"{self.file}: {self.raw_name} cannot be read: {brief(error)}"
            ) from error
        return result

    def _items(self, box: Sequence[Run]) -> list[ReadItem]:
        """What to read of the pieces that lie in a box of entries."""
        starts, stops = self._bounds
        first, last = (np.array([run[end] for run in box], np.int64) for end in (0, 1))
        inside = np.flatnonzero(((starts < last) & (stops > first)).all(1))
        near = replace(self.stored, chunks=[self.stored.chunks[i] for i in inside])
        size = torch.Size((last - first).tolist())
        wanted = ChunkStorageMetadata(torch.Size(first.tolist()), size)
        return create_read_items_for_chunk_list(self.raw_name, near, [wanted])


@dataclass(frozen=True)
class _Into:
    """Tells a storage reader where in `tensor` each piece goes, as a load planner does."""

    tensor: Tensor

    def resolve_tensor(self, item: ReadItem) -> Tensor:
        target = self.tensor
        first = item.dest_index.offset or (0,) * target.ndim
        for dim, size in enumerate(item.lengths):
            target = target.narrow(dim, first[dim] + item.dest_offsets[dim], size)
        return target

    def commit_tensor(self, item: ReadItem, tensor: Tensor) -> None:
        pass


def read_distributed(directory: Path, expected: Mapping[str, str]) -> dict[str, DistributedTensor]:
    """The model's tensors in a distributed checkpoint, by the model's names.

    Everything else in the checkpoint, such as an optimizer, is ignored.

    Args:
        expected: the model's names -> those in files.

    Raises:
        GrowthError: metadata that cannot be read or holds unexpected classes; no tensor of the
            model.
    """
    reader = SafeReader(directory)
    entries, found = reader.metadata.state_dict_metadata, dict[str, str]()
    stored = {k: v for k, v in entries.items() if isinstance(v, TensorStorageMetadata)}
    for prefix in PREFIXES:
        tensors = {k: prefix + v for k, v in expected.items() if prefix + v in stored}
        found = max(found, tensors, key=len)
    if not found:
        some = ", ".join(list(entries)[:3])
        raise GrowthError(f"{directory}: it has none of the model's tensors; it holds {some}")
    return {name: DistributedTensor(reader, raw, stored[raw]) for name, raw in found.items()}


def read_distributed_optimizer(
    directory: Path, parameters: Mapping[str, str]
) -> dict[str, dict[str, DistributedTensor]]:
    """An optimizer's state in a distributed checkpoint: parameter -> key -> tensor.

    It must have the form that `get_optimizer_state_dict` returns, alone or in a larger state dict.

    Args:
        parameters: name of a parameter in the model -> its name in the result.
    """
    reader = SafeReader(directory)
    stored = reader.metadata.state_dict_metadata
    found: dict[str, dict[str, dict[str, DistributedTensor]]] = {}
    for raw, entry in stored.items():
        before, separator, rest = raw.partition("state.")
        name, _, key = rest.rpartition(".")
        bare = next((n for p in PREFIXES if (n := name.removeprefix(p)) in parameters), None)
        if separator and bare is not None and isinstance(entry, TensorStorageMetadata):
            state = found.setdefault(before, {}).setdefault(parameters[bare], {})
            state[key] = DistributedTensor(reader, raw, entry)
    if not found:
        some = ", ".join(list(stored)[:3])
        raise GrowthError(f"{directory}: no optimizer state of this model; it holds {some}")
    if len(found) > 1:
        raise GrowthError(f"{directory}: several optimizers ({', '.join(found)}): save one")
    return next(iter(found.values()))


def runs_of(index: Tensor) -> list[Run]:
    """The runs of consecutive numbers among entries, [start, stop) each.

    If there are more than `MOST_RUNS`, a single run from the first entry to the last.
    """
    entries = index.unique()
    if not len(entries):
        return []
    last = torch.ones(len(entries), dtype=torch.bool)
    last[:-1] = entries.diff() != 1
    first = last.roll(1)
    starts, stops = entries[first].tolist(), (entries[last] + 1).tolist()
    if len(starts) > MOST_RUNS:
        return [(starts[0], stops[-1])]
    return list(zip(starts, stops, strict=True))
