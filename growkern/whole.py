"""Writes a file so that readers see all of it or none of it, also after a crash."""

import os
import secrets
from collections.abc import Callable
from pathlib import Path
from typing import Any

# what an interrupted `write_whole` leaves beside its file
PARTIAL = ".{name}.*.part"


def write_whole(file: Path, write: Callable[[Path], Any]) -> None:
    """Write a file under a temporary name beside it, sync it to disk, then rename it.

    Several processes may write the same file at once: each has a temporary file of its own.

    Args:
        file: the file; its folder must exist. A file that is there is replaced.
        write: writes the contents to the path it is given.

    Raises:
        OSError: the disk is full or cannot be written. `file` is as it was, and nothing is left.
    """
    partial = file.with_name(f".{file.name}.{secrets.token_hex(4)}.part")
    try:
        partial.touch()
        mode = partial.stat().st_mode
        write(partial)
        # safetensors makes its files unreadable for other users
        partial.chmod(mode)
        with partial.open("rb") as written:
            os.fsync(written.fileno())
        partial.replace(file)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise
