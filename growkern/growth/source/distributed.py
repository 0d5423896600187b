"""Reads checkpoints of `torch.distributed.checkpoint` without gathering them first.

Many ranks saved such a checkpoint in pieces. Its metadata lists where each piece lies. To build a
part of a target tensor, a process reads only the pieces with the source entries that it copies. It
does not communicate with other processes.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.distributed._shard._utils import narrow_tensor_by_index
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner
from torch.futures import Future

from growkern.errors import GrowthError
from growkern.growth.source.files import WeightFile, weight_file
from growkern.growth.source.pickles import UNREADABLE, brief, read_metadata, read_piece
from growkern.growth.source.refused import METADATA_FILE
from growkern.growth.stored import StoredTensor, consecutive

# boxes between the edges of a tensor's pieces: as many as pieces that are cut evenly
MOST_BOXES = 1 << 22


class SafeReader(FileSystemReader):
    """PyTorch's reader. The metadata is read once, and without running code from it.

    A piece must hold the tensor that the metadata describes.
    """

    def __init__(self, directory: Path) -> None:
        super().__init__(directory)
        self.metadata = read_metadata(directory)
        self.set_up_storage_reader(self.metadata, is_coordinator=False)
        # per tensor: the first entry of a piece -> its shape
        self._shapes: dict[str, dict[torch.Size, torch.Size]] = {}
        # those that were read, which stay open
        self._files: dict[str, WeightFile] = {}

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """PyTorch's: the metadata."""
        return self.metadata

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """PyTorch's: read the pieces of a plan. ValueError if one is not that of the metadata."""
        for item in plan.items:
            if item.type is LoadItemType.TENSOR:
                index = item.storage_index
                if index.offset is None:
                    raise ValueError(f"{index.fqn} is no tensor")
                piece = self.piece(index.fqn, index.offset)
                piece = narrow_tensor_by_index(piece, item.storage_offsets, item.lengths)
                target = planner.resolve_tensor(item).detach()
                target.copy_(piece)
                planner.commit_tensor(item, target)
        others = [item for item in plan.items if item.type is not LoadItemType.TENSOR]
        return super().read_data(LoadPlan(others), planner)

    def piece(self, name: str, offset: torch.Size) -> Tensor:
        """The saved piece of a tensor that starts at an entry."""
        stored = self.metadata.state_dict_metadata[name]
        place = self.storage_data[MetadataIndex(name, offset)]
        if not isinstance(stored, TensorStorageMetadata):
            raise ValueError(f"{name} is no tensor")
        if name not in self._shapes:
            self._shapes[name] = {chunk.offsets: chunk.sizes for chunk in stored.chunks}
        if getattr(place, "transform_descriptors", None):
            raise ValueError("its pieces are compressed: save it without extensions")
        file = self._files.setdefault(
            place.relative_path, weight_file(Path(self.path) / place.relative_path)
        )
        dtype, shape = stored.properties.dtype, self._shapes[name][offset]
        return read_piece(file, (place.offset, place.length), dtype, shape)

    @cached_property
    def _sizes(self) -> dict[str, int]:
        """The size of each file that is there."""
        names = {place.relative_path for place in self.metadata.storage_data.values()}
        files = {name: Path(self.path) / name for name in names}
        return {name: file.stat().st_size for name, file in files.items() if file.is_file()}

    def check_filled(self, name: str) -> None:
        """Refuse a tensor whose pieces do not fill it, overlap, or are not in the files."""
        stored = self.metadata.state_dict_metadata[name]
        if not isinstance(stored, TensorStorageMetadata):
            raise GrowthError(f"{Path(self.path) / METADATA_FILE}: {name} is no tensor")
        wrong = wrong_pieces(stored.size, *bounds_of(stored.chunks, len(stored.size)))
        for chunk in stored.chunks if wrong is None else ():
            if 0 in chunk.sizes:
                continue
            place = self.metadata.storage_data.get(MetadataIndex(name, chunk.offsets))
            if place is None:
                wrong = f"the piece at {tuple(chunk.offsets)} has no place in a file"
                break
            if place.offset + place.length > self._sizes.get(place.relative_path, -1):
                wrong = f"{place.relative_path} is missing or truncated"
                break
        if wrong is not None:
            file, shape = Path(self.path) / METADATA_FILE, tuple(stored.size)
            raise GrowthError(
                f"{file}: {name} of shape {shape}: {wrong}: copy or save the checkpoint again"
            )


def bounds_of(chunks: Sequence[ChunkStorageMetadata], axes: int) -> tuple[np.ndarray, np.ndarray]:
    """The first entries of pieces, and the ones past their last: (pieces, axes) each."""
    shape = len(chunks), axes
    starts = np.array([chunk.offsets for chunk in chunks], np.int64).reshape(shape)
    return starts, starts + np.array([chunk.sizes for chunk in chunks], np.int64).reshape(shape)


def wrong_pieces(size: Sequence[int], starts: np.ndarray, stops: np.ndarray) -> str | None:
    """Why pieces do not fill a tensor exactly once, as a phrase; None if they do."""
    if (stops > np.array(size, np.int64)).any():
        return f"a piece ends beyond it, at {tuple(stops.max(0).tolist())}"
    volumes = (stops - starts).prod(1)
    if missing := math.prod(size) - int(volumes.sum()):
        return f"{missing} entries lie in no piece" if missing > 0 else "pieces overlap"
    starts, stops = starts[volumes > 0], stops[volumes > 0]
    # all edges of pieces cut the tensor into boxes: each box must lie in one piece
    edges = [np.unique([starts[:, axis], stops[:, axis]]) for axis in range(len(size))]
    if math.prod(map(len, edges)) > MOST_BOXES:
        return f"{len(starts)} pieces, with edges at {[*map(len, edges)]} places, are too many"
    places = [
        [np.searchsorted(own, ends[:, axis]) for ends in (starts, stops)]
        for axis, own in enumerate(edges)
    ]
    # the number of pieces rises at the first corner of a piece, and falls behind it
    filled = np.zeros([*map(len, edges)], np.int64)
    for corner in product((0, 1), repeat=len(size)):
        at = tuple(own[end] for own, end in zip(places, corner, strict=True))
        np.add.at(filled, at, (-1) ** sum(corner))
    for axis in range(len(size)):
        filled = filled.cumsum(axis)
    return "pieces overlap" if (filled[(slice(-1),) * len(size)] != 1).any() else None


# prefixes of the model's tensors in a larger state dict
PREFIXES = ("", "model.", "module.", "app.model.", "state_dict.")
# an axis with more runs of wanted entries than this is read from the first to the last of them
MOST_RUNS = 16
Run = tuple[int, int]


@dataclass(frozen=True)
class DistributedTensor(StoredTensor):
    """One tensor of a distributed checkpoint."""

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

    def read(self) -> Tensor:
        return self.read_runs([[(0, n)] for n in self.shape])

    def rows(self, start: int, stop: int) -> Tensor:
        """Rows [start, stop) of the first axis."""
        return self.read_runs([[(start, stop)], *([(0, n)] for n in self.shape[1:])])[start:stop]

    def read_entries(self, index: Sequence[Tensor]) -> Tensor:
        """The tensor, undefined outside the wanted entries of every axis."""
        return self.read_runs([runs_of(entries) for entries in index])

    def read_runs(self, runs: Sequence[Sequence[Run]]) -> Tensor:
        """The tensor, undefined outside the wanted runs [start, stop) of every axis.

        It takes the memory of the wanted entries and of one saved piece: the system allocates
        memory when it is first written.
        """
        result = torch.empty(self.shape, dtype=self.dtype)
        starts, stops = self._bounds
        for box in product(*runs):
            first, last = (np.array([run[end] for run in box], np.int64) for end in (0, 1))
            for number in np.flatnonzero(((starts < last) & (stops > first)).all(1)):
                start = starts[number]
                ends = np.maximum(first, start), np.minimum(last, stops[number])
                try:
                    piece = self.reader.piece(self.raw_name, self.stored.chunks[number].offsets)
                except UNREADABLE as error:
                    raise GrowthError(
                        f"{self.file}: {self.raw_name} cannot be read: {brief(error)}"
                    ) from error
                inside = tuple(map(slice, *(end - start for end in ends)))
                result[tuple(map(slice, *ends))] = piece[inside]
        return result


def read_distributed(directory: Path, expected: Mapping[str, str]) -> dict[str, DistributedTensor]:
    """The model's tensors in a distributed checkpoint, by the model's names.

    Everything else in the checkpoint, such as an optimizer, is ignored. `expected` has the model's
    names and those in files.
    """
    reader = SafeReader(directory)
    entries = reader.metadata.state_dict_metadata
    stored = {k: v for k, v in entries.items() if isinstance(v, TensorStorageMetadata)}
    named = ({k: p + v for k, v in expected.items() if p + v in stored} for p in PREFIXES)
    names = max(named, key=len)
    if not names:
        some = ", ".join(list(entries)[:3])
        raise GrowthError(f"{directory}: it has none of the model's tensors; it holds {some}")
    return {name: DistributedTensor(reader, raw, stored[raw]) for name, raw in names.items()}


def read_distributed_optimizer(
    directory: Path, parameters: Mapping[str, str]
) -> dict[str, dict[str, DistributedTensor]]:
    """An optimizer's state in a distributed checkpoint: parameter -> key -> tensor.

    It must have the form that `get_optimizer_state_dict` returns, alone or in a larger state dict.
    `parameters` has the name of a parameter in the model and its name in the result.
    """
    reader = SafeReader(directory)
    stored = reader.metadata.state_dict_metadata
    states: dict[str, dict[str, dict[str, DistributedTensor]]] = {}
    for raw, entry in stored.items():
        before, separator, rest = raw.partition("state.")
        name, _, key = rest.rpartition(".")
        bare = next((n for p in PREFIXES if (n := name.removeprefix(p)) in parameters), None)
        if separator and bare is not None and isinstance(entry, TensorStorageMetadata):
            state = states.setdefault(before, {}).setdefault(parameters[bare], {})
            state[key] = DistributedTensor(reader, raw, entry)
    if not states:
        some = ", ".join(list(stored)[:3])
        raise GrowthError(f"{directory}: no optimizer state of this model; it holds {some}")
    if len(states) > 1:
        raise GrowthError(f"{directory}: several optimizers ({', '.join(states)}): save one")
    return next(iter(states.values()))


def runs_of(index: Tensor) -> list[Run]:
    """The runs of consecutive numbers among entries, [start, stop) each.

    If there are more than `MOST_RUNS`, a single run from the first entry to the last.
    """
    runs = consecutive(index.unique())
    return runs if len(runs) <= MOST_RUNS else [(runs[0][0], runs[-1][1])]
