"""Runs of 110 million parameters in minutes, here at a toy size or with made-up numbers."""

from dataclasses import replace

import pytest
import torch

from bench.gpt_110m import family, seed, training
from bench.on_gpu import gpu_table
from bench.shared.recorder import Recorder


def row(steps, loss, *, is_end=True):
    return {"steps": steps, "flops": 10.0 * steps, "loss": loss, "ends a run": is_end}


SCRATCH = [row(0, 9.0, is_end=False), row(80, 2.5, is_end=False), row(100, 3.0)]


def test_the_saving_is_read_between_the_ends_of_two_runs():
    """The trunk is below scratch's loss earlier, but a trunk is no run that has ended."""
    grown = [row(20, 3.5), row(30, 2.0, is_end=False), row(60, 2.7), row(100, 2.5)]
    found = seed.saving(grown, SCRATCH, source_flops=400.0)
    # the loss falls by 0.8 in 40 steps, so 3.0 comes after 25 of them
    assert found["saved"] == pytest.approx(1 - 45 / 100)
    assert found["source counted"] == pytest.approx(1 - 85 / 100)
    assert found["words"].startswith("55.0% of the FLOPs saved, 15.0% with")
    assert seed.saving([row(25, 2.9), row(100, 2.5)], SCRATCH, 0.0)["words"].startswith(
        "at least 75"
    )
    missed = seed.saving([row(25, 3.4), row(100, 3.1)], SCRATCH, 400.0)
    assert missed["saved"] is None and "not reached" in missed["words"]


def toy_place(tmp_path, **changes):
    recorder = Recorder("gpt_110m_1", tmp_path / "rows.json", toy=True)
    setting = replace(seed.TOY, **changes)
    tokens = torch.randint(4, setting.vocab, (64, setting.length))
    text = training.Text(tokens[:48], tokens[48:], {})
    losses = training.head_loss
    return training.Place(recorder, setting, 1, text, losses, "eager", torch.arange(48))


def test_growth_inside_a_run_keeps_the_loss_and_costs_what_it_runs(tmp_path):
    place = toy_place(tmp_path)
    model = place.untrained(place.setting.target, 2)
    one = training.Training(place, "one", model, 40)
    for step in range(10):
        one.step(step)
    before, small = one.validate(), one.step_flops
    one.grow(n_layer=4)
    # autocast rounds to bfloat16
    assert one.validate() == pytest.approx(before, abs=1e-3)
    one.step(10)
    assert one.step_flops > small and one.flops == 10 * small + one.step_flops
    moments = one.optimizer.state[one.model.transformer.wte.weight]
    assert moments["step"] == 11


# ---------------------------------------------------------------------- the family


def test_each_question_has_its_control():
    """Scratch is at 3.0 after 1000 FLOPs, the grown one after 650 and the fixed size after 900."""
    rows = {name: [row(100, 4.0)] for name in family.ENDS}
    rows[family.LARGE] = [row(50, 3.5), row(100, 3.0)]
    rows[family.GROWN] = [row(60, 3.1), row(70, 2.9)]
    rows[family.NEVER] = [row(80, 3.1), row(100, 2.9)]
    rows[family.SMALL] = [row(20, 3.8)]
    found = family.answers(rows)
    assert found["family"] == pytest.approx(350 / 1200)
    assert found["given size, source counted"] == pytest.approx(1 - 850 / 1000)
    assert found["given loss, never grown"] == pytest.approx(1 - 900 / 1000)
    assert found["given size, one run"] is None and not found["at least"]
    plan = {"what": "plan", "tokens per parameter": 3.9}
    words = gpu_table._family_figure([plan, {"what": "saving by question"} | found])
    assert "a family: 29.2%" in words and "never grown: 10.0%" in words
    assert "in one run: loss not reached" in words and "3.9 tokens" in words
