"""Publishes a directory atomically: it appears complete, or is replaced in a single step.

The process that works on a target holds its lock, see `growkern.publish.calls`. The contents are
made in a private directory beside the target, `.NAME.KIND`:

    journal.jsonl  the caller's record of finished work, see `growkern.growth.disk.staging`
    new/           the new contents; one rename makes it the target
    swap           exists during a replacement; contains the inode of new/, which identifies it
    old/           the old contents, until they are confirmed to be replaceable
    trash/         old contents that are being deleted

A rename never replaces a target that another process created meanwhile. With `overwrite` the new
and the old contents change places in one step (RENAME_EXCHANGE), so there is a whole target at any
moment. Where the system or the file system cannot do that, two plain renames do it. Between them
there is no target. If the process is killed just then, the next start puts the old contents back.

Nothing here follows a link: others may be allowed to write to the folder that holds the target.
"""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

from growkern.errors import GrowthError, warn
from growkern.files import sync_tree, write_all
from growkern.publish.calls import (
    Lock,
    delete,
    exchange,
    exists,
    inode,
    lock_file_of,
    make_folder,
    open_ours,
    remove,
    rename_new,
)

JOURNAL, NEW, SWAP, OLD, TRASH = "journal.jsonl", "new", "swap", "old", "trash"


def workplace_of(target: Path, kind: str) -> Path:
    """The private directory of a target; `kind` is the work, "growing"."""
    return target.parent / f".{target.name}.{kind}"


def delete_leftovers(target: Path, kind: str, may_replace: Callable[[Path], bool]) -> None:
    """Finish or undo the unfinished work of a killed process beside a target, and tidy up.

    Unfinished new contents are kept for a resume.
    """
    if any(map(os.path.lexists, (workplace_of(target, kind), lock_file_of(target)))):
        place = Workplace(target, kind, may_replace)
        place.close(keep=os.path.lexists(place.new))


def check_space(target: Path, kind: str, size: int) -> None:
    """Refuse a disk without room for `size` bytes. An interrupted run's space counts as free."""
    parent = target.parent
    while not parent.exists():
        parent = parent.parent
    free = shutil.disk_usage(parent).free
    kept = (workplace_of(target, kind) / NEW).glob("*")
    free += sum(file.lstat().st_blocks * 512 for file in kept)
    if free < size:
        raise GrowthError(
            f"{target}: {size / 1e9:.2f} GB to write, {free / 1e9:.2f} GB free on that disk: make "
            "room or choose another one"
        )


class Workplace:
    """The lock on a target and the private directory beside it; a context manager.

    The work of an interrupted run is kept for the next one if its journal notes anything. A full
    disk is an interruption. After a `GrowthError` it is not kept, as a repeat would fail in the
    same way. Work that was found there at the start, or that is finished, is always kept.

    Attributes:
        new: where its contents are made, see `open_new`.
    """

    def __init__(
        self, target: Path, kind: str, may_replace: Callable[[Path], bool], *, resume: bool = True
    ) -> None:
        """Take the lock, and finish or undo the unfinished work of a killed process.

        `kind` is the work, as an English participle: "growing". `may_replace` says of a directory
        whether `publish(overwrite=True)` may delete it. The target is an absolute path.
        """
        self.target, self.kind = target, kind
        self.directory = workplace_of(target, kind)
        self.new, self.journal = self.directory / NEW, self.directory / JOURNAL
        self._may_replace = may_replace
        self._is_finished = self._is_published = False
        with contextlib.ExitStack() as stack:
            try:
                self._open(stack)
                self._settle()
                self._is_resumed = exists(JOURNAL, self._here)
                if not resume:
                    self.clear()
            except OSError as error:
                raise GrowthError(
                    f"{target} cannot be made there: {error.strerror or error}. Choose another "
                    "directory"
                ) from error
            self._descriptors = stack.pop_all()

    def _open(self, stack: contextlib.ExitStack) -> None:
        """Lock the target and make the private directory."""
        make_folder(self.directory.parent)
        self._lock = Lock(lock_file_of(self.target), self.target, self.kind)
        stack.callback(self._lock.release)
        self._parent = os.open(self.directory.parent, os.O_RDONLY | os.O_DIRECTORY)
        stack.callback(os.close, self._parent)
        with contextlib.suppress(FileExistsError):
            os.mkdir(self.directory, 0o700)
        self._here = open_ours(self.directory, private=True)
        stack.callback(os.close, self._here)

    def __enter__(self) -> Workplace:
        return self

    def __exit__(self, kind: Any, error: BaseException | None, trace: object) -> None:
        interrupted = error is not None and not isinstance(error, GrowthError)
        worth = self._is_resumed or self._is_finished or (interrupted and self._is_begun())
        keep = error is not None and worth and not self._is_published
        self.close(keep=keep)
        if isinstance(error, OSError):
            what = "nothing was changed"
            if self._is_published:
                what = "it is complete, but may not survive a power failure"
            elif keep:
                what = f"finished work is kept in {self.directory}; repeat the run to resume"
            raise GrowthError(f"{self.target}: {error.strerror or error}; {what}") from error

    def _is_begun(self) -> bool:
        """Whether the journal holds more than its first line, which only describes the work."""
        try:
            return self.journal.read_bytes().count(b"\n") > 1
        except FileNotFoundError:
            return False
        except OSError:
            # the next run detects it
            return True

    def close(self, *, keep: bool = False) -> None:
        """Release the lock; unless `keep`, remove the private directory with unfinished work."""
        if not self._lock.is_held:
            return
        # files that cannot be removed now are removed at the next start
        with contextlib.suppress(OSError), self._descriptors:
            # until it is settled which contents are the old ones, nothing is removed
            if keep or exists(SWAP, self._here):
                return
            for name in sorted(os.listdir(self._here)):
                remove(name, self._here)
            os.rmdir(self.directory)

    # ------------------------------------------------------------ the contents

    def open_new(self) -> Path:
        """The directory for the new contents; an interrupted run may have left some there."""
        # of the mode that the umask says, not a private one: it becomes the target
        with contextlib.suppress(FileExistsError):
            os.mkdir(NEW, dir_fd=self._here)
        os.close(open_ours(self.new, private=False))
        return self.new

    def clear(self) -> None:
        """Remove the unfinished work of a killed process; call it before `open_new`."""
        remove(JOURNAL, self._here)
        remove(NEW, self._here)
        self._is_resumed = False

    def keep_only(self, files: Collection[str]) -> None:
        """Remove everything from the new contents besides these files."""
        for path in self.new.iterdir():
            if path.name not in files or path.is_dir() or path.is_symlink():
                delete(path)

    def publish(self, *, overwrite: bool) -> None:
        """Make the new contents the target in one step, after they have been written to disk.

        With `overwrite` they replace a target that `may_replace` allows, and its old contents are
        deleted. A target that must not be replaced is unchanged, and the finished work is kept.
        """
        sync_tree(self.new)
        self._is_finished = True
        try:
            rename_new(NEW, self._here, self.target.name, self._parent)
        except FileExistsError:
            if not overwrite:
                raise GrowthError(
                    f"{self.target} was created by another process during the work and was not "
                    f"changed; the result is kept in {self.directory}: move {self.target} away and "
                    "repeat"
                ) from None
            self._replace()
        self._is_published = True
        os.fsync(self._parent)
        try:
            self._settle()
        except OSError as error:
            warn(
                f"{self.target} is complete, but its old contents in {self.directory} cannot be "
                f"removed: {error.strerror or error}"
            )

    def _replace(self) -> None:
        """Move the new contents to the target's place; the old ones are then in new/ or old/."""
        note = os.open(SWAP, os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW, 0o600, dir_fd=self._here)
        try:
            os.ftruncate(note, 0)
            write_all(note, f"{inode(NEW, self._here)}\n".encode())
            os.fsync(note)
        finally:
            os.close(note)
        os.fsync(self._here)
        if exchange(NEW, self._here, self.target.name, self._parent):
            return
        os.rename(self.target.name, OLD, src_dir_fd=self._parent, dst_dir_fd=self._here)
        try:
            if not self._may_replace(self.directory / OLD):
                raise self._refusal()
            rename_new(NEW, self._here, self.target.name, self._parent)
        except BaseException:
            self._put_back()
            raise

    # ------------------------------------------------- after a kill, and at the end

    def _settle(self) -> None:
        """Finish an interrupted replacement; undo it if the old contents must not be deleted."""
        remove(TRASH, self._here)
        number = self._noted()
        if number is not None:
            if inode(NEW, self._here) not in (None, number):
                # the contents have changed places: these are the old ones
                os.rename(NEW, OLD, src_dir_fd=self._here, dst_dir_fd=self._here)
            if inode(OLD, self._here) == number:
                # they have changed back
                os.rename(OLD, NEW, src_dir_fd=self._here, dst_dir_fd=self._here)
            if exists(OLD, self._here):
                self._settle_old(number)
        remove(SWAP, self._here)
        remove(TRASH, self._here)

    def _settle_old(self, number: int) -> None:
        """Delete the old contents where the new ones have their place; else put them back."""
        if exists(NEW, self._here):
            self._put_back()
        elif self._may_replace(self.directory / OLD):
            # the new name first: until it is on disk, a power failure may bring the old one back
            os.fsync(self._parent)
            os.rename(OLD, TRASH, src_dir_fd=self._here, dst_dir_fd=self._here)
        else:
            self._undo(number)

    def _noted(self) -> int | None:
        """The inode of the new contents, if a replacement was begun."""
        try:
            note = os.open(SWAP, os.O_RDONLY | os.O_NOFOLLOW, dir_fd=self._here)
        except FileNotFoundError:
            return None
        try:
            text = os.read(note, 100)
        finally:
            os.close(note)
        # a note that was cut short was not on disk yet: nothing had been renamed
        return int(text) if text.endswith(b"\n") and text[:-1].isdigit() else None

    def _put_back(self) -> None:
        """Move the old contents back to the target's place, which is empty."""
        old = self.directory / OLD
        try:
            rename_new(OLD, self._here, self.target.name, self._parent)
        except FileExistsError:
            raise GrowthError(
                f"another process created {self.target} while it was being replaced; its old "
                f"contents are in {old}: move one of them away and repeat"
            ) from None
        except OSError as error:
            raise GrowthError(
                f"{self.target}: {error.strerror or error}; its old contents are in {old}: repeat "
                "the run to put them back"
            ) from error

    def _undo(self, number: int) -> None:
        """Put the old contents back, because they must not be replaced."""
        self._is_published = False
        is_ours = inode(self.target.name, self._parent) == number
        if not is_ours or not exchange(OLD, self._here, self.target.name, self._parent):
            raise GrowthError(
                f"{self.target} held other files when it was replaced; they are in "
                f"{self.directory / OLD}: move them away and repeat"
            )
        os.rename(OLD, NEW, src_dir_fd=self._here, dst_dir_fd=self._here)
        remove(SWAP, self._here)
        raise self._refusal()

    def _refusal(self) -> GrowthError:
        return GrowthError(
            f"other files appeared in {self.target} during the work, so it was not changed; the "
            f"result is kept in {self.directory}: move {self.target} away and repeat"
        )
