"""Reads the optimizer files of `transformers.Trainer` without loading them into memory.

`torch.save` has written zip archives with uncompressed records since PyTorch 1.6, so tensors can be
memory-mapped. Mapping skips the checksums of the records; `check_archive` compares them. Only
tensors and plain values are unpickled.
"""

from __future__ import annotations

import ctypes
import mmap
import pickle
import sys
import zipfile
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from growkern.bounded import regular_size
from growkern.errors import GrowthError

OPTIMIZER_FILE = "optimizer.pt"
ARCHIVE_START = b"PK\x03\x04"


def read_optimizer(path: Path) -> dict[str, Any]:
    """The state dict in a file of `torch.save`, with memory-mapped tensors.

    Args:
        path: the file, or a directory with an optimizer.pt.
    """
    file = optimizer_file(path)
    if file.exists():
        regular_size(file)
    try:
        state = torch.load(file, map_location="cpu", weights_only=True, mmap=can_be_mapped(file))
    except FileNotFoundError:
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
        raise GrowthError(f"{file}: holds a {type(state).__name__}, not an optimizer's state")
    return state


def can_be_mapped(file: Path) -> bool:
    """Whether a file is an archive: those from before PyTorch 1.6 are not.

    `zipfile.is_zipfile` would take an archive that cannot be read for such a file.

    Raises:
        OSError: it cannot be read.
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
    start = mapped.data_ptr() // mmap.PAGESIZE * mmap.PAGESIZE
    size = mapped.data_ptr() + mapped.nbytes - start
    ctypes.CDLL(None).madvise(ctypes.c_void_p(start), ctypes.c_size_t(size), mmap.MADV_DONTNEED)
