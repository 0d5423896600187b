"""Marks of what is done: a demo that is killed at any moment goes on where it was."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from growkern.errors import GrowthError
from growkern.whole import PARTIAL, write_whole

IDENTITY_FILE = "demo.json"


class Stages:
    """Pieces of work in a directory, each done once and remembered by its result, a JSON value.

    A piece is marked when it is over, in one rename. Work that was cut off is called again and has
    to cope with what it left.
    """

    def __init__(self, directory: Path, identity: dict[str, Any]) -> None:
        """identity: what the directory is for.

        raises: GrowthError when the directory holds something else.
        """
        self.directory = directory
        file = directory / IDENTITY_FILE
        if file.is_file():
            if json.loads(file.read_text()) != json.loads(json.dumps(identity)):
                raise GrowthError(
                    f"{directory} holds a demo of another size, seed or version: choose another "
                    "--dir, or remove it"
                )
            return
        if directory.exists() and not (directory.is_dir() and _is_empty(directory)):
            raise GrowthError(
                f"{directory} exists and is no demo's directory: choose another --dir"
            )
        write_json(file, identity)

    def once(self, name: str, work: Callable[[], Any]) -> Any:
        """The result of `work`, from now on or from an earlier run."""
        mark = self.directory / "done" / f"{name}.json"
        if not mark.is_file():
            write_json(mark, work())
        return json.loads(mark.read_text())

    def is_done(self, name: str) -> bool:
        return (self.directory / "done" / f"{name}.json").is_file()


def _is_empty(directory: Path) -> bool:
    """But for the identity that was being written when an earlier start was killed."""
    return all(path.match(PARTIAL.format(name=IDENTITY_FILE)) for path in directory.iterdir())


def write_json(file: Path, value: Any) -> None:
    """Write a file that is there whole or not at all."""
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        text = json.dumps(value, indent=1)
        write_whole(file, lambda partial: partial.write_text(text, encoding="utf-8"))
    except OSError as error:
        raise GrowthError(f"{file}: {error.strerror or error}") from error
