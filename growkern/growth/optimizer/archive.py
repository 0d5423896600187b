"""Writes files for `torch.load` without ever holding a whole tensor in memory.

`torch.save` needs every tensor in memory. Here, tensors on the meta device are placeholders whose
values arrive in pieces.

The format is that of PyTorch since version 1.6, a zip archive with uncompressed records. data.pkl
refers to the tensors' storages by number. The storages are data/0, data/1 and so on, each aligned
to 64 bytes.
"""

from __future__ import annotations

import io
import pickle
import struct
import sys
import zipfile
from collections import OrderedDict
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from growkern.errors import GrowthError

# the classes by which data.pkl names the dtype of a storage
STORAGES = {
    torch.float64: torch.DoubleStorage,
    torch.float32: torch.FloatStorage,
    torch.float16: torch.HalfStorage,
    torch.bfloat16: torch.BFloat16Storage,
    torch.int64: torch.LongStorage,
    torch.int32: torch.IntStorage,
    torch.uint8: torch.ByteStorage,
    torch.bool: torch.BoolStorage,
}
ROOT = "archive"
ALIGNMENT = 64
# upper bound of a record's overhead: two headers, two names, the padding
RECORD_BYTES = 512
# bytes of a local header without its name and extra fields; the extra field for sizes past 4 GB
HEADER_BYTES, ZIP64_BYTES = 30, 20
PADDING = struct.Struct("<2sH")


@dataclass(frozen=True)
class _Storage:
    """A reference to a storage, for data.pkl."""

    key: str
    dtype: torch.dtype
    count: int


class _Pickler(pickle.Pickler):
    """Replaces every tensor by a reference to a storage of its own, and collects the tensors."""

    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file, protocol=2)
        self.tensors: list[Tensor] = []

    def reducer_override(self, x: Any) -> Any:
        if not isinstance(x, Tensor):
            return NotImplemented
        if x.dtype not in STORAGES:
            raise GrowthError(f"the optimizer holds a tensor of {x.dtype}, which cannot be written")
        storage = _Storage(str(len(self.tensors)), x.dtype, x.numel())
        self.tensors.append(x)
        stride = torch.empty(x.shape, device="meta").stride()
        hooks: OrderedDict[str, Any] = OrderedDict()
        rebuild = torch._utils._rebuild_tensor_v2
        return rebuild, (storage, 0, tuple(x.shape), stride, False, hooks)

    def persistent_id(self, x: Any) -> Any:
        if not isinstance(x, _Storage):
            return None
        return "storage", STORAGES[x.dtype], x.key, "cpu", x.count


def _pickled(state: Any) -> tuple[bytes, list[Tensor]]:
    """The bytes of data.pkl, and the tensors in the order of their storages."""
    stream = io.BytesIO()
    pickler = _Pickler(stream)
    pickler.dump(state)
    return stream.getvalue(), pickler.tensors


def archive_size(state: Any) -> int:
    """Upper bound of the bytes that `write_archive` writes."""
    text, tensors = _pickled(state)
    return len(text) + sum(x.nbytes for x in tensors) + RECORD_BYTES * (len(tensors) + 3)


def write_archive(state: Any, file: Path, pieces_of: Callable[[Tensor], Iterable[Tensor]]) -> None:
    """Write plain values and tensors for `torch.load(file, weights_only=True)`.

    Args:
        state: tensors in nested containers. Each tensor gets a storage of its own.
        pieces_of: returns the values of a meta tensor as consecutive contiguous pieces, in its
            dtype.

    Source: `torch.save`; APPNOTE.TXT (PKWARE) for the archive.
    """
    text, tensors = _pickled(state)
    with zipfile.ZipFile(file, "w") as archive:
        for name, data in (("data.pkl", text), ("byteorder", sys.byteorder), ("version", "3\n")):
            archive.writestr(zipfile.ZipInfo(f"{ROOT}/{name}"), data)
        for key, x in enumerate(tensors):
            record, is_large = _record(archive, f"{ROOT}/data/{key}", x.nbytes)
            with archive.open(record, "w", force_zip64=is_large) as stream:
                for piece in pieces_of(x) if x.is_meta else [x.contiguous()]:
                    stream.write(piece.reshape(-1).view(torch.uint8).numpy().data)


def _record(archive: zipfile.ZipFile, name: str, size: int) -> tuple[zipfile.ZipInfo, bool]:
    """The next record's zip entry with alignment padding, and whether it needs the zip64 form."""
    assert archive.fp is not None
    record, is_large = zipfile.ZipInfo(name), size > 1 << 30
    record.file_size = size
    head = HEADER_BYTES + len(name) + ZIP64_BYTES * is_large + PADDING.size
    padding = -(archive.fp.tell() + head) % ALIGNMENT
    # PyTorch pads with the same extra field
    record.extra = PADDING.pack(b"FB", padding) + b"Z" * padding
    return record, is_large
