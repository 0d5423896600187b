"""Every file operation fails once, in every way: nothing is lost, wrong, or left for good.

The walks are processes of their own (`walk.py`), since a library has to be loaded before Python.
"""

import json
from types import SimpleNamespace

import pytest

from growkern.errors import MOST
from tests.faults.walk import Work, attempt

KINDS = {"EIO", "ENOSPC", "cut", "kill"}


def check(done, most):
    """The report of a walk: a line per work, with the cases of each kind; nothing is wrong."""
    assert done.stderr == ""
    works = [json.loads(line) for line in done.stdout.splitlines()]
    for work in works:
        cases = work["cases"]
        assert cases.keys() >= KINDS | {"done", "refused", "killed"}, work
        assert cases["killed"] == cases["kill"] and sum(cases.values()) < most
    return works


def test_the_library_sees_every_operation(preloaded):
    """As many reads and writes as the system counts for the process."""
    counted = json.loads(preloaded("tests.faults.counting").stdout)
    assert counted["seen"] == counted["system"]
    assert min(counted["system"].values()) > 20


def test_publishing(preloaded):
    works = check(preloaded("tests.faults.publishing"), 2000)
    assert len(works) == 6


@pytest.mark.parametrize("said", ["none left", "none\nleft", "x" * MOST, "x" * (MOST + 1)])
def test_memory_runs_out_in_one_line(said, tmp_path):
    def run(folder):
        raise MemoryError(said)

    shim = SimpleNamespace(faults_disarm=lambda: None, faults_fired=lambda: None)
    outcome, *_ = attempt(Work("work", lambda _: None, run), tmp_path, shim)
    assert (outcome == "starved") == (said in ("none left", "x" * MOST))


NAMES = ("cache", "cache-over", "export", "export-over", "grow")


@pytest.fixture(scope="module")
def walked(preloaded):
    """Works -> their reports, of one process: its imports take as long as a small walk."""
    works = check(preloaded("tests.faults.work", *NAMES, "tokens"), 2000)
    return {work["name"]: work for work in works}


@pytest.mark.parametrize("name", NAMES)
def test_changes_of_the_disk(walked, name):
    assert walked[name]["operations"]["EIO"] > 40


def test_tokens_on_disk(walked):
    """A damaged cache of tokens is replaced."""
    assert walked["tokens"]["operations"]["EIO"] > 20
