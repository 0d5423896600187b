"""Facts that advice and forecasts rest on: statements of papers' abstracts, and our own runs.

Our own runs are those of bench/results/paper.md.

| short name | paper |
|---|---|
| bert2BERT | Chen et al., 2022, arXiv 2110.07143 |
| G_stack | Du et al., 2024, arXiv 2405.15319 |
| SPARKLING | Yu et al., 2026, arXiv 2602.02472 |
| growth factors | Mallik et al., 2026, arXiv 2605.13405 |
| overtrained sources | Liew and Kato, 2025, arXiv 2510.06548 |
| Chinchilla | Hoffmann et al., 2022, arXiv 2203.15556 |
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from growkern.errors import GrowthError

# tokens per parameter of a compute-optimal training run (Chinchilla); gains of growth are largest
# below it (growth factors)
CHINCHILLA = 20
# how many times the parameters grow in the most reliable growths; far above it, training from
# scratch is more efficient (growth factors)
RELIABLE_FACTOR = 2.0
# how many times G_stack multiplies layers at most
MOST_STACKED = 4.0
# parameters of the smallest target that the law of `stacking_tokens` is used for
LEAST_STACKED = 400_000_000


@dataclass(frozen=True)
class Saving:
    """The cost that a paper saved to reach the loss of training from scratch, source not counted.

    Attributes:
        paper: short name.
        axis: "width" or "depth".
        share: of the cost from scratch, 0 to 1.
        models: that it was measured on.
    """

    paper: str
    axis: str
    share: float
    models: str


# Our runs of BERT are left out: from scratch, so small a BERT spends much of its training on a
# plateau. A large one may not.
SAVINGS = (
    Saving("bert2BERT", "width", 0.45, "BERT-base, grown from about half its size"),
    Saving("bert2BERT", "width", 0.47, "GPT-base, grown from about half its size"),
    Saving("SPARKLING", "width", 0.35, "twice the width, the largest of several savings"),
    Saving("growkern", "width", 0.378, "GPT-2 of 4 x 64 to 4 x 128, mean of 3 seeds"),
    Saving("G_stack", "depth", 1 - 194 / 300, "7B, 194 in place of 300 billion tokens"),
)

# tokens that a small GPT-2 had seen when it grew, as a share of those that the target was to see ->
# the cost it saved, source not counted: the table "When to grow" of our own runs, mean of the seeds
MOMENTS = {0.1: 0.107, 0.3: 0.190, 1.0: 0.378}
# the papers' sources had seen more than this share
EARLY = 0.5


def check_tokens(name: str, tokens: float | None) -> None:
    """Refuse a number of tokens that is none.

    Args:
        name: of the argument.
        tokens: None is fine.

    Raises:
        GrowthError: it is not positive or not finite.
    """
    if tokens is not None and not 0 < tokens < math.inf:
        raise GrowthError(f"{name}={tokens:g}: give the number of tokens, for example 3e9")


def is_past_chinchilla(tokens: float, parameters: int) -> bool:
    """Whether a model has seen more tokens than a compute-optimal run gives it."""
    return tokens > CHINCHILLA * parameters


def stacking_tokens(parameters: int, flops: float) -> float:
    """Tokens after which a small model is best stacked, by the law of G_stack.

    log10 d = 0.88 log10 N + 163.27 / log10 C - 5.74

    Args:
        parameters: N, of the target.
        flops: C, of the whole training.

    Returns:
        d, tokens.
    """
    return float(10 ** (0.88 * math.log10(parameters) + 163.27 / math.log10(flops) - 5.74))
