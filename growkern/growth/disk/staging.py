"""The hidden directory beside a target in which it comes to be.

.NAME.growing/lock           held by the run that works here
.NAME.growing/journal.jsonl  what is done (`growkern.growth.disk.journal`)
.NAME.growing/checkpoint/    becomes the target by one rename, which is atomic within a disk
.NAME.growing/replaced/      what stood in the target's place, until the rename has happened
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any

from growkern.errors import GrowthError


def check_target(source: Path, target: Path, overwrite: bool) -> None:
    """GrowthError unless the target may be made, or replaced."""
    source = source.resolve()
    if source in target.parents:
        raise GrowthError(
            f"{target} is inside the source {source}; give a directory beside it, as what is there "
            "counts as the source's"
        )
    if target.exists() and not overwrite:
        raise GrowthError(f"{target} exists; give another directory or overwrite (--overwrite)")
    if not target.exists():
        return
    if not target.is_dir():
        raise GrowthError(f"{target} is a file; give a directory")
    if source == target or target in source.parents:
        raise GrowthError(f"{target} holds the source itself; give another directory")
    if any(target.iterdir()) and not (target / "config.json").is_file():
        raise GrowthError(
            f"{target} holds something other than a checkpoint; only a checkpoint is replaced"
        )


@contextlib.contextmanager
def refusing(target: Path) -> Iterator[None]:
    """Inside, what the system refuses about a target is a GrowthError: nothing was begun."""
    try:
        yield
    except OSError as error:
        raise GrowthError(f"{target}: {error.strerror or error}; give another directory") from error


def check_space(target: Path, size: int) -> None:
    """GrowthError unless `size` bytes fit beside the target, or are reserved there already."""
    parent = target.parent
    while not parent.exists():
        parent = parent.parent
    free = shutil.disk_usage(parent).free
    kept = (_directory(target) / "checkpoint").glob("*")
    free += sum(file.stat().st_blocks * 512 for file in kept)
    if free < size:
        raise GrowthError(
            f"{target}: {size / 1e9:.2f} GB to write, {free / 1e9:.2f} GB free on that disk"
        )


def _directory(target: Path) -> Path:
    return target.parent / f".{target.name}.growing"


def sweep(target: Path) -> None:
    """Remove what a run killed right after its last rename has left: the target is complete."""
    directory = _directory(target)
    if directory.exists() and target.exists() and not (directory / "checkpoint").exists():
        with Staging(target, resume=False):
            pass


class Staging:
    """The lock on a target, and the place where it is made; a context manager.

    What an interrupted run has done stays here for the next one. That includes a full disk, and
    excludes a `GrowthError`, after which there is nothing to go on with; but what was found here
    at the start survives that too.
    """

    def __init__(self, target: Path, *, resume: bool) -> None:
        """Takes the lock.

        Raises:
            GrowthError: another run has it, or the place cannot be written to.
        """
        self.target = target
        self.directory = _directory(target)
        self.checkpoint = self.directory / "checkpoint"
        self.journal = self.directory / "journal.jsonl"
        self._replaced = self.directory / "replaced"
        try:
            self._lock = self._take_lock()
        except OSError as error:
            raise GrowthError(f"{target}: {error.strerror or error}") from error
        # killed between two renames: the old checkpoint is the target's until a new one is
        if self._replaced.exists() and not target.exists():
            self._replaced.rename(target)
        shutil.rmtree(self._replaced, ignore_errors=True)
        if not resume:
            self._clear()
        self._is_resumed = self.journal.exists()

    def __enter__(self) -> Staging:
        return self

    def __exit__(self, kind: Any, error: BaseException | None, trace: object) -> None:
        is_begun = self.journal.exists() and self.journal.read_bytes().count(b"\n") > 1
        interrupted = error is not None and not isinstance(error, GrowthError)
        keep = error is not None and (self._is_resumed or (interrupted and is_begun))
        self._release(keep=keep)
        if isinstance(error, OSError):
            what = "nothing was changed"
            if keep:
                what = f"what is done is kept in {self.directory}; repeat the run to go on"
            raise GrowthError(f"{self.target}: {error.strerror or error}; {what}") from error

    def _take_lock(self) -> int:
        path = self.directory / "lock"
        while True:
            self.directory.mkdir(parents=True, exist_ok=True)
            try:
                lock = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
            except FileNotFoundError:
                continue
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                # the run that had it may have removed the file just after it was opened here
                if path.exists() and os.path.samestat(os.fstat(lock), path.stat()):
                    return lock
            except BlockingIOError:
                os.close(lock)
                raise GrowthError(
                    f"{self.target}: another run is growing it in {self.directory}; wait for it"
                ) from None
            os.close(lock)

    def _clear(self) -> None:
        self.journal.unlink(missing_ok=True)
        shutil.rmtree(self.checkpoint, ignore_errors=True)

    def _release(self, *, keep: bool) -> None:
        if not keep:
            self._clear()
            shutil.rmtree(self._replaced, ignore_errors=True)
            # the lock last: from here on the directory may be another run's
            (self.directory / "lock").unlink(missing_ok=True)
            with contextlib.suppress(OSError):
                self.directory.rmdir()
        os.close(self._lock)

    def clear_but(self, files: Collection[str]) -> None:
        """Remove what lies in the checkpoint besides these files."""
        for path in self.checkpoint.iterdir():
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path)
            elif path.name not in files:
                path.unlink()

    def publish(self) -> None:
        """Make the checkpoint the target: whole, on disk, and at once."""
        for path in self.checkpoint.rglob("*"):
            sync(path)
        sync(self.checkpoint)
        if self.target.exists():
            self.target.rename(self._replaced)
        try:
            self.checkpoint.rename(self.target)
        except OSError:
            if self._replaced.exists():
                self._replaced.rename(self.target)
            raise
        sync(self.target.parent)


def sync(path: Path) -> None:
    """Return when a file, or the names in a directory, are on disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
