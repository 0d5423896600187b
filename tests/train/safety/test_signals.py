"""SIGINT and SIGTERM save a checkpoint, say one line, and end with their exit codes."""

import contextlib
import os
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import TrainerCallback

from growkern import GrowthError, run as train
from growkern.train.loop import growing
from growkern.train.run.start import _train_from
from growkern.train.safety.checkpoints import checkpoints_in, damage
from growkern.train.safety.signals import SignalWatch, Terminated, settle
from tests.train.growth.ranks import trainer_for
from tests.train.run.test_run import RUN, workplace  # noqa: F401
from tests.train.safety.runs import SENDERS, At, assert_same, small_trainer, weights_of
from tests.train.safety.test_saving import full_while_saving

ROOT = Path(__file__).parents[3]
KINDS = {signal.SIGINT: KeyboardInterrupt, signal.SIGTERM: Terminated, signal.SIGUSR1: Terminated}


def send(number):
    return lambda model: os.kill(os.getpid(), number)


@pytest.fixture(scope="module")
def straight(tmp_path_factory):
    trainer = small_trainer(tmp_path_factory.mktemp("straight"))
    trainer.train()
    return weights_of(trainer)


@pytest.mark.parametrize(
    "number, event",
    [
        *((number, "on_step_begin") for number in KINDS),
        (signal.SIGTERM, "on_pre_optimizer_step"),
        (signal.SIGINT, "on_optimizer_step"),
    ],
)
def test_a_signal_saves_and_the_run_goes_on_bit_for_bit(tmp_path, straight, number, event, capsys):
    before = signal.getsignal(number)
    trainer = small_trainer(tmp_path, callbacks=[At(4, send(number), event)])
    trainer.saver.hint = "do it again"
    with pytest.raises(KINDS[number]) as caught:
        trainer.train()
    assert signal.getsignal(number) is before
    # a signal after the processes have talked waits for the next step
    step = 5 if event == "on_step_begin" else 6
    last = [line for line in capsys.readouterr().err.splitlines() if "SIG" in line]
    saved = tmp_path / f"checkpoint-{step}"
    name = signal.Signals(number).name
    assert last == [f"{name} after step {step}: saved in {saved}; to resume: do it again"]
    assert not str(caught.value)
    if number != signal.SIGINT:
        assert caught.value.code == 143
    assert checkpoints_in(tmp_path)[0] == saved
    again = small_trainer(tmp_path)
    again.train(resume_from_checkpoint=True)
    assert_same(weights_of(again), straight)
    # what was logged before the stop is in the checkpoint
    assert [line["step"] for line in again.state.log_history if "loss" in line] == [*range(1, 9)]


def test_a_stop_changes_no_line_of_the_log(tmp_path):
    """The trainer that was stopped has not kept the means of its checkpoint too."""
    logged, args = [], {"logging_steps": 4}
    for stops in ([], [At(4, send(signal.SIGTERM))]):
        trainer = small_trainer(tmp_path / str(len(stops)), callbacks=stops, args=args)
        with pytest.raises(Terminated) if stops else contextlib.nullcontext():
            trainer.train()
        if stops:
            trainer.train(resume_from_checkpoint=True)
        logged.append(
            [(x["step"], x["loss"], x["label_loss"]) for x in trainer.state.log_history[:2]]
        )
    assert logged[0] == logged[1] and [x[0] for x in logged[0]] == [4, 8]


def test_a_second_sigterm_does_not_disturb_the_save(tmp_path, straight):
    def twice(model):
        os.kill(os.getpid(), signal.SIGTERM)
        os.kill(os.getpid(), signal.SIGTERM)
        os.kill(os.getpid(), signal.SIGINT)

    trainer = small_trainer(tmp_path, callbacks=[At(4, twice)])
    with pytest.raises(Terminated):
        trainer.train()
    assert damage(tmp_path / "checkpoint-5") is None


@pytest.mark.parametrize("event", ["on_step_begin", "on_optimizer_step"])
def test_a_signal_in_the_last_step_ends_a_whole_run(tmp_path, straight, event, capsys):
    """Whoever calls `train` must not go on as if there had been no signal."""
    trainer = small_trainer(tmp_path, callbacks=[At(7, send(signal.SIGTERM), event)])
    with pytest.raises(Terminated):
        trainer.train()
    assert "SIGTERM after step 8: saved in" in capsys.readouterr().err
    assert_same(weights_of(trainer), straight)
    again = small_trainer(tmp_path)
    assert _train_from(again, again.saver.newest_whole()) is None
    assert_same(weights_of(again), straight)


def test_an_evaluation_does_not_delay_the_save(tmp_path, monkeypatch):
    args = {"eval_strategy": "steps", "eval_steps": 5}
    trainer = small_trainer(tmp_path, callbacks=[At(4, send(signal.SIGTERM))], args=args)
    monkeypatch.setattr(trainer, "_evaluate", lambda *_: pytest.fail("evaluated"))
    with pytest.raises(Terminated):
        trainer.train()


class InEvaluation(TrainerCallback):
    """Sends SIGTERM after the second batch of the evaluation after a step."""

    def __init__(self, step):
        self.step, self.batches = step, 0

    def on_prediction_step(self, args, state, control, **objects):
        if state.global_step == self.step:
            self.batches += 1
            if self.batches == 2:
                os.kill(os.getpid(), signal.SIGTERM)


@pytest.mark.parametrize("step", [4, 8])
def test_a_long_evaluation_ends_early(tmp_path, straight, step, capsys):
    """The next start does it again, with the numbers of a run that was not stopped."""
    args = {
        "eval_strategy": "steps", "eval_steps": 4, "per_device_eval_batch_size": 1,
        "metric_for_best_model": "eval_loss", "save_steps": 3,
    }  # fmt: skip
    whole = small_trainer(tmp_path / "whole", args=args)
    whole.train()
    callback = InEvaluation(step)
    trainer = small_trainer(tmp_path / "stopped", callbacks=[callback], args=args)
    with pytest.raises(Terminated):
        trainer.train()
    assert callback.batches == 2
    assert f"SIGTERM after step {step}: saved in" in capsys.readouterr().err
    assert checkpoints_in(tmp_path / "stopped")[0].name == f"checkpoint-{step}"
    again = small_trainer(tmp_path / "stopped", args=args)
    _train_from(again, again.saver.newest_whole())
    assert_same(weights_of(again), straight)
    seen, expected = (
        {line["step"]: line["eval_loss"] for line in t.state.log_history if "eval_loss" in line}
        for t in (again, whole)
    )
    assert list(expected) == [4, 8] and seen == expected
    assert again.state.best_metric == whole.state.best_metric
    best = [Path(t.state.best_model_checkpoint).name for t in (again, whole)]
    assert best[0] == best[1]


def test_an_evaluation_of_ones_own_is_not_stopped(tmp_path):
    trainer = small_trainer(tmp_path)
    trainer.train()
    trainer.add_callback(InEvaluation(8))
    with SignalWatch() as trainer.stops.signals:
        trainer.stops.signals.defer()
        assert trainer.evaluate()["eval_loss"] > 0
        assert trainer.stops.signals.pending == signal.SIGTERM
        settle()


def test_a_trainer_that_saves_nothing_leaves_signals_alone(tmp_path):
    trainer = small_trainer(
        tmp_path, callbacks=[At(4, send(signal.SIGINT))], args={"save_strategy": "no"}
    )
    with pytest.raises(KeyboardInterrupt):
        trainer.train()
    assert trainer.state.global_step == 4


def test_if_the_stop_cannot_save_it_says_so(tmp_path, monkeypatch):
    full_while_saving(monkeypatch, (5,), 1000)
    trainer = small_trainer(tmp_path, callbacks=[At(4, send(signal.SIGTERM))])
    match = r"SIGTERM: .*checkpoint-5 was not saved .*checkpoint-4; to resume: "
    with pytest.raises(GrowthError, match=match):
        trainer.train()


def test_the_best_checkpoint_does_not_displace_that_of_the_stop(tmp_path, monkeypatch):
    """If it keeps one checkpoint."""
    args = {
        "save_total_limit": 1, "eval_strategy": "steps", "eval_steps": 2,
        "metric_for_best_model": "eval_loss", "load_best_model_at_end": True,
    }  # fmt: skip
    trainer = small_trainer(tmp_path, callbacks=[At(4, send(signal.SIGTERM))], args=args)
    trainer._evaluate = lambda *_: {"eval_loss": float(trainer.state.global_step)}
    with pytest.raises(Terminated):
        trainer.train()
    assert [p.name for p in checkpoints_in(tmp_path)] == ["checkpoint-5", "checkpoint-2"]


# -------------------------------------------------------------------- handlers


@pytest.mark.parametrize("number", KINDS)
def test_before_the_first_step_a_signal_raises_at_once(number):
    with pytest.raises(KINDS[number], match="say this"), SignalWatch("say this"):
        os.kill(os.getpid(), number)
        time.sleep(1)


def test_an_impatient_second_sigint_raises(monkeypatch):
    with SignalWatch("stopped") as watch:
        watch.defer()
        os.kill(os.getpid(), signal.SIGINT)
        os.kill(os.getpid(), signal.SIGINT)
        assert watch.pending == signal.SIGINT
        monkeypatch.setattr("growkern.train.safety.signals.REPEATED_AFTER", -1.0)
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)
        settle()


@pytest.mark.parametrize("number", KINDS)
@pytest.mark.parametrize("how", [how for how in SENDERS if how != "plain"])
@pytest.mark.parametrize("goes_on", [True, False])
def test_nobody_can_swallow_a_signal(number, how, goes_on, capsys):
    """It raises again soon, or when the watch ends."""
    before = signal.getsignal(signal.SIGALRM)
    with pytest.raises(KINDS[number], match="say this"), SignalWatch("say this") as watch:
        SENDERS[how](number)
        if goes_on:
            time.sleep(60)
            pytest.fail("lost")
    assert watch.raised == number
    assert "ignored" not in capsys.readouterr().err
    assert signal.getsignal(signal.SIGALRM) == before
    assert signal.getitimer(signal.ITIMER_REAL) == (0.0, 0.0)


@pytest.mark.parametrize("number", KINDS)
def test_code_cannot_swallow_a_signal(number):
    """Nor between two watches. What is done because of it is not disturbed."""
    cleaned = []
    with pytest.raises(KINDS[number], match="outer"), SignalWatch("outer") as outer:
        try:
            with SignalWatch("inner"):
                try:
                    os.kill(os.getpid(), number)
                    time.sleep(60)
                finally:
                    os.kill(os.getpid(), signal.SIGTERM)
                    time.sleep(0.2)
                    cleaned.append(True)
        except BaseException:
            time.sleep(0.2)
            cleaned.append(True)
        time.sleep(60)
    assert cleaned == [True, True] and outer.pending == outer.raised == number


def test_a_signal_that_is_noted_raises_when_the_watch_ends():
    outer, inner = (pytest.raises(Terminated, match=name) for name in ("outer", "inner"))
    with outer, SignalWatch("outer"), inner, SignalWatch("inner") as watch:
        watch.defer()
        os.kill(os.getpid(), signal.SIGTERM)
        assert watch.pending and not watch.raised
    with pytest.raises(GrowthError), SignalWatch() as watch:
        watch.defer()
        os.kill(os.getpid(), signal.SIGTERM)
        raise GrowthError("the cause that is shown")
    with SignalWatch() as watch:
        watch.defer()
        os.kill(os.getpid(), signal.SIGTERM)
        settle()


def test_an_ignored_signal_stays_ignored_and_threads_catch_nothing():
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        with SignalWatch() as watch:
            os.kill(os.getpid(), signal.SIGINT)
            assert watch.pending == 0
    finally:
        signal.signal(signal.SIGINT, before)

    def elsewhere():
        with SignalWatch():
            assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL

    thread = threading.Thread(target=elsewhere)
    thread.start()
    thread.join()


# --------------------------------------------------------------- a real process


def start(folder):
    return subprocess.Popen(
        [sys.executable, "-m", "growkern", "train", str(folder / "run.toml")],
        env={**os.environ, "PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": "1"},
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip


@pytest.mark.parametrize("workplace", ["bert"], indirect=True)
def test_a_run_that_is_ended_by_a_signal_goes_on_where_it_was(workplace):  # noqa: F811
    """SIGTERM, in a process of its own. `tests/test_signals.py` sends both to forks."""
    text = RUN.replace("steps = 6", "steps = 50", 1).replace("save_every = 2\n", "")
    (workplace / "run.toml").write_text(text.replace("eval_every = 3", "eval_every = 1000"))
    process = start(workplace)
    out = ""
    while "label loss" not in out:
        line = process.stdout.readline()
        assert line, process.stderr.read()
        out += line
    process.send_signal(signal.SIGTERM)
    _, errors = process.communicate(timeout=120)
    assert process.returncode == 143, errors
    assert out.index("to resume") < out.index("label loss")
    file, output = workplace / "run.toml", workplace / "out"
    said = [line for line in errors.splitlines() if "SIG" in line]
    pattern = r"(\w+) after step (\d+): saved in (\S+); to resume: growkern train (\S+)"
    name, step, saved, again = re.fullmatch(pattern, said[0]).groups()
    assert (name, saved, again) == ("SIGTERM", f"{output}/checkpoint-{step}", str(file))
    assert len(said) == 1
    assert "Traceback" not in errors
    assert not (output / "model.safetensors").exists()

    assert train(file, progress=False).global_step == 50
    (workplace / "run.toml").write_text(
        (workplace / "run.toml").read_text().replace('directory = "out"', 'directory = "straight"')
    )
    train(file, progress=False)
    assert_same(
        load_file(output / "model.safetensors"),
        load_file(workplace / "straight" / "model.safetensors"),
    )


@pytest.mark.parametrize("how", ["__del__", "weakref", "suppress"])
def test_nobody_can_swallow_a_signal_of_a_growth_in_python(how, tmp_path, monkeypatch):
    """No part of the run trains then, and no run file watches."""
    grow = growing.grown_model

    def grown(*args):
        SENDERS[how](signal.SIGINT)
        # longer than until the signal raises again: this growth is that quick
        time.sleep(1)
        return grow(*args)

    monkeypatch.setattr(growing, "grown_model", grown)
    with pytest.raises(KeyboardInterrupt, match="stopped; to resume"):
        trainer_for(tmp_path).train()


def test_a_signal_that_skips_the_end_of_no_grad_leaves_gradients_on(tmp_path, monkeypatch):
    def interrupted(*args):
        torch.set_grad_enabled(False)
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(1)

    monkeypatch.setattr(growing, "grown_model", interrupted)
    with pytest.raises(KeyboardInterrupt):
        trainer_for(tmp_path).train()
    is_enabled = torch.is_grad_enabled()
    torch.set_grad_enabled(True)
    assert is_enabled
