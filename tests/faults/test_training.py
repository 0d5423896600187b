"""File operations of a training run fail, or kill it; it then ends with the same weights.

The walk of this test leaps. `training.py` has the command for a walk through every operation.
"""

from tests.faults.test_walk import check


def test_a_run_survives_failed_file_operations(preloaded):
    (work,) = check(preloaded("tests.faults.training", "23"), 300)
    assert work["cases"]["states"] > 10
