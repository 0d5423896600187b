"""Facts that advice and forecasts rest on: statements of papers, and our own runs.

Our own runs are those of bench/results/paper.md. The papers' figures are those of their abstracts,
with three exceptions: bert2BERT's FPI alone and AKI alone, and G_stack's comparison at 1.1 billion
parameters.

| short name | paper |
|---|---|
| bert2BERT | Chen et al., 2022, arXiv 2110.07143 |
| G_stack | Du et al., 2024, arXiv 2405.15319 |
| SPARKLING | Yu et al., 2026, arXiv 2602.02472 |
| growth factors | Mallik et al., 2026, arXiv 2605.13405 |
| progressive depth | Bu, 2025, arXiv 2511.04981 |
| overtrained sources | Liew and Kato, 2025, arXiv 2510.06548 |
| upcycling | Liew et al., 2025, arXiv 2502.03009, of dense models that become mixtures of experts |
| Chinchilla | Hoffmann et al., 2022, arXiv 2203.15556 |
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from growkern.errors import GrowthError

# tokens per parameter of a compute-optimal training run (Chinchilla); gains of growth are largest
# below it (growth factors)
CHINCHILLA = 20
# how many times the parameters grow in the most reliable growths; far above it, training from
# scratch is more efficient (growth factors)
RELIABLE_FACTOR = 2.0
# how many times the parameters grow at least in a measured growth, rounded down
LEAST_FACTOR = 1.5
# The same at most, rounded up, in the growths with more width whose savings stand below. A BERT of
# ours grew farther (`FAR_FACTOR`). Its savings do not stand there.
MOST_FACTOR = 4.0
# how many times G_stack multiplies layers at most
MOST_STACKED = 4.0
# Growth of the parameters, with more width, from which on training from scratch is better. The
# growth factors have such a limit, but the abstract has no number. A small BERT of ours that grew
# to 14 times its parameters, by AKI, FPI or direct copy, saved little or nothing if its source had
# seen as many tokens as it would itself, and one that grew to 46 times nothing. From a source of
# three times as many tokens, AKI to 14 times saved much. Beyond that nothing is measured.
FAR_FACTOR = 13.0
FARTHEST_FACTOR = 15.0
LONG_SOURCE = 3.0
# how many times the layers grow at most in a published gain: from 1 to 60 (progressive depth)
FAR_LAYERS = 60.0
# Tokens per parameter of the source below which it has nothing to pass on. Our youngest source had
# seen 0.8, and saved 8 % of the training. This is an eighth of that.
LEAST_SEEN = 0.1
# the same of the target; the shortest runs of our tables in width saw 0.3
LEAST_SEEN_LATER = 0.1
# Tokens per parameter of the target above which a source should not be trained for the growth:
# gains shrink above 20 (growth factors), and G_stack's 7B still gained at 43.
FREE_ABOVE = 100
# the cost of training a source, as a share of the target's, that is not worth a thought
CHEAP = 0.01
# parameters of the smallest target that the law of `stacking_tokens` is used for
LEAST_STACKED = 400_000_000
# parameters above which a decoder is large: G_stack lost by width from 400 million to 1.1 billion
LARGE_DECODER = 1_000_000_000

# Parameters of the largest model of our own runs, rounded up, and how many times as many a target
# may have for them to say what it may save. The second number is a judgement: no run tells.
OUR_LARGEST = 2_000_000
NEAR_OURS = 10

# of a training, thousands of times more than the largest so far
MOST_TOKENS = 1e18

# the short name of our own runs
OURS = "growkern"


@dataclass(frozen=True)
class Saving:
    """The cost that was saved to reach the loss of training from scratch, source not counted.

    Attributes:
        paper: short name, or `OURS`.
        axis: "width", "depth" or "both".
        share: of the cost from scratch; negative where growth cost more.
        models: that it was measured on.
        ways: words of `growkern.growth.plan.advice.kind.ways_of`. It is evidence only for a growth
            that has all of them.
        margin: half of the 95 % interval of `share`; 0 if not known.
        bound: "up to" if it is the largest of several savings.
    """

    paper: str
    axis: str
    share: float
    models: str
    ways: tuple[str, ...]
    margin: float = 0.0
    bound: Literal["", "up to "] = ""

    @property
    def low(self) -> float:
        """The lowest share that it stands for."""
        return 0.0 if self.bound == "up to " else self.share - self.margin

    @property
    def high(self) -> float:
        """The highest share that it stands for."""
        return self.share + self.margin

    @property
    def text(self) -> str:
        """The share in percent, with its interval or its bound."""
        margin = f" ± {percent(self.margin)}" if self.margin else ""
        return f"{self.bound}{percent(self.share)}{margin}"


def percent(share: float) -> str:
    """A share in whole percent, never as -0%."""
    return f"{round(100 * share)}%"


def _from_speed_up(gain: float) -> float:
    """The saving of a run that is `gain` faster: G_stack counts FLOPs(scratch)/FLOPs(grown) - 1."""
    return 1 - 1 / (1 + gain)


# Two kinds of our runs are left out. From scratch, so small a BERT or T5 spends much of its
# training on a plateau. A large one may not. And some sources stand close to the loss that their
# target reaches from scratch, or below it, before they grow: those of 4 x 64 beside 8 x 64 and
# 16 x 64, and one that has seen four times the tokens of the target. What they save says little
# about growth.
_TINY = "GPT-2 of 4 x 64"
SAVINGS = (
    Saving("bert2BERT", "width", 0.304, "BERT-base from 512, FPI alone", ("fpi", "copies")),
    Saving("bert2BERT", "width", 0.384, "BERT-base from 512, AKI alone", ("aki", "copies")),
    *(
        Saving(
            *("bert2BERT", "width", share, f"{name}-base from half its size, AKI and two stages"),
            ways=("aki", "copies"),
        )
        for name, share in (("BERT", 0.45), ("GPT", 0.47))
    ),
    Saving("SPARKLING", "width", 0.35, "twice the width", ("fpi", "copies"), bound="up to "),
    Saving(OURS, "width", 0.378, f"{_TINY} to 4 x 128, 3 seeds", ("fpi", "padded"), 0.170),
    Saving(OURS, "width", 0.479, "GPT-2 of 16 x 32 to 16 x 64, 3 seeds", ("fpi", "padded"), 0.093),
    Saving(OURS, "width", 0.396, f"{_TINY} to 4 x 128, 3 seeds", ("aki", "padded"), 0.144),
    Saving(OURS, "width", 0.172, f"{_TINY} to 4 x 128, 3 seeds", ("fpi", "copies"), 0.203),
    Saving(OURS, "width", 0.183, f"{_TINY} to 4 x 128, 3 seeds", ("aki", "copies"), 0.186),
    # The best and the worst of its four ways to widen. Ours resemble both, so both count. Its
    # sources had seen a tenth of the target's tokens or fewer. A gain counts for such sources
    # alone, a loss is a warning for all.
    *(
        Saving("G_stack", axis, _from_speed_up(gain), f"400M to 1.1B in {axis}, {way}", only)
        for axis, gain, way, only in (
            ("width", -0.007, "by copies", ("large decoder",)),
            ("width", -0.179, "by zeros", ("large decoder",)),
            ("depth", 0.491, "by copies", ("stack", "young")),
            ("depth", 0.466, "by zeros", ("identity", "young")),
        )
    ),
    Saving("G_stack", "depth", 1 - 194 / 300, "7B, 194 for 300 billion tokens", ("stack", "young")),
    *(
        Saving(
            *(OURS, "depth", share, f"{_TINY} to 8 x 64, source of a tenth of the steps, 3 seeds"),
            ways=(way, "young"),
            margin=margin,
        )
        for way, share, margin in (
            ("identity", 0.214, 0.054),
            ("stack", 0.198, 0.037),
            ("interleave", 0.194, 0.065),
        )
    ),
    Saving(
        *(OURS, "both", 0.482, f"{_TINY} to 8 x 96, source of as many steps, 3 seeds"),
        ways=("fpi", "padded", "identity", "trained"),
        margin=0.250,
    ),
)
# a baseline, so no forecast is made from it
DIRECT_COPY = Saving(OURS, "width", 0.387, f"{_TINY} to 4 x 128, 3 seeds", ("direct_copy",), 0.147)

# Tokens that a small GPT-2 had seen when it grew in width, as a share of those that the target was
# to see -> the cost it saved, source not counted, and half of the 95 % interval: the table "When to
# grow" of our own runs.
MOMENTS = {0.1: (0.076, 0.067), 0.3: (0.175, 0.033), 1.0: (0.378, 0.170)}
# the share below which a source is young
EARLY = 0.5


def check_tokens(name: str, tokens: float | None) -> None:
    """Refuse a number of tokens that is none.

    Args:
        name: of the argument.
        tokens: None is fine.

    Raises:
        GrowthError: it is below 1, or more than any model could see.
    """
    if tokens is not None and not 1 <= tokens <= MOST_TOKENS:
        example = "for example 1e11 for 100 billion"
        raise GrowthError(
            f"{name}={tokens:g}: give a number of tokens from 1 to {MOST_TOKENS:g}, {example}"
        )


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
