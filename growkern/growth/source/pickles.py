"""Reads the pickles of `torch.distributed.checkpoint` without running code that they name.

The metadata: an unpickler that knows only the classes of metadata, and paths. What it returns is
checked, field by field. A saved piece of a tensor: `torch.load` with `weights_only`, and the piece
has to hold the tensor that the metadata describes.
"""

from __future__ import annotations

import io
import pickle
import reprlib
import struct
import zipfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)

from growkern.errors import GrowthError, a_kind
from growkern.files import no_collections, read_all, read_bounded, regular_size, stays_inside
from growkern.growth.source.files import MOST_ENTRIES, WeightFile, refuse_links_out
from growkern.growth.source.refused import METADATA_FILE

# A piece of a tensor takes 140 bytes. A model of 70 billion parameters and its optimizer on 1024
# processes have 2.2 million pieces, and a model of a trillion on 4096 has 5 million
MOST_BYTES = 1_000_000_000
# the classes that occur in the metadata of a checkpoint of tensors
INSTANCES: tuple[type, ...] = (
    *(Metadata, MetadataIndex, StorageMeta, ChunkStorageMetadata, TensorStorageMetadata),
    *(TensorProperties, BytesStorageMetadata, _StorageInfo),
)
OTHERS = {
    "torch.distributed.checkpoint.metadata": {"_MEM_FORMAT_ENCODING"},
    "torch.distributed.checkpoint.filesystem": {"_StoragePrefix"},
    "torch.serialization": {"_get_layout"},
    "collections": {"OrderedDict"},
    "pathlib": {"Path", "PosixPath", "WindowsPath", "PurePosixPath", "PureWindowsPath"},
}
OTHERS["pathlib._local"] = OTHERS["pathlib"]
# the stubs have its public methods only
_InPython: Any = pickle._Unpickler
# errors that pickle and the reader raise for a damaged file
UNREADABLE: tuple[type[Exception], ...] = (
    *(OSError, EOFError, RuntimeError, ValueError, TypeError, LookupError, OverflowError),
    *(AttributeError, AssertionError, ImportError, MemoryError, pickle.UnpicklingError),
    *(struct.error, zipfile.BadZipFile),
)


def brief(error: Exception) -> str:
    """The first line of an error, or its kind."""
    return str(error).strip().partition("\n")[0] or type(error).__name__


def read_metadata(directory: Path) -> Metadata:
    """The metadata of a checkpoint. Every number and every name in it is checked."""
    file = directory / METADATA_FILE
    refuse_links_out(file, directory)
    content = read_bounded(file, MOST_BYTES, "metadata")
    try:
        with no_collections():
            metadata = _Unpickler(io.BytesIO(content)).load()
        _check(metadata)
    except UNREADABLE as error:
        raise GrowthError(
            f"{file}: not the metadata of a distributed checkpoint: {brief(error)}"
        ) from error
    # it may name files elsewhere, or something that is no file
    for name in sorted({place.relative_path for place in metadata.storage_data.values()}):
        if not stays_inside(name):
            raise GrowthError(f"{file}: {reprlib.repr(name)} is not a file of the checkpoint")
        refuse_links_out(directory / name, directory)
        if (directory / name).exists():
            regular_size(directory / name)
    return metadata


class _Unpickler(_InPython):
    """Unpickles only plain values and metadata: other pickles could run any code."""

    # its methods are looked up there
    dispatch: ClassVar[dict[int, Any]] = dict(_InPython.dispatch)

    def find_class(self, module: str, name: str) -> Any:
        is_dtype = module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)
        if is_dtype or (module, name) == ("torch", "Size"):
            return getattr(torch, name)
        for cls in INSTANCES:
            if (module, name) == (cls.__module__, cls.__name__):
                return cls
        if name not in OTHERS.get(module, ()):
            raise pickle.UnpicklingError(f"it holds a {module}.{name}")
        return super().find_class(module, name)

    def load_build(self) -> None:
        # a class or a function could be changed for the whole process
        if type(self.stack[-2]) not in INSTANCES:
            raise pickle.UnpicklingError("it changes something else than metadata")
        super().load_build()

    dispatch[pickle.BUILD[0]] = load_build


def _check(metadata: Any) -> None:
    """Refuse metadata with other types or values than PyTorch writes."""
    for name, entry in metadata.state_dict_metadata.items():
        if type(name) is not str:
            raise ValueError("a tensor has no name")
        if type(entry) is not TensorStorageMetadata:
            continue
        boxes = [entry.size, *(x for piece in entry.chunks for x in (piece.offsets, piece.sizes))]
        if type(entry.properties.dtype) is not torch.dtype:
            raise ValueError(f"{name} has no dtype")
        if not all(type(x) is torch.Size and len(x) == len(entry.size) for x in boxes):
            raise ValueError(f"{name} has a shape or a piece of other axes")
        _check_counts(name, [n for box in boxes for n in box])
    for key, place in metadata.storage_data.items():
        if type(key.fqn) is not str or type(key.offset) not in (torch.Size, type(None)):
            raise ValueError("a piece has no name or no place in its tensor")
        if type(place.relative_path) is not str:
            raise ValueError(f"{key.fqn} has a piece that lies in no file")
        _check_counts(key.fqn, [place.offset, place.length])


def _check_counts(name: str, numbers: Sequence[Any]) -> None:
    if not all(type(n) is int and 0 <= n <= MOST_ENTRIES for n in numbers):
        raise ValueError(f"{name} has sizes or places that are no counts")


def read_piece(
    file: WeightFile, place: tuple[int, int], dtype: torch.dtype, shape: Sequence[int]
) -> Tensor:
    """The tensor of an archive in a file; ValueError if it is damaged or something else.

    `place` is the offset and the length of the archive, bytes.
    """
    offset, length = place
    content, opened = bytearray(length), file.opened()
    read_all(opened.number, memoryview(content), offset)
    try:
        with zipfile.ZipFile(io.BytesIO(content)) as archive:
            # all checksums are 0 after torch.serialization.set_crc32_options(False)
            if any(record.CRC for record in archive.infolist()) and (name := archive.testzip()):
                raise ValueError(f"{name} is damaged, as its checksum differs")
        tensor = torch.load(io.BytesIO(content), map_location="cpu", weights_only=True)
    except UNREADABLE as error:
        raise ValueError(f"a piece is no archive of a tensor: {brief(error)}") from error
    if not isinstance(tensor, Tensor) or tensor.layout is not torch.strided:
        raise ValueError(f"a piece holds {a_kind(tensor)}, not a dense tensor")
    if (tensor.dtype, tensor.shape) != (dtype, shape):
        raise ValueError(
            f"a piece holds a tensor of {tensor.dtype} {tuple(tensor.shape)}, "
            f"but the metadata says {dtype} {tuple(shape)}"
        )
    if tensor.device.type != "cpu":
        raise ValueError("a piece does not hold the values of its tensor")
    return tensor.detach()
