"""Reads one saved piece of a tensor, an archive of `torch.save`, as data of a stranger.

`torch.load` would decompress records of any size, and return any tensor. Here the archive has to
hold the tensor that the metadata describes, as PyTorch saves it: alone and uncompressed.
"""

from __future__ import annotations

import io
import math
import struct
import sys
import zipfile
import zlib
from collections.abc import Sequence
from typing import IO, Any

import torch
from torch import Tensor
from torch._weights_only_unpickler import Unpickler

# bytes of an archive besides those of its tensor: PyTorch writes some 1500
MOST_OVERHEAD = 1 << 20
# where the lengths of a name and of the bytes behind it stand in the header of a record
LENGTHS = struct.Struct("<26xHH")


def read_piece(
    stream: IO[bytes], place: tuple[int, int], dtype: torch.dtype, shape: Sequence[int]
) -> Tensor:
    """The tensor of an archive in a file.

    Args:
        place: the offset and the length of the archive, bytes.

    Raises:
        ValueError: the archive is damaged, or holds something else.
    """
    offset, length = place
    nbytes = math.prod(shape) * dtype.itemsize
    if length > nbytes + MOST_OVERHEAD:
        raise ValueError(f"a piece of {nbytes} bytes takes {length} bytes in the file")
    content = bytearray(length)
    stream.seek(offset)
    if stream.readinto(content) != length:  # type: ignore[attr-defined]
        raise ValueError("the file is truncated")
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
