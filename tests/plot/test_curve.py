"""Curves and savings, from curves whose answer is known."""

import json
import math

import pytest
import torch
import transformers

import growkern
from growkern.demo.corpus import train_tokenizer
from growkern.errors import GrowthError
from growkern.plot import (
    Curve,
    attention_maps,
    curve_of,
    draw,
    first_crossing,
    plot_attention,
    plot_runs,
    read_curve,
    saving,
)
from tests.growth.models import BERT, random_model


def curve(name, losses, flops=None, seconds=()):
    steps = tuple(range(len(losses)))
    return Curve(name, steps, tuple(flops or [10.0 * s for s in steps]), tuple(losses), seconds)


SCRATCH = curve("scratch", [8.0, 6.0, 5.0, 4.0])  # reaches 4 at 30


def test_crossing_is_linear_between_points():
    assert first_crossing([0, 10, 20], [8, 6, 2], 5) == pytest.approx(12.5)
    assert first_crossing([0, 10, 20], [8, 6, 2], 6) == 10
    assert first_crossing([0, 10], [8, 6], 9) == 0
    assert first_crossing([0, 10], [8, 6], 5.9) is None


def test_the_first_crossing_counts_where_a_loss_goes_up_again():
    assert first_crossing([0, 10, 20, 30], [8, 4, 6, 4], 5) == pytest.approx(7.5)


def test_crossing_of_an_exponential_decay():
    """Against the closed form: exp(-t / 100) = 1/2 at t = 100 ln 2."""
    times = list(range(0, 200, 2))
    found = first_crossing(times, [math.exp(-t / 100) for t in times], 0.5)
    assert found == pytest.approx(100 * math.log(2), rel=1e-3)


def test_saving():
    grown = curve("grown", [6.0, 4.5, 3.5])  # reaches 4 at 15
    assert saving(grown, SCRATCH) == pytest.approx(0.5)
    assert saving(grown, SCRATCH, extra_flops=6.0) == pytest.approx(0.3)
    assert saving(grown, SCRATCH, extra_flops=30.0) == pytest.approx(-0.5)
    assert saving(SCRATCH, SCRATCH) == 0


def test_saving_of_a_run_that_never_gets_there():
    assert saving(curve("slow", [8.0, 7.0, 4.1]), SCRATCH, extra_flops=5.0) is None


def test_seconds():
    timed = curve("timed", [6.0, 5.0, 4.0], seconds=(0.0, 3.0, 5.0))
    assert timed.seconds_at(4.5) == pytest.approx(4.0)
    assert SCRATCH.seconds_at(5.0) is None


HISTORY = [
    {"step": 0, "eval_loss": 8.0, "flops": 0.0, "seconds": 0.0},
    {"step": 5, "loss": 7.0, "mlm": 6.5, "flops": 50.0, "seconds": 1.0},
    {"step": 10, "eval_loss": 6.0, "flops": 100.0, "seconds": 2.0},
    {"step": 10, "eval_loss": 6.0, "flops": 100.0, "seconds": 2.0},
    {"step": 10, "train_runtime": 3.0},
]


def test_curve_of_a_log():
    found = curve_of(HISTORY, "run")
    assert found == Curve("run", (0, 10), (0.0, 100.0), (8.0, 6.0), (0.0, 2.0))


def test_without_validation_the_plain_loss_is_the_curve():
    found = curve_of([line for line in HISTORY if "eval_loss" not in line], "run")
    assert found == Curve("run", (5,), (50.0,), (6.5,), (1.0,), validation=False)


def write_run(directory, history):
    directory.mkdir(parents=True)
    (directory / "trainer_state.json").write_text(json.dumps({"log_history": history}))
    return directory


def test_reads_a_run_that_is_not_finished(tmp_path):
    write_run(tmp_path / "run" / "checkpoint-5", HISTORY[:1])
    write_run(tmp_path / "run" / "checkpoint-10", HISTORY)
    assert read_curve(tmp_path / "run").steps == (0, 10)
    assert read_curve(tmp_path / "run").name == "run"


def test_refuses_what_is_no_run(tmp_path):
    with pytest.raises(GrowthError, match="not a training directory"):
        read_curve(tmp_path)
    write_run(tmp_path / "runs" / "generation-1", HISTORY)
    with pytest.raises(GrowthError, match=r": give one of its runs, .*generation-1$"):
        read_curve(tmp_path / "runs")
    with pytest.raises(GrowthError, match="no line of the log has a loss"):
        read_curve(write_run(tmp_path / "other", [{"step": 1, "loss": 2.0}]))


def test_refuses_to_mix_training_and_validation_loss(tmp_path):
    runs = [write_run(tmp_path / "a", HISTORY), write_run(tmp_path / "b", HISTORY[1:2])]
    with pytest.raises(GrowthError, match="validation loss"):
        plot_runs(runs, tmp_path / "plot.png")


def test_draws_a_picture(tmp_path):
    pytest.importorskip("matplotlib")
    plot_runs([write_run(tmp_path / name, HISTORY) for name in "ab"], tmp_path / "new" / "plot.png")
    assert (tmp_path / "new" / "plot.png").read_bytes().startswith(b"\x89PNG")
    assert [path.name for path in (tmp_path / "new").iterdir()] == ["plot.png"]


def test_says_in_the_picture_what_was_saved(tmp_path, monkeypatch):
    pytest.importorskip("matplotlib")
    from matplotlib.figure import Figure

    texts = []

    def keep(figure, file, **_):
        texts.extend(text.get_text() for text in figure.axes[0].get_legend().get_texts())
        file.write_bytes(b"")

    monkeypatch.setattr(Figure, "savefig", keep)
    slow = curve("slow", [8.0, 7.0])
    draw([SCRATCH, curve("grown", [6.0, 4.5, 3.5]), slow], tmp_path / "plot.png")
    assert texts == ["scratch", "grown: 50%", "slow: not reached"]


# ----------------------------------------------------------------- attention


def test_attention_maps_are_the_models_own_and_copies_attend_alike(tmp_path):
    """FPI copies whole heads: the grown model's map of head h is the source's of h mod heads."""
    source = random_model("BertModel", BERT, dtype=torch.float32)
    grown = growkern.grow(source, hidden_size=24)
    tokens = torch.randint(50, (1, 9), generator=torch.Generator().manual_seed(0))
    maps = []
    for name, model in (("source", source), ("grown", grown)):
        model.save_pretrained(tmp_path / name)
        loaded = transformers.BertModel.from_pretrained(
            tmp_path / name, attn_implementation="eager"
        )
        maps.append(attention_maps(loaded.eval(), tokens))
    assert maps[0].shape == (2, 3, 9, 9) and maps[1].shape == (2, 6, 9, 9)
    torch.testing.assert_close(maps[0].sum(-1), torch.ones(2, 3, 9))
    torch.testing.assert_close(maps[1], torch.cat([maps[0], maps[0]], 1))


def test_attention_is_drawn(tmp_path):
    corpus = ["attention is drawn for every head of every layer " * 4]
    tokenizer = train_tokenizer(corpus, 50)
    source = random_model("BertModel", BERT, vocab_size=len(tokenizer), dtype=torch.float32)
    for name, model in (("a", source), ("b", growkern.grow(source, hidden_size=24))):
        model.save_pretrained(tmp_path / name)
        tokenizer.save_pretrained(tmp_path / name)
    plot_attention([tmp_path / "a", tmp_path / "b"], corpus[0], tmp_path / "a.png", length=16)
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")
    with pytest.raises(GrowthError, match="is empty"):
        plot_attention([tmp_path / "a"], "", tmp_path / "b.png")
    assert not (tmp_path / "b.png").exists()


@pytest.mark.parametrize("loss", ["1" + "0" * 400, '"x"', "[1]", "null", "{}"])
def test_losses_that_are_no_numbers_are_refused(tmp_path, loss):
    line = f'{{"step": 1, "loss": {loss}, "flops": 1.0}}'
    (tmp_path / "trainer_state.json").write_text(f'{{"log_history": [{line}]}}')
    with pytest.raises(GrowthError, match="not the log of a run") as error:
        read_curve(tmp_path)
    assert "\n" not in str(error.value) and len(str(error.value)) < 400
