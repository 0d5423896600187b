"""Reads text and cuts it into blocks of tokens of one length."""

import contextlib
import glob
from collections.abc import Iterable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any, TextIO, TypeVar

import numpy as np
from torch.utils.data import Dataset

from growkern.bounded import regular_size
from growkern.errors import GrowthError
from growkern.train.model.load import head_of, separator_of

_TEXTS_PER_CALL = 256
# characters of a text that are read at once
PIECE = 1 << 24
T = TypeVar("T")
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


def pack_text(texts: Iterable[str | Path], tokenizer: Any, sequence_length: int) -> TokenBlocks:
    """Tokenise texts, join them and cut them into blocks of one length.

    Each text is followed by the tokenizer's separator (eos, else sep). Each block starts with the
    cls token if the tokenizer has one. Tokens left over at the end are dropped.

    Args:
        texts: a `Path` is read as a UTF-8 file, a `str` is the text itself.
        tokenizer: of transformers.
        sequence_length: tokens per block, the cls token included.

    Returns:
        The blocks; `.tokens_NS` is their (N, sequence_length) int32 array. There is no attention
        mask, because nothing is padded.

    Raises:
        GrowthError: a file cannot be read, or the text is shorter than one block.
    """
    head = head_of(tokenizer)
    body = sequence_length - len(head)
    if body < 1:
        raise GrowthError(f"sequence_length is {sequence_length}: it must be at least 2")

    stream_T = np.concatenate([np.empty(0, np.int32), *_token_runs(texts, tokenizer)])
    blocks = len(stream_T) // body
    if blocks == 0:
        raise GrowthError(
            f"the text has {len(stream_T)} tokens, fewer than one block of {body}: "
            "give more text or a smaller sequence_length"
        )
    tokens_NS = np.empty((blocks, sequence_length), np.int32)
    tokens_NS[:, : len(head)] = head
    tokens_NS[:, len(head) :] = stream_T[: blocks * body].reshape(blocks, body)
    return TokenBlocks(tokens_NS)


def _token_runs(texts: Iterable[str | Path], tokenizer: Any) -> Iterator[np.ndarray]:
    """The tokens of each text, followed by the separator."""
    end = separator_of(tokenizer)
    for chunk in _chunks(_pieces(texts), _TEXTS_PER_CALL):
        runs = tokenise([piece for piece, _ in chunk], tokenizer)
        for ids, (_, is_last) in zip(runs, chunk, strict=True):
            yield np.asarray(ids + end if is_last else ids, np.int32)


def tokenise(texts: list[str], tokenizer: Any) -> list[list[int]]:
    """The tokens of texts, without any special ones."""
    return tokenizer(texts, add_special_tokens=False, return_attention_mask=False, verbose=False)[
        "input_ids"
    ]


def _pieces(texts: Iterable[str | Path]) -> Iterator[tuple[str, bool]]:
    for text in texts:
        if isinstance(text, str):
            yield text, True
        else:
            yield from text_pieces(text)


def text_pieces(file: Path) -> Iterator[tuple[str, bool]]:
    """A text file in pieces, and whether each is the last. All but the last end with a line.

    A file of up to 16 million characters is one piece.

    Raises:
        GrowthError: it is missing, no regular file, or not UTF-8.
    """
    with _text_stream(file) as stream:
        held = stream.read(PIECE)
        while more := stream.read(PIECE):
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
        raise GrowthError(f"cannot read the text file {file}: {error}") from error


def read_text(file: Path, most: int = -1) -> str:
    """A text file, or its first `most` characters.

    Raises:
        GrowthError: it is missing, no regular file, or not UTF-8.
    """
    with _text_stream(file) as stream:
        return stream.read(most)


def matching_files(base: Path, pattern: str) -> list[Path]:
    """The regular files whose names match a pattern, sorted; "**" matches folders of any depth.

    Args:
        base: folder of a relative pattern. Brackets and stars in its own name are no pattern.
        pattern: of names. If a file has that very name, it is the only one.

    Raises:
        GrowthError: there are none, or far too many names to look at.
    """
    escaped, shown = Path(glob.escape(str(base))) / pattern, base / pattern
    exact = glob.glob(glob.escape(str(shown)))
    names = exact or list(islice(glob.iglob(str(escaped), recursive=True), MOST_NAMES + 1))
    if len(names) > MOST_NAMES:
        raise GrowthError(f"{shown} matches more than {MOST_NAMES} names: give a narrower one")
    found = [Path(name) for name in sorted(names) if Path(name).is_file()]
    if not found:
        raise GrowthError(f"no file matches {shown}")
    return found


def _chunks(items: Iterable[T], size: int) -> Iterator[list[T]]:
    chunk: list[T] = []
    for item in items:
        chunk.append(item)
        if len(chunk) == size:
            yield chunk
            chunk = []
    if chunk:
        yield chunk
