"""Fingerprints of files and of values, by which caches and runs are recognised, and their place."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import time
from pathlib import Path
from typing import Any

from growkern.files import read_bounded, write_whole
from growkern.publish.manifest import checksum

VARIABLE = "GROWKERN_TOKENS"
# the checksum of a larger file is noted, so that the next start need not read all of it
MOST_READ = 8 << 20
# seconds in which a second change of a file may leave its times as they are
SETTLED = 2.0
NOTED_BYTES = 32


def fingerprint(file: Path) -> str:
    """A checksum of all bytes of a file."""
    digest, size = hashlib.sha256(), file.stat().st_size
    digest.update(size.to_bytes(8, "little"))
    digest.update(file.read_bytes() if size <= MOST_READ else _noted(file).encode())
    return digest.hexdigest()


def _noted(file: Path) -> str:
    """The checksum of a file, which is read if it changed since it was noted."""
    stamp = _stamp(file)
    note = user_cache() / "checksums" / digest_of(stamp)
    with contextlib.suppress(OSError, ValueError):
        known = read_bounded(note, NOTED_BYTES, "checksum").decode()
        if len(known) == NOTED_BYTES:
            return known
    is_settled = time.time() - file.stat().st_ctime > SETTLED
    total = checksum(file)
    if is_settled and _stamp(file) == stamp:
        # without a note the next start reads the file again
        with contextlib.suppress(OSError):
            note.parent.mkdir(parents=True, exist_ok=True)
            write_whole(note, lambda partial: partial.write_text(total))
    return total


def _stamp(file: Path) -> list[Any]:
    """Values that change with a file. The time of the last change cannot be set back."""
    found = file.stat()
    times = found.st_mtime_ns, found.st_ctime_ns
    return [str(file.resolve()), found.st_dev, found.st_ino, found.st_size, *times]


def digest_of(values: Any) -> str:
    """A name for values of JSON: the same for the same values."""
    return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()[:32]


def user_cache() -> Path:
    """The directory for tokenised data: `GROWKERN_TOKENS`, or a place in the user's cache."""
    if os.environ.get(VARIABLE):
        return Path(os.environ[VARIABLE])
    root = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(root) / "growkern" / "tokens"
