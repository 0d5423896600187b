"""The texts of the runs: files that the user names, or files that are on every machine."""

from __future__ import annotations

import hashlib
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from glob import glob
from itertools import chain, groupby
from pathlib import Path

import torch
from transformers import AutoTokenizer

from bench.paper.models import FAMILIES, SEPARATOR
from bench.paper.settings import Setting
from examples.demo.corpus import (
    VALIDATION_PARTS,
    hash_of,
    is_held_out,
    library_files,
    read_corpus,
    train_tokenizer,
)
from growkern.errors import GrowthError, GrowthWarning
from growkern.files import write_whole

# text of another kind, for models that are trained on Python and go on with C++
HEADERS = ("ATen/native", "c10", "torch")
Text = dict[str, int | str]
Facts = dict[str, Text]
# whether for validation, and the text
Piece = tuple[bool, str]
SIZES, HASH = ("train_bytes", "validation_bytes"), "train_sha256"
# characters of a token, on average and by far at most
MOST_CHARACTERS = 20
# characters of a block; a short text has shorter ones, so that some of them are for validation
BLOCK, LEAST_BLOCKS = 4096, 20 * VALIDATION_PARTS
# characters that are read at a time, and those that a tokenizer learns from
CHUNK, MOST_LEARNED = 1 << 20, 10**9


def header_files() -> list[Path]:
    """The C++ headers of PyTorch."""
    include = Path(torch.__file__).parent / "include"
    return sorted(path for folder in HEADERS for path in (include / folder).rglob("*.h"))


# folder of a text -> the files it is made of, if the user names none
TEXTS: dict[str, Callable[[], list[Path]]] = {"corpus": library_files, "domain": header_files}


def files_of(patterns: Sequence[str]) -> list[Path]:
    """The text files that glob patterns name."""
    files = set()
    for pattern in patterns:
        named = {path for path in map(Path, glob(pattern, recursive=True)) if path.is_file()}
        if not named:
            raise GrowthError(
                f"{pattern}: no such file: give text files, or patterns such as '*.txt'"
            )
        files |= named
    return sorted(files)


def split(files: Sequence[Path]) -> Iterator[Piece]:
    """The pieces of files that the user names, and whether each is for validation.

    Blocks of lines are held out by a hash of their text, so that copies of one are never in both.
    No more than a few blocks are in memory.
    """
    total = sum(path.stat().st_size for path in files)
    if total < LEAST_BLOCKS:
        raise GrowthError(
            f"{', '.join(map(str, files[:3]))}: {total} bytes in all {len(files)} text files: too "
            "few for training and validation. Give more text"
        )
    return _by_blocks(files, min(BLOCK, total // LEAST_BLOCKS))


def _by_blocks(files: Iterable[Path], size: int) -> Iterator[Piece]:
    for path in files:
        blocks = _blocks(_read(path, errors="replace"), size)
        for held_out, kind in groupby(blocks, lambda block: is_held_out(hash_of(block))):
            yield held_out, "".join(kind)


def _read(path: Path, errors: str = "strict") -> Iterator[str]:
    """The text of a file, a chunk at a time."""
    with path.open(encoding="utf-8", errors=errors) as file:
        while chunk := file.read(CHUNK):
            yield chunk


def _blocks(chunks: Iterable[str], size: int) -> Iterator[str]:
    """A text in blocks of about `size` characters, cut at ends of lines where there are any."""
    text = ""
    for chunk in chain(chunks, [None]):
        start, text = 0, text + (chunk or "")
        while len(text) - start >= 2 * size or (chunk is None and start < len(text)):
            end = text.find("\n", start + size, start + 2 * size) + 1 or start + size
            yield text[start:end]
            start = end
        text = text[start:]


def _paragraphs(path: Path) -> Iterator[str]:
    """The parts of a text between empty lines, up to `MOST_LEARNED` characters."""
    rest, seen = "", 0
    for chunk in _read(path):
        *whole, rest = (rest + chunk).split("\n\n")
        yield from whole
        seen += len(chunk)
        if seen >= MOST_LEARNED:
            return
    yield rest


def prepare(folder: Path, setting: Setting, named: Mapping[str, Sequence[Path]]) -> Facts:
    """Write the text of a setting, that of its origin, and the tokenizer, each once.

    Args:
        setting: its text, its vocabulary, and how much validation text it uses. The tokenizer
            learns from the text of its origin.
        named: files for each of `TEXTS`; empty: those that are on every machine.

    Returns:
        Name of each text -> the bytes of its parts, and the hash of that for training.
    """
    facts = {} if setting.origin is None else prepare(folder, setting.origin, named)
    place = folder / setting.text
    hashed = _write_text(place, setting.text, named.get(setting.text, ()))
    tokenizer = folder / setting.tokenizer
    if not (tokenizer / "tokenizer.json").is_file():
        sentinels = [f"<extra_id_{i}>" for i in range(FAMILIES[setting.family].sentinels)]
        texts = _paragraphs(place / "train.txt")
        made = train_tokenizer(texts, setting.vocab - len(sentinels))
        made.add_special_tokens({"extra_special_tokens": sentinels})
        made.eos_token = made.convert_ids_to_tokens(SEPARATOR)
        made.save_pretrained(tokenizer)
    used = folder / setting.validation
    if not used.is_file():
        wanted = setting.validation_tokens
        with (place / "validation.txt").open(encoding="utf-8") as file:
            # enough of a large text, whose tokens would take long to count
            text = file.read(-1 if wanted is None else MOST_CHARACTERS * wanted)
        if wanted is not None:
            tokens = len(AutoTokenizer.from_pretrained(tokenizer)(text).input_ids)
            text = text[: len(text) * wanted // tokens]
            if tokens < wanted:
                warnings.warn(
                    f"{place}: {tokens:,} tokens for validation, and this size is meant to have "
                    f"{wanted:,}: its losses are less certain. Give more text",
                    GrowthWarning,
                    stacklevel=2,
                )
        whole = "\n\n".join([text] * setting.validation_passes)
        write_whole(used, lambda partial: partial.write_text(whole, encoding="utf-8"))
    files = (place / "train.txt", used)
    sizes = {name: file.stat().st_size for name, file in zip(SIZES, files, strict=True)}
    return {**facts, setting.text: {**sizes, HASH: hashed}}


def _write_text(place: Path, kind: str, files: Sequence[Path]) -> str:
    """Write a text into its folder, or check that it is the one there.

    Returns:
        The hash of the training text.
    """
    there, pieces = place / "train.txt", _pieces(kind, files)
    if not there.is_file():
        place.mkdir(parents=True, exist_ok=True)
        _write_parts(pieces, there, place / "validation.txt")
        return _hash(text.encode() for text in _read(there))
    hashed = _hash(data for held_out, data in _joined(pieces) if not held_out)
    if (before := _hash(text.encode() for text in _read(there))) != hashed:
        option = {"corpus": "--text", "domain": "--domain"}[kind]
        raise GrowthError(
            f"{place} holds another text (hash {before}) than this call has (hash {hashed}). Give "
            f"the same {option} again, or another --dir"
        )
    return hashed


def _pieces(kind: str, files: Sequence[Path]) -> Iterator[Piece]:
    """The pieces of the files that the user names, or of those of a text."""
    if files:
        return split(files)
    train, validation = read_corpus(TEXTS[kind]())
    return chain(((False, text) for text in train), ((True, text) for text in validation))


def _write_parts(pieces: Iterable[Piece], train: Path, validation: Path) -> None:
    """Write the pieces into two files. That for training comes last: where it is, both are."""

    def fill(train_part: Path, validation_part: Path) -> None:
        with train_part.open("wb") as own, validation_part.open("wb") as other:
            for held_out, data in _joined(pieces):
                (other if held_out else own).write(data)
            if not (own.tell() and other.tell()):
                raise GrowthError(
                    "the text is too short for training and validation, or repeats itself. Give "
                    "more text"
                )

    write_whole(train, lambda part: write_whole(validation, lambda other: fill(part, other)))


def _joined(pieces: Iterable[Piece]) -> Iterator[tuple[bool, bytes]]:
    """The pieces as bytes, with an empty line between two of the same kind."""
    seen = set[bool]()
    for held_out, text in pieces:
        yield held_out, (b"\n\n" if held_out in seen else b"") + text.encode()
        seen.add(held_out)


def _hash(parts: Iterable[bytes]) -> str:
    hashed = hashlib.sha256()
    for part in parts:
        hashed.update(part)
    return hashed.hexdigest()[:16]
