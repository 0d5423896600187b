"""Writes files that `torch.load` reads, of tensors that are nowhere whole.

An archive whose records are not compressed: data.pkl, which names the tensors' storages by number,
and the storages, data/0 and so on, each at a multiple of 64 bytes. PyTorch has read this form since
1.6. `torch.save` wants every tensor in memory; here those on the meta device come in pieces.
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

# PyTorch's names for what a storage holds
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
# of a record's entries beside its bytes: two headers, two names, the padding
RECORD_BYTES = 512
# a local header is as long as this, its name and its extra fields; that of sizes past 4 GB is 20
HEADER_BYTES, ZIP64_BYTES = 30, 20
PADDING = struct.Struct("<2sH")


@dataclass(frozen=True)
class _Storage:
    """What stands for a storage in data.pkl."""

    key: str
    dtype: torch.dtype
    count: int


class _Pickler(pickle.Pickler):
    """Gives every tensor a storage of its own, and collects them."""

    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file, protocol=2)
        self.tensors: list[Tensor] = []

    def reducer_override(self, x: Any) -> Any:
        if not isinstance(x, Tensor):
            return NotImplemented
        if x.dtype not in STORAGES:
            raise GrowthError(f"the optimizer holds a tensor of {x.dtype}, which is not written")
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
    """data.pkl, and the tensors by the numbers of their storages."""
    stream = io.BytesIO()
    pickler = _Pickler(stream)
    pickler.dump(state)
    return stream.getvalue(), pickler.tensors


def archive_size(state: Any) -> int:
    """The most bytes that `write_archive` writes."""
    text, tensors = _pickled(state)
    return len(text) + sum(x.nbytes for x in tensors) + RECORD_BYTES * (len(tensors) + 3)


def write_archive(state: Any, file: Path, pieces_of: Callable[[Tensor], Iterable[Tensor]]) -> None:
    """Write plain values and tensors; `torch.load(file, weights_only=True)` gives them back.

    Args:
        state: tensors in any nest of what pickle takes; each gets a storage of its own.
        pieces_of: gives the values of a tensor on the meta device, in their order, contiguous and
            in its dtype.

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
    """The entry of the next record, padded, and whether its size takes the longer form."""
    assert archive.fp is not None
    record, is_large = zipfile.ZipInfo(name), size > 1 << 30
    record.file_size = size
    head = HEADER_BYTES + len(name) + ZIP64_BYTES * is_large + PADDING.size
    padding = -(archive.fp.tell() + head) % ALIGNMENT
    # the field that PyTorch pads with
    record.extra = PADDING.pack(b"FB", padding) + b"Z" * padding
    return record, is_large
