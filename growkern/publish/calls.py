"""System calls on directories, which never follow links and replace nothing unasked; and a lock.

With the lock, two processes do not write to the same directory at once. Each target has one,
`.NAME.lock` beside it, whatever a command does there. Where nobody may write beside a directory,
such as a mounted volume, it is `.lock` inside.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import socket
import stat
from collections.abc import Iterator
from pathlib import Path

from growkern.errors import GrowthError
from growkern.files import write_all

RENAME_NOREPLACE, RENAME_EXCHANGE = 1, 2
# of renameat2: the kernel, or the file system, does not know the call or its flag
UNSUPPORTED = (errno.ENOSYS, errno.EINVAL, errno.EOPNOTSUPP)
# errors of rename(2) when the new name already exists
TAKEN = (errno.EEXIST, errno.ENOTEMPTY, errno.ENOTDIR, errno.EISDIR)
LOCK_FILE = ".lock"
# errors of a folder that takes no new files
READ_ONLY = (errno.EACCES, errno.EPERM, errno.EROFS)
# errors of a lock where the file system, or its mount, has none
NO_LOCKS = (errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP)


def rename_new(name: str, folder: int, new_name: str, new_folder: int) -> None:
    """Rename a directory; never replace anything: FileExistsError if the new name is taken.

    The folders that hold it before and after are given by their descriptors.
    """
    try:
        _renameat2(name, folder, new_name, new_folder, RENAME_NOREPLACE)
        return
    except OSError as error:
        if error.errno not in UNSUPPORTED:
            raise
    # rename(2) replaces only an empty directory, even one created a moment ago
    taken = FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), new_name)
    if exists(new_name, new_folder):
        raise taken
    try:
        os.rename(name, new_name, src_dir_fd=folder, dst_dir_fd=new_folder)
    except OSError as error:
        if error.errno not in TAKEN:
            raise
        raise taken from None


def exchange(name: str, folder: int, other: str, other_folder: int) -> bool:
    """Let two names in two folders, given by descriptors, change places in one step.

    False says that the system cannot.
    """
    try:
        _renameat2(name, folder, other, other_folder, RENAME_EXCHANGE)
    except OSError as error:
        if error.errno not in UNSUPPORTED:
            raise
        return False
    return True


def _renameat2(name: str, folder: int, new_name: str, new_folder: int, flags: int) -> None:
    """Linux's rename that can refuse to replace, or exchange two names in one step."""
    call = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    if call is None:
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))
    names = os.fsencode(name), os.fsencode(new_name)
    while call(folder, names[0], new_folder, names[1], ctypes.c_uint(flags)):
        code = ctypes.get_errno()
        if code != errno.EINTR:
            raise OSError(code, os.strerror(code), new_name)


def remove(name: str, folder: int) -> None:
    """Remove a file, a link, or a directory with all that is in it; links are not followed.

    The folder is given by its descriptor. After an OSError some of it may be gone.
    """
    try:
        mode = os.stat(name, dir_fd=folder, follow_symlinks=False).st_mode
    except FileNotFoundError:
        return
    if not stat.S_ISDIR(mode):
        os.unlink(name, dir_fd=folder)
        return
    inside = os.open(name, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW, dir_fd=folder)
    try:
        for entry in sorted(os.listdir(inside)):
            remove(entry, inside)
    finally:
        os.close(inside)
    os.rmdir(name, dir_fd=folder)


def delete(path: Path) -> None:
    """`remove` by a path; nothing may be there."""
    try:
        with _opened(path.parent) as folder:
            remove(path.name, folder)
    except FileNotFoundError:
        return


def move(path: Path, place: Path) -> None:
    """Rename a file or directory. One that has the new name gets the old name, in the same step.

    Where the system cannot do that, the one that is there moves beside the other one first.
    """
    with _opened(path.parent) as here, _opened(place.parent) as there:
        try:
            rename_new(path.name, here, place.name, there)
        except FileExistsError:
            if not exchange(path.name, here, place.name, there):
                aside = f"replaced-{place.name}"
                remove(aside, here)
                os.rename(place.name, aside, src_dir_fd=there, dst_dir_fd=here)
                rename_new(path.name, here, place.name, there)


@contextlib.contextmanager
def _opened(directory: Path) -> Iterator[int]:
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def open_ours(path: Path, *, private: bool) -> int:
    """A descriptor of a directory that this user made, not reached by a link.

    `private` takes the rights of everybody else away.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    except OSError as error:
        if error.errno not in (errno.ENOTDIR, errno.ELOOP):
            raise
        raise GrowthError(
            f"{path} must be a directory, but is a link or a file: remove it"
        ) from error
    try:
        state = os.fstat(descriptor)
        if state.st_uid != os.geteuid() and state.st_uid != _owner_of_ours(path.parent):
            raise GrowthError(f"{path} belongs to another user: give another directory")
        if private and stat.S_IMODE(state.st_mode) & 0o077:
            # where the mount decides on modes, they cannot be changed
            with contextlib.suppress(PermissionError):
                os.fchmod(descriptor, state.st_mode & stat.S_ISGID | 0o700)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def _owner_of_ours(folder: Path) -> int:
    """The user that our files get in a folder; network file systems may map them to another."""
    probe = folder / f".growkern-{os.urandom(4).hex()}"
    os.mkdir(probe, 0o700)
    try:
        return os.lstat(probe).st_uid
    finally:
        os.rmdir(probe)


def inode(name: str, folder: int) -> int | None:
    """The inode of a name in a folder, given by its descriptor; None: there is no such name."""
    try:
        return os.stat(name, dir_fd=folder, follow_symlinks=False).st_ino
    except FileNotFoundError:
        return None


def exists(name: str, folder: int) -> bool:
    """Whether a folder, given by its descriptor, holds a name; a link counts, wherever it leads."""
    return inode(name, folder) is not None


# -------------------------------------------------------------------- lock


def lock_file_of(target: Path) -> Path:
    """The lock of a directory that exists or will."""
    return target.parent.resolve() / f".{target.name}{LOCK_FILE}"


class Held(GrowthError):
    """Another process, or another part of this one, has the lock."""


class Lock:
    """An exclusive lock that ends with its process, however that ends; a forked child has none.

    The file holds the process id and the host of the process that has the lock, and its work.
    """

    def __init__(self, file: Path, target: Path, doing: str) -> None:
        """Take the lock. The folder of the file must exist.

        The message to other processes names the target, which the lock protects, and the work, as
        in "growing".

        Raises:
            Held: somebody else has it.
            GrowthError: the file system has no locks.
        """
        # it imports asyncio, which costs every command a tenth of its start
        from filelock import FileLock, Timeout

        words = f"{os.getpid()} {socket.gethostname()} {doing}\n".encode()
        self.file = file
        # a lock that only a file stands for would outlive a killed process
        self._lock = FileLock(
            file, mode=0o666, thread_local=False, fallback_to_soft=False,
            on_acquired=lambda descriptor: write_all(descriptor, words, 0),
        )  # fmt: skip
        while not self.is_held:
            try:
                self._lock.acquire(blocking=False)
            except Timeout:
                # the process that had the lock may have removed the file since it was opened here
                if os.path.lexists(file):
                    raise Held(
                        f"{target}: {_holder(file)} it now: wait for it or stop it"
                    ) from None
            except OSError as error:
                if error.errno not in NO_LOCKS:
                    raise
                raise GrowthError(
                    f"{file.parent} is on a file system without locks ({error.strerror}): mount it "
                    "with them (Lustre: option flock; NFS: local_lock=none and a lock service), or "
                    "give a directory on another one"
                ) from error

    @property
    def is_held(self) -> bool:
        """Whether this process has the lock; a forked child does not."""
        return self._lock.is_locked

    def release(self) -> None:
        """Let the next process in, also if the file cannot be deleted; no effect if not held."""
        if self.is_held:
            try:
                self.file.unlink(missing_ok=True)
            finally:
                self._lock.release()


def make_folder(directory: Path) -> None:
    """Make a directory, and those that it is in."""
    try:
        directory.mkdir(parents=True, exist_ok=True)
    except (FileExistsError, NotADirectoryError) as error:
        file = next(path for path in (directory, *directory.parents) if path.exists())
        raise GrowthError(f"{directory}: {file} is a file: give another directory") from error


@contextlib.contextmanager
def locked(directory: Path, doing: str) -> Iterator[None]:
    """Hold the lock of a directory; it is made if it does not exist, and must not stay empty then.

    `doing` is the work, for the message to a second process: "training".
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


def _holder(file: Path) -> str:
    """The process that wrote the lock file, and its work; it may not have come to that yet."""
    words = ""
    with contextlib.suppress(OSError):
        words = file.read_bytes()[:300].decode(errors="replace")
    if len(found := words.split(maxsplit=2)) < 3:
        return "another process is writing"
    process, host, doing = found
    return f"process {process} on {host} is {doing.strip()}"
