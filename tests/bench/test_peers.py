"""Other libraries are compared in the same turn."""

from bench.shared import loss_measure
from bench.shared.loss_measure import Provider, in_turns


def test_ratios_are_taken_turn_by_turn(monkeypatch):
    """A turn that other load slowed three times has the same ratio."""
    seconds = {"ours": [9.0, 1.0, 3.0, 1.0], "torch.compile": [9.0, 2.0, 6.0, 2.5]}
    seconds["ours, labels alone"] = [1.0] * 4
    taken = {name: iter(values) for name, values in seconds.items()}
    monkeypatch.setattr(loss_measure, "_sample", lambda name: {"wall s": next(taken[name])})
    ratios = {
        row["provider"]: row.get("x compile")
        for row in in_turns([Provider(name, name) for name in seconds], 3)
    }
    # there is no compiled version of the labels alone
    assert ratios == {"ours": 0.5, "torch.compile": 1.0, "ours, labels alone": None}
