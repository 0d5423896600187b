"""The text of the study: bytes of Python's own standard library, which every machine has."""

from __future__ import annotations

import functools
from collections.abc import Iterator

import torch
from torch import Tensor

from growkern.demo.corpus import library_files, read_corpus

LENGTH = 64  # bytes of a window
ROWS = 12  # windows of a training batch
# 100,352 bytes are predicted in every validation
VALIDATION_WINDOWS = 1568
VALIDATION_ROWS = 112
# BERT reads this token in the place of a masked byte
MASK = 256
MASKED = 0.15
# marks positions without a label, as in PyTorch's cross entropy
NO_LABEL = -100


@functools.cache
def _bytes() -> tuple[Tensor, Tensor]:
    """The text for training and for validation, int64 each."""
    corpus = read_corpus(library_files())
    joined = ("\n".join(texts).encode() for texts in (corpus.train, corpus.validation))
    train, validation = (torch.frombuffer(bytearray(x), dtype=torch.uint8).long() for x in joined)
    return train, validation


def facts() -> dict[str, int]:
    """How much text there is."""
    train, validation = _bytes()
    return {"train_bytes": len(train), "validation_bytes": len(validation)}


def _labelled(windows: Tensor, masked: bool, rng: torch.Generator) -> tuple[Tensor, Tensor]:
    """Inputs and labels of windows of LENGTH + 1 bytes."""
    if not masked:
        return windows[:, :-1], windows[:, 1:]
    x = windows[:, 1:].clone()
    hidden = torch.rand(x.shape, generator=rng) < MASKED
    labels = torch.where(hidden, x, NO_LABEL)
    return x.masked_fill(hidden, MASK), labels


def training_batches(seed: int, masked: bool) -> Iterator[tuple[Tensor, Tensor]]:
    """Endless random batches: inputs and labels, (ROWS, LENGTH) int64.

    Args:
        seed: of the places and masks.
        masked: True for a masked language model, False for a causal one.
    """
    train, _ = _bytes()
    rng = torch.Generator().manual_seed(seed)
    while True:
        starts = torch.randint(len(train) - LENGTH - 1, (ROWS, 1), generator=rng)
        yield _labelled(train[starts + torch.arange(LENGTH + 1)], masked, rng)


@functools.cache
def validation_batches(masked: bool) -> tuple[tuple[Tensor, Tensor], ...]:
    """The validation set, the same for every run: windows spread evenly over the text."""
    _, validation = _bytes()
    starts = torch.linspace(0, len(validation) - LENGTH - 1, VALIDATION_WINDOWS).long()[:, None]
    rng = torch.Generator().manual_seed(0)
    x, labels = _labelled(validation[starts + torch.arange(LENGTH + 1)], masked, rng)
    both = (part.split(VALIDATION_ROWS) for part in (x, labels))
    return tuple(zip(*both, strict=True))
