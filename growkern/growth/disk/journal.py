"""What of an unfinished checkpoint is done: a file that a killed run leaves and the next one reads.

    {"plan": ..., "source": ..., ...}             what is being made, and of what
    ["source", name, sum]                         a source tensor that was read
    ["target", name, start, stop, sum]            rows of a target tensor that are on disk

A line is written after the data it speaks of has reached the disk; and rows are believed again only
if what lies there still has the sum. A last line cut short is no line.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from growkern.errors import GrowthError

Mark = tuple[str, int, int]


class Journal:
    """Append-only; written by one thread at a time.

    Attributes:
        marks: (tensor, first row, past the last row) -> sum, of what earlier runs completed.
        source_sums: source tensor -> its sum, as it was read so far.
    """

    def __init__(self, file: Path, identity: Mapping[str, Any]) -> None:
        """Opens the journal, a new one if there is none.

        Raises:
            GrowthError: the file is about something else than `identity`.
        """
        self.marks: dict[Mark, str] = {}
        self.source_sums: dict[str, str] = {}
        lines, valid = _read_lines(file)
        if lines:
            _check_same(file, lines[0], json.loads(json.dumps(identity)))
        for kind, *fields in lines[1:]:
            if kind == "target":
                name, start, stop, total = fields
                self.marks[name, start, stop] = total
            else:
                self.source_sums[fields[0]] = fields[1]
        self._fd = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)
        os.ftruncate(self._fd, valid)
        if not lines:
            self._append([identity])

    def add(self, marks: Mapping[Mark, str], source_sums: Mapping[str, str]) -> None:
        """Record rows whose data is on disk, and the source tensors they came from."""
        sources = [["source", *item] for item in source_sums.items()]
        self.source_sums.update(source_sums)
        self._append([*sources, *(["target", *mark, total] for mark, total in marks.items())])

    def _append(self, lines: Iterable[object]) -> None:
        data = "".join(json.dumps(line) + "\n" for line in lines).encode()
        while data:
            data = data[os.write(self._fd, data) :]
        os.fsync(self._fd)

    def __enter__(self) -> Journal:
        return self

    def __exit__(self, *error: object) -> None:
        os.close(self._fd)


def _read_lines(file: Path) -> tuple[list[Any], int]:
    """The lines that are whole, and the bytes they take up."""
    data = file.read_bytes() if file.is_file() else b""
    lines: list[Any] = []
    valid = 0
    for raw in data.splitlines(keepends=True):
        try:
            line = json.loads(raw)
        except (ValueError, RecursionError):
            break
        if not raw.endswith(b"\n") or not _is_line(line, first=not lines):
            break
        lines.append(line)
        valid += len(raw)
    return lines, valid


def _is_line(line: Any, first: bool) -> bool:
    if first:
        return isinstance(line, dict)
    if not isinstance(line, list) or not line:
        return False
    kinds = {"source": [str, str], "target": [str, int, int, str]}.get(str(line[0]))
    return kinds is not None and [type(field) for field in line[1:]] == kinds


def _check_same(file: Path, found: Mapping[str, Any], wanted: Mapping[str, Any]) -> None:
    """Named from the outside in: the first thing that differs is what the user changed."""
    for what in {**wanted, **found}:
        if found.get(what) != wanted.get(what):
            detail = _difference(found.get(what), wanted.get(what))
            raise GrowthError(
                f"{file.parent} holds an unfinished growth with another {what}{detail}; repeat "
                "that one to finish it, or start over with resume=False (--no-resume)"
            )


def _difference(found: Any, wanted: Any) -> str:
    if isinstance(found, dict) and isinstance(wanted, dict):
        name = next(n for n in {**wanted, **found} if found.get(n) != wanted.get(n))
        return f" ({name}{_difference(found.get(name), wanted.get(name))})"
    if isinstance(found, (str, int, float)) and isinstance(wanted, (str, int, float)):
        return f": {found}, now {wanted}"
    return ""
