"""Reads checkpoints of `torch.distributed.checkpoint` without gathering them first.

Many ranks saved such a checkpoint in pieces. Its metadata lists where each piece lies. To build a
part of a target tensor, a process reads only the pieces with the source entries that it copies. It
does not communicate with other processes.
"""

from __future__ import annotations

import io
import math
import pickle
import reprlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadPlan, ReadItem
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

from growkern.bounded import regular_size, stays_inside
from growkern.errors import GrowthError
from growkern.growth.source.files import METADATA_FILE
from growkern.growth.source.links import refuse_links_out

# prefixes of the model's tensors in a larger state dict
PREFIXES = ("", "model.", "module.", "app.model.", "state_dict.")
# an axis with more runs of wanted entries than this is read from the first to the last of them
MOST_RUNS = 16

# the classes that occur in the metadata of a checkpoint of tensors
SAFE_CLASSES = {
    "torch.distributed.checkpoint.metadata": {
        "Metadata",
        "MetadataIndex",
        "StorageMeta",
        "ChunkStorageMetadata",
        "TensorStorageMetadata",
        "TensorProperties",
        "BytesStorageMetadata",
        "_MEM_FORMAT_ENCODING",
    },
    "torch.distributed.checkpoint.filesystem": {"_StorageInfo", "_StoragePrefix"},
    "torch.serialization": {"_get_layout"},
    "collections": {"OrderedDict"},
    "pathlib": {"Path", "PosixPath", "WindowsPath", "PurePosixPath", "PureWindowsPath"},
}
SAFE_CLASSES["pathlib._local"] = SAFE_CLASSES["pathlib"]
# errors that pickle and the reader raise for a damaged file
UNREADABLE: tuple[type[Exception], ...] = (
    *(OSError, EOFError, RuntimeError, ValueError, TypeError, KeyError, IndexError),
    *(AttributeError, AssertionError, pickle.UnpicklingError),
)
Run = tuple[int, int]


class _MetadataUnpickler(pickle.Unpickler):
    """Unpickles only the classes of metadata: other pickles could run any code."""

    def find_class(self, module: str, name: str) -> Any:
        is_dtype = module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)
        if is_dtype or (module, name) == ("torch", "Size"):
            return getattr(torch, name)
        if name not in SAFE_CLASSES.get(module, ()):
            raise pickle.UnpicklingError(f"it holds a {module}.{name}")
        return super().find_class(module, name)


class _Reader(FileSystemReader):
    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        content = (Path(self.path) / METADATA_FILE).read_bytes()
        metadata = _MetadataUnpickler(io.BytesIO(content)).load()
        if not isinstance(metadata, Metadata):
            raise pickle.UnpicklingError(f"it is a {type(metadata).__name__}")
        return metadata


@dataclass(frozen=True)
class DistributedTensor:
    """One tensor of a distributed checkpoint, a `growkern.growth.source.stored.StoredTensor`.

    Attributes:
        raw_name: its name in the checkpoint.
        stored: its entry in the metadata.
    """

    reader: FileSystemReader
    raw_name: str
    stored: TensorStorageMetadata

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

        Raises:
            GrowthError: a piece that cannot be read.
        """
        result = torch.empty(self.shape, dtype=self.dtype)
        wanted = [
            ChunkStorageMetadata(torch.Size(a for a, _ in box), torch.Size(b - a for a, b in box))
            for box in product(*runs)
        ]
        items = create_read_items_for_chunk_list(self.raw_name, self.stored, wanted)
        try:
            self.reader.read_data(LoadPlan(items), _Into(result))  # type: ignore[arg-type]
        except UNREADABLE as error:
            why = str(error).strip().partition("\n")[0] or type(error).__name__
            raise GrowthError(f"{self.file}: {self.raw_name} cannot be read: {why}") from error
        return result


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


def read_distributed(directory: Path, expected: Iterable[str]) -> dict[str, DistributedTensor]:
    """The model's tensors in a distributed checkpoint, by the model's names.

    Everything else in the checkpoint, such as an optimizer, is ignored.

    Args:
        expected: the names of the model's tensors.

    Raises:
        GrowthError: metadata that cannot be read or holds unexpected classes; no tensor of the
            model.
    """
    reader, stored = _open(directory)
    found: dict[str, DistributedTensor] = {}
    for prefix in PREFIXES:
        named = {name: stored.get(prefix + name) for name in expected}
        tensors = {
            name: DistributedTensor(reader, prefix + name, entry)
            for name, entry in named.items()
            if isinstance(entry, TensorStorageMetadata)
        }
        found = max(found, tensors, key=len)
    if not found:
        some = ", ".join(list(stored)[:3])
        raise GrowthError(f"{directory}: it has none of the model's tensors; it holds {some}")
    return found


def read_distributed_optimizer(
    directory: Path, parameters: Mapping[str, str]
) -> dict[str, dict[str, DistributedTensor]]:
    """An optimizer's state in a distributed checkpoint: parameter -> key -> tensor.

    It must have the form that `get_optimizer_state_dict` returns, alone or in a larger state dict.

    Args:
        parameters: name of a parameter in the model -> its name in the result.

    Raises:
        GrowthError: as `read_distributed`; no state of this model, or that of several optimizers.
    """
    reader, stored = _open(directory)
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


def _open(directory: Path) -> tuple[_Reader, Mapping[str, Any]]:
    """A reader of the checkpoint's files, and the entries of its metadata by name."""
    reader = _Reader(directory)
    refuse_links_out(directory / METADATA_FILE, directory)
    try:
        metadata = reader.read_metadata()
        _check_files(directory, metadata)
        reader.set_up_storage_reader(metadata, is_coordinator=False)
    except GrowthError:
        raise
    except UNREADABLE as error:
        raise GrowthError(
            f"{directory / METADATA_FILE}: not the metadata of a distributed checkpoint: {error}"
        ) from error
    return reader, metadata.state_dict_metadata


def _check_files(directory: Path, metadata: Metadata) -> None:
    """Refuse metadata that names files elsewhere, or something that is no file.

    Raises:
        GrowthError: it does.
    """
    for name in sorted({place.relative_path for place in metadata.storage_data.values()}):
        if not stays_inside(name):
            raise GrowthError(
                f"{directory / METADATA_FILE}: {reprlib.repr(name)} is not a file of the checkpoint"
            )
        refuse_links_out(directory / name, directory)
        if (directory / name).exists():
            regular_size(directory / name)


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
