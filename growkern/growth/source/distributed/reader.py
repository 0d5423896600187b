"""Opens a distributed checkpoint, and checks that the pieces of a tensor fill it exactly."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cached_property
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
from growkern.growth.source.distributed.metadata import read_metadata
from growkern.growth.source.distributed.piece import read_piece
from growkern.growth.source.files import METADATA_FILE

# corners of the pieces of a tensor: a million pieces that are divided along two axes
MOST_CORNERS = 1 << 22


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

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """PyTorch's: the metadata."""
        return self.metadata

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """PyTorch's: read the pieces of a plan.

        Raises:
            ValueError: a piece is damaged, or is not the one that the metadata describes.
        """
        for item in plan.items:
            if item.type is LoadItemType.TENSOR:
                piece = self._piece(item.storage_index)
                piece = narrow_tensor_by_index(piece, item.storage_offsets, item.lengths)
                target = planner.resolve_tensor(item).detach()
                target.copy_(piece)
                planner.commit_tensor(item, target)
        others = [item for item in plan.items if item.type is not LoadItemType.TENSOR]
        return super().read_data(LoadPlan(others), planner)

    def _piece(self, index: MetadataIndex) -> Tensor:
        stored, place = self.metadata.state_dict_metadata[index.fqn], self.storage_data[index]
        if not isinstance(stored, TensorStorageMetadata) or index.offset is None:
            raise ValueError(f"{index.fqn} is no tensor")
        if index.fqn not in self._shapes:
            self._shapes[index.fqn] = {chunk.offsets: chunk.sizes for chunk in stored.chunks}
        if getattr(place, "transform_descriptors", None):
            raise ValueError("its pieces are compressed: save it without extensions")
        with (Path(self.path) / place.relative_path).open("rb") as stream:
            dtype, shape = stored.properties.dtype, self._shapes[index.fqn][index.offset]
            return read_piece(stream, (place.offset, place.length), dtype, shape)

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
    """Why pieces do not fill a tensor exactly once, as a phrase; None if they do.

    A piece is the product of differences of steps at its corners. Pieces fill a tensor exactly once
    if the steps at their corners cancel, up to those at the corners of the tensor. So the work
    grows with the number of pieces, not with its square.
    """
    whole = np.array(size, np.int64)
    if (stops > whole).any():
        return f"a piece ends beyond it, at {tuple(stops.max(0).tolist())}"
    if 0 in size:
        return None
    volumes = (stops - starts).prod(1)
    missing = math.prod(size) - int(volumes.sum())
    if missing > 0:
        return f"{missing} entries lie in no piece"
    starts, stops = starts[volumes > 0], stops[volumes > 0]
    # axes that no piece divides tell nothing
    divided = [a for a, n in enumerate(size) if ((starts[:, a] > 0) | (stops[:, a] < n)).any()]
    if len(starts) << len(divided) > MOST_CORNERS:
        return f"{len(starts)} pieces, divided along {len(divided)} axes, are too many"
    places, steps = np.zeros(len(starts) + 1, np.int64), np.ones(len(starts) + 1, np.int64)
    steps[-1] = -1
    for axis in divided:
        first, last = np.append(starts[:, axis], 0), np.append(stops[:, axis], size[axis])
        count = len(places) // len(first)
        above = places * (size[axis] + 1)
        places = np.concatenate([above + np.tile(first, count), above + np.tile(last, count)])
        steps = np.concatenate([steps, -steps])
    _, inverse = np.unique(places, return_inverse=True)
    if np.bincount(inverse, steps).any():
        return "pieces overlap"
    return None
