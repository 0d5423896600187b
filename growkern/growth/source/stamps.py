"""Notices files that change while they are read.

Only files that the work reads or copies count. Small files are the same if their bytes are.
Weights are too large to read once more, so the system's times and places on the disk stand for
their bytes. A change of those alone, as by a hard link, needs a comparison of what was read.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

from growkern.errors import GrowthError
from growkern.files import read_json
from growkern.growth.history import LINEAGE_FILE
from growkern.growth.source.files import (
    INDEX_FILE,
    METADATA_FILE,
    WEIGHTS_FILE,
    shard_names,
    stays_in,
)
from growkern.growth.source.formats import GENERATION_FILE, MODEL_FILES, beside_weights
from growkern.growth.source.refused import STATE_FILES

CONFIG_FILE, MODULES_FILE = "config.json", "modules.json"
# of a list of modules
MOST_BYTES = 1_000_000
BLOCK = 1 << 20
# of a stamp: a difference in others alone may come from a link, a new mode or a copy
DECISIVE = ("size", "modified")


@dataclass(frozen=True)
class Stamps:
    """What was known of files before they were read.

    Unlike the time of the last modification, that of the last change cannot be set back.
    """

    path: Path  # a file, or the directory of a checkpoint: then all files that are read or copied
    # by name the size, with the checksum of a small file or what the system knows of weights
    found: dict[str, dict[str, Any]] = field(default_factory=dict)

    @classmethod
    def of(cls, path: Path) -> Stamps:
        """The stamps of a path as they are now."""
        return cls(path, _stamps(path))

    def check(self, is_same: Callable[[], bool] = lambda: False) -> None:
        """Refuse what was read if a file changed or went since the stamps were taken.

        A file that came is refused if loaders look for its name. `is_same` tells whether the
        weights are those that were read. It is asked if the system changed something about their
        files and their sizes and times are as before.
        """
        now = _stamps(self.path)
        new = {name for name in now.keys() - self.found if Path(name).name in MODEL_FILES}
        unsure = []
        for name in sorted({*self.found, *new}):
            before, after = self.found.get(name), now.get(name)
            if before == after:
                continue
            if not (before and after and "changed" in before) or any(
                before[key] != after.get(key) for key in DECISIVE
            ):
                raise _changed(name)
            unsure.append(name)
        if unsure and not is_same():
            raise _changed(unsure[0])

    def identity(self) -> dict[str, Any]:
        """Size and checksum of the files that loaders look for, for a journal.

        The journal has checksums of the weights that were read.
        """
        return {
            os.path.relpath(name, self.path): [*stamp.values()]
            for name, stamp in self.found.items()
            if Path(name).name in MODEL_FILES
        }


def _changed(name: str) -> GrowthError:
    return GrowthError(
        f"{name} was changed while it was read: repeat with files that stay the same"
    )


def module_folders(directory: Path) -> set[str]:
    """The folders that a model of sentence-transformers names."""
    try:
        modules = read_json(directory / MODULES_FILE, MOST_BYTES, "list of modules")
    except GrowthError:
        return set()
    entries = modules if isinstance(modules, list) else []
    paths = [entry.get("path") for entry in entries if isinstance(entry, dict)]
    return {path for path in paths if isinstance(path, str) and Path(path).name == path}


def _stamps(path: Path) -> dict[str, dict[str, Any]]:
    files = [(path, True)] if path.is_file() else _files(path)
    stamps: dict[str, dict[str, Any]] = {}
    for file, is_large in files:
        # a link that leads nowhere, or a file that has gone
        with contextlib.suppress(OSError):
            stamps[str(file)] = _of_system(file) if is_large else _of_bytes(file)
    return stamps


def _of_system(file: Path) -> dict[str, Any]:
    found = file.stat()
    return {
        "size": found.st_size,
        "modified": found.st_mtime_ns,
        "changed": found.st_ctime_ns,
        "device": found.st_dev,
        "inode": found.st_ino,
    }


def _of_bytes(file: Path) -> dict[str, Any]:
    total = hashlib.sha256()
    with file.open("rb") as opened:
        while block := opened.read(BLOCK):
            total.update(block)
        return {"size": opened.tell(), "bytes": total.hexdigest()}


def _files(directory: Path) -> Iterator[tuple[Path, bool]]:
    """The files of a checkpoint that are read or copied, and whether they are weights.

    The config may lie in the directory above.
    """
    if not directory.is_dir():
        return
    for name in _weights(directory):
        yield directory / name, True
    is_above = (directory / METADATA_FILE).is_file() and not (directory / CONFIG_FILE).is_file()
    place = directory.parent if is_above else directory
    small = [place / name for name in (CONFIG_FILE, GENERATION_FILE, LINEAGE_FILE, MODULES_FILE)]
    for folder in module_folders(place):
        inside = (place / folder).iterdir() if (place / folder).is_dir() else ()
        small += [inner for inner in inside if not any(fnmatch(inner.name, p) for p in STATE_FILES)]
    with contextlib.suppress(GrowthError):
        # too many files are refused where they are copied
        small += beside_weights(place)
    for file in dict.fromkeys(small):
        # links that lead out are not followed
        if file.is_file() and stays_in(file, place):
            yield file, False


def _weights(directory: Path) -> list[str]:
    """The names of the files that hold the weights, and of the one that lists them."""
    if (directory / METADATA_FILE).is_file():
        return [METADATA_FILE, *(file.name for file in directory.glob("*.distcp"))]
    if (directory / WEIGHTS_FILE).is_file():
        return [WEIGHTS_FILE]
    # a damaged index is refused where it is read
    with contextlib.suppress(GrowthError):
        return [INDEX_FILE, *shard_names(directory)]
    return [INDEX_FILE]
