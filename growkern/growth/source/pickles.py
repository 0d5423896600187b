"""Reads the pickles of `torch.distributed.checkpoint`, as data of a stranger.

The metadata: Python's unpickler in C reserves memory for numbers in the file before it looks at the
rest. The one in Python does not, and takes twice the time. Here it knows only what metadata is made
of: plain values, and instances of the classes of metadata. They have keys that are quick to
compare, so that no structure that holds itself many times is walked through.

A saved piece of a tensor, an archive of `torch.save`: `torch.load` would decompress records of any
size, and return any tensor. Here the archive has to hold the tensor that the metadata describes, as
PyTorch saves it: alone and uncompressed.
"""

from __future__ import annotations

import io
import math
import pickle
import pickletools
import reprlib
import struct
import sys
import zipfile
import zlib
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor
from torch._weights_only_unpickler import Unpickler
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

from growkern.errors import GrowthError
from growkern.files import no_collections, read_all, read_bounded, regular_size, stays_inside
from growkern.growth.source.files import MOST_AXES, MOST_ENTRIES, refuse_links_out
from growkern.growth.source.opened import WeightFile
from growkern.growth.source.refused import METADATA_FILE

# A piece of a tensor takes 140 bytes. A model of 70 billion parameters and its optimizer on 1024
# processes have 2.2 million pieces, and a model of a trillion on 4096 has 5 million
MOST_BYTES = 1_000_000_000
# bytes that a piece takes at least
LEAST_BYTES = 8
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
# of the machine that reads pickles
OPCODES = (
    *("PROTO", "FRAME", "STOP", "MARK", "MEMOIZE", "PUT", "BINPUT", "LONG_BINPUT"),
    *("GET", "BINGET", "LONG_BINGET", "NONE", "NEWTRUE", "NEWFALSE", "BININT", "BININT1"),
    *("BININT2", "LONG1", "SHORT_BINUNICODE", "BINUNICODE", "EMPTY_TUPLE", "TUPLE", "TUPLE1"),
    *("TUPLE2", "TUPLE3", "EMPTY_LIST", "APPEND", "APPENDS", "EMPTY_DICT", "SETITEM"),
    *("SETITEMS", "GLOBAL", "STACK_GLOBAL", "REDUCE", "NEWOBJ", "BUILD"),
)
# the stubs have its public methods only
_InPython: Any = pickle._Unpickler
# errors that pickle and the reader raise for a damaged file
UNREADABLE: tuple[type[Exception], ...] = (
    *(OSError, EOFError, RuntimeError, ValueError, TypeError, LookupError, OverflowError),
    *(AttributeError, AssertionError, ImportError, MemoryError, pickle.UnpicklingError),
    struct.error,
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
        _check(metadata, len(content))
    except UNREADABLE as error:
        raise GrowthError(
            f"{file}: not the metadata of a distributed checkpoint: {brief(error)}"
        ) from error
    _check_files(directory, {place.relative_path for place in metadata.storage_data.values()})
    return metadata


class _Unpickler(_InPython):
    """Unpickles only plain values and metadata: other pickles could run any code."""

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

    def load_setitems(self) -> None:
        items = self.pop_mark()
        self._set(items[::2], items[1::2])

    def load_setitem(self) -> None:
        value, key = self.stack.pop(), self.stack.pop()
        self._set([key], [value])

    def _set(self, keys: list[Any], values: list[Any]) -> None:
        if type(self.stack[-1]) not in (dict, OrderedDict):
            raise pickle.UnpicklingError("it sets an item of something else than a table")
        if not all(type(key) is str or _is_index(key) for key in keys):
            raise pickle.UnpicklingError("it has a table with other keys than names")
        self.stack[-1].update(zip(keys, values, strict=True))

    def _check_call(self) -> None:
        made, arguments = self.stack[-2:]
        if type(arguments) is not tuple or not all(map(_is_plain, arguments)):
            raise pickle.UnpicklingError(f"it makes a {reprlib.repr(made)} of other things")

    def load_reduce(self) -> None:
        self._check_call()
        super().load_reduce()

    def load_newobj(self) -> None:
        self._check_call()
        super().load_newobj()

    def load_build(self) -> None:
        # a class or a function could be changed for the whole process
        if type(self.stack[-2]) not in INSTANCES or type(self.stack[-1]) not in (dict, tuple):
            raise pickle.UnpicklingError("it changes something else than metadata")
        if type(self.stack[-2]) is not TensorProperties and type(self.stack[-1]) is not dict:
            raise pickle.UnpicklingError("its metadata has no fields")
        super().load_build()


def _refuse(self: _Unpickler) -> None:
    raise pickle.UnpicklingError("it holds other things than metadata")


for _opcode in pickletools.opcodes:
    # the methods of this class too, which are found by their names
    _method = getattr(_Unpickler, f"load_{_opcode.name.lower()}", None)
    if _opcode.name not in OPCODES:
        _Unpickler.dispatch[ord(_opcode.code)] = _refuse
    elif _method in vars(_Unpickler).values():
        _Unpickler.dispatch[ord(_opcode.code)] = _method


def _is_plain(value: Any) -> bool:
    """Whether a value is a text, a number or a tuple of those."""
    inner = value if type(value) in (tuple, torch.Size) else (value,)
    return all(x is None or type(x) in (str, int, bool) for x in inner)


def _is_index(key: Any) -> bool:
    if type(key) is not MetadataIndex:
        return False
    fields = vars(key)
    offset = fields.get("offset")
    return type(fields.get("fqn")) is str and (offset is None or type(offset) is torch.Size)


def _check(metadata: Any, size: int) -> None:
    """Refuse metadata of `size` bytes with other types or values than PyTorch writes."""
    if type(metadata) is not Metadata:
        raise ValueError(f"it is a {type(metadata).__name__}")
    stored, places = metadata.state_dict_metadata, metadata.storage_data
    if type(stored) is not dict or type(places) is not dict:
        raise ValueError("it has no tables of tensors and of their places")
    tensors = {k: v for k, v in stored.items() if type(v) is TensorStorageMetadata}
    if not all(type(name) is str for name in stored):
        raise ValueError("a tensor has no name")
    if LEAST_BYTES * sum(len(entry.chunks) for entry in tensors.values()) > size:
        raise ValueError("tensors share their pieces")
    for name, entry in tensors.items():
        dtype, shape = entry.properties.dtype, entry.size
        if type(dtype) is not torch.dtype or type(shape) is not torch.Size:
            raise ValueError(f"{name} has no dtype and shape")
        # the product of many sizes takes time; an empty tensor may not hide large ones
        is_wrong = len(shape) > MOST_AXES or min(shape, default=0) < 0
        if is_wrong or math.prod(max(1, n) for n in shape) > MOST_ENTRIES:
            raise ValueError(f"{name} has the shape {reprlib.repr(tuple(shape))}")
        pieces = entry.chunks if type(entry.chunks) is list else [None]
        if not all(_is_piece(piece, len(shape)) for piece in pieces):
            raise ValueError(f"{name} has a piece of other axes or of negative numbers")
    for key, place in places.items():
        if not _is_index(key) or not _is_place(place):
            raise ValueError("a piece has no place in a file")
    if _share_bytes([place for place in places.values() if place.length]):
        raise ValueError("pieces share bytes of a file")


def _is_piece(piece: Any, axes: int) -> bool:
    if type(piece) is not ChunkStorageMetadata:
        return False
    return all(
        type(counts) is torch.Size
        and len(counts) == axes
        and all(0 <= n <= MOST_ENTRIES for n in counts)
        for counts in (piece.offsets, piece.sizes)
    )


def _is_place(place: Any) -> bool:
    if type(place) is not _StorageInfo or type(place.relative_path) is not str:
        return False
    numbers, steps = (place.offset, place.length), getattr(place, "transform_descriptors", None)
    are_texts = steps is None or (type(steps) is list and all(type(x) is str for x in steps))
    return are_texts and all(type(n) is int and 0 <= n <= MOST_ENTRIES for n in numbers)


def _share_bytes(places: Sequence[_StorageInfo]) -> bool:
    """Whether two places overlap: what lies there would become the values of two tensors."""
    numbers = {name: i for i, name in enumerate({place.relative_path for place in places})}
    files = np.array([numbers[place.relative_path] for place in places], np.int64)
    starts = np.array([place.offset for place in places], np.int64)
    stops = starts + np.array([place.length for place in places], np.int64)
    order = np.lexsort((starts, files))
    files, starts, stops = files[order], starts[order], stops[order]
    return bool(((files[1:] == files[:-1]) & (starts[1:] < stops[:-1])).any())


def _check_files(directory: Path, names: Iterable[str]) -> None:
    """Refuse metadata that names files elsewhere, or something that is no file."""
    for name in sorted(names):
        if not stays_inside(name):
            raise GrowthError(
                f"{directory / METADATA_FILE}: {reprlib.repr(name)} is not a file of the checkpoint"
            )
        refuse_links_out(directory / name, directory)
        if (directory / name).exists():
            regular_size(directory / name)


# bytes of an archive besides those of its tensor: PyTorch writes some 1500
MOST_OVERHEAD = 1 << 20
# where the lengths of a name and of the bytes behind it stand in the header of a record
LENGTHS = struct.Struct("<26xHH")


def read_piece(
    file: WeightFile, place: tuple[int, int], dtype: torch.dtype, shape: Sequence[int]
) -> Tensor:
    """The tensor of an archive in a file; ValueError if it is damaged or something else.

    `place` is the offset and the length of the archive, bytes.
    """
    offset, length = place
    nbytes = math.prod(shape) * dtype.itemsize
    if length > nbytes + MOST_OVERHEAD:
        raise ValueError(f"a piece of {nbytes} bytes takes {length} bytes in the file")
    content = bytearray(length)
    opened = file.opened()
    read_all(opened.number, memoryview(content), offset)
    try:
        tensor = _load(content, nbytes)
    except (zipfile.BadZipFile, NotImplementedError, struct.error, LookupError) as error:
        raise ValueError(f"a piece is no archive of a tensor: {error}") from error
    if not isinstance(tensor, Tensor) or tensor.layout is not torch.strided:
        raise ValueError(f"a piece holds a {type(tensor).__name__}, not a dense tensor")
    if (tensor.dtype, tensor.shape) != (dtype, shape):
        raise ValueError(
            f"a piece holds a tensor of {tensor.dtype} {tuple(tensor.shape)}, "
            f"but the metadata says {dtype} {tuple(shape)}"
        )
    if tensor.device.type != "cpu" or tensor.untyped_storage().nbytes() != nbytes:
        raise ValueError(f"a piece does not hold the {nbytes} bytes of its tensor")
    if torch._debug_has_internal_overlap(tensor):
        raise ValueError("a piece holds a tensor whose entries share bytes")
    return tensor.detach()


def _load(content: bytearray, nbytes: int) -> Any:
    """What an archive holds. Its tensors share their memory with `content`."""
    with zipfile.ZipFile(io.BytesIO(content)) as archive:
        records = {record.filename.partition("/")[2]: record for record in archive.infolist()}
    # all checksums are 0 after torch.serialization.set_crc32_options(False)
    is_checked = any(record.CRC for record in records.values())

    def bytes_of(name: str) -> memoryview:
        record = records[name]
        if record.compress_type != zipfile.ZIP_STORED:
            raise ValueError("the records of a piece are compressed: save it with torch.save")
        start = record.header_offset
        start += LENGTHS.size + sum(LENGTHS.unpack_from(content, start))
        result = memoryview(content)[start : start + record.file_size]
        if is_checked and zlib.crc32(result) != record.CRC:
            raise ValueError(f"{name} of a piece is damaged: its checksum differs")
        return result

    def load_storage(saved: tuple[Any, ...]) -> torch.storage.TypedStorage:
        _, kind, key, _, count = saved
        dtype = torch.uint8 if kind is torch.UntypedStorage else kind.dtype
        stored = bytes_of(f"data/{key}")
        if not len(stored) == count * dtype.itemsize == nbytes:
            raise ValueError(f"a piece holds {len(stored)} bytes, but its tensor has {nbytes}")
        raw = torch.frombuffer(stored, dtype=torch.uint8) if stored else torch.empty(0)
        return torch.storage.TypedStorage(
            wrap_storage=raw.untyped_storage(), dtype=dtype, _internal=True
        )

    if "byteorder" in records and bytes_of("byteorder") != sys.byteorder.encode():
        raise ValueError("a piece was saved on a machine of another byte order: save it again here")
    unpickler: Any = Unpickler(io.BytesIO(bytes_of("data.pkl")), encoding="utf-8")
    unpickler.persistent_load = load_storage
    return unpickler.load()
