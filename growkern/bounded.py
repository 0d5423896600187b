"""Reads files that strangers may have written, within limits that are checked before any work.

Python's parser has no limit on the size of a file. Code that walks through deep nesting would
overflow the stack.
"""

from __future__ import annotations

import contextlib
import gc
import json
import reprlib
import stat
from collections import Counter
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import Any

from growkern.errors import GrowthError

# no file of ours nests deeper than a config, which has two or three levels
MOST_LEVELS = 20
# eight for each tensor of the largest models
MOST_VALUES = 1 << 20
# bytes of a file's name
MOST_NAME = 256


def read_bounded(file: Path, most_bytes: int, what: str) -> bytes:
    """All bytes of a file.

    Args:
        file: a regular file.
        most_bytes: of the file; a larger one is refused unread.
        what: the file's kind, for messages: "config".
    """
    size, data = regular_size(file), b""
    try:
        if size <= most_bytes:
            with file.open("rb") as opened:
                # it may grow meanwhile; Python reserves memory for all bytes that it is asked for
                data = opened.read(size + 1)
    except OSError as error:
        raise GrowthError(f"{file}: {error.strerror or error}") from error
    if size > most_bytes:
        raise GrowthError(f"{file}: {size} bytes, more than any {what} has ({most_bytes})")
    if len(data) > size:
        raise GrowthError(f"{file}: it grew while it was read: try again when it is complete")
    return data


def regular_size(file: Path) -> int:
    """The size of a file in bytes; a pipe or a device could make the process wait for ever."""
    try:
        found = file.stat()
    except (OSError, ValueError) as error:
        # ValueError: a null byte in the name
        raise GrowthError(f"{file}: {getattr(error, 'strerror', error)}") from error
    if not stat.S_ISREG(found.st_mode):
        raise GrowthError(f"{file}: not a regular file")
    return found.st_size


def read_json(file: Path, most_bytes: int, what: str, most_values: int = MOST_VALUES) -> Any:
    """The content of a JSON file; the arguments are those of `read_bounded` and `parse_json`."""
    try:
        return parse_json(read_bounded(file, most_bytes, what), most_values)
    except GrowthError:
        raise
    except ValueError as error:
        raise GrowthError(f"{file}: not valid JSON: {error}") from error


def check_format(file: Path, record: Any, known: int) -> None:
    """Refuse a record in another format than the one that this version of growkern writes.

    Args:
        record: content of the file. One that is damaged is left to other checks.
        known: number of the format.
    """
    found = record.get("format", known) if isinstance(record, dict) else known
    if found != known:
        writer = reprlib.repr(record.get("growkern", "that wrote it")).strip("'")
        raise GrowthError(
            f"{file}: its format is {reprlib.repr(found)}, and this version of growkern reads "
            f"{known}: use growkern {writer}"
        )


def parse_json(data: bytes, most_values: int = MOST_VALUES) -> Any:
    """The value of a JSON text.

    Args:
        most_values: of all its objects and lists together.

    Raises:
        ValueError: it is not UTF-8, not JSON, has too many values, or nests too deep; or an object
            has a name twice.
    """
    if data.count(b",") > most_values:
        raise ValueError(f"more than {most_values} values")
    try:
        with no_collections():
            value = json.loads(data.decode(), object_pairs_hook=_unique)
    except RecursionError:
        raise ValueError(f"nested more than {MOST_LEVELS} levels deep") from None
    _check_levels(value, MOST_LEVELS)
    if rb"\ud" in data or rb"\uD" in data:
        # half of a pair of UTF-16 stands for no character, and cannot be written again
        json.dumps(value, ensure_ascii=False).encode()
    return value


def _check_levels(value: Any, left: int) -> None:
    if not isinstance(value, (dict, list)):
        return
    if not left:
        raise ValueError(f"nested more than {MOST_LEVELS} levels deep")
    for inner in value.values() if isinstance(value, dict) else value:
        _check_levels(inner, left - 1)


def stays_inside(name: str) -> bool:
    """Whether a path that a file names lies below the directory that it belongs to."""
    path = PurePosixPath(name)
    is_printable = name.isprintable() and len(name.encode()) < MOST_NAME
    return is_printable and bool(path.parts) and not path.is_absolute() and ".." not in path.parts


@contextlib.contextmanager
def no_collections() -> Iterator[None]:
    """No garbage collection: with a million new objects it takes longer than the parser."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """A JSON object without repeated names: readers disagree on which of them counts."""
    found = dict(pairs)
    if len(found) < len(pairs):
        ((name, _),) = Counter(name for name, _ in pairs).most_common(1)
        raise ValueError(f"{name!r} is given twice")
    return found
