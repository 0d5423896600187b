"""Tokenised data on disk, made once and shared by processes and runs; fingerprints of files.

A cache is a directory with a name that follows from the data, the tokenizer and the settings:

    input_ids.bin, labels.bin, ...   the columns of all rows, one after the other
    starts.bin                       int64: where each row starts, and the end
    manifest.json                    size and checksum of each file, written last

It appears complete, by one rename. One that is not as it was written is made again. A cache may be
deleted whenever no run uses it.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import os
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path, PurePosixPath
from typing import Any

import numpy as np
import torch.distributed as dist
from torch.utils.data import Dataset

from growkern.errors import GrowthError, warn
from growkern.files import ALGORITHM, checksum, read_bounded, sync, sync_tree, write_whole
from growkern.publish import (
    MANIFEST,
    Held,
    Lock,
    check_space,
    damage_of,
    delete,
    lock_file_of,
    move,
    read_manifest,
    why_kept,
    write_manifest,
)
from growkern.train.objectives import SOURCE

# Columns of a record or a row, of one length: input_ids int32, and labels int32 and weights
# float32 if the data has them. The ids of a pair are those that are read and then those that are
# written; its side is 0 and then 1
Tokens = dict[str, np.ndarray]
IDS, LABELS, WEIGHTS, SIDE = "input_ids", "labels", "weights", "side"
DTYPES: dict[str, np.dtype[Any]] = {
    **dict.fromkeys((IDS, LABELS), np.dtype("<i4")),
    **{WEIGHTS: np.dtype("<f4"), SIDE: np.dtype("i1")},
}
# of the format and of the way rows are made
VERSION = 1
STARTS, KIND = "starts.bin", "part"
# all that a cache may hold
FILES = {PurePosixPath(name) for name in (MANIFEST, STARTS, *(f"{x}.bin" for x in DTYPES))}
# seconds between two looks at a cache that another run is making
POLL = 0.5
ROWS_AT_ONCE = 256
# The processes speak to each other this often. A group gives up after some minutes of silence
SECONDS = 30.0
WORKING, DONE = "working", "done"
VARIABLE = "GROWKERN_TOKENS"
# the checksum of a larger file is noted, so that the next start need not read all of it
MOST_READ = 8 << 20
# seconds in which a second change of a file may leave its times as they are
SETTLED = 2.0
NOTED_BYTES = 32


def features_of(row: Tokens, weights: str | None) -> Tokens:
    """A row as collators get it. Of a pair, labels and weights are those that are written.

    Weights of tokens get the key `weights`; without one they are left out.
    """
    kept = {name: values for name, values in row.items() if name not in (WEIGHTS, SIDE)}
    if WEIGHTS in row and weights is not None:
        kept[weights] = row[WEIGHTS]
    if SIDE not in row:
        return kept
    written = row[SIDE] == 1
    pair = {name: values[written] for name, values in kept.items()}
    return pair | {LABELS: pair[IDS], IDS: kept[IDS][~written]}


class TokenRows(Dataset[dict[str, Any]]):
    """The rows of a cache: `rows[i]` is {"input_ids": (S,) int32, ...}. Nothing is held in memory.

    The labels of a pair have a length of their own. Weights of tokens get the key `weights`. If
    there are several sources, each row holds the name of its own.
    """

    def __init__(
        self, directory: Path, weights: str | None = None, source: str | None = None
    ) -> None:
        self.directory, self.weights, self.source = directory, weights, source
        self.starts = np.memmap(directory / STARTS, np.dtype("<i8"), mode="r")
        self.columns = {
            name: np.memmap(file, dtype, mode="r")
            for name, dtype in DTYPES.items()
            if (file := _file_of(directory, name)).exists()
        }

    def __reduce__(self) -> tuple[Any, ...]:
        # a data worker that is spawned maps the files itself
        return TokenRows, (self.directory, self.weights, self.source)

    def __len__(self) -> int:
        return len(self.starts) - 1

    @property
    def tokens(self) -> int:
        """The number of tokens of all rows."""
        return int(self.starts[-1])

    def __getitem__(self, index: int) -> dict[str, Any]:
        start, stop = self.starts[index], self.starts[index + 1]
        row = {name: np.array(values[start:stop]) for name, values in self.columns.items()}
        features = features_of(row, self.weights)
        return features if self.source is None else {**features, SOURCE: self.source}


def cached_rows(
    directory: Path,
    rows: Iterable[Tokens],
    name: str,
    size: int,
    weights: str | None,
    source: str | None = None,
) -> TokenRows:
    """The rows of a cache, which is made first if it is not there. All processes call this.

    The first process makes it, and then the first of each machine that does not see it. The rows
    are only read there. About `size` bytes will be written.
    """
    rank, local = (int(os.environ.get(key, "0")) for key in ("RANK", "LOCAL_RANK"))
    work = _make(directory, rows, name, size)
    wait_together(work if rank == 0 else None)
    wait_together(work if local == 0 and rank else None)
    return TokenRows(directory, weights, source)


def _make(directory: Path, rows: Iterable[Tokens], name: str, size: int) -> Iterator[None]:
    """Make a cache if it is not there, in small steps."""
    # where it is written before it appears
    staged = directory.with_name(f".{directory.name}.{KIND}")
    lock_file = lock_file_of(directory)
    if _wrong_with(directory) is None and not any(map(os.path.lexists, (staged, lock_file))):
        return
    try:
        directory.parent.mkdir(parents=True, exist_ok=True)
        lock = None
        while lock is None:
            # another run may be making the same cache
            with contextlib.suppress(Held):
                lock = Lock(lock_file, directory, "tokenising to")
            if lock is None:
                time.sleep(POLL)
                yield
        try:
            wrong = _wrong_with(directory)
            if wrong is not None:
                if directory.exists():
                    if why := why_kept(directory, "tokenised data", FILES.__contains__):
                        raise GrowthError(
                            f"{directory}: {why}, or set data.cache to another directory"
                        )
                    warn(
                        f"the tokenised data in {directory} is damaged ({wrong}): it is made again"
                    )
                check_space(directory, KIND, size)
                yield from _write(directory, staged, rows, name)
        finally:
            # of a killed process, unfinished, or a damaged cache that was replaced
            with contextlib.suppress(OSError):
                delete(staged)
            # a file that stays is locked again by the next process
            with contextlib.suppress(OSError):
                lock.release()
    except OSError as error:
        if _wrong_with(directory) is None:
            # of another user, with something left beside it
            return
        full = " (the disk is full)" if error.errno in (errno.ENOSPC, errno.EDQUOT) else ""
        raise GrowthError(
            f"the tokens of {name} cannot be written to {directory.parent}{full}: "
            f"{error.strerror or error}. Set data.cache to another directory"
        ) from error


def _wrong_with(directory: Path) -> str | None:
    """Why a cache cannot be used; None if every file is as it was written."""
    try:
        manifest = read_manifest(directory)
    except GrowthError as error:
        return str(error)
    damage = (damage_of(directory, file, manifest) for file in manifest)
    return next((phrase for phrase in damage if phrase is not None), None)


def _write(directory: Path, staged: Path, rows: Iterable[Tokens], name: str) -> Iterator[None]:
    """Write a cache beside its place, and move it there when it is complete."""
    delete(staged)
    staged.mkdir()
    yield from _write_columns(staged, rows, name)
    write_manifest(staged)
    sync_tree(staged)
    move(staged, directory)
    # a cache that is not there after a power failure is made again
    with contextlib.suppress(OSError):
        sync(directory.parent)


def _write_columns(staged: Path, rows: Iterable[Tokens], name: str) -> Iterator[None]:
    end, count = 0, 0
    with contextlib.ExitStack() as stack:
        starts = stack.enter_context((staged / STARTS).open("wb"))
        starts.write(np.zeros(1, "<i8").tobytes())
        files: dict[str, Any] = {}
        for row in rows:
            for column, values in row.items():
                if column not in files:
                    files[column] = stack.enter_context(_file_of(staged, column).open("wb"))
                files[column].write(values.astype(DTYPES[column]).tobytes())
            end, count = end + len(row[IDS]), count + 1
            starts.write(np.asarray([end], "<i8").tobytes())
            if count % ROWS_AT_ONCE == 0:
                yield
    if not count:
        raise GrowthError(
            f"{name} has fewer tokens than one row: give more data, or a smaller sequence_length"
        )


def _file_of(directory: Path, column: str) -> Path:
    return directory / f"{column}.bin"


# ------------------------------------------------------------ several processes


def wait_together(work: Iterator[Any] | None) -> None:
    """Do work in some processes; all return when all of it is done. All processes call this.

    It is done in small steps, one per `next`. None waits for the others. If it fails in a process,
    all of them raise the error.
    """
    state = DONE if work is None else WORKING
    while True:
        error: GrowthError | None = None
        if work is not None and state == WORKING:
            try:
                until = time.monotonic() + SECONDS
                state = next((WORKING for _ in work if time.monotonic() >= until), DONE)
            except GrowthError as failed:
                error, state = failed, str(failed)
        states: list[Any] = [state]
        if dist.is_initialized() and dist.get_world_size() > 1:
            states *= dist.get_world_size()
            dist.all_gather_object(states, state)
        if error is not None:
            raise error
        failures = [text for text in states if text not in (WORKING, DONE)]
        if failures:
            raise GrowthError(failures[0])
        if WORKING not in states:
            return


def from_first(function: Callable[[], Any]) -> Any:
    """What a function gives in the first process, or its error. All processes call this."""
    values: list[Any] = [None]

    def work() -> Iterator[None]:
        values[0] = function()
        yield

    several = dist.is_initialized() and dist.get_world_size() > 1
    wait_together(work() if not several or dist.get_rank() == 0 else None)
    if several:
        dist.broadcast_object_list(values, src=0)
    return values[0]


# ----------------------------------------------------------- fingerprints


def fingerprint(file: Path) -> str:
    """A checksum of all bytes of a file."""
    digest, size = hashlib.sha256(), file.stat().st_size
    digest.update(size.to_bytes(8, "little"))
    digest.update(file.read_bytes() if size <= MOST_READ else _noted(file).encode())
    return digest.hexdigest()


def _noted(file: Path) -> str:
    """The checksum of a file, which is read if it changed since it was noted."""
    stamp = _stamp(file)
    note = user_cache() / "checksums" / digest_of([ALGORITHM, *stamp])
    with contextlib.suppress(OSError, ValueError):
        known = read_bounded(note, NOTED_BYTES, "checksum").decode()
        if len(known) == NOTED_BYTES:
            return known
    is_settled = time.time() - file.stat().st_ctime > SETTLED
    total = checksum(file)
    if is_settled and _stamp(file) == stamp:
        # without a note the next start reads the file again
        with contextlib.suppress(OSError):
            note.parent.mkdir(parents=True, exist_ok=True)
            write_whole(note, lambda partial: partial.write_text(total))
    return total


def _stamp(file: Path) -> list[Any]:
    """Values that change with a file. The time of the last change cannot be set back."""
    state = file.stat()
    times = state.st_mtime_ns, state.st_ctime_ns
    return [str(file.resolve()), state.st_dev, state.st_ino, state.st_size, *times]


def digest_of(values: Any) -> str:
    """A name for values of JSON: the same for the same values."""
    return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()[:32]


def user_cache() -> Path:
    """The directory for tokenised data: `GROWKERN_TOKENS`, or a place in the user's cache."""
    if os.environ.get(VARIABLE):
        return Path(os.environ[VARIABLE])
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "growkern" / "tokens"
