"""python -m tests.faults.power DIRECTORY NAME...: cut the power at every operation of a work.

The work runs once, and before each change of the disk and each sync all files are noted. From these
notes follow the disks that a power failure may leave. Linux promises little:

- Of a file, what was written until its last fsync is there, and any first part of what came after.
  Zeros may stand in place of the rest.
- Of names (new files, renames, removals), a first part of all changes is there. A directory's fsync
  makes its own names sure, and with them every change before. A file's fsync makes no name sure.

So a disk is given by the change of names that came last, and for each file by its last write. After
a cut the two extremes of both are tried, and some disks drawn between them. On each the target must
be the old one or the new one. Then the work is done again and must end to the byte.
"""

from __future__ import annotations

import ctypes
import os
import random
import stat
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from growkern.publish.calls import delete
from tests.faults import publishing, saving, work
from tests.faults.saving import SavingWalk
from tests.faults.walk import EVERY, WATCHER, Walk, Work, attempt

SYNCS = ("fsync", "fdatasync")
# disks drawn between the extremes of each cut; without EVERY, one cut of so many is tried
DRAWN, STRIDE = 2, 4


@dataclass
class Moment:
    """The files at one moment: path -> inode and mode, inode -> contents; directories have none."""

    names: dict[str, tuple[int, int]] = field(default_factory=dict)
    data: dict[int, bytes] = field(default_factory=dict)


def _names_in(folder: int, at: Moment) -> dict[str, int]:
    """The names in a directory, given by its inode, and their inodes."""
    # the top is not in the list
    place = next((name for name, (inode, _) in at.names.items() if inode == folder), "")
    return {n: inode for n, (inode, _) in at.names.items() if os.path.dirname(n) == place}


def moment(folder: Path) -> Moment:
    """All files below a folder, as they are."""
    now = Moment()
    for path in sorted(folder.rglob("*")):
        found = path.lstat()
        now.names[str(path.relative_to(folder))] = found.st_ino, found.st_mode
        if stat.S_ISREG(found.st_mode):
            now.data[found.st_ino] = path.read_bytes()
    return now


class Recording:
    """A work that ran once, and what was sure of it at each moment.

    Attributes:
        moments: the files before each change and each sync, and at the end.
        sure_names: for each moment, an earlier one whose names are on disk.
        sure_data: for each moment, inode -> an earlier one whose contents are on disk.
    """

    def __init__(self, work: Work, folder: Path, armed: Path, shim: ctypes.CDLL) -> None:
        self.moments: list[Moment] = []
        self.sure_names: list[int] = []
        self.sure_data: list[dict[int, int]] = []
        self._folder = armed
        # what lies there at the start is on disk
        self._data = dict.fromkeys(moment(armed).data, 0)
        self._names = 0
        watcher = WATCHER(self._note)
        shim.faults_watch(os.fsencode(armed), watcher)
        self.outcome, self.message, _ = attempt(work, folder, shim)
        self._note(b"end", -1)

    def _note(self, name: bytes, file: int) -> None:
        now, number = moment(self._folder), len(self.moments)
        self.moments.append(now)
        self.sure_names.append(self._names)
        self.sure_data.append(dict(self._data))
        # a sync counts for the moments after it
        if name.decode() in SYNCS:
            inode = os.fstat(file).st_ino
            if stat.S_ISDIR(os.fstat(file).st_mode):
                self._names = max(self._names, self._last_change(inode, number))
            else:
                self._data[inode] = number

    def _last_change(self, folder: int, number: int) -> int:
        """The first moment since when the names in a directory are what they are now."""
        now = _names_in(folder, self.moments[number])
        while number and _names_in(folder, self.moments[number - 1]) == now:
            number -= 1
        return number

    def changing(self) -> set[str]:
        """The names at the top whose files or directories change."""
        states = [
            {(name, inode, mode, now.data.get(inode)) for name, (inode, mode) in now.names.items()}
            for now in self.moments
        ]
        return {entry[0].split("/")[0] for entry in set.union(*states) - set.intersection(*states)}

    def disks(self, number: int, draw: random.Random) -> Iterator[Moment]:
        """Disks that a power failure at a moment may leave."""
        first = self.sure_names[number]
        for names in {first, number}:
            yield self._disk(names, number, lambda sure: sure)
            yield self._disk(names, number, lambda _: number)
            yield self._disk(names, number, lambda sure: sure, zeros=True)
        for _ in range(DRAWN):
            names = draw.randint(first, number)
            yield self._disk(names, number, lambda sure: draw.randint(sure, number))

    def _disk(
        self, names: int, number: int, last_write: Callable[[int], int], *, zeros: bool = False
    ) -> Moment:
        """A disk with the names of one moment and, for each file, the contents of another one.

        Args:
            names: the moment of the names.
            number: the moment of the failure.
            last_write: for each file, from the moment of its last sync to that of its contents.
            zeros: each file has its length, and zeros where it was not synced.
        """
        disk = Moment(self.moments[names].names)
        for inode, mode in disk.names.values():
            if stat.S_ISREG(mode):
                data = self._contents(inode, last_write(self.sure_data[number].get(inode, 0)))
                if zeros:
                    data = data.ljust(len(self._contents(inode, number)), b"\0")
                disk.data[inode] = data
        return disk

    def _contents(self, inode: int, number: int) -> bytes:
        """What a file held at a moment, or before its removal; nothing before it was made."""
        versions = (self.moments[n].data.get(inode) for n in range(number, -1, -1))
        return next((data for data in versions if data is not None), b"")


class PowerWalk(Walk):
    """All power failures of one kind of work, in a folder of its own."""

    def run(self) -> Iterator[str]:
        """Every disk; gives what is wrong."""
        self.shim.faults_without_renameat2(self.without)
        self._reset()
        recording = Recording(self.work, self.folder, self.armed, self.shim)
        assert recording.outcome == "done", recording.message
        last, changing = len(recording.moments) - 1, recording.changing()
        draw, tried = random.Random(0), set()
        stride = 1 if EVERY in sys.argv else STRIDE
        for number in sorted({*range(0, last, stride), last}):
            # work that says it is done is done for good
            outcome = "done" if number == last else "killed"
            self.work.operations["power"] += 1
            for disk in recording.disks(number, draw):
                key = outcome, repr((disk.names, disk.data))
                if key not in tried:
                    tried.add(key)
                    self.work.cases["power"] += 1
                    self._lay(disk, changing)
                    for wrong in (*self._check(outcome, ""), *self._repeat()):
                        yield f"{self.work.name}: power cut at {number} of {last}: {wrong}"

    def _lay(self, disk: Moment, changing: set[str]) -> None:
        """Make the folder as a power failure left it."""
        self._reset()
        for name in changing:
            delete(self.armed / name)
        kept = {n: value for n, value in disk.names.items() if n.split("/")[0] in changing}
        made: dict[int, int] = {}
        for name, (inode, mode) in sorted(kept.items()):
            path = self.armed / name
            path.mkdir() if stat.S_ISDIR(mode) else path.touch()
            made[inode] = path.stat().st_ino
        for name, (inode, mode) in kept.items():
            path = self.armed / name
            if stat.S_ISREG(mode):
                path.write_bytes(_renumbered(disk.data[inode], made))
            path.chmod(stat.S_IMODE(mode))


class PowerSavingWalk(PowerWalk, SavingWalk):
    """All power failures while a run saves."""


def _renumbered(data: bytes, made: dict[int, int]) -> bytes:
    """The contents of a file; one that notes an inode notes the new one of the same file."""
    text = data.strip()
    inode = made.get(int(text)) if text.isdigit() else None
    return data if inode is None else data.replace(text, str(inode).encode())


if __name__ == "__main__":
    mains = {"publishing": (publishing.main, PowerWalk), "saving": (saving.main, PowerSavingWalk)}
    main, walk = mains.get(sys.argv[2], (work.main, PowerWalk))
    main(walk)
