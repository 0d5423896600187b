"""Libraries that cannot be imported or fail stay in the table, with the reason."""

import sys
from types import ModuleType

import pytest

from bench.shared import harness, loss_measure, peers
from bench.shared.loss_measure import Provider, in_turns
from bench.shared.peers import Peer


def fails():
    raise ValueError("not for this dtype\nand more")


def test_a_peer_that_is_missing_is_named(monkeypatch):
    missing = Peer("some-package", "no_such_module_here", None, needs_gpu=False)
    (row,) = in_turns([Provider("some", fails, peer=missing)], 1)
    why = "some-package is not installed: no module no_such_module_here"
    assert row == {"provider": "some", "why not": why}
    monkeypatch.setattr(peers, "DEVICE", "cpu")
    assert missing._replace(needs_gpu=True).why_not() == "needs a GPU"


def test_a_failing_library_leaves_the_other_rows(monkeypatch):
    monkeypatch.setitem(sys.modules, "there", ModuleType("there"))
    peer = Peer("there", "there", None, needs_gpu=False)
    calls = []
    good = Provider("good", lambda: calls.append("good"), lambda: 0.5, peer)
    also = Provider("also", lambda: calls.append("also"))
    late = Provider("late", lambda: None, fails)
    graph = Provider("graph", lambda: None, replays=True)
    rows = in_turns([good, Provider("bad", fails, peer=peer), also, late, graph], 2)
    assert calls == ["good", "also"] * 3  # in turns; the first turn is a warm-up
    by_name = {row.pop("provider"): row for row in rows}
    assert by_name["good"]["gradient error"] == 0.5
    assert by_name["also"].keys() == {"wall s", "CPU s", "extra MiB"}
    # a graph keeps its memory, so that of a replay would be 0
    assert by_name["graph"].keys() == {"wall s", "CPU s"}
    assert by_name["bad"] == by_name["late"] == {"why not": "ValueError: not for this dtype"}
    with pytest.raises(ValueError, match="not for this dtype"):
        in_turns([Provider("ours", fails, ours=True)], 1)


def test_rows_are_there_before_all_turns_are_over(monkeypatch):
    """A time-out in the middle of a shape leaves a row of every provider that ran."""
    seen = []

    def stopped():
        assert len(seen[-1]) == 1
        raise KeyboardInterrupt

    monkeypatch.setattr(harness, "observer", lambda rows: seen.append(rows))
    first = Provider("first", lambda: None, lambda: 0.25)
    with pytest.raises(KeyboardInterrupt):
        in_turns([first, Provider("second", stopped)], 2, facts={"shape": "2x3"})
    (row,) = seen[-1]
    assert {"shape": "2x3", "provider": "first", "gradient error": 0.25}.items() <= row.items()
    assert row["wall s"] >= 0 and row["turns"] == 0
    made = in_turns([first], 2)
    assert (
        seen[-2][0]["turns"] == 2 and seen[-1] == [] and len(made) == 1 and "turns" not in made[0]
    )


def test_ratios_are_taken_turn_by_turn(monkeypatch):
    """A turn that other load slowed three times has the same ratio."""
    seconds = {"ours": [9.0, 1.0, 3.0, 1.0], "torch.compile": [9.0, 2.0, 6.0, 2.5]}
    seconds["ours, labels alone"] = [1.0] * 4
    taken = {name: iter(values) for name, values in seconds.items()}
    monkeypatch.setattr(loss_measure, "_sample", lambda name: {"wall s": next(taken[name])})
    ratios = {row["provider"]: row.get("x compile") for row in in_turns(named(seconds), 3)}
    # there is no compiled version of the labels alone
    assert ratios == {"ours": 0.5, "torch.compile": 1.0, "ours, labels alone": None}


def named(names):
    """Providers whose step is their name."""
    return [Provider(name, name) for name in names]
