"""The text of the runs: files that the user names, or Python's own library."""

from __future__ import annotations

from collections.abc import Sequence
from glob import glob
from pathlib import Path
from typing import Any

from transformers import AutoTokenizer

from bench.paper.settings import FAMILIES, SEPARATOR, Setting
from growkern.demo.corpus import library_files, read_corpus, train_tokenizer
from growkern.whole import write_whole


def files_of(patterns: Sequence[str]) -> list[Path]:
    """The text files that glob patterns name; without patterns, Python's own library."""
    if not patterns:
        return library_files()
    found = {Path(name) for one in patterns for name in glob(one, recursive=True)}
    return sorted(path for path in found if path.is_file())


def prepare(folder: Path, setting: Setting, patterns: Sequence[str]) -> dict[str, Any]:
    """Write the text and its tokenizer once, and return their facts.

    Args:
        folder: of all jobs.
        setting: its vocabulary, and how much validation text it uses.
        patterns: of text files; empty: Python's own library.
    """
    place = folder / "corpus"
    if not (place / "train.txt").is_file():
        place.mkdir(parents=True, exist_ok=True)
        corpus = read_corpus(files_of(patterns))
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
    return {
        "train_bytes": (place / "train.txt").stat().st_size,
        "validation_bytes": used.stat().st_size,
    }


def _write(file: Path, text: str) -> None:
    write_whole(file, lambda partial: partial.write_text(text, encoding="utf-8"))
