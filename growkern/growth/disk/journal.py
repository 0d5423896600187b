"""The resume journal: the finished pieces of an unfinished checkpoint.

    {"plan": ..., "source": ..., ...}             the work: its plan and its source
    ["source", name, checksum]                    a source tensor that was read
    ["target", name, start, stop, checksum]       rows of a target tensor that are on disk
    ["lost", name, start, stop]                   rows that are damaged, and are written again

Nothing is noted before it is on disk. A line about rows follows the lines about the source tensors
that they were made of. On resume, rows are checksummed again before they are used. A line that was
cut short does not count, nor does anything after it.

A failed sync loses what it covered (the rule of PostgreSQL since 2018). Linux reports the failure
once, may keep the data in the page cache, marked as written, and lets the next sync succeed. So:

- Rows that a failed sync covered are never noted: nothing is synced again to note them after all.
- The checksum of such rows on resume would prove nothing, since the page cache answers. Rows
  without a line are written again, whatever lies there, and that makes the system write them.
- Rows that were noted and then turn out damaged are first noted as lost. Otherwise a sync that
  fails after they were repaired would leave the old line, and the page cache would confirm it.
- After a failed append nothing more is appended. Whether its lines are there or not, they are true.
"""

from __future__ import annotations

import json
import os
import reprlib
import threading
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from growkern.errors import GrowthError
from growkern.files import write_all

Mark = tuple[str, int, int]
# fields whose values say nothing to a person
NAMED = {"modified": "another time of change", "header": "other tensors"}
# of a line, after its first word
FIELDS = {"source": [str, str], "target": [str, int, int, str], "lost": [str, int, int]}


class Journal:
    """Append-only; threads may share it.

    Attributes:
        marks: (tensor, first row, past the last row) -> checksum, for rows that earlier runs wrote.
        source_checksums: source tensor -> its checksum, for the tensors noted on disk.
    """

    def __init__(
        self,
        file: Path,
        identity: Mapping[str, Any],
        start_over: str = "resume=False (--no-resume)",
    ) -> None:
        """Open the journal, or begin a new one, in a directory that only this user can write to.

        `identity` has plain values that describe the work. A journal of other work is refused;
        `start_over` is the option that drops it, for the message.
        """
        self.marks: dict[Mark, str] = {}
        self.source_checksums: dict[str, str] = {}
        self._appending = threading.Lock()
        self._error: OSError | None = None
        self._fd = os.open(file, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW, 0o666)
        try:
            lines, valid = _read_lines(file)
            if lines:
                _check_same(file, lines[0], json.loads(json.dumps(identity)), start_over)
            for kind, name, *fields in lines[1:]:
                if kind == "target":
                    start, stop, total = fields
                    self.marks[name, start, stop] = total
                elif kind == "lost":
                    self.marks.pop((name, *fields), None)
                else:
                    self.source_checksums[name] = fields[0]
            os.ftruncate(self._fd, valid)
            if not lines:
                self._append([identity])
        except BaseException:
            os.close(self._fd)
            raise

    def add(self, marks: Mapping[Mark, str], source_checksums: Mapping[str, str]) -> None:
        """Note rows that are on disk, and the source tensors they were made of."""
        sources = [["source", *item] for item in source_checksums.items()]
        self._append([*sources, *(["target", *mark, total] for mark, total in marks.items())])
        # only now that it is on disk: callers do not note a tensor again that is in here
        self.source_checksums.update(source_checksums)

    def lose(self, mark: Mark) -> None:
        """Note that rows of an earlier run are damaged, before they are written again."""
        self._append([["lost", *mark]])

    def _append(self, lines: Iterable[object]) -> None:
        data = "".join(json.dumps(line) + "\n" for line in lines).encode()
        with self._appending:
            if self._error is not None:
                raise self._error
            try:
                write_all(self._fd, data)
                os.fsync(self._fd)
            except OSError as error:
                self._error = error
                raise

    def __enter__(self) -> Journal:
        return self

    def __exit__(self, *error: object) -> None:
        os.close(self._fd)


def _read_lines(file: Path) -> tuple[list[Any], int]:
    """The lines that are whole, and the bytes they take up."""
    data = file.read_bytes()
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
    kinds = FIELDS.get(str(line[0]))
    return kinds is not None and [type(field) for field in line[1:]] == kinds


def _check_same(
    file: Path, recorded: Mapping[str, Any], wanted: Mapping[str, Any], start_over: str
) -> None:
    """Refuse a journal of other work. The message names the first field that differs."""
    for what in {**wanted, **recorded}:
        if recorded.get(what) != wanted.get(what):
            detail = _difference(recorded.get(what), wanted.get(what))
            raise GrowthError(
                f"{file.parent} holds unfinished work with another {_short(what)}{detail}: repeat "
                f"the run that began it, or start over with {start_over}"
            )


def _difference(recorded: Any, wanted: Any) -> str:
    if isinstance(recorded, dict) and isinstance(wanted, dict):
        name = next(n for n in {**wanted, **recorded} if recorded.get(n) != wanted.get(n))
        if name in NAMED:
            return f" has {NAMED[name]}"
        return f" ({_short(name)}{_difference(recorded.get(name), wanted.get(name))})"
    if isinstance(recorded, (str, int, float)) and isinstance(wanted, (str, int, float)):
        return f": {_short(recorded)}, now {_short(wanted)}"
    return ""


def _short(value: Any) -> str:
    """A name or a value of a file, in a part of one line."""
    return reprlib.repr(value).strip("'")
