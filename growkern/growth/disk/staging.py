"""Checks a growth's target, makes the workplace beside it, and keeps the journal for a resume.

A directory may be replaced if it is a checkpoint that growkern wrote: its record lists every file
but the card, whose last line tells whether anybody edited it. `save_pretrained` of a grown model
records a lineage only, which stands for the files that it writes. A model of another program has no
record and is never replaced.

The journal lists the finished pieces of an unfinished checkpoint:

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

import contextlib
import hashlib
import json
import os
import re
import reprlib
import threading
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path, PurePosixPath
from typing import Any

from growkern.errors import GrowthError, listed
from growkern.files import read_json, text_of, write_all
from growkern.growth.history import (
    CARD_FILE,
    CHECKSUMS_FILE,
    LINEAGE_FILE,
    MOST_LINEAGE_BYTES,
    NEEDED,
)
from growkern.publish import manifest, read_record, recorded_in, workplace

KIND = "growing"
Mark = tuple[str, int, int]
# fields whose values say nothing to a person
NAMED = {"modified": "time of change", "header": "tensors"}
# fields that may follow from others, which are named instead
FOLLOWING = (
    *("maps", "layer_maps", "identity_layers", "parameters", "active_parameters"),
    *("flops_per_token", "target config", "input", "files"),
)
MOST_NAMED = 8
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
    """Refuse a journal of other work. The message names what differs."""
    if recorded != wanted:
        raise GrowthError(
            f"{file.parent} holds unfinished work that differs in "
            f"{_differences(recorded, wanted)}: repeat the run that began it, or start over with "
            f"{start_over}"
        )


def _differences(recorded: Mapping[str, Any], wanted: Mapping[str, Any]) -> str:
    names = [n for n in {**wanted, **recorded} if recorded.get(n) != wanted.get(n)]
    names = [n for n in names if n not in FOLLOWING] or names
    return listed([_difference(n, recorded.get(n), wanted.get(n)) for n in names], MOST_NAMED)


def _difference(name: str, recorded: Any, wanted: Any) -> str:
    if name in NAMED:
        return NAMED[name]
    if isinstance(recorded, dict) and isinstance(wanted, dict):
        return f"{_short(name)} ({_differences(recorded, wanted)})"
    if isinstance(recorded, (str, int, float)) and isinstance(wanted, (str, int, float)):
        return f"{_short(name)}: {_short(recorded)}, now {_short(wanted)}"
    return _short(name)


def _short(value: Any) -> str:
    """A name or a value of a file, in a part of one line."""
    return reprlib.repr(value).strip("'")


def staging(target: Path, *, resume: bool) -> workplace.Workplace:
    """The workplace of a growth into `target`; `resume` continues unfinished work."""
    return workplace.Workplace(target, KIND, may_replace, resume=resume)


def may_replace(directory: Path) -> bool:
    """Whether a directory is a checkpoint of growkern or empty: nothing else is ever replaced."""
    return why_kept(directory) is None


def check_target(source: Path, target: Path, overwrite: bool) -> None:
    """Refuse a target that may not be made or replaced."""
    source = source.resolve()
    if source in target.parents:
        raise GrowthError(
            f"{target} is inside the source {source} and would become part of it: give a "
            "directory beside it"
        )
    if not target.exists():
        return
    if not target.is_dir():
        raise GrowthError(f"{target} exists and is a file: give a directory")
    if source == target or target in source.parents:
        raise GrowthError(f"{target} exists and holds the source itself: give another directory")
    if why := why_kept(target):
        raise GrowthError(
            f"{target} exists and holds something other than a checkpoint of growkern, which "
            f"is never replaced: {why}: give another directory"
        )
    if not overwrite:
        again = "overwrite=True (--overwrite)"
        raise GrowthError(f"{target} exists: give another directory or {again}")


def free_target(source: Path, target: Path, overwrite: bool) -> None:
    """`check_target`, after tidying up beside it what a killed process left."""
    with _refusing(target):
        workplace.delete_leftovers(target, KIND, may_replace)
        check_target(source, target, overwrite)


def check_space(target: Path, size: int) -> None:
    """`growkern.publish.workplace.check_space` for a growth."""
    with _refusing(target):
        workplace.check_space(target, KIND, size)


@contextlib.contextmanager
def _refusing(target: Path) -> Iterator[None]:
    """Turn the system's errors about a target into `GrowthError`, before any work is done."""
    try:
        yield
    except OSError as error:
        raise GrowthError(f"{target}: {error.strerror or error}: give another directory") from error


# what `save_pretrained` of a grown model writes beside its lineage, which lists no files
SAVED = re.compile(
    r"config\.json|generation_config\.json|lineage\.json"
    r"|model(-\d{5}-of-\d{5})?\.safetensors|model\.safetensors\.index\.json"
)


def why_kept(directory: Path) -> str | None:
    """Why a directory must not be deleted, as a phrase about it; None if it may be.

    A directory may be deleted if it is empty, or if growkern recorded that it wrote it and every
    file in it. Nothing whose name starts with a dot is ever deleted.
    """
    if directory.is_symlink() or not directory.is_dir():
        return "it is no directory"
    if not any(directory.iterdir()):
        return None
    recorded = recorded_in(directory) | _with_checksums(directory)
    # of a record that lists files, the lineage is one
    is_grown = LINEAGE_FILE not in recorded and _is_grown(directory)
    if not (recorded or is_grown):
        return (
            "no record in it says that growkern wrote it, as in a model of another program (move "
            "it away by hand)"
        )

    def is_known(file: PurePosixPath) -> bool:
        if str(file) == CARD_FILE:
            return is_unedited(text_of(directory / CARD_FILE))
        return is_grown and SAVED.fullmatch(str(file)) is not None

    return manifest.why_kept(directory, "a checkpoint", is_known, recorded)


# keys of the record of a growth's checksums
RECORDED = {"piece_bytes": int, "files": dict, "source": dict, "target": dict}
# a piece is held in memory
MOST_PIECE_BYTES = 1 << 28


def read_checksums(directory: Path) -> dict[str, Any]:
    """The record of a growth's checksums; one that is damaged or another program's is refused."""
    file = directory / CHECKSUMS_FILE
    if not file.is_file():
        raise GrowthError(f"{directory}: no {file.name}; only grow_checkpoint writes one")
    record = read_record(file, "record of checksums", RECORDED)
    if not 1 <= record["piece_bytes"] <= MOST_PIECE_BYTES:
        raise GrowthError(f"{file}: piece_bytes is {reprlib.repr(record['piece_bytes'])}")
    return record


def _with_checksums(directory: Path) -> set[str]:
    """The files that a growth recorded, and its record."""
    try:
        return {*read_checksums(directory)["files"], CHECKSUMS_FILE}
    except GrowthError:
        return set()


def _is_grown(directory: Path) -> bool:
    """Whether a lineage of growkern is there."""
    try:
        lineage = read_json(directory / LINEAGE_FILE, MOST_LINEAGE_BYTES, "lineage")
    except GrowthError:
        return False
    return isinstance(lineage, dict) and {"format", *NEEDED} <= lineage.keys()


# the last line of a card that growkern wrote: the checksum of the lines above it
STAMP = "<!-- growkern rewrites this file as long as nobody edits it: {} -->\n"
STAMPED = re.compile(f"(.*\n){re.escape(STAMP).replace(re.escape('{}'), '([0-9a-f]{64})')}", re.S)


def stamped(text: str) -> str:
    """A card with the line that tells `is_unedited` whether it was edited since."""
    return text + STAMP.format(hashlib.sha256(text.encode()).hexdigest())


def is_unedited(text: str) -> bool:
    """Whether a card is as growkern wrote it."""
    match = STAMPED.fullmatch(text)
    return match is not None and stamped(match[1]) == text
