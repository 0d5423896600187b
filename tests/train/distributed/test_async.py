"""Checkpoints that are written while training continues, on a group of one rank."""

import errno
import os
import shutil
import signal
import threading
import warnings

import pytest
import torch

from growkern import DistributedOptions, GrowthError, shard
from growkern.errors import GrowthWarning
from growkern.growth.models import local_tensor
from growkern.train.distributed.shards import load_optimizer, load_weights
from growkern.train.safety import saving
from growkern.train.safety.checkpoints import checkpoints_in, damage
from growkern.train.safety.signals import Terminated
from growkern.train.safety.staging import STAGING
from tests.train.safety.runs import At, small_model, small_trainer


@pytest.fixture
def gate(monkeypatch):
    """Closed, it keeps the thread from writing."""
    opened, write = threading.Event(), saving.write_parts
    opened.set()

    def write_when_open(*args):
        assert opened.wait(60)
        write(*args)

    monkeypatch.setattr(saving, "write_parts", write_when_open)
    return opened


def sharded_trainer(path, mesh, *callbacks, limit=None, **options):
    model = shard(small_model(), DistributedOptions(sharding="fsdp", **options), mesh)
    args = {"save_total_limit": limit}
    return small_trainer(path, model, args=args, callbacks=list(callbacks))


def weights_of(model):
    return {name: local_tensor(p).clone() for name, p in model.named_parameters()}


def moments_of(optimizer):
    """By number: accelerate wraps the optimizer."""
    state = optimizer.state_dict()["state"]
    return {n: {k: local_tensor(v).clone() for k, v in s.items()} for n, s in state.items()}


def names(path):
    return [one.name for one in checkpoints_in(path)]


def assert_equal(ours, theirs):
    assert ours.keys() == theirs.keys()
    for name, value in ours.items():
        assert torch.equal(value, theirs[name]), name


def test_training_continues_and_the_copy_does_not_change(mesh, gate, tmp_path):
    """The checkpoint of step 4 is written after step 5."""
    seen = {}

    def saved(model):
        seen["weights"], seen["moments"] = weights_of(model), moments_of(trainer.optimizer)

    def a_step_later(model):
        seen["later"] = weights_of(model)
        seen["names"] = names(tmp_path), (tmp_path / STAGING).is_dir()
        gate.set()

    close = At(4, lambda model: gate.clear(), "on_step_end")
    later = At(5, a_step_later, "on_step_end")
    trainer = sharded_trainer(tmp_path, mesh, close, At(4, saved, "on_save"), later, limit=3)
    trainer.train()

    # an unfinished checkpoint is not visible and does not count
    assert seen["names"] == (["checkpoint-2"], True)
    assert names(tmp_path) == ["checkpoint-8", "checkpoint-6", "checkpoint-4"]
    assert not (tmp_path / STAGING).exists()
    assert all(damage(one) is None for one in checkpoints_in(tmp_path))

    word = "bert.embeddings.word_embeddings.weight"
    assert not torch.equal(seen["later"][word], seen["weights"][word])
    load_weights(trainer.model, tmp_path / "checkpoint-4")
    assert_equal(weights_of(trainer.model), seen["weights"])
    load_optimizer(trainer.model, trainer.optimizer.optimizer, tmp_path / "checkpoint-4")
    for number, state in moments_of(trainer.optimizer).items():
        assert_equal(state, seen["moments"][number])


def test_a_run_resumes_bit_for_bit(mesh, tmp_path):
    """From a checkpoint that was written behind, as from one that training waited for."""
    ends = []
    for name, behind in (("behind", True), ("waited", False)):
        trainer = sharded_trainer(tmp_path / name, mesh, async_checkpoints=behind)
        assert trainer.shards.async_checkpoints == behind
        trainer.train()
        ends.append(weights_of(trainer.model))
        shutil.rmtree(tmp_path / name / "checkpoint-8")
        shutil.rmtree(tmp_path / name / "checkpoint-6")
        again = sharded_trainer(tmp_path / name, mesh, async_checkpoints=behind)
        again.train(resume_from_checkpoint=True)
        ends.append(weights_of(again.model))
    for end in ends[1:]:
        assert_equal(end, ends[0])


def test_without_it_training_waits(mesh, tmp_path):
    seen = []
    look = At(2, lambda model: seen.append(names(tmp_path)), "on_save")
    sharded_trainer(tmp_path, mesh, look, async_checkpoints=False).train()
    assert seen == [["checkpoint-2"]]


def failing(monkeypatch, step, error):
    """Make the write of one checkpoint fail after its first file."""
    write = saving.write_parts

    def fail(parts, directory, group=None):
        write(parts, directory, group)
        if directory.name == f"checkpoint-{step}":
            raise error

    monkeypatch.setattr(saving, "write_parts", fail)


def ends_before_step_5(trainer):
    """Let the write of step 4 end while step 5 begins."""
    trainer.add_callback(At(4, lambda model: trainer.saver._pending[1].exception()))


def test_a_full_disk_costs_one_checkpoint(mesh, monkeypatch, tmp_path):
    failing(monkeypatch, 4, OSError(errno.ENOSPC, "No space left on device"))
    seen = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")

        def look(model):
            seen.extend(str(w.message) for w in caught if w.category is GrowthWarning)

        trainer = sharded_trainer(tmp_path, mesh, At(5, look))
        ends_before_step_5(trainer)
        trainer.train()
    # at the next step
    assert seen == [
        f"{tmp_path / 'checkpoint-4'} was not saved (No space left on device); the last good "
        f"checkpoint is {tmp_path / 'checkpoint-2'}; training continues"
    ]
    assert names(tmp_path) == ["checkpoint-8", "checkpoint-6", "checkpoint-2"]
    assert not (tmp_path / STAGING).exists()


def test_another_error_ends_the_run_at_the_next_step(mesh, monkeypatch, tmp_path):
    failing(monkeypatch, 4, ValueError("a fault"))
    trainer = sharded_trainer(tmp_path, mesh)
    ends_before_step_5(trainer)
    with pytest.raises(GrowthError, match=r"checkpoint-4 was not saved: a fault"):
        trainer.train()
    assert trainer.state.global_step == 5
    assert names(tmp_path) == ["checkpoint-2"]


def stop(signal_number):
    return lambda model: os.kill(os.getpid(), signal_number)


@pytest.mark.parametrize("how", ["signal", "crash"])
def test_the_end_of_a_run_waits(mesh, gate, monkeypatch, tmp_path, how):
    """The write of step 4 is under way when step 5 ends the run."""
    timer = threading.Timer(0.5, gate.set)
    act = {"signal": stop(signal.SIGTERM), "crash": lambda model: 1 / 0}[how]
    close = At(4, lambda model: (gate.clear(), timer.start()), "on_step_end")
    trainer = sharded_trainer(tmp_path, mesh, close, At(4, act))
    with pytest.raises((ZeroDivisionError, Terminated)):
        trainer.train()
    expected = ["checkpoint-4", "checkpoint-2"]
    assert names(tmp_path) == ["checkpoint-5"] * (how == "signal") + expected
    assert all(damage(one) is None for one in checkpoints_in(tmp_path))
    assert not (tmp_path / STAGING).exists()
