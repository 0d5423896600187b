"""Fingerprints of files and of values, by which caches and runs are recognised."""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path
from typing import Any

# of a large file, the first and the last MiB and blocks between them are read
READ_WHOLE, END, BLOCK, BLOCKS = 8 << 20, 1 << 20, 1 << 14, 256


def fingerprint(file: Path) -> str:
    """A checksum of a file that is quick for files of any size.

    Up to 8 MiB all bytes count. Of a larger file count its size, its first and last MiB, and 256
    blocks of 16 KiB that are evenly spread between these. It misses a change that lies between
    the blocks alone. Training changes nearly all weights, so two models are told apart.
    """
    digest, size = hashlib.sha256(), file.stat().st_size
    digest.update(size.to_bytes(8, "little"))
    with file.open("rb") as stream:
        if size <= READ_WHOLE:
            digest.update(stream.read())
            return digest.hexdigest()
        gap = (size - 2 * END - BLOCK) / (BLOCKS - 1)
        middle = [(END + int(i * gap), BLOCK) for i in range(BLOCKS)]
        for start, length in [(0, END), *middle, (size - END, END)]:
            stream.seek(start, os.SEEK_SET)
            digest.update(stream.read(length))
    return digest.hexdigest()


def version_of(file: Path) -> list[Any]:
    """Values that change with a file: its fingerprint and, for a change that misses, its time."""
    return [fingerprint(file), file.stat().st_mtime_ns]


def digest_of(values: Any) -> str:
    """A name for values of JSON: the same for the same values."""
    return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()[:32]
