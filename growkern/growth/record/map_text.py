"""Encodes long vectors as short text for `lineage.json`.

Maps consist of few runs, so run lengths keep the file small:

    index    "0-11 0-5"        0, 1, ... 11, 0, 1, ... 5
    values   "1.0x12 0.5x6"    1 twelve times, 0.5 six times; a value without a count occurs once

Values read back bit for bit. This is a file format: keep old texts readable.
"""

from __future__ import annotations

import torch
from torch import Tensor

# more units than any space of any model has: a longer vector means a damaged file
LONGEST = 1 << 26


def index_text(index: Tensor) -> str:
    """The text of an index vector, (n,) int64, with values >= 0."""
    # value - position is constant within a run
    starts, counts = _runs(index - torch.arange(len(index)))
    firsts = index[starts].tolist()
    runs = zip(firsts, counts, strict=True)
    return " ".join(f"{a}-{a + n - 1}" if n > 1 else str(a) for a, n in runs)


def read_index(text: str) -> Tensor:
    """The index vector of a text, (n,) int64.

    Raises:
        ValueError: the text is malformed.
    """
    ends = [run.partition("-") for run in text.split()]
    runs = [(int(first), int(last or first) + 1) for first, _, last in ends]
    _check_lengths([stop - start for start, stop in runs])
    return torch.cat([torch.empty(0, dtype=torch.int64), *(torch.arange(*run) for run in runs)])


def value_text(values: Tensor) -> str:
    """The text of a vector, (n,) float64."""
    starts, counts = _runs(values)
    runs = zip(values[starts].tolist(), counts, strict=True)
    return " ".join(f"{x!r}x{n}" if n > 1 else repr(x) for x, n in runs)


def read_values(text: str) -> Tensor:
    """The vector of a text, (n,) float64.

    Raises:
        ValueError: the text is malformed.
    """
    runs = [run.partition("x") for run in text.split()]
    counts = [int(n or 1) for _, _, n in runs]
    _check_lengths(counts)
    values = torch.tensor([float(x) for x, _, _ in runs], dtype=torch.float64)
    return values.repeat_interleave(torch.tensor(counts, dtype=torch.int64))


def _check_lengths(lengths: list[int]) -> None:
    if min(lengths, default=1) < 1 or sum(lengths) > LONGEST:
        raise ValueError(f"runs of {min(lengths)} to {max(lengths)} numbers, {sum(lengths)} in all")


def _runs(values: Tensor) -> tuple[Tensor, list[int]]:
    """Start and length of every run of equal values."""
    counts = torch.unique_consecutive(values, return_counts=True)[1]
    return counts.cumsum(0) - counts, counts.tolist()
