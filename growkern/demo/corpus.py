"""Text that is already there: the sources and documents of the running Python's own library.

Files are split into training and validation by a hash of what they hold, so that two copies of one
file never stand on both sides, and the split does not depend on the machine.
"""

import hashlib
import sysconfig
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

from transformers import PreTrainedTokenizerFast

from growkern.errors import GrowthError

SUFFIXES = (".py", ".rst", ".txt")
# not the library's own text; its tests and its tables of characters, which some systems leave out
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
    """Texts in a fixed order."""

    train: list[str]
    validation: list[str]


def library_files(root: Path | None = None) -> list[Path]:
    """Text files of the standard library (or below `root`), sorted by their path in it."""
    root = root or Path(sysconfig.get_path("stdlib"))
    found = {
        path.relative_to(root).as_posix(): path
        for path in root.rglob("*")
        if path.suffix in SUFFIXES and not SKIPPED.intersection(path.relative_to(root).parts)
    }
    return [found[name] for name in sorted(found) if found[name].is_file()]


def read_corpus(files: Iterable[Path], max_files: int | None = None) -> Corpus:
    """Read and split files. max_files: only so many, those whose hash comes first.

    raises: GrowthError when one side of the split would be empty.
    """
    texts = [path.read_text(encoding="utf-8", errors="replace") for path in files]
    numbers = [int.from_bytes(hashlib.sha256(t.encode()).digest()[:8], "little") for t in texts]
    chosen = sorted(sorted(range(len(texts)), key=lambda i: (numbers[i], i))[:max_files])
    corpus = Corpus([], [])
    for i in chosen:
        held_out = numbers[i] % VALIDATION_PARTS == 0
        (corpus.validation if held_out else corpus.train).append(texts[i])
    if not (any(corpus.train) and any(corpus.validation)):
        raise GrowthError(
            f"{len(chosen)} text files found in this Python's library: too few to train and to "
            "validate on; install the whole standard library"
        )
    return corpus


def train_tokenizer(texts: Iterable[str], vocab_size: int) -> PreTrainedTokenizerFast:
    """Byte-pair encoding learnt from the texts; every byte is known, so nothing is lost."""
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
