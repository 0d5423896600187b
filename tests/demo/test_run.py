"""The whole demo on models of a few thousand weights: its numbers, and a resume after a kill."""

import dataclasses
import io
import json

import pytest
from rich.console import Console
from transformers import AutoTokenizer, GPT2LMHeadModel

import growkern
from growkern.demo import progress
from growkern.demo.config import CONTESTANTS, FULL, MICRO, QUICK
from growkern.demo.report import result_table, summarize, table_cells
from growkern.demo.run import run_demo
from growkern.errors import GrowthError
from growkern.plot.curve import Curve, read_curve
from growkern.train.loop.trainer import TwoStageTrainer


def run(directory, **options):
    console = Console(file=io.StringIO(), width=80)
    result = run_demo(directory, config=MICRO, console=console, **options)
    return result, console.file.getvalue()


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    directory = tmp_path_factory.mktemp("demo") / "work"
    return directory, *run(directory)


def numbers(result):
    """A result without what depends on the clock."""
    rows = [{k: v for k, v in row.items() if k != "seconds"} for row in result["rows"]]
    curves = [{**one, "seconds": None} for one in (*result["sources"], *result["curves"])]
    return json.loads(json.dumps([rows, curves, result["plan"], result["growth"]]))


def test_leaves_what_it_says(finished):
    directory, result, text = finished
    assert json.loads((directory / "results.json").read_text()) == json.loads(json.dumps(result))
    assert (directory / "loss_vs_flops.png").read_bytes().startswith(b"\x89PNG")
    for contestant in CONTESTANTS:
        assert contestant.title in " ".join(text.split())
    # ordinary checkpoints, each with its tokenizer
    for name in ("seed0/source", "seed1/grown/aki", "seed0/aki"):
        model = GPT2LMHeadModel.from_pretrained(directory / name)
        assert len(AutoTokenizer.from_pretrained(directory / name)) == model.config.vocab_size
    assert not list(directory.glob("*/checkpoint-*"))


def test_grown_models_start_from_the_source_and_are_verified(finished):
    directory, result, _ = finished
    levels = {"direct_copy": "changed", "fpi": "exact", "aki": "changed"}
    assert len(result["growth"]) == MICRO.seeds
    for checks in result["growth"]:
        assert {method: check["level"] for method, check in checks.items()} == levels
    report = growkern.verify(directory / "seed1/source", directory / "seed1/grown/fpi")
    assert report.ok and report.level == "exact"
    grown = GPT2LMHeadModel.from_pretrained(directory / "seed1/grown/fpi")
    assert grown.config.n_embd == MICRO.target.n_embd
    # FPI starts where the small model ended
    for source, row in zip(result["sources"], rows_of(result, "FPI"), strict=True):
        assert row["start_loss"] == pytest.approx(source["losses"][-1], rel=1e-5)
    assert result["sources"][0]["losses"] != result["sources"][1]["losses"]


def rows_of(result, run):
    return [row for row in result["rows"] if row["run"] == run]


def test_table_agrees_with_the_runs_own_logs(finished):
    directory, result, _ = finished
    for contestant in CONTESTANTS:
        for row in rows_of(result, contestant.title):
            folder = directory / f"seed{row['seed']}"
            curve, scratch = (read_curve(folder / name) for name in (contestant.name, "scratch"))
            assert (row["start_loss"], row["final_loss"]) == (curve.losses[0], curve.losses[-1])
            assert row["flops"] == curve.flops_at(scratch.losses[-1])
    assert [row["seed"] for row in rows_of(result, "AKI")] == list(range(MICRO.seeds))


def test_a_run_stops_where_it_reaches_the_target_or_runs_out_of_steps(finished):
    _, result, _ = finished
    own = [row["final_loss"] for row in rows_of(result, "scratch")]
    targets = [min(end, sum(own) / len(own)) for end in own]
    per_seed, stopped = len(CONTESTANTS), 0
    for number, curve in enumerate(result["curves"]):
        target, last = targets[number // per_seed], curve["steps"][-1]
        if number % per_seed:
            assert min(curve["losses"][:-1], default=9) > target or len(curve["losses"]) <= 2
            assert curve["losses"][-1] <= target or last == MICRO.training.steps
            stopped += last < MICRO.training.steps
        else:
            assert last == MICRO.training.steps
    assert stopped


def test_a_finished_demo_does_nothing_again(finished, monkeypatch):
    directory, result, _ = finished
    monkeypatch.setattr(TwoStageTrainer, "train", lambda *a, **k: pytest.fail("trained again"))
    again, text = run(directory)
    assert numbers(again) == numbers(result)
    assert text.count("done before") == 2 + 10 * MICRO.seeds


@pytest.mark.parametrize("terminal", [True, False])
def test_progress_on_a_terminal_and_in_a_file(terminal, monkeypatch):
    monkeypatch.setattr(progress, "QUIET_SECONDS", -1)
    console = Console(file=io.StringIO(), width=120, force_terminal=terminal)
    narrator = progress.Narrator(console, 2)
    narrator.skip("first")
    with narrator.stage("second") as stage:
        stage.report(0, 10, None)
        stage.report(5, 10, 4.25)
        stage.note = "all well"
    text = console.file.getvalue()
    assert "first: done before" in text and "second: all well" in text
    assert "5/10" in text and "validation loss 4.250" in text


class Killed(BaseException):
    pass


# training steps: 4 of the source; its last 3 again and 3 from scratch; 4 and 3 of the next run
KILLED_AFTER = (4, 6, 7)


def test_killed_and_started_again_it_ends_the_same(finished, tmp_path, monkeypatch):
    """Killed three times on the way: in the source, in the first run, in a later one."""
    _, result, _ = finished
    step, left = TwoStageTrainer.training_step, 0

    def stumbling(*args, **kwargs):
        nonlocal left
        left -= 1
        if left < 0:
            raise Killed
        return step(*args, **kwargs)

    monkeypatch.setattr(TwoStageTrainer, "training_step", stumbling)
    done = []
    for steps in KILLED_AFTER:
        left = steps
        with pytest.raises(Killed):
            run(tmp_path / "work")
        # a stage that is done has left its mark
        done.append(len(list((tmp_path / "work").glob("done/*.json"))))
    assert done[0] < done[1] < done[2], "no two kills in the same stage"
    monkeypatch.setattr(TwoStageTrainer, "training_step", step)
    again, _ = run(tmp_path / "work")
    assert numbers(again) == numbers(result)


def test_refuses_a_directory_of_something_else(finished, tmp_path):
    directory, _, _ = finished
    with pytest.raises(GrowthError, match="another size, seed or version"):
        run(directory, seed=1)
    (tmp_path / "mine.txt").write_text("keep")
    with pytest.raises(GrowthError, match="not the directory of a demo"):
        run(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["mine.txt"]


def curve(name, losses, flops, seconds):
    return Curve(name, tuple(range(len(losses))), flops, losses, seconds)


def printed(rows, sources):
    console = Console(file=io.StringIO(), width=80)
    console.print(result_table(rows, sources))
    return console.file.getvalue()


def test_savings_with_and_without_the_source():
    source = curve("source", (7.0, 5.0), (0.0, 20.0), (0.0, 2.0))
    scratch = curve("scratch", (8.0, 6.0, 4.0), (0.0, 50.0, 100.0), (0.0, 5.0, 10.0))
    grown = curve("grown", (5.0, 3.0), (0.0, 80.0), (0.0, 8.0))
    slow = curve("slow", (9.0, 4.5), (0.0, 100.0), (0.0, 9.0))
    rows = summarize(source, [scratch, grown, slow])
    assert [row["flops"] for row in rows] == [100.0, 40.0, None]
    assert [row["seconds"] for row in rows] == [10.0, 4.0, None]
    assert [row["saving"] for row in rows] == [0.0, pytest.approx(0.6), None]
    assert [row["saving_with_source"] for row in rows] == [0.0, pytest.approx(0.4), None]

    text = printed(rows, [source])
    words = " ".join(text.split())
    assert "One seed does not order" in words and "already reached" not in words
    assert cells_of(text)["grown"] == ["5.00", "40", "4", "60%", "40%"]
    assert cells_of(text)["slow"] == ["9.00", "not reached", "-", "-", "-"]
    # a second seed, in which the grown model is slower and the slow one arrives
    faster = curve("grown", (5.0, 3.0), (0.0, 40.0), (0.0, 4.0))
    arrives = curve("slow", (9.0, 4.0), (0.0, 90.0), (0.0, 9.0))
    rows += summarize(source, [scratch, faster, arrives])
    text = printed(rows, [source, source])
    words = " ".join(text.split())
    assert "mean of 2 seeds" in words and "Those that overlap order nothing" in words
    assert "constant, which favours ways that keep the function" in words
    assert cells_of(text).keys() >= {"scratch", "grown", "slow"}
    _, grown, slow = table_cells(rows)
    assert grown == ["grown", "5.00", "20 to 40", "2 to 4", "60% to 80%", "40% to 60%"]
    assert slow[2:] == ["not reached", "-", "-", "-"]


def cells_of(text):
    lines = [line.split("│")[1:-1] for line in text.splitlines() if "│" in line]
    return {line[0].strip(): [cell.strip() for cell in line[1:]] for line in lines}


def test_a_source_beyond_scratch_is_said_to_be():
    scratch = curve("scratch", (8.0, 6.0), (0.0, 50.0), (0.0, 5.0))
    source = curve("source", (7.0, 6.0), (0.0, 20.0), (0.0, 2.0))
    text = " ".join(printed(summarize(source, [scratch]), [source]).split())
    assert "The small model has already reached the loss" in text


def test_presets_compare_like_with_like():
    for config in (FULL, QUICK, MICRO):
        source, target = config.source, config.target
        assert target.n_embd % source.n_embd == 0, "FPI is exact"
        assert source.n_embd // source.n_head == target.n_embd // target.n_head
        assert dataclasses.asdict(config) != dataclasses.asdict(FULL) or config is FULL
