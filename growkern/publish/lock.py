"""A lock file, so that two processes do not write to the same directory at once.

Each target has one lock, `.NAME.lock` beside it, whatever a command does there. Where nobody may
write beside a directory, such as a mounted volume, it is `.lock` inside.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import socket
from collections.abc import Iterator
from pathlib import Path

from growkern.errors import GrowthError
from growkern.files import write_all

LOCK_FILE = ".lock"
# errors of a folder that takes no new files
READ_ONLY = (errno.EACCES, errno.EPERM, errno.EROFS)


def lock_file_of(target: Path) -> Path:
    """The lock of a directory that exists or will."""
    return target.parent.resolve() / f".{target.name}{LOCK_FILE}"


class Lock:
    """An exclusive lock that ends with its process, however that ends.

    The file holds the process id and the host of the process that has the lock, and its work.
    """

    def __init__(self, file: Path, target: Path, doing: str) -> None:
        """Take the lock.

        Args:
            file: the lock file; its folder must exist.
            target: the directory that the lock protects, for the message.
            doing: the work, for the message to other processes: "growing".

        Raises:
            GrowthError: another process has the lock; the message names it.
            FileNotFoundError: the folder does not exist, or not any more.
            OSError: the file cannot be made, or the file system has no locks.
        """
        self.file = file
        while True:
            self._descriptor = os.open(file, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o666)
            try:
                if self._take(target, doing):
                    break
            except BaseException:
                os.close(self._descriptor)
                raise
            os.close(self._descriptor)
        _held.add(self)

    def _take(self, target: Path, doing: str) -> bool:
        """Lock the open file; False: it is not the file of that name any more."""
        try:
            fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = _holder(self._descriptor)
            raise GrowthError(f"{target}: {holder} it now: wait for it or stop it") from None
        # the process that had the lock may have removed the file since it was opened here
        try:
            if not os.path.samestat(os.fstat(self._descriptor), os.lstat(self.file)):
                return False
        except FileNotFoundError:
            return False
        os.ftruncate(self._descriptor, 0)
        write_all(self._descriptor, f"{os.getpid()} {socket.gethostname()} {doing}\n".encode(), 0)
        return True

    @property
    def is_held(self) -> bool:
        """Whether this process has the lock; a forked child does not."""
        return self in _held

    def release(self, *, remove: bool = True) -> None:
        """Let the next process in; without effect where the lock is not held.

        Raises:
            OSError: the file cannot be deleted; the lock is released.
        """
        if not self.is_held:
            return
        _held.remove(self)
        try:
            if remove:
                self.file.unlink(missing_ok=True)
        finally:
            os.close(self._descriptor)


_held: set[Lock] = set()


def make_folder(directory: Path) -> None:
    """Make a directory, and those that it is in.

    Raises:
        GrowthError: a file is in the way.
        OSError: the directory cannot be made.
    """
    try:
        directory.mkdir(parents=True, exist_ok=True)
    except (FileExistsError, NotADirectoryError) as error:
        file = next(one for one in (directory, *directory.parents) if one.exists())
        raise GrowthError(f"{directory}: {file} is a file: give another directory") from error


@contextlib.contextmanager
def locked(directory: Path, doing: str) -> Iterator[None]:
    """Hold the lock of a directory; it is made if it does not exist, and must not stay empty then.

    Args:
        doing: the work, for the message to a second process: "training".

    Raises:
        GrowthError: another process has the lock; the message names it.
        OSError: the directory or the lock cannot be made.
    """
    was_there = directory.exists()
    make_folder(directory)
    try:
        lock = Lock(lock_file_of(directory.resolve()), directory, doing)
    except OSError as error:
        if error.errno not in READ_ONLY:
            raise
        lock = Lock(directory / LOCK_FILE, directory, doing)
    try:
        yield
    finally:
        # a file that stays is locked again by the next process
        with contextlib.suppress(OSError):
            lock.release()
            if not was_there:
                directory.rmdir()


def _holder(descriptor: int) -> str:
    """The process that wrote the lock file, and its work; it may not have come to that yet."""
    words = os.pread(descriptor, 300, 0).decode(errors="replace").split(maxsplit=2)
    if len(words) < 3:
        return "another process is writing"
    process, host, doing = words
    return f"process {process} on {host} is {doing.strip()}"


def _let_go_in_child() -> None:
    # a fork shares the locks of its parent: workers of a data loader outlive a killed trainer by
    # some seconds, and the restarted one would find its directory taken
    for lock in _held:
        os.close(lock._descriptor)
    _held.clear()


os.register_at_fork(after_in_child=_let_go_in_child)
