"""Intervals against printed tables, and against how often they contain the truth."""

import math

import numpy as np
import pytest

from growkern import GrowthError
from growkern.train.evaluation.evaluate import check_confidence, ratio_interval, t_quantile

TABLE = [
    (0.95, 1, 12.7062047),
    (0.95, 2, 4.3026527),
    (0.9, 30, 1.6972609),
    (0.99, 4, 4.6040949),
    (0.95, 10_000, 1.9602012),
]


@pytest.mark.parametrize("confidence, freedom, value", TABLE)
def test_quantiles_are_those_of_the_table(confidence, freedom, value):
    assert t_quantile(confidence, freedom) == pytest.approx(value, abs=1e-6)


def test_equal_counts_give_the_interval_of_a_mean():
    values = [1.0, 2.0, 4.0, 7.0]
    mean, (low, high) = ratio_interval([2 * x for x in values], [2] * 4, 0.95)
    width = 3.1824463 * np.std(values, ddof=1) / 2
    assert mean == 3.5
    assert (low, high) == pytest.approx((3.5 - width, 3.5 + width), rel=1e-7)


def test_the_interval_contains_the_truth_as_often_as_it_says():
    """Groups of unequal size whose items depend on each other."""
    rng, inside, tries = np.random.default_rng(0), 0, 1000
    for _ in range(tries):
        counts = rng.integers(1, 20, 30)
        sums = counts * rng.normal(3.0, 1.0, 30) + rng.normal(0, 1, 30)
        _, (low, high) = ratio_interval(sums.tolist(), counts.tolist(), 0.9)
        inside += low < 3.0 < high
    # the true share is a little below 0.9; four standard errors are 0.04
    assert 0.85 < inside / tries < 0.94


def test_one_group_has_no_interval():
    mean, ends = ratio_interval([6.0], [3], 0.95)
    assert mean == 2.0 and all(map(math.isnan, ends))


@pytest.mark.parametrize("confidence", [0, 1, 95, math.nan])
def test_a_confidence_out_of_range_is_refused(confidence):
    with pytest.raises(GrowthError, match=r"confidence is .* such as 0.95"):
        check_confidence(confidence)
