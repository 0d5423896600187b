"""Provides text for the demo without a download: the standard library of the running Python.

A hash of its content decides whether a file is for training or for validation. Two copies of a file
are therefore never in both sets, and the split is the same on every machine.
"""

import hashlib
import os
import sysconfig
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

from transformers import PreTrainedTokenizerFast

from growkern.errors import GrowthError

SUFFIXES = (".py", ".rst", ".txt")
# installed packages, and parts of the library that some systems leave out
SKIPPED = {"site-packages", "dist-packages", "__pycache__", "test", "tests", "idle_test"}
SKIPPED |= {"encodings", "lib-dynload"}
# one file in 20 is for validation
VALIDATION_PARTS = 20
SPECIAL_TOKENS = {
    "pad_token": "[PAD]",
    "unk_token": "[UNK]",
    "cls_token": "[CLS]",
    "sep_token": "[SEP]",
    "mask_token": "[MASK]",
}


class Corpus(NamedTuple):
    """Texts for training and validation, in a fixed order."""

    train: list[str]
    validation: list[str]


def library_files(root: Path | None = None) -> list[Path]:
    """The text files of the standard library or of another folder.

    Args:
        root: folder to search; None takes the standard library.

    Returns:
        The files, sorted by their path below the folder.
    """
    root = root or Path(sysconfig.get_path("stdlib"))
    files = []
    for folder, folders, names in os.walk(root):
        # it does not go into those that are taken out
        folders[:] = [name for name in folders if name not in SKIPPED]
        files += [Path(folder, name) for name in names if name.endswith(SUFFIXES)]
    return sorted(filter(Path.is_file, files), key=lambda path: path.relative_to(root).as_posix())


def read_corpus(files: Iterable[Path], max_files: int | None = None) -> Corpus:
    """Read files and split them into training and validation texts.

    Args:
        files: text files.
        max_files: how many to use, those with the smallest hashes; None uses all.

    Raises:
        GrowthError: there is no text for training or none for validation.
    """
    texts = [path.read_text(encoding="utf-8", errors="replace") for path in files]
    numbers = [hash_of(text) for text in texts]
    chosen = sorted(sorted(range(len(texts)), key=lambda i: (numbers[i], i))[:max_files])
    corpus = Corpus([], [])
    for i in chosen:
        held_out = is_held_out(numbers[i])
        (corpus.validation if held_out else corpus.train).append(texts[i])
    if not (any(corpus.train) and any(corpus.validation)):
        raise GrowthError(
            f"{len(chosen)} text files found in this Python's standard library: too few for "
            "training and validation. Install the complete standard library"
        )
    return corpus


def make_text(
    folder: Path, vocab_size: int, max_files: int | None, validation_characters: int
) -> PreTrainedTokenizerFast:
    """Write train.txt and validation.txt to a folder, and learn their tokenizer."""
    corpus = read_corpus(library_files(), max_files)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "train.txt").write_text("\n".join(corpus.train), encoding="utf-8")
    held_out = "\n".join(corpus.validation)[:validation_characters]
    (folder / "validation.txt").write_text(held_out, encoding="utf-8")
    return train_tokenizer(corpus.train, vocab_size)


def hash_of(text: str) -> int:
    """A number that depends on a text alone."""
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "little")


def is_held_out(number: int) -> bool:
    """Whether the text with this hash is for validation: one in 20 is."""
    return number % VALIDATION_PARTS == 0


def train_tokenizer(texts: Iterable[str], vocab_size: int) -> PreTrainedTokenizerFast:
    """Learn a byte-pair encoding from texts. Every byte is a token, so no text is unknown.

    Args:
        texts: to learn from.
        vocab_size: number of tokens, special ones included.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=list(SPECIAL_TOKENS.values()),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, **SPECIAL_TOKENS)
