"""Notices files that change while they are read."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from transformers.utils import CHAT_TEMPLATE_DIR

from growkern.bounded import read_json
from growkern.errors import GrowthError
from growkern.growth.source.files import METADATA_FILE

CONFIG_FILE, MODULES_FILE = "config.json", "modules.json"
# of a list of modules
MOST_BYTES = 1_000_000


@dataclass(frozen=True)
class Stamps:
    """What the system knows of files before they are read: sizes, times and places on the disk.

    Unlike the time of the last modification, that of the last change cannot be set back.

    Attributes:
        path: a file, or the directory of a checkpoint: then all files that are read or copied.
        found: name -> its stamp.
    """

    path: Path
    found: dict[str, dict[str, int]] = field(default_factory=dict)

    @classmethod
    def of(cls, path: Path) -> Stamps:
        """The stamps of a path as they are now."""
        return cls(path, _stamps(path))

    def check(self) -> None:
        """Refuse what was read if a file changed, went or came since the stamps were taken.

        Raises:
            GrowthError: the message names it.
        """
        now = _stamps(self.path)
        for name in {**self.found, **now}:
            if self.found.get(name) != now.get(name):
                raise GrowthError(
                    f"{name} was changed while it was read: repeat with files that stay the same"
                )

    def identity(self) -> dict[str, Any]:
        """The stamps for a journal: devices and inodes differ after a restart of the machine."""
        kept = ("size", "modified", "changed")
        return {
            os.path.relpath(name, self.path): {key: stamp[key] for key in kept}
            for name, stamp in self.found.items()
        }


def module_folders(directory: Path) -> set[str]:
    """The folders that a model of sentence-transformers names."""
    try:
        modules = read_json(directory / MODULES_FILE, MOST_BYTES, "list of modules")
    except GrowthError:
        return set()
    entries = modules if isinstance(modules, list) else []
    paths = [entry.get("path") for entry in entries if isinstance(entry, dict)]
    return {path for path in paths if isinstance(path, str) and Path(path).name == path}


def _stamps(path: Path) -> dict[str, dict[str, int]]:
    stamps = {}
    for file in [path] if path.is_file() else sorted(_files(path)):
        try:
            found = file.stat()
        except OSError:
            # a link that leads nowhere, or a file that has gone
            continue
        stamps[str(file)] = {
            "size": found.st_size,
            "modified": found.st_mtime_ns,
            "changed": found.st_ctime_ns,
            "device": found.st_dev,
            "inode": found.st_ino,
        }
    return stamps


def _files(directory: Path) -> Iterator[Path]:
    """The files of a checkpoint, with those of the directory above that holds its config."""
    if not directory.is_dir():
        return
    places = [directory]
    if (directory / METADATA_FILE).is_file() and not (directory / CONFIG_FILE).is_file():
        places.append(directory.parent)
    for place in places:
        for folder in ("", CHAT_TEMPLATE_DIR, *module_folders(place)):
            found = (place / folder).iterdir() if (place / folder).is_dir() else ()
            for file in found:
                is_hidden = file.name.startswith(".") and file.name != METADATA_FILE
                if not is_hidden and file.is_file():
                    yield file
