"""The collaborators of the trainer know nothing of it: each works in a loop of one's own."""

import math
import random

import numpy as np
import pytest
import torch
from accelerate import Accelerator
from transformers import TrainerControl, TrainerState, TrainingArguments

from growkern import GrowthError, LossOptions
from growkern.errors import GrowthWarning
from growkern.train.distributed.shards import Shards
from growkern.train.loop.callbacks import LoopCallback
from growkern.train.loop.growing import GrowthInRun, GrowthStep
from growkern.train.loop.meter import Meter
from growkern.train.loop.objective import WHOLE, Objective
from growkern.train.loss.batches import Batches, LabelledSteps, unchanged_random_state
from growkern.train.loss.inheritance import Teachers
from growkern.train.loss.inherited import EvaluationSums
from growkern.train.model.sub_model import TwoStageConfig
from growkern.train.optimizer import OptimizerMaker, OptimizerOptions
from growkern.train.safety.checkpoints import damage
from growkern.train.safety.saving import EvaluationStopped, Saver, Stops
from growkern.train.safety.steps import StepOptions, StepWatch, clip_on_cpu
from testbed.tiny import batch, build

STEPS = 8
KIND = {"causal": False, "decoder": False}


@pytest.fixture
def args(tmp_path):
    return TrainingArguments(
        str(tmp_path), max_steps=STEPS, save_total_limit=1, use_cpu=True, report_to="none"
    )


@pytest.fixture
def accelerator(args):
    """Made after the arguments, which reset what all accelerators share."""
    return Accelerator(cpu=True)


def state_at(step):
    return TrainerState(global_step=step, max_steps=STEPS)


def test_the_objective_is_that_of_the_model(accelerator):
    model = build("bert", layers=2)
    objective = Objective(model, LossOptions(), None, Teachers([], None))
    objective.take_model(model)
    rows, meter = batch(2, 8, seed=1), Meter()
    items = (rows["labels"] != -100).sum()
    loss, _ = objective.train(model.eval(), rows, WHOLE, items, accelerator, meter)
    torch.testing.assert_close(loss, model(**rows).loss)
    sums = EvaluationSums()
    sums.add(*objective.evaluate_rows(model, rows, accelerator), accelerator)
    sums.write(metrics := {}, "eval", None)
    assert metrics["eval_loss"] == pytest.approx(float(loss), rel=1e-5)
    assert meter.drain(0.0)["mlm"] == pytest.approx(float(loss), rel=1e-5)
    flops = objective.flops
    flops.add(rows, None, meter, taught=False)
    assert flops.drain() > flops.drain() == 0
    growths = GrowthInRun((), model)
    assert objective.plan(0, TwoStageConfig(1, stage1_steps=1), growths).part is not None
    assert objective.plan(1, TwoStageConfig(1, stage1_steps=1), growths) == WHOLE


@pytest.mark.parametrize("processes", [1, 3])
def test_a_line_measures_steps_with_the_waiting_for_their_data(processes, monkeypatch):
    seconds = iter([0.0, 10.0, 11.0, 20.0, 23.0, 30.0, 32.0])
    monkeypatch.setattr("growkern.train.loop.meter.time.perf_counter", lambda: next(seconds))
    meter = Meter(lambda rows: rows * processes)
    meter.flops = 100.0
    with meter.clock("data"):
        meter.add_tokens(60)
    meter.start_step()
    meter.end_step()
    with meter.clock("checkpoint"):
        pass
    monkeypatch.undo()
    assert meter.drain(100.0 + 8.0 * processes, peak=4.0) == {
        "tokens_per_second": 60 * processes / 4,
        "step_time": 4.0,
        "data_time_share": 0.25,
        "mfu": 0.5,
        "checkpoint_time": 2.0,
    }
    # nothing since then
    assert meter.drain(100.0) == {}


def test_a_batch_that_the_data_cannot_fill_is_left_out(accelerator):
    batches, rows = Batches(accelerator, **KIND), [batch(2, 8, seed=i) for i in range(3)]
    source = iter(rows)
    assert batches.read(source, 2, state_at(1)) == rows[:2]
    with pytest.warns(GrowthWarning, match="its last 1 of 2 batches are left out"):
        assert batches.read(source, 2, state_at(1)) == []
    batches.done = 0
    with pytest.raises(GrowthError, match="not enough examples for a single step"):
        batches.read(iter([]), 1, state_at(0))
    with pytest.raises(GrowthError, match="no 'labels'"):
        batches.prepare([{"input_ids": rows[0]["input_ids"]}], None, 2)


def test_steps_without_a_label_do_not_count(accelerator):
    steps = LabelledSteps()
    for loss, items in ((2.0, 3), (5.0, 0), (4.0, 1)):
        steps.begin(torch.tensor(items))
        steps.add(torch.tensor(loss))
    assert steps.corrected(11 / 3, accelerator) == pytest.approx(3)
    steps.begin(torch.tensor(0))
    assert math.isnan(steps.corrected(0.0, accelerator))


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


def test_the_saver_writes_whole_checkpoints_and_keeps_the_newest(accelerator, args, tmp_path):
    saver, model = Saver(args, accelerator, Stops(accelerator)), torch.nn.Linear(2, 2)

    def write(directory):
        directory.mkdir()
        torch.save(model.state_dict(), directory / "weights.pt")

    for step in (2, 4):
        saved = saver.save(model, tmp_path, state_at(step), write, Shards(model))
        assert saved == tmp_path / f"checkpoint-{step}" and damage(saved) is None
    assert saver.newest_whole() == saver.chosen(True) == tmp_path / "checkpoint-4"
    assert not (tmp_path / "checkpoint-2").exists()
    with pytest.raises(GrowthError, match=r"step 5: the weights are not finite.*checkpoint-4"):
        model.weight.data.fill_(math.nan)
        saver.save(model, tmp_path, state_at(5), write, Shards(model))
    (tmp_path / "checkpoint-4" / "weights.pt").write_text("")
    with pytest.raises(GrowthError, match="is damaged"):
        saver.chosen(tmp_path / "checkpoint-4")


def test_a_bad_step_is_not_taken_and_a_signal_saves(accelerator, args):
    stops = Stops(accelerator)
    steps = StepWatch(StepOptions("skip"), accelerator, stops, Saver(args, accelerator, stops))
    steps.add(torch.tensor(1.0))
    assert steps.is_taken(torch.tensor(1.0, dtype=torch.float64), 1)
    steps.add(torch.tensor(math.nan))
    assert not steps.is_taken(torch.tensor(1.0), 2) and steps.skipped == 1
    stops.signals.defer()
    stops.end_evaluation()
    stops.signals.pending = 15
    with pytest.raises(EvaluationStopped):
        stops.end_evaluation()
    steps.add(torch.tensor(1.0))
    assert steps.is_taken(torch.tensor(1.0), 3)
    control = TrainerControl(should_evaluate=True)
    growths, saver = (
        GrowthInRun((), torch.nn.Linear(1, 1)),
        Saver(args, accelerator, stops),
    )
    callback = LoopCallback(Batches(accelerator, **KIND), Meter(), growths, steps, saver)
    callback.on_step_end(args, state_at(3), control)
    assert control.should_save and control.should_log and not control.should_evaluate
    assert stops.number == 15


def test_a_part_of_the_run_ends_before_a_growth(args, tmp_path):
    growth = [GrowthStep(at_step=n, sizes={"num_hidden_layers": n}) for n in (4, 6)]
    growths = GrowthInRun(growth, build("bert", layers=2))
    assert [growths.grown_at(tmp_path / f"checkpoint-{n}") for n in (4, 5, 8)] == [0, 1, 2]
    control = TrainerControl()
    growths.end_part(control, 3)
    assert not growths.ends_here
    growths.end_part(control, 4)
    assert growths.ends_here and control.should_save
    with growths.stop(control):
        assert not control.should_training_stop
    assert control.should_training_stop
    assert growths.part(4) is None


def test_the_optimizer_of_a_model_that_was_not_grown_is_that_of_the_arguments(args):
    maker = OptimizerMaker("auto", OptimizerOptions(), args, {}, grows=False)
    model = build("bert", layers=2)
    maker.take_model(model)
    assert maker.plan is None and maker.make(model, ()) is None


def test_every_generator_is_as_before():
    """Those of Python, NumPy and PyTorch, which collators draw from, also after an error."""

    def draw():
        return random.random(), np.random.rand(), torch.rand(()).item()  # noqa: NPY002

    random.seed(3), np.random.seed(3), torch.manual_seed(3)  # noqa: NPY002
    expected = draw()
    random.seed(3), np.random.seed(3), torch.manual_seed(3)  # noqa: NPY002
    with pytest.raises(KeyError), unchanged_random_state():
        assert draw() == expected
        raise KeyError
    assert draw() == expected
