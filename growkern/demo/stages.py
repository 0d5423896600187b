"""Stores the results of finished stages, so that an interrupted demo can resume."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from growkern.errors import GrowthError
from growkern.publish.lock import LOCK_FILE
from growkern.whole import PARTIAL, write_whole

IDENTITY_FILE = "demo.json"


class Stages:
    """Pieces of work in a directory. Each is done once, and its result is stored as JSON.

    A piece counts as done when its result is stored. Interrupted work is called again, and must
    handle the files it left behind.

    Args:
        directory: for the results. It is made if needed.
        identity: the settings of the demo, JSON values.

    Raises:
        GrowthError: the directory holds something else.
    """

    def __init__(self, directory: Path, identity: dict[str, Any]) -> None:
        self.directory = directory
        file = directory / IDENTITY_FILE
        if file.is_file():
            if json.loads(file.read_text()) != json.loads(json.dumps(identity)):
                raise GrowthError(
                    f"{directory} holds a demo of another size, seed or version: choose another "
                    "--dir, or delete it"
                )
            return
        if directory.exists() and not (directory.is_dir() and _is_empty(directory)):
            raise GrowthError(
                f"{directory} exists and is not the directory of a demo: choose another --dir"
            )
        write_json(file, identity)

    def once(self, name: str, work: Callable[[], Any]) -> Any:
        """Do a piece of work, or read its result if it was done earlier.

        Args:
            name: of the piece.
            work: does it and returns a JSON value.
        """
        mark = self.directory / "done" / f"{name}.json"
        if not mark.is_file():
            write_json(mark, work())
        return json.loads(mark.read_text())

    def is_done(self, name: str) -> bool:
        """Whether the result of a piece of work is stored."""
        return (self.directory / "done" / f"{name}.json").is_file()


def _is_empty(directory: Path) -> bool:
    """Whether a directory holds no more than a demo that was killed at its start leaves."""
    begun = (LOCK_FILE, PARTIAL.format(name=IDENTITY_FILE))
    return all(any(path.match(one) for one in begun) for path in directory.iterdir())


def write_json(file: Path, value: Any) -> None:
    """Write a JSON file, completely or not at all.

    Raises:
        GrowthError: the disk is full or cannot be written.
    """
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        text = json.dumps(value, indent=1)
        write_whole(file, lambda partial: partial.write_text(text, encoding="utf-8"))
    except OSError as error:
        raise GrowthError(f"{file}: {error.strerror or error}") from error
