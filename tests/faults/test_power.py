"""The power fails, or memory runs out: the target is the old or the new one, and a repeat ends."""

import json

from tests.shared import walks


def reports(done):
    assert done.stderr == ""
    return [json.loads(line) for line in done.stdout.splitlines()]


def test_power_fails_during_a_publication(preloaded):
    works = reports(preloaded("tests.faults.power", "publishing"))
    assert len(works) == 6 and all(work["cases"]["power"] > 10 for work in works)


def test_power_fails_while_a_run_saves(preloaded):
    (work,) = reports(preloaded("tests.faults.power", "saving"))
    assert work["cases"]["power"] > 40


NAMES = ["grow-over", "cache", "export", "tokens"]
MORE = ["grow", "cache-over", "export-over"]


def test_power_fails_during_other_work(preloaded):
    names = NAMES + MORE * (walks.times > 1)
    works = reports(preloaded("tests.faults.power", *names))
    assert len(works) == len(names) and all(work["cases"]["power"] > 15 for work in works)


def test_memory_runs_out(preloaded):
    """Each large allocation of a growth and of a cache fails once."""
    works = reports(preloaded("tests.faults.work", "grow-memory", "cache-memory"))
    assert len(works) == 2
    for work in works:
        assert work["operations"]["memory"] > 20 and work["cases"]["starved"] >= 4
