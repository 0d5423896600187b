"""`growkern train` with each objective: it learns, resumes to the bit, and refuses in one line."""

import json
import shutil

import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import load_file

from examples import objectives as example
from examples.objectives import MODELS
from growkern import GrowthError, run as train
from growkern.plot.curves import read_curve
from tests.train.objectives.places import place_of

# what the loss of one batch may differ from the mean
NOISE = 0.9


def history(directory):
    return json.loads((directory / "trainer_state.json").read_text())["log_history"]


def losses_in(directory):
    return [line["loss"] for line in history(directory) if "loss" in line]


@pytest.mark.parametrize("objective", MODELS)
def test_every_objective_learns_from_real_text(objective, tmp_path, capsys):
    run = place_of(tmp_path, objective)
    train(run)
    losses = losses_in(tmp_path / "out")
    assert len(losses) == 50
    assert np.mean(losses[-5:]) < NOISE * np.mean(losses[:5])
    said = capsys.readouterr().out
    assert f"\nobjective  {objective}" in said
    # points of the plot, before the first step and after the last
    curve = read_curve(tmp_path / "out")
    assert curve.validation and curve.steps == (0, 50) and curve.flops[1] > curve.flops[0] == 0
    place = tmp_path / "out"
    cls = getattr(transformers, MODELS[objective][0])
    assert type(cls.from_pretrained(place)) is cls


def test_resumed_equals_straight_bit_for_bit(tmp_path, objective="denoising"):
    """The draws of a batch follow from the seed, the epoch and the rows."""
    run = place_of(tmp_path, objective, steps=6)
    train(run, progress=False)
    out = tmp_path / "out"
    files = [file.relative_to(out) for file in out.rglob("model.safetensors")]
    straight = {file: load_file(out / file) for file in files}
    assert len(files) == 3
    before = losses_in(out)
    # killed after step 3, its only checkpoint
    shutil.rmtree(out / "checkpoint-6")
    for path in out.iterdir():
        if path.name not in ("checkpoint-3", "run.json"):
            shutil.rmtree(path) if path.is_dir() else path.unlink()
    assert train(run, progress=False).global_step == 6
    assert losses_in(out) == before
    for file, weights in straight.items():
        for name, value in load_file(out / file).items():
            assert torch.equal(value, weights[name]), (file, name)


def test_a_stream_of_corrupted_rows(tmp_path):
    run = place_of(tmp_path, "span_corruption", steps=4, data="streaming = true")
    train(run, progress=False)
    assert np.isfinite(losses_in(tmp_path / "out")).all()


# ------------------------------------------------------------------- refusals

CACHE = '[teacher]\ncache = "kept"\n[inheritance]\nend_step = 4'
REFUSED = {
    "another class": (
        "mlm",
        {"data": 'objective = "clm"'},
        "BertForMaskedLM is trained with 'mlm'",
    ),
    "cached decoder": ("denoising", {"more": CACHE}, "no decoder's predictions"),
    "own labels": (
        "span_corruption",
        {"data": 'objective = "span_corruption"\ninput_ids_column = "a"\nlabels_column = "b"'},
        "makes the labels itself: leave out data.labels_column",
    ),
    "rows that are not full": (
        "denoising",
        {"data": 'input_ids_column = "a"\npacking = false'},
        "needs full rows: leave out data.packing",
    ),
    "weights": ("denoising", {"more": '[loss]\nrow_weights = "w"'}, "makes itself: leave it out"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_settings_that_do_not_fit_are_refused_before_any_work(case, tmp_path):
    objective, options, message = REFUSED[case]
    run = place_of(tmp_path, objective, **options)
    with pytest.raises(GrowthError, match=message) as refused:
        train(run, progress=False)
    assert "\n" not in str(refused.value)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("objective", ["mlm", "denoising"])
def test_the_example_trains_with_every_objective(objective, tmp_path):
    trainer = example.train(objective, tmp_path)
    losses = [line["loss"] for line in trainer.state.log_history if "loss" in line]
    assert np.mean(losses[-5:]) < NOISE * np.mean(losses[:5])
