"""Collaborators of the trainer in a loop of one's own: what they measure, clip and restore."""

import math

import pytest
import torch
from accelerate import Accelerator
from transformers import TrainingArguments

from growkern.train.loop.meter import Meter
from growkern.train.safety.steps import clip_on_cpu

STEPS = 8


@pytest.fixture
def args(tmp_path):
    return TrainingArguments(str(tmp_path), max_steps=STEPS, use_cpu=True, report_to="none")


@pytest.fixture
def accelerator(args):
    """Made after the arguments, which reset what all accelerators share."""
    return Accelerator(cpu=True)


@pytest.mark.parametrize("processes", [1, 3])
def test_a_line_measures_steps_with_the_waiting_for_their_data(processes, monkeypatch):
    seconds = iter([0.0, 10.0, 11.0, 20.0, 23.0, 30.0, 32.0])
    monkeypatch.setattr("growkern.train.loop.meter.time.perf_counter", lambda: next(seconds))
    # the slowest process takes as many times as long, and as much memory
    meter = Meter(lambda rows: rows * processes, lambda rows: rows * processes)
    meter.flops = 100.0
    with meter.clock("data"):
        meter.add_tokens(60)
    meter.start_step()
    meter.end_step()
    with meter.clock("checkpoint"):
        pass
    monkeypatch.undo()
    assert meter.drain(100.0 + 8.0 * processes, peak=4.0, memory=("maxrss", 5.0)) == {
        "maxrss": 5.0 * processes,
        "tokens_per_second": 60 * processes / 4,
        "step_time": 4.0 * processes,
        "data_time_share": 0.25,
        "mfu": 0.5,
        "checkpoint_time": 2.0,
    }
    # nothing since then
    assert meter.drain(100.0) == {}


@pytest.mark.parametrize("most", [math.inf, 1e3, 0.01])
@pytest.mark.parametrize("scale", [1.0, math.nan])
def test_gradients_are_clipped_on_a_cpu_as_accelerate_does(most, scale, accelerator):
    found = []
    for clip in (
        lambda model: clip_on_cpu(model, most, accelerator),
        lambda model: accelerator.clip_grad_norm_(model.parameters(), most),
    ):
        model = torch.nn.Linear(5, 3)
        for number, p in enumerate(model.parameters()):
            p.grad = torch.linspace(-2.0, 3.0 + number, p.numel()).view_as(p) * scale
        found.append([clip(model), *(p.grad for p in model.parameters())])
    for ours, theirs in zip(*found, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=0, equal_nan=True)
