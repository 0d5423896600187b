"""Reads text files in pieces, and blocks of tokens of one length."""

import contextlib
import glob
import warnings
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any, TextIO

import numpy as np
from torch.utils.data import Dataset

from growkern.errors import GrowthError, GrowthWarning
from growkern.files import regular_size

# characters of a text that are read at once
PIECE = 1 << 24
# names that a pattern of text files may match; listing them takes half a second
MOST_NAMES = 100_000


class TokenBlocks(Dataset[dict[str, np.ndarray]]):
    """A data set of token blocks of one length: `blocks[i]` is {"input_ids": (S,) int32}.

    Args:
        tokens_NS: (N, S) int32, one block per row.
    """

    def __init__(self, tokens_NS: np.ndarray) -> None:
        self.tokens_NS = tokens_NS

    def __len__(self) -> int:
        return len(self.tokens_NS)

    def __getitem__(self, index: int) -> dict[str, np.ndarray]:
        return {"input_ids": self.tokens_NS[index]}


def tokenise(texts: list[str], tokenizer: Any) -> list[list[int]]:
    """The tokens of texts, without any special ones."""
    return tokenizer(texts, add_special_tokens=False, return_attention_mask=False, verbose=False)[
        "input_ids"
    ]


def text_pieces(file: Path) -> Iterator[tuple[str, bool]]:
    """A text file in pieces, and whether each is the last. All but the last end with a line.

    A file of up to 16 million characters is one piece.

    Raises:
        GrowthError: it is missing, no regular file, or not UTF-8.
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
    """A text file, or its first `most` characters.

    Raises:
        GrowthError: it is missing, no regular file, or not UTF-8.
    """
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

    Args:
        base: folder of a relative pattern. Brackets and stars in its own name are no pattern.
        pattern: of names. If a file has that very name, it is the only one.
        key: of the pattern, for messages.

    Raises:
        GrowthError: there are none, or far too many names to look at.
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
