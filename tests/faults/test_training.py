"""File operations of a training run fail, or kill it; it then ends with the same weights."""

from tests.faults.test_walk import check


def test_a_save_survives_a_fault_of_every_operation(preloaded):
    """Every rename, write and sync of a checkpoint and of the model, one after the other."""
    (work,) = check(preloaded("tests.faults.saving"), 2000)
    assert min(work["operations"][kind] for kind in ("EIO", "ENOSPC", "cut", "kill")) > 50


def test_a_run_survives_failed_file_operations(preloaded):
    """Whole runs; this walk leaps. `training.py` has the command for one without leaps."""
    (work,) = check(preloaded("tests.faults.training", "23"), 300)
    assert work["cases"]["states"] > 10
