"""The texts of the runs: files that the user names, or files that are on every machine."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from glob import glob
from pathlib import Path

import torch
from transformers import AutoTokenizer

from bench.paper.settings import FAMILIES, SEPARATOR, Setting
from growkern.demo.corpus import (
    VALIDATION_PARTS,
    Corpus,
    library_files,
    read_corpus,
    train_tokenizer,
)
from growkern.errors import GrowthError
from growkern.whole import write_whole

# text of another kind, for models that are trained on Python and go on with C++
HEADERS = ("ATen/native", "c10", "torch")
Text = dict[str, int | str]
Facts = dict[str, Text]
SIZES, HASH = ("train_bytes", "validation_bytes"), "train_sha256"
# with fewer files, one in 20 may be none at all, or half of the text
LEAST_FILES = 100
# characters of a token, on average and by far at most
MOST_CHARACTERS = 20
# characters of a block where a text is split by blocks; a short text has shorter ones
BLOCK, LEAST_BLOCKS = 4096, 5 * VALIDATION_PARTS


def header_files() -> list[Path]:
    """The C++ headers of PyTorch."""
    include = Path(torch.__file__).parent / "include"
    return sorted(path for folder in HEADERS for path in (include / folder).rglob("*.h"))


# folder of a text -> the files it is made of, if the user names none
TEXTS: dict[str, Callable[[], list[Path]]] = {"corpus": library_files, "domain": header_files}


def files_of(patterns: Sequence[str]) -> list[Path]:
    """The text files that glob patterns name.

    Raises:
        GrowthError: a pattern names no file.
    """
    found = set()
    for one in patterns:
        named = {path for path in map(Path, glob(one, recursive=True)) if path.is_file()}
        if not named:
            raise GrowthError(f"{one}: no such file: give text files, or patterns such as '*.txt'")
        found |= named
    return sorted(found)


def split(files: Sequence[Path]) -> Corpus:
    """The training and validation texts of files that the user names.

    Many files are split by files, so that copies of one are never in both. A few are split by
    blocks of text, of which every 20th is for validation.

    Raises:
        GrowthError: the files hold too little text.
    """
    if len(files) >= LEAST_FILES:
        # by chance all may be for training
        with suppress(GrowthError):
            return read_corpus(files)
    text = "\n\n".join(path.read_text(encoding="utf-8", errors="replace") for path in files)
    if len(text.strip()) < LEAST_BLOCKS:
        raise GrowthError(
            f"{', '.join(map(str, files[:3]))}: {len(text.strip())} characters in all "
            f"{len(files)} text files: too few for training and validation. Give more text"
        )
    blocks = _blocks(text, min(BLOCK, len(text) // LEAST_BLOCKS))
    starts = range(0, len(blocks), VALIDATION_PARTS)
    # the last block of 20, so that the one at the start of the text is for training
    parts = [blocks[start : start + VALIDATION_PARTS] for start in starts]
    whole = [part for part in parts if len(part) == VALIDATION_PARTS]
    train = ["".join(part[: VALIDATION_PARTS - 1]) for part in parts]
    return Corpus(train, [part[-1] for part in whole])


def _blocks(text: str, size: int) -> list[str]:
    """A text in blocks of about `size` characters, cut at ends of lines where there are any."""
    blocks, start = [], 0
    while start < len(text):
        end = text.find("\n", start + size, start + 2 * size) + 1 or start + size
        blocks.append(text[start:end])
        start = end
    return blocks


def prepare(folder: Path, setting: Setting, named: Mapping[str, Sequence[Path]]) -> Facts:
    """Write the text of a setting, that of its origin, and the tokenizer, each once.

    Args:
        folder: of all jobs.
        setting: its text, its vocabulary, and how much validation text it uses. The tokenizer
            learns from the text of its origin.
        named: files for each of `TEXTS`; empty: those that are on every machine.

    Returns:
        Name of each text -> the bytes of its parts, and the hash of that for training.

    Raises:
        GrowthError: the folder has another text, or the files hold too little.
    """
    facts = {} if setting.origin is None else prepare(folder, setting.origin, named)
    place = folder / setting.text
    hashed = _write_text(place, setting.text, named.get(setting.text, ()))
    tokenizer = folder / setting.tokenizer
    if not (tokenizer / "tokenizer.json").is_file():
        texts = (place / "train.txt").read_text(encoding="utf-8").split("\n\n")
        sentinels = [f"<extra_id_{i}>" for i in range(FAMILIES[setting.family].sentinels)]
        made = train_tokenizer(texts, setting.vocab - len(sentinels))
        made.add_special_tokens({"extra_special_tokens": sentinels})
        made.eos_token = made.convert_ids_to_tokens(SEPARATOR)
        made.save_pretrained(tokenizer)
    used = folder / setting.validation
    if not used.is_file():
        text = (place / "validation.txt").read_text(encoding="utf-8")
        if setting.validation_tokens is not None:
            # enough of a large text, whose tokens would take long to count
            text = text[: MOST_CHARACTERS * setting.validation_tokens]
            tokens = len(AutoTokenizer.from_pretrained(tokenizer)(text).input_ids)
            text = text[: len(text) * setting.validation_tokens // tokens]
        _write(used, "\n\n".join([text] * setting.validation_passes))
    files = (place / "train.txt", used)
    sizes = {name: file.stat().st_size for name, file in zip(SIZES, files, strict=True)}
    return {**facts, setting.text: {**sizes, HASH: hashed}}


def _write_text(place: Path, kind: str, files: Sequence[Path]) -> str:
    """Write a text into its folder, or check that it is the one there.

    Args:
        place: the folder.
        kind: key of `TEXTS`.
        files: that the user names.

    Returns:
        The hash of the training text.

    Raises:
        GrowthError: another text is there.
    """
    corpus = split(files) if files else read_corpus(TEXTS[kind]())
    text = "\n\n".join(corpus.train)
    hashed = _hash(text)
    origin = [str(path.resolve()) for path in files] or "files that are on every machine"
    there, about = place / "train.txt", place / "origin.json"
    if not there.is_file():
        place.mkdir(parents=True, exist_ok=True)
        _write(place / "validation.txt", "\n\n".join(corpus.validation))
        _write(there, text)
    elif (found := _hash(there.read_text(encoding="utf-8"))) != hashed:
        was = json.loads(about.read_text())["origin"] if about.is_file() else "not known"
        said = was if isinstance(was, str) else ", ".join(was[:3])
        option = {"corpus": "--text", "domain": "--domain"}[kind]
        raise GrowthError(
            f"{place} holds another text (hash {found}, from: {said}) than this call has (hash "
            f"{hashed}). Give the same {option} again, or another --dir"
        )
    if not about.is_file():
        _write(about, json.dumps({"origin": origin, HASH: hashed}, indent=1) + "\n")
    return hashed


def _hash(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _write(file: Path, text: str) -> None:
    write_whole(file, lambda partial: partial.write_text(text, encoding="utf-8"))
