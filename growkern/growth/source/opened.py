"""Keeps the files of weights open while a checkpoint is read from them, piece by piece.

A shared file system takes longer to open a file than to read a small tensor from it.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import resource
import threading
from collections import OrderedDict
from collections.abc import Callable
from typing import Any, ClassVar
from weakref import WeakValueDictionary, finalize

# of the descriptors that a process may have
SHARE = 4
# Python's mmap holds a descriptor per mapping, and a model has thousands of tensors
LIBC = ctypes.CDLL(None, use_errno=True)
LIBC.mmap.restype = ctypes.c_void_p
LIBC.mmap.argtypes = (
    *(ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int),
    ctypes.c_int64,
)
LIBC.munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
FAILED = ctypes.c_void_p(-1).value


class Descriptor:
    """An open file. It is closed when the last reference to it is gone."""

    def __init__(self, path: str) -> None:
        self.number = -1
        self.number = os.open(path, os.O_RDONLY)
        self.identity = _identity(os.fstat(self.number))

    # at exit a module loses its names first
    def __del__(self, close: Callable[[int], None] = os.close) -> None:
        try:
            if self.number >= 0:
                close(self.number)
        except OSError:
            # nothing was written, so an error of the disk loses nothing
            pass


def _identity(state: os.stat_result) -> tuple[int, int]:
    return state.st_dev, state.st_ino


class WeightFile:
    """A file of weights: opened once, at its first use, and closed when its last tensor is gone.

    Of a checkpoint with thousands of files, those that were used last stay open. If another file
    takes the name, that one is read. `weight_file` makes them.
    """

    __slots__ = ("__weakref__", "path")
    kept: ClassVar[OrderedDict[str, Descriptor]] = OrderedDict()

    def __init__(self, path: str) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Callable[[str], WeightFile], tuple[str]]:
        return weight_file, (self.path,)

    def __del__(self) -> None:
        # without the lock, which this thread may hold
        self.kept.pop(self.path, None)

    def opened(self) -> Descriptor:
        """The open file. Keep the result while its number is used. OSError if it cannot be opened.

        Several threads may read from it, each from places of its own.
        """
        identity, kept = _identity(os.stat(self.path)), self.kept
        with _LOCK:
            found = kept.get(self.path)
            if found is None or found.identity != identity:
                found = Descriptor(self.path)
                most, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
                while most != resource.RLIM_INFINITY and len(kept) > most // SHARE:
                    kept.popitem(last=False)
            kept[self.path] = found
            kept.move_to_end(self.path)
            return found

    def map(self, size: int, start: int) -> Any:
        """`size` bytes from byte `start` on, which is one of whole pages, as a buffer.

        Writing into it leaves the file as it is. OSError if the file is shorter, or cannot be read.
        """
        file = self.opened()
        # a page beyond the end would end the process when it is read
        if os.fstat(file.number).st_size < start + size:
            raise OSError(errno.EIO, "the file is truncated")
        access = mmap.PROT_READ | mmap.PROT_WRITE
        place = LIBC.mmap(None, size, access, mmap.MAP_PRIVATE, file.number, start)
        if place == FAILED:
            raise OSError(code := ctypes.get_errno(), os.strerror(code))
        buffer = (ctypes.c_char * size).from_address(place)
        # a tensor may outlive the end of Python
        finalize(buffer, LIBC.munmap, place, size).atexit = False
        return buffer


_LOCK = threading.Lock()
_KNOWN: WeakValueDictionary[str, WeightFile] = WeakValueDictionary()


def weight_file(path: str | os.PathLike[str]) -> WeightFile:
    """The file of this path, which all tensors in it share."""
    name = os.fspath(path)
    with _LOCK:
        return _KNOWN.get(name) or _KNOWN.setdefault(name, WeightFile(name))
