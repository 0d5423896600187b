"""Directory system calls that never follow links, and replace something only when asked to."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import stat
from collections.abc import Iterator
from pathlib import Path

from growkern.errors import GrowthError

RENAME_NOREPLACE, RENAME_EXCHANGE = 1, 2
# of renameat2: the kernel, or the file system, does not know the call or its flag
UNSUPPORTED = (errno.ENOSYS, errno.EINVAL, errno.EOPNOTSUPP)
# errors of rename(2) when the new name already exists
TAKEN = (errno.EEXIST, errno.ENOTEMPTY, errno.ENOTDIR, errno.EISDIR)


def rename_new(name: str, folder: int, new_name: str, new_folder: int) -> None:
    """Rename a directory; never replace anything.

    Args:
        folder, new_folder: descriptors of the directories that hold it before and after.

    Raises:
        FileExistsError: the new name is taken.
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
    """Let two names change places in one step; False: the system cannot.

    Args:
        folder, other_folder: descriptors of the directories that hold them.

    Raises:
        OSError: one of them does not exist, or the disk failed.
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

    Args:
        name: may be of nothing that exists.
        folder: a descriptor of the directory that holds it.

    Raises:
        OSError: something cannot be removed; some of the rest may be gone.
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
    """Remove a file, a link, or a directory with all that is in it; nothing may be there.

    Raises:
        OSError: something cannot be removed; some of the rest may be gone.
    """
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

    Args:
        private: take the rights of everybody else away.
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
        found = os.fstat(descriptor)
        if found.st_uid != os.geteuid() and found.st_uid != _owner_of_ours(path.parent):
            raise GrowthError(f"{path} belongs to another user: give another directory")
        if private and stat.S_IMODE(found.st_mode) & 0o077:
            # where the mount decides on modes, they cannot be changed
            with contextlib.suppress(PermissionError):
                os.fchmod(descriptor, found.st_mode & stat.S_ISGID | 0o700)
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
