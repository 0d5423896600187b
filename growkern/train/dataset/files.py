"""The files of training data: their names, their text, and fingerprints that tell a change."""

from __future__ import annotations

import contextlib
import glob
import hashlib
import json
import os
import time
import warnings
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any, TextIO

from growkern.errors import GrowthError, GrowthWarning
from growkern.files import read_bounded, regular_size, write_whole
from growkern.publish.manifest import ALGORITHM, checksum

VARIABLE = "GROWKERN_TOKENS"
# characters of a text that are read at once
PIECE = 1 << 24
# names that a pattern of text files may match; listing them takes half a second
MOST_NAMES = 100_000
# the checksum of a larger file is noted, so that the next start need not read all of it
MOST_READ = 8 << 20
# seconds in which a second change of a file may leave its times as they are
SETTLED = 2.0
NOTED_BYTES = 32


def text_pieces(file: Path) -> Iterator[tuple[str, bool]]:
    """A text file in pieces, and whether each is the last. All but the last end with a line.

    A file of up to 16 million characters is one piece.
    """
    with _text_stream(file) as stream:
        held = stream.read(PIECE)
        _note_nul(held, file)
        while more := stream.read(PIECE):
            _note_nul(more, file)
            cut = held.rfind("\n") + 1
            if cut:
                yield held[:cut], False
            held = held[cut:] + more
    yield held, True


@contextlib.contextmanager
def _text_stream(file: Path) -> Iterator[TextIO]:
    try:
        regular_size(file)
    except GrowthError as error:
        raise GrowthError(f"cannot read the text file {error}") from error
    try:
        with file.open(encoding="utf-8") as stream:
            yield stream
    except UnicodeDecodeError as error:
        raise GrowthError(
            f"cannot read the text file {file}: {error}: give a text file, saved as UTF-8"
        ) from error
    except OSError as error:
        raise GrowthError(f"cannot read the text file {file}: {error.strerror or error}") from error


def read_text(file: Path, most: int = -1) -> str:
    """A text file, or its first `most` characters."""
    with _text_stream(file) as stream:
        text = stream.read(most)
    _note_nul(text, file)
    return text


def _note_nul(text: str, file: Path) -> None:
    """Warn of NUL characters, which no text has: UTF-16 without a mark, or a binary file."""
    if "\0" in text:
        warnings.warn(
            GrowthWarning(
                f"{file} has NUL characters, so it may be no text: they become tokens like others. "
                "If it is UTF-16 or binary, save it as UTF-8, or leave it out"
            ),
            stacklevel=3,
        )


def matching_files(base: Path, pattern: str, key: str = "text") -> list[Path]:
    """The regular files whose names match a pattern, sorted; "**" matches folders of any depth.

    A relative pattern begins in the folder `base`. Brackets and stars in the own name of that are
    no pattern. If a file has the very name of the pattern, it is the only one. The key is that of
    the pattern, for messages.
    """
    escaped, shown = Path(glob.escape(str(base))) / pattern, base / pattern
    exact = glob.glob(glob.escape(str(shown)))
    names = exact or list(islice(glob.iglob(str(escaped), recursive=True), MOST_NAMES + 1))
    if len(names) > MOST_NAMES:
        raise GrowthError(
            f"{key}: {shown} matches more than {MOST_NAMES} names: give a narrower one"
        )
    found = [Path(name) for name in sorted(names) if Path(name).is_file()]
    if not found:
        raise GrowthError(f"{key}: no file matches {shown}")
    return found


# ------------------------------------------------------------------- fingerprints


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
    found = file.stat()
    times = found.st_mtime_ns, found.st_ctime_ns
    return [str(file.resolve()), found.st_dev, found.st_ino, found.st_size, *times]


def digest_of(values: Any) -> str:
    """A name for values of JSON: the same for the same values."""
    return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()[:32]


def user_cache() -> Path:
    """The directory for tokenised data: `GROWKERN_TOKENS`, or a place in the user's cache."""
    if os.environ.get(VARIABLE):
        return Path(os.environ[VARIABLE])
    root = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(root) / "growkern" / "tokens"
