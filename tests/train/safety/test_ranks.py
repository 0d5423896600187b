"""Two processes stop, save, skip and give up together, whichever of them has the reason to."""

import json
import signal

import pytest

from testbed.forked_ranks import on_ranks
from tests.shared import walks

SIGNALS = 3


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    folder = tmp_path_factory.mktemp("ranks")
    (folder / "walk.json").write_text(json.dumps([SIGNALS * walks.times, walks.start or 0]))
    on_ranks(2, "tests.train.safety.ranks", folder, limit_s=600 * walks.times)
    both = [json.loads((folder / f"{rank}.json").read_text()) for rank in (0, 1)]
    return {case: [one[case] for one in both] for case in both[0]}


@pytest.mark.parametrize(
    ("name", "end"), [("SIGTERM", "Terminated"), ("SIGINT", "KeyboardInterrupt")]
)
def test_a_signal_to_one_process_stops_both_at_one_step(found, name, end):
    for one in found[name]:
        assert (one["end"], one["step"]) == (end, 5)
        assert one["checkpoints"] == ["checkpoint-5", "checkpoint-4", "checkpoint-2"]
    for one in found[f"{name} resumed"]:
        assert (one["end"], one["step"], one["same"]) == ("done", 8, True)


def test_a_signal_to_one_process_right_before_a_growth_stops_both(found):
    for one in found["growth"]:
        assert (one["end"], one["step"], one["checkpoints"][0]) == ("Terminated", 4, "checkpoint-4")


def test_no_signal_to_one_process_of_a_run_that_grows_is_lost(found):
    """At random events of the loop, also in finalisers, in imports and where code swallows all."""
    ours, theirs = found["walk"]
    assert len(ours) == len(theirs) == SIGNALS * walks.times
    kinds = {signal.SIGINT: "KeyboardInterrupt", signal.SIGTERM: "Terminated"}
    for one, other in zip(ours, theirs, strict=True):
        assert one["end"].split()[0] == kinds[one["number"]], one
        assert other["end"].split()[0] == kinds[one["number"]], one
        assert one["step"] == other["step"], one
        assert (one["resumed"], one["same"], other["same"]) == ("done", True, True), one


def test_a_signal_to_one_process_ends_the_evaluation_of_both(found):
    for one in found["evaluation"]:
        assert (one["end"], one["step"]) == ("Terminated", 4)
        assert one["checkpoints"] == ["checkpoint-4", "checkpoint-2"]


def test_a_nan_on_one_process_stops_both_and_is_named(found):
    for one in found["nan"]:
        assert one["end"].startswith("GrowthError step 6: the loss is NaN or infinite on rank 1; ")
        assert "checkpoint-4; lower learning_rate" in one["end"]
        assert one["step"] == 5


def test_a_full_disk_of_one_process_costs_one_checkpoint(found):
    for one in found["disk"]:
        assert one["end"] == "done"
        assert one["checkpoints"] == ["checkpoint-8", "checkpoint-6", "checkpoint-2"]
        assert one["same"]
    warned = [one["warned"] for one in found["disk"]]
    assert [len(lines) for lines in warned] == [1, 0]
    assert "checkpoint-4 was not saved" in warned[0][0]


def test_the_clock_of_one_process_saves_for_both(found):
    for one in found["clock"]:
        assert one["checkpoints"] == [f"checkpoint-{n}" for n in range(8, 0, -1)]


def test_both_pass_over_a_damaged_checkpoint(found):
    for one in found["damaged"]:
        assert one["end"] == "done"
        assert one["checkpoints"] == [
            "checkpoint-8",
            "checkpoint-6",
            "checkpoint-4",
            "checkpoint-2",
        ]
    warned = [one["warned"] for one in found["damaged"]]
    assert [len(lines) for lines in warned] == [1, 0]
    assert "rng_state_1.pth has" in warned[0][0]
