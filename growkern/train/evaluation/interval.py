"""Confidence intervals of means by Student's t distribution."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import NamedTuple

from growkern.errors import GrowthError

# of Simpson's rule, for an error of the quantile below 1e-6
STEPS = 1000


class Interval(NamedTuple):
    """A confidence interval; both ends are NaN if there is a single value."""

    low: float
    high: float


def check_confidence(confidence: float) -> None:
    """Refuse a confidence that is none.

    Raises:
        GrowthError: it is not in (0, 1).
    """
    if not 0 < confidence < 1:
        raise GrowthError(f"confidence is {confidence}: it must be between 0 and 1, such as 0.95")


def ratio_interval(
    sums: Sequence[float], counts: Sequence[float], confidence: float
) -> tuple[float, Interval]:
    """The mean over all items of several groups, and its interval over the groups.

    Items of a group may depend on each other, groups may not. The error of the ratio of both totals
    is linearised (delta method). With counts of 1 this is the usual interval of a mean.

    Args:
        sums: per group the sum over its items.
        counts: per group the number of items.
        confidence: chance of the interval to contain the truth, in (0, 1).

    Returns:
        The mean and its interval.

    Source: W. G. Cochran, Sampling Techniques, 3rd edition, section 6.3.
    """
    groups, total = len(sums), math.fsum(counts)
    mean = math.fsum(sums) / total
    if groups < 2:
        return mean, Interval(math.nan, math.nan)
    squares = math.fsum((s - mean * n) ** 2 for s, n in zip(sums, counts, strict=True))
    error = math.sqrt(squares * groups / (groups - 1)) / total
    width = t_quantile(confidence, groups - 1) * error
    return mean, Interval(mean - width, mean + width)


@functools.cache
def t_quantile(confidence: float, freedom: int) -> float:
    """The t for which Student's distribution has the probability `confidence` in [-t, t].

    Args:
        confidence: in (0, 1).
        freedom: degrees of freedom, 1 or more.
    """
    # with x = sqrt(freedom) tan(angle) the density is a power of a cosine, without tails
    gamma = math.lgamma((freedom + 1) / 2) - math.lgamma(freedom / 2)
    scale = 2 * math.exp(gamma) / math.sqrt(math.pi)

    def probability(angle: float) -> float:
        step = angle / STEPS
        values = [math.cos(k * step) ** (freedom - 1) for k in range(STEPS + 1)]
        inner = 4 * math.fsum(values[1:-1:2]) + 2 * math.fsum(values[2:-1:2])
        return scale * step / 3 * (values[0] + inner + values[-1])

    # many degrees of freedom make the density narrow: the range of angles follows it
    low, high = 0.0, min(math.pi / 2, 40 / math.sqrt(freedom))
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if probability(middle) < confidence else (low, middle)
    return math.sqrt(freedom) * math.tan(low)
