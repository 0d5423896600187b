"""Reads the safetensors files of a checkpoint: checks every header, maps tensors on demand.

A link in a downloaded checkpoint could end at any file of its user. growkern would publish that
file with the grown model, so links are followed inside the checkpoint alone.

A shared file system takes longer to open a file than to read a small tensor from it. So files stay
open while a checkpoint is read piece by piece.
"""

from __future__ import annotations

import ctypes
import dataclasses
import errno
import math
import mmap
import os
import reprlib
import resource
import struct
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar
from weakref import WeakValueDictionary, finalize

import torch
from torch import Tensor

from growkern.errors import GrowthError, warn
from growkern.files import no_collections, parse_json, read_all, read_json, refuse_pointer
from growkern.growth.source.refused import quantised_advice, refuse_directory
from growkern.growth.stored import MOST_TENSORS, STORED_DTYPES, StoredTensor

# of the descriptors that a process may have
SHARE = 4
# Python's mmap holds a descriptor per mapping, and a model has thousands of tensors
LIBC = ctypes.CDLL(None, use_errno=True)
LIBC.mmap.restype = ctypes.c_void_p
LIBC.mmap.argtypes = (
    *(ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int),
    ctypes.c_int64,
)
LIBC.munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
FAILED = ctypes.c_void_p(-1).value
INDEX_FILE = "model.safetensors.index.json"
WEIGHTS_FILE = "model.safetensors"
# a safetensors file begins with the length of its header
LENGTH = struct.Struct("<Q")
# 150 bytes for each of `MOST_TENSORS`. Parsed, it takes five times as much memory
MOST_HEADER_BYTES = 20_000_000


# slots: a mixture has 100,000 of them
@dataclass(frozen=True, slots=True)
class Header(StoredTensor):
    """One tensor of a safetensors file; `start` is the byte of the file where its values start."""

    opened: WeightFile
    raw_name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    start: int
    is_mapped = True

    @property
    def file(self) -> str:
        return self.opened.path

    def read(self) -> Tensor:
        """The tensor, mapped. The parts that are used stay in memory until it is deleted."""
        return self._map(0, math.prod(self.shape)).view(self.shape)

    def rows(self, start: int, stop: int) -> Tensor:
        """Rows [start, stop) of the first axis, mapped. A tensor without axes has one row."""
        row = math.prod(self.shape[1:])
        shape = (stop - start, *self.shape[1:]) if self.shape else ()
        return self._map(start * row, (stop - start) * row).view(shape)

    def part(self, start: int, stop: int) -> Header:
        ((_, at, _),) = self.places(start, stop)
        return dataclasses.replace(self, shape=(stop - start, *self.shape[1:]), start=at)

    def inside(self, directory: Path) -> Header:
        """The same tensor, whose file lies in a directory."""
        return dataclasses.replace(self, opened=weight_file(directory / self.file))

    def places(self, start: int, stop: int) -> Iterator[tuple[str, int, int]]:
        """File, first byte and number of bytes of the rows [start, stop)."""
        row = math.prod(self.shape[1:]) * self.dtype.itemsize
        yield self.file, self.start + start * row, (stop - start) * row

    def _map(self, first: int, count: int) -> Tensor:
        if not count:
            return torch.empty(0, dtype=self.dtype)
        start = self.start + first * self.dtype.itemsize
        base = start // mmap.ALLOCATIONGRANULARITY * mmap.ALLOCATIONGRANULARITY
        try:
            mapped = self.opened.map(start - base + count * self.dtype.itemsize, base)
        except OSError as error:
            raise GrowthError(f"{self.file}: {self.raw_name} cannot be read: {error}") from error
        return torch.frombuffer(mapped, dtype=self.dtype, count=count, offset=start - base)


@dataclass(frozen=True)
class Transposed(StoredTensor):
    """A tensor that files hold with its last two axes swapped."""

    stored: Header

    @property
    def file(self) -> str:
        return self.stored.file

    @property
    def shape(self) -> tuple[int, ...]:
        *first, rows, columns = self.stored.shape
        return (*first, columns, rows)

    @property
    def dtype(self) -> torch.dtype:
        return self.stored.dtype

    def rows(self, start: int, stop: int) -> Tensor:
        return self.stored.rows(start, stop).mT.contiguous()

    def inside(self, directory: Path) -> Transposed:
        """The same tensor, whose file lies in a directory."""
        return Transposed(self.stored.inside(directory))

    def places(self, start: int, stop: int) -> Iterator[tuple[str, int, int]]:
        """File, first byte and number of bytes of the rows [start, stop)."""
        return self.stored.places(start, stop)


HANDLED = "growth handles F64, F32, F16 and BF16"
EIGHT_BITS = torch.float8_e4m3fn
STORED_FLOATS = [d for d in STORED_DTYPES.values() if d.is_floating_point and d != EIGHT_BITS]
# dtypes that only quantised weights have
QUANTISED_DTYPES = ("F8_E5M2", "F8_E8M0", "F6_E2M3", "F6_E3M2", "F4", "I8", "I16", "U16")
# no tensor of a model has more axes, and no axis more entries
MOST_AXES, MOST_ENTRIES = 8, 1 << 48
# a name and its shard take about 100 bytes, and mixtures have 140,000 tensors
MOST_INDEX_BYTES = 64_000_000


@no_collections()
def read_headers(
    directory: Path,
    read_shard: Callable[[Path], dict[str, Header]] | None = None,
    is_single: bool | None = None,
) -> dict[str, Header]:
    """The headers of all tensors of a checkpoint, by their names in the files.

    Files that are missing, truncated or corrupt are refused, and an index that does not match them
    or points outside the directory. A warning says so if there is an index that is not read.

    Args:
        read_shard: file -> its headers; default: from the file, which must lie in the directory.
        is_single: whether it has a single file of weights; default: whether it lies there.
    """
    refuse_directory(directory)
    index = directory / INDEX_FILE
    if is_single is None:
        is_single = (directory / WEIGHTS_FILE).is_file()
    if is_single and index.is_file():
        warn(
            f"{directory}: {WEIGHTS_FILE} is read, and {INDEX_FILE} with its files is ignored, as "
            "transformers does: delete those that are out of date"
        )
    if is_single or not index.is_file():
        single = directory / WEIGHTS_FILE
        if not read_shard and not single.is_file():
            raise GrowthError(
                f"{directory}: no {WEIGHTS_FILE} and no {INDEX_FILE}: download the model again, or "
                "save it with save_pretrained; a plan also takes a model made on the meta device"
            )
        return (read_shard or _read_shard)(single)
    weight_map, headers, files = _read_index(directory), dict[str, Header](), dict[str, str]()
    for shard in sorted(set(weight_map.values())):
        for name, header in (read_shard or _read_shard)(directory / shard).items():
            if name in headers:
                raise GrowthError(f"{directory}: {name} is in {headers[name].file} and in {shard}")
            headers[name], files[name] = header, shard
    for name, shard in weight_map.items():
        if files.get(name) != shard:
            raise GrowthError(f"{index}: {name} is not in {shard}")
    return headers


def shard_names(directory: Path) -> list[str]:
    """The names of the files that hold the weights, whether they are there or not.

    Where there is a single file of weights, transformers does not look at the index. Nor does
    growth.
    """
    if (directory / WEIGHTS_FILE).is_file() or not (directory / INDEX_FILE).is_file():
        return [WEIGHTS_FILE]
    return sorted(set(_read_index(directory).values()))


def _read_index(directory: Path) -> dict[str, str]:
    index = directory / INDEX_FILE
    refuse_links_out(index, directory)
    record = read_json(index, MOST_INDEX_BYTES, "safetensors index")
    weight_map = record.get("weight_map") if isinstance(record, dict) else None
    if not isinstance(weight_map, dict) or not weight_map:
        raise GrowthError(f'{index}: not a safetensors index: "weight_map" names no tensors')
    for name, shard in weight_map.items():
        if not isinstance(shard, str):
            raise GrowthError(f"{index}: shard {shard!r} of {name} is not a plain file name")
    for shard in sorted(set(weight_map.values())):
        if not shard or Path(shard).name != shard or "\0" in shard:
            raise GrowthError(f"{index}: shard {shard!r} is not a plain file name")
    return weight_map


def read_header_bytes(file: Path) -> bytes:
    """The raw header of a safetensors file, length and JSON; ValueError if the file is shorter."""
    opened = weight_file(file).opened()
    size = os.fstat(opened.number).st_size
    if size < LENGTH.size:
        raise ValueError(f"it has {size} bytes, fewer than the length of a header")
    head = _bytes_at(opened, LENGTH.size, 0)
    refuse_pointer(file, head, "weights")
    (length,) = LENGTH.unpack(head)
    if length > size - len(head):
        raise ValueError(f"it declares a header of {length} bytes, but has only {size}")
    check_header_size(file, length, size)
    return head + _bytes_at(opened, length, len(head))


def _bytes_at(opened: Descriptor, size: int, start: int) -> bytes:
    content = bytearray(size)
    read_all(opened.number, memoryview(content), start)
    return bytes(content)


def check_header_size(file: Path, length: int, size: int) -> None:
    """Refuse a header of more bytes than growkern reads, in a file that can be whole."""
    if MOST_HEADER_BYTES < length < size:
        raise GrowthError(
            f"{file}: its header has {length} bytes, more than the {MOST_HEADER_BYTES} that "
            "growkern reads: save the model in more files, with a smaller max_shard_size"
        )


def _read_shard(file: Path) -> dict[str, Header]:
    """The headers of one file.

    The safetensors library would map the whole file, which fails if it is larger than memory.
    """
    # Path.is_file would raise if the name is too long for the file system
    if not os.path.isfile(file):
        raise GrowthError(f"{file.parent}: shard {file.name!r} is missing: download it again")
    refuse_links_out(file, file.parent)
    # it stays open for the tensors in it
    opened = weight_file(file)
    with _naming(file):
        head, size = read_header_bytes(file), file.stat().st_size
    return parse_headers(opened, head, size)


@contextmanager
def _naming(file: Path) -> Iterator[None]:
    """Turn errors about the bytes of a file into `GrowthError`."""
    try:
        yield
    except OSError as error:
        raise GrowthError(f"{file}: {error.strerror or error}") from error
    except GrowthError:
        raise
    except (ValueError, KeyError, TypeError) as error:
        raise GrowthError(
            f"{file}: truncated or corrupt safetensors file: {error}: download or save it again"
        ) from error


def parse_headers(opened: WeightFile, head: bytes, size: int) -> dict[str, Header]:
    """The tensors that the header of a safetensors file lists. The file is not read.

    `head` has its first bytes: the length of the header, and the header.
    """
    with _naming(Path(opened.path)):
        if head[LENGTH.size : LENGTH.size + 1] != b"{":
            raise ValueError("its header is not a JSON object")
        entries = parse_json(head[LENGTH.size :])
        if len(entries) > MOST_TENSORS:
            raise ValueError(f"{len(entries)} tensors, more than any model has")
        metadata = entries.pop("__metadata__", None)
        # null is read like no table, as by the safetensors library
        metadata = {} if metadata is None else metadata
        if not isinstance(metadata, dict):
            raise ValueError("its __metadata__ is no table")
        if not all(isinstance(text, str) for text in (*metadata, *metadata.values())):
            raise ValueError("its __metadata__ holds more than texts")
        headers = {name: _header(opened, len(head), name, e) for name, e in entries.items()}
        _check_places(entries, len(head), size)
        return headers


def _header(opened: WeightFile, data_start: int, name: str, entry: Mapping[str, Any]) -> Header:
    try:
        code, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    except (KeyError, TypeError) as error:
        given = reprlib.repr(entry)
        raise ValueError(f"{name} needs dtype, shape and data_offsets, got {given}") from error
    if len(entry) > 3:
        # other readers may refuse extra fields
        raise ValueError(f"{name} has more than dtype, shape and data_offsets")
    if len(shape) > MOST_AXES:
        raise ValueError(f"{name} has {len(shape)} axes")
    numbers = [*shape, *offsets]
    # not isinstance: True is an int
    is_count = {*map(type, numbers)} == {int} and min(numbers) >= 0 and max(numbers) <= MOST_ENTRIES
    if not is_count or len(offsets) != 2:
        places = reprlib.repr(offsets)
        raise ValueError(f"{name} has shape {reprlib.repr(shape)} and data_offsets {places}")
    if code in QUANTISED_DTYPES:
        raise GrowthError(_quantised(opened.path, name, code))
    if code not in STORED_DTYPES:
        raise GrowthError(f"{opened.path}: {name} has dtype {reprlib.repr(code)}; {HANDLED}")
    header = Header(opened, name, tuple(shape), STORED_DTYPES[code], data_start + offsets[0])
    if header.nbytes != offsets[1] - offsets[0]:
        raise ValueError(f"{name} is {code} {shape} and has bytes {offsets[0]} to {offsets[1]}")
    return header


def _quantised(file: str | Path, name: str, code: str) -> str:
    return (
        f"{file}: {name} has dtype {code}, as in a quantised checkpoint: {quantised_advice()} "
        f"({HANDLED})"
    )


def refuse_eight_bits(headers: Mapping[str, Any]) -> None:
    """Refuse weights of 8 bits, whose scales nobody applied."""
    for name, header in headers.items():
        if header.dtype == EIGHT_BITS:
            raise GrowthError(_quantised(header.file, name, "F8_E4M3"))


def _check_places(entries: Mapping[str, Mapping[str, Any]], data_start: int, size: int) -> None:
    """Refuse a file whose tensors overlap, leave gaps or do not fill it."""
    end = 0
    for start, stop, name in sorted((*e["data_offsets"], name) for name, e in entries.items()):
        if start != end:
            raise ValueError(
                f"{name} starts at byte {data_start + start}, expected {data_start + end}"
            )
        end = stop
    if data_start + end != size:
        raise ValueError(f"it has {size} bytes, its header says {data_start + end}")


def stays_in(file: Path, directory: Path) -> bool:
    """Whether a path below a directory, with all links followed, ends inside its root.

    That is the checkpoint, or its repository in a cache of the Hub.
    """
    try:
        real = directory.resolve()
        # models--ORG--NAME/snapshots/REVISION holds links into models--ORG--NAME/blobs
        is_cached = real.parent.name == "snapshots" and (real.parents[1] / "blobs").is_dir()
        return file.resolve().is_relative_to(real.parents[1] if is_cached else real)
    except (OSError, RuntimeError):
        # links in a circle
        return False


def refuse_links_out(file: Path, directory: Path) -> None:
    """Refuse a file that a link leads out of the checkpoint."""
    if not stays_in(file, directory):
        raise GrowthError(
            f"{file} links to {os.path.realpath(file)}, outside of the checkpoint: replace the "
            "link by the file itself"
        )


class Descriptor:
    """An open file. It is closed when the last reference to it is gone."""

    def __init__(self, path: str) -> None:
        self.number = -1
        self.number = os.open(path, os.O_RDONLY)
        self.identity = _identity(os.fstat(self.number))

    # at exit a module loses its names first
    def __del__(self, close: Callable[[int], None] = os.close) -> None:
        try:
            if self.number >= 0:
                close(self.number)
        except OSError:
            # nothing was written, so an error of the disk loses nothing
            pass


def _identity(state: os.stat_result) -> tuple[int, int]:
    return state.st_dev, state.st_ino


class WeightFile:
    """A file of weights: opened once, at its first use, and closed when its last tensor is gone.

    Of a checkpoint with thousands of files, those that were used last stay open. If another file
    takes the name, that one is read. `weight_file` makes them.
    """

    __slots__ = ("__weakref__", "path")
    kept: ClassVar[OrderedDict[str, Descriptor]] = OrderedDict()

    def __init__(self, path: str) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Callable[[str], WeightFile], tuple[str]]:
        return weight_file, (self.path,)

    def __del__(self) -> None:
        # without the lock, which this thread may hold
        self.kept.pop(self.path, None)

    def opened(self) -> Descriptor:
        """The open file. Keep the result while its number is used. OSError if it cannot be opened.

        Several threads may read from it, each from places of its own.
        """
        identity, kept = _identity(os.stat(self.path)), self.kept
        with _LOCK:
            found = kept.get(self.path)
            if found is None or found.identity != identity:
                found = Descriptor(self.path)
                most, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
                while most != resource.RLIM_INFINITY and len(kept) > most // SHARE:
                    kept.popitem(last=False)
            kept[self.path] = found
            kept.move_to_end(self.path)
            return found

    def map(self, size: int, start: int) -> Any:
        """`size` bytes from byte `start` on, which is one of whole pages, as a buffer.

        Writing into it leaves the file as it is. OSError if the file is shorter, or cannot be read.
        """
        file = self.opened()
        # a page beyond the end would end the process when it is read
        if os.fstat(file.number).st_size < start + size:
            raise OSError(errno.EIO, "the file is truncated")
        access = mmap.PROT_READ | mmap.PROT_WRITE
        place = LIBC.mmap(None, size, access, mmap.MAP_PRIVATE, file.number, start)
        if place == FAILED:
            raise OSError(code := ctypes.get_errno(), os.strerror(code))
        buffer = (ctypes.c_char * size).from_address(place)
        # a tensor may outlive the end of Python
        finalize(buffer, LIBC.munmap, place, size).atexit = False
        return buffer


_LOCK = threading.Lock()
_KNOWN: WeakValueDictionary[str, WeightFile] = WeakValueDictionary()


def weight_file(path: str | os.PathLike[str]) -> WeightFile:
    """The file of this path, which all tensors in it share."""
    name = os.fspath(path)
    with _LOCK:
        return _KNOWN.get(name) or _KNOWN.setdefault(name, WeightFile(name))
