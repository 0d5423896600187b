"""File operations of a growth fail in every way. The longest of the walks."""

from tests.faults.test_walk import check


def test_operations_of_a_growth(preloaded):
    """With an optimizer, over an existing target; reads are failed too, and interrupted."""
    (work,) = check(preloaded("tests.faults.work", "grow-over"), 10_000)
    assert work["operations"]["EIO"] > 300 and work["operations"]["EINTR"] > 150
    assert work["cases"]["EIO"] > 90 and work["cases"]["EINTR"] > 45
    assert min(work["cases"][kind] for kind in ("ENOSPC", "cut", "kill")) > 15
