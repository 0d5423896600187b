"""Curves and savings, from curves whose answer is known."""

import json
from dataclasses import replace

import pytest

from growkern.errors import GrowthError
from growkern.plot.curves import Curve, curve_of, first_crossing, read_curve, settings_apart
from tests.plot.runs import HISTORY, write_run


def test_crossing_is_linear_between_points():
    assert first_crossing([0, 10, 20], [8, 6, 2], 5) == pytest.approx(12.5)
    assert first_crossing([0, 10, 20], [8, 6, 2], 6) == 10
    assert first_crossing([0, 10], [8, 6], 9) == 0
    assert first_crossing([0, 10], [8, 6], 5.9) is None
    # the first one counts where a loss goes up again
    assert first_crossing([0, 10, 20, 30], [8, 4, 6, 4], 5) == pytest.approx(7.5)


def test_curve_of_a_log():
    found = replace(curve_of(HISTORY, "run"), measured={})
    assert found == Curve("run", (0, 10), (0.0, 100.0), (8.0, 6.0))
    # without validation the plain loss is the curve
    found = curve_of([line for line in HISTORY if "eval_loss" not in line], "run")
    assert found.measured == {"label_loss": [(50.0, 6.5)]}
    assert replace(found, measured={}) == Curve("run", (5,), (50.0,), (6.5,), validation=False)


def test_a_growth_is_where_its_last_line_before_is():
    lines = [{"step": i, "loss": 5.0 - i, "flops": 10.0 * i} for i in range(1, 5)]
    lines[2] |= {"growth": 1, "growth/hidden_size": 8}
    lines[2] |= {"growth/loss_before": 3.0, "growth/num_hidden_layers": 4}
    found = curve_of(lines, "run")
    assert found.growths == (20.0,) and found.grown == ("hidden_size 8\nnum_hidden_layers 4",)


def test_a_growth_has_the_losses_before_and_after_it_also_if_its_line_comes_later():
    lines = [
        {"step": 4, "loss": 5.0, "flops": 40.0},
        *({"step": 4, "eval_loss": loss, "flops": 40.0} for loss in (5.0, 6.0)),
        *({"step": 5, "eval_loss": loss, "flops": 60.0} for loss in (4.0, 4.0)),
        {"step": 6, "loss": 4.0, "flops": 80.0, "growth": 1, "growth/hidden_size": 8},
    ]
    lines[-1] |= {"growth/eval_loss_before": 5.0, "growth/eval_loss_after": 6.0}
    found = curve_of(lines, "run")
    assert found.losses == (5.0, 6.0, 4.0) and found.steps == (4, 4, 5)
    assert found.growths == (40.0,) and found.grown == ("hidden_size 8",)
    assert found.flops == pytest.approx((40.0, 40.0, 60.0), rel=1e-12)
    assert found.flops[0] < found.flops[1]


def test_runs_are_told_apart_by_the_settings_in_which_they_differ():
    def run(name, rate, seed, teacher):
        training = {"learning_rate": rate, "batch_size": 8, "seed": seed}
        settings = {"training": training, "inheritance": teacher, "teacher": teacher}
        return Curve(name, (1,), (1.0,), (2.0,), settings=settings)

    runs = [run("a", 0.1, 0, None), run("b", 0.2, 1, {"alpha": 0.5})]
    said = ["learning_rate 0.1, no inheritance", "learning_rate 0.2, with inheritance"]
    assert settings_apart(runs) == said
    assert settings_apart(runs[:1]) == [""]
    # of a run without a record nothing is known
    bare = Curve("c", (1,), (1.0,), (2.0,))
    assert settings_apart([runs[0], bare]) == ["", ""]


def test_nothing_is_said_of_how_random_weights_would_be_copied():
    def grown(method, depth, width):
        growth = {"depth": depth, "symmetry": depth, "sizes": {"hidden_size": width}}
        return Curve("a", (1,), (1.0,), (2.0,), settings={"growth": growth}, method=method)

    scratch, one, other = grown("random", "stack", 8), grown("fpi", "a", 8), grown("fpi", "b", 8)
    assert settings_apart([scratch, one]) == ["", ""]
    assert settings_apart([scratch, one, other])[0] == ""
    assert settings_apart([scratch, one, other])[1:] == [
        "depth a, symmetry a",
        "depth b, symmetry b",
    ]
    wide = settings_apart([scratch, grown("fpi", "a", 16)])
    assert wide == ["sizes hidden_size 8", "sizes hidden_size 16"]
    # a run from scratch has no growth, though its section says how it is made
    bare = Curve("b", (1,), (1.0,), (2.0,), settings={"growth": None})
    assert settings_apart([scratch, bare, one]) == [""] * 3
    dense, mixed = grown("fpi", "a", 8), grown("fpi", "a", 8)
    dense.settings["growth"]["to"], mixed.settings["growth"]["to"] = "", "qwen3_moe"
    assert settings_apart([dense, mixed]) == ["", "to qwen3_moe"]


def test_an_unfinished_run_says_where_its_last_evaluation_was():
    run = Curve("a", (0, 20), (0.0, 1.0), (3.0, 2.0), finished=False, last=(40, 60))
    assert run.state == "unfinished: step 40 of 60, last evaluation at step 20"
    assert replace(run, last=(20, 60)).state == "unfinished: step 20 of 60"
    assert replace(run, validation=False).state == "unfinished: step 40 of 60"
    assert replace(run, finished=True).state == ""


def test_reads_a_run_that_is_not_finished(tmp_path):
    write_run(tmp_path / "run" / "checkpoint-5", HISTORY[:1])
    write_run(tmp_path / "run" / "checkpoint-10", HISTORY)
    found = read_curve(tmp_path / "run")
    assert (found.name, found.steps) == ("run", (0, 10))


def test_reads_the_log_of_a_run_that_has_no_checkpoint_yet(tmp_path):
    """It begins with a grown model. The last line is only half written."""
    lines = [
        *HISTORY[:3],
        {"step": 11, "label_loss": 6.0, "loss": 6.0, "flops": 110.0, "growth": 0},
    ]
    lines[-1]["growth/hidden_size"] = 8
    text = "\n".join(map(json.dumps, lines))
    (tmp_path / "log.jsonl").write_text(f'{text}\n{{"step": 12, "label_loss"')
    (tmp_path / "run.json").write_text('{"run": {"training": {"steps": 40}}}')
    found = read_curve(tmp_path)
    assert found.steps == (0, 10) and found.is_grown and not found.finished
    assert found.state == "unfinished: step 11 of 40, last evaluation at step 10"
    settings = '{"run": {"growth": {"method": "random"}}}'
    (tmp_path / "run.json").write_text(settings)
    assert read_curve(tmp_path).from_scratch


def test_refuses_what_is_no_run(tmp_path):
    with pytest.raises(GrowthError, match=r"no log.jsonl or trainer_state.json"):
        read_curve(tmp_path)
    with pytest.raises(GrowthError, match="no line has a loss"):
        read_curve(write_run(tmp_path / "other", [{"step": 1, "loss": 2.0}]))


@pytest.mark.parametrize("loss", ["NaN", "Infinity"])
def test_a_run_that_diverged_is_named_with_its_step(tmp_path, loss):
    lines = [f'{{"step": {i}, "eval_loss": {x}, "flops": {i}}}' for i, x in ((1, 2.0), (7, loss))]
    (tmp_path / "trainer_state.json").write_text(f'{{"log_history": [{", ".join(lines)}]}}')
    with pytest.raises(GrowthError, match=r"trainer_state.json: the loss at step 7 is (nan|inf)"):
        read_curve(tmp_path)


@pytest.mark.parametrize("loss", ["1" + "0" * 400, '"x"', "[1]", "null", "{}"])
def test_losses_that_are_no_numbers_are_refused(tmp_path, loss):
    line = f'{{"step": 1, "loss": {loss}, "flops": 1.0}}'
    (tmp_path / "trainer_state.json").write_text(f'{{"log_history": [{line}]}}')
    with pytest.raises(GrowthError, match="not the log of a run") as error:
        read_curve(tmp_path)
    assert "\n" not in str(error.value) and len(str(error.value)) < 400
