"""Optimizer files of `transformers.Trainer`: read as tensors alone, checked and let go of by parts.

Their form is that of `torch.save` since PyTorch 1.6: an archive whose records are not compressed,
so that tensors can be mapped. Mapping skips the records' checksums.
"""

from __future__ import annotations

import ctypes
import mmap
import pickle
import sys
import zipfile
import zlib
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from growkern.errors import GrowthError

OPTIMIZER_FILE = "optimizer.pt"
ARCHIVE_START = b"PK\x03\x04"
# what files that are damaged, or something else, make PyTorch and its unpickler raise
UNREADABLE = (
    *(RuntimeError, EOFError, ValueError, TypeError, LookupError, AttributeError),
    *(AssertionError, ImportError, OverflowError, MemoryError),
)


def read_optimizer(path: Path) -> dict[str, Any]:
    """The state dict in a file of `torch.save`, its tensors mapped from there.

    Args:
        path: the file, or the directory in which it is called optimizer.pt.

    Raises:
        GrowthError: no file, or one that holds more than tensors and plain values.
    """
    file = optimizer_file(path)
    try:
        # files of before 2020 are not archives, and cannot be mapped. zipfile.is_zipfile would take
        # a file that it fails to read for one of those
        with file.open("rb") as opened:
            mapped = opened.read(len(ARCHIVE_START)) == ARCHIVE_START
        state = torch.load(file, map_location="cpu", weights_only=True, mmap=mapped)
    except FileNotFoundError:
        raise GrowthError(f"{file}: no such file") from None
    except OSError as error:
        raise GrowthError(f"{file}: {error.strerror or error}") from error
    except pickle.UnpicklingError as error:
        # PyTorch's own advice here is to unpickle it all the same
        raise GrowthError(
            f"{file}: not a file of optimizer state: damaged, or more than tensors and plain "
            "values; nothing else is unpickled"
        ) from error
    except UNREADABLE as error:
        why = str(error).strip().partition("\n")[0] or type(error).__name__
        raise GrowthError(f"{file}: not a file of optimizer state: {why}") from error
    if not isinstance(state, dict):
        raise GrowthError(f"{file}: holds a {type(state).__name__}, not an optimizer's state")
    return state


def optimizer_file(path: Path) -> Path:
    """The file that is meant: itself, or optimizer.pt in a directory."""
    return path / OPTIMIZER_FILE if path.is_dir() else path


def check_archive(file: Path) -> None:
    """Compare every record with its CRC-32, a megabyte at a time.

    Raises:
        GrowthError: a record that differs, a file that is no archive or of another byte order.
    """
    try:
        with zipfile.ZipFile(file) as archive:
            records = archive.infolist()
            # PyTorch leaves all of them 0 after torch.serialization.set_crc32_options(False)
            damaged = archive.testzip() if any(record.CRC for record in records) else None
    except (OSError, *UNREADABLE, zipfile.BadZipFile, zlib.error) as error:
        raise GrowthError(
            f"{file}: cannot be streamed: {error}; save it again: torch.save(torch.load(...), ...)"
        ) from error
    if any(record.compress_type != zipfile.ZIP_STORED for record in records):
        raise GrowthError(
            f"{file}: its records are compressed, and cannot be mapped; save it again: "
            "torch.save(torch.load(...), ...)"
        )
    if damaged is not None:
        raise GrowthError(f"{file}: damaged: the bytes of {damaged} are not those that were saved")
    orders = [record for record in records if record.filename.endswith("/byteorder")]
    # "big" or "little"
    if any(record.file_size != len(sys.byteorder) for record in orders):
        raise GrowthError(f"{file}: saved on a machine of another byte order; save it again here")


def let_go(mapped: Tensor) -> None:
    """Give back the memory of a tensor of `read_optimizer`; it is read again where it is used.

    Only for tensors that are mapped from an archive: of others this would be the end.
    """
    start = mapped.data_ptr() // mmap.PAGESIZE * mmap.PAGESIZE
    size = mapped.data_ptr() + mapped.nbytes - start
    ctypes.CDLL(None).madvise(ctypes.c_void_p(start), ctypes.c_size_t(size), mmap.MADV_DONTNEED)
