"""The texts of the runs: files that the user names, or files that are on every machine."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from glob import glob
from pathlib import Path

import torch
from transformers import AutoTokenizer

from bench.paper.settings import FAMILIES, SEPARATOR, Setting
from growkern.demo.corpus import library_files, read_corpus, train_tokenizer
from growkern.whole import write_whole

# text of another kind, for models that are trained on Python and go on with C++
HEADERS = ("ATen/native", "c10", "torch")
Facts = dict[str, dict[str, int]]
SIZES = ("train_bytes", "validation_bytes")


def header_files() -> list[Path]:
    """The C++ headers of PyTorch."""
    include = Path(torch.__file__).parent / "include"
    return sorted(path for folder in HEADERS for path in (include / folder).rglob("*.h"))


# folder of a text -> the files it is made of, if the user names none
TEXTS: dict[str, Callable[[], list[Path]]] = {"corpus": library_files, "domain": header_files}


def files_of(patterns: Sequence[str]) -> list[Path]:
    """The text files that glob patterns name."""
    found = {Path(name) for one in patterns for name in glob(one, recursive=True)}
    return sorted(path for path in found if path.is_file())


def prepare(folder: Path, setting: Setting, patterns: Mapping[str, Sequence[str]]) -> Facts:
    """Write the text of a setting, that of its origin, and the tokenizer, each once.

    Args:
        folder: of all jobs.
        setting: its text, its vocabulary, and how much validation text it uses. The tokenizer
            learns from the text of its origin.
        patterns: of text files for each of `TEXTS`; empty: those that are on every machine.

    Returns:
        Name of each text -> the bytes of its parts.
    """
    facts = {} if setting.origin is None else prepare(folder, setting.origin, patterns)
    place = folder / setting.text
    if not (place / "train.txt").is_file():
        place.mkdir(parents=True, exist_ok=True)
        named = patterns.get(setting.text)
        corpus = read_corpus(files_of(named) if named else TEXTS[setting.text]())
        for name, texts in (("validation", corpus.validation), ("train", corpus.train)):
            _write(place / f"{name}.txt", "\n\n".join(texts))
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
            tokens = len(AutoTokenizer.from_pretrained(tokenizer)(text).input_ids)
            text = text[: len(text) * setting.validation_tokens // tokens]
        _write(used, "\n\n".join([text] * setting.validation_passes))
    files = (place / "train.txt", used)
    sizes = {name: file.stat().st_size for name, file in zip(SIZES, files, strict=True)}
    return {**facts, setting.text: sizes}


def _write(file: Path, text: str) -> None:
    write_whole(file, lambda partial: partial.write_text(text, encoding="utf-8"))
