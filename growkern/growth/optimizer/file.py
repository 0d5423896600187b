"""Reads and writes optimizer files of `torch.save` without holding a whole tensor in memory.

`torch.save` has written zip archives with uncompressed records since PyTorch 1.6: data.pkl, which
refers to the tensors' storages by number, and the storages data/0, data/1 and so on, each aligned
to 64 bytes.

- So tensors can be memory-mapped when they are read. Mapping skips the checksums of the records;
  `check_archive` compares them. Only tensors and plain values are unpickled.
- Written tensors may be on the meta device. They are placeholders whose values arrive in pieces.

`OptimizerStream` grows such a file into another one: moments are built, written and freed a few
rows at a time. `growkern.growth.grow` publishes the file together with the weights. It is not
resumed: a run that is killed while it writes this file writes it again from the start.
"""

from __future__ import annotations

import ctypes
import io
import math
import mmap
import pickle
import struct
import sys
import zipfile
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from growkern.errors import GrowthError, a_kind
from growkern.files import regular_size
from growkern.growth.optimizer.checks import check_values
from growkern.growth.optimizer.moments import grow_moment
from growkern.growth.optimizer.state import (
    ShownMoment,
    State,
    grown_state,
    moments_in,
    reader_of,
    source_entry,
    state_by_name,
)
from growkern.growth.options import check_moments
from growkern.growth.plan import FIXED_BYTES, GrowthPlan, Piece, Task
from growkern.growth.source import METADATA_FILE, OPTIMIZER, Stamps, pieces_in
from growkern.growth.stored import row_blocks

OPTIMIZER_FILE = "optimizer.pt"
ARCHIVE_START = b"PK\x03\x04"


def read_optimizer(path: Path) -> dict[str, Any]:
    """The state dict in a file of `torch.save`, or in an optimizer.pt, with mapped tensors."""
    file = optimizer_file(path)
    if file.exists():
        regular_size(file)
    try:
        state = torch.load(file, map_location="cpu", weights_only=True, mmap=can_be_mapped(file))
    except FileNotFoundError:
        if (pieces_in(path, OPTIMIZER) / METADATA_FILE).is_file():
            raise GrowthError(
                f"{path} holds an optimizer's state in the parts of processes: grow it in a run, "
                "by optimizer in [growth], or with growkern.grow_optimizer_into"
            ) from None
        raise GrowthError(f"{file}: no such file") from None
    except OSError as error:
        raise GrowthError(f"{file}: {error.strerror or error}") from error
    except pickle.UnpicklingError as error:
        # PyTorch's own message advises to unpickle such a file anyway, which can run any code
        raise GrowthError(
            f"{file}: not a file of optimizer state: it is damaged, or contains objects other than "
            "tensors and plain values; these are never unpickled"
        ) from error
    except Exception as error:
        # damaged files raise errors of all kinds
        why = str(error).strip().partition("\n")[0] or type(error).__name__
        raise GrowthError(f"{file}: not a file of optimizer state: {why}") from error
    if not isinstance(state, dict):
        raise GrowthError(f"{file}: holds {a_kind(state)}, not an optimizer's state")
    return state


def can_be_mapped(file: Path) -> bool:
    """Whether a file is an archive: those from before PyTorch 1.6 are not.

    `zipfile.is_zipfile` would take an archive that cannot be read for such a file.
    """
    with file.open("rb") as opened:
        return opened.read(len(ARCHIVE_START)) == ARCHIVE_START


def optimizer_file(path: Path) -> Path:
    """The optimizer file of a path: the path itself, or optimizer.pt in a directory."""
    return path / OPTIMIZER_FILE if path.is_dir() else path


def check_archive(file: Path) -> None:
    """Compare every record with its CRC-32. The file is read in small blocks."""
    try:
        with zipfile.ZipFile(file) as archive:
            records = archive.infolist()
            # all checksums are 0 after torch.serialization.set_crc32_options(False)
            damaged = archive.testzip() if any(record.CRC for record in records) else None
    except Exception as error:
        # here too
        raise GrowthError(
            f"{file}: cannot be streamed: {error}: save it again with "
            "torch.save(torch.load(...), ...)"
        ) from error
    if any(record.compress_type != zipfile.ZIP_STORED for record in records):
        raise GrowthError(
            f"{file}: its records are compressed, and cannot be mapped: save it again with "
            "torch.save(torch.load(...), ...)"
        )
    if damaged is not None:
        raise GrowthError(f"{file}: damaged: the bytes of {damaged} are not those that were saved")
    orders = [record for record in records if record.filename.endswith("/byteorder")]
    # the record holds "big" or "little", so its length tells which
    if any(record.file_size != len(sys.byteorder) for record in orders):
        raise GrowthError(f"{file}: saved on a machine of another byte order: save it again here")


def release_pages(mapped: Tensor) -> None:
    """Free the memory of a mapped tensor of `read_optimizer`; the next use reads the file again.

    The tensor must be mapped from an archive. Any other tensor would lose its values.
    """
    for part in getattr(mapped, "tensors", (mapped,)):
        start = part.data_ptr() // mmap.PAGESIZE * mmap.PAGESIZE
        size = part.data_ptr() + part.nbytes - start
        ctypes.CDLL(None).madvise(ctypes.c_void_p(start), ctypes.c_size_t(size), mmap.MADV_DONTNEED)


# -------------------------------------------------------------------- writing


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
        return torch._utils._rebuild_tensor_v2, (storage, 0, tuple(x.shape), stride, False, hooks)

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

    Each tensor in the nested containers of `state` gets a storage of its own. `pieces_of` returns
    the values of a meta tensor as consecutive contiguous pieces, in its dtype.

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


# bytes of the target per piece: half the size of the pieces of weights, and as fast
PIECE_BYTES = 8 << 20


class OptimizerStream:
    """One optimizer file that is checked and ready to be grown.

    `nbytes` is an upper bound of the grown file's size.
    """

    def __init__(self, plan: GrowthPlan, path: Path, moments: str, memory_limit: int) -> None:
        """Read the whole file once to check it; nothing is written.

        A file is refused if it is damaged, does not fit the model, or holds values that no
        optimizer writes; and a limit that is too small.
        """
        check_moments(moments)
        self._stamps = Stamps.of(optimizer_file(path))
        # it was saved beside a model of the class
        plan = plan.without_second()
        self._plan, self._moments = plan, moments
        state_dict = read_optimizer(path)
        check_archive(optimizer_file(path))
        _, self._source = state_by_name(plan, state_dict)
        self._placeholders: dict[int, tuple[Task, str, bool]] = {}
        self._state = grown_state(plan, state_dict, moments, self._lay_out)
        self._check_limit(memory_limit)
        self._scan()
        self.nbytes = archive_size(self._state)

    def write(self, file: Path) -> None:
        """Build the grown state into a new file."""
        write_archive(self._state, file, self._pieces)
        self._stamps.check()

    def _lay_out(self, state: State, task: Task, key: str, is_zero: bool) -> Tensor:
        """A meta tensor in place of a grown moment; `_pieces` builds its values later."""
        moment = torch.empty(task.shape, dtype=source_entry(task, state)[key].dtype, device="meta")
        self._placeholders[id(moment)] = task, key, is_zero
        return moment

    def _check_limit(self, memory_limit: int) -> None:
        pieces = [
            (stop - start) * math.prod(task.shape[1:]) * itemsize
            for task, key, _ in self._placeholders.values()
            for itemsize in [source_entry(task, self._source)[key].dtype.itemsize]
            for start, stop in row_blocks(task.shape, itemsize, PIECE_BYTES)
        ]
        # a piece, the piece before it, and the mapped rows of up to two source tensors
        least = FIXED_BYTES + 4 * max(pieces, default=0)
        if memory_limit < least:
            raise GrowthError(
                f"memory_limit={memory_limit / 1e6:g}MB is too small: growing this optimizer needs "
                f"at least {math.ceil(least / 1e6)}MB"
            )

    def _scan(self) -> None:
        """Refuse values that Adam never writes. The pages that were read are freed."""
        for name, entry in self._source.items():
            for key in moments_in(entry) if self._moments != "reset" else ():
                moment = entry[key]
                if isinstance(moment, ShownMoment):
                    # its parts have entries of their own
                    continue
                for block in row_blocks(moment.shape, moment.dtype.itemsize, PIECE_BYTES):
                    rows = moment[slice(*block)]
                    check_values(name, key, rows)
                    release_pages(rows)
            for value in entry.values():
                if isinstance(value, Tensor):
                    release_pages(value)

    def _pieces(self, moment: Tensor) -> Iterator[Tensor]:
        """The values of one grown moment, a few rows at a time."""
        task, key, is_zero = self._placeholders[id(moment)]
        read = reader_of(self._source, key)
        for start, stop in row_blocks(task.shape, moment.dtype.itemsize, PIECE_BYTES):
            # a mapped file that was cut would end the process
            self._stamps.check()
            if is_zero:
                yield torch.zeros(stop - start, *task.shape[1:], dtype=moment.dtype)
                continue
            part = Piece(task, (start, stop)).part
            yield grow_moment(self._plan, task, read, key=key, moments=self._moments, part=part)
            for name in filter(None, (task.source, task.upper)):
                release_pages(self._source[name][key])
