"""Writes a file so that readers see all of it or none of it, also after a crash."""

import errno
import os
import secrets
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any

# what an interrupted `write_whole` leaves beside its file
PARTIAL = ".{name}.*.part"
READABLE = stat.S_IRUSR | stat.S_IRGRP | stat.S_IROTH


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
        sync(partial)
        partial.replace(file)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise


def sync(path: Path) -> None:
    """Return when a file, or the names in a directory, are on disk.

    Raises:
        OSError: the disk failed. Nothing written since the last successful sync is safe then, even
            if another sync succeeds: Linux reports a failure once and forgets the data.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sync_tree(directory: Path) -> None:
    """Return when all of a new directory is on disk, and readable for those who may read new files.

    Raises:
        OSError: the disk failed; see `sync`.
    """
    probe = directory / f".{secrets.token_hex(4)}.part"
    probe.touch()
    readers = probe.stat().st_mode & READABLE
    probe.unlink()
    for path in directory.rglob("*"):
        if path.is_file() and not path.is_symlink():
            # safetensors makes its files unreadable for other users
            path.chmod(stat.S_IMODE(path.stat().st_mode) | readers)
        sync(path)
    sync(directory)


def write_all(file: int, data: bytes | memoryview, at: int | None = None) -> None:
    """Write all bytes; the system may take them in several bites.

    Args:
        file: a descriptor.
        at: byte of the file to start at; None: where the file stands.

    Raises:
        OSError: the disk is full or cannot be written; some of the bytes may be there.
    """
    view, done = memoryview(data), 0
    while done < len(view):
        rest = view[done:]
        count = os.write(file, rest) if at is None else os.pwrite(file, rest, at + done)
        if not count:
            raise OSError(errno.EIO, "the disk takes no more bytes")
        done += count
