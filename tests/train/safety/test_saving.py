"""A disk that takes no more bytes costs a checkpoint, not the run; a save leaves nothing behind."""

import contextlib
import resource
import warnings
from pathlib import Path

import pytest
import torch

from growkern import GrowthError, TwoStageTrainer
from growkern.errors import GrowthWarning
from growkern.publish.manifest import MANIFEST
from growkern.train.run.start import _train_from
from growkern.train.safety.checkpoints import checkpoints_in, damage
from growkern.train.safety.staging import STAGING
from testbed.tiny import TinyTokenizer
from tests.train.safety.runs import At, assert_same, small_trainer, weights_of


@contextlib.contextmanager
def small_files(most):
    """While active, no file can become larger; the system's answer is that of a quota."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (most, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def full_while_saving(monkeypatch, steps, most):
    """Make the disk full while the checkpoints of these steps are written."""
    save = TwoStageTrainer._save_checkpoint

    def save_on_a_full_disk(trainer, *args):
        with contextlib.ExitStack() as stack:
            if trainer.state.global_step in steps:
                stack.enter_context(small_files(most))
            save(trainer, *args)

    monkeypatch.setattr(TwoStageTrainer, "_save_checkpoint", save_on_a_full_disk)


def names(directory):
    return [path.name for path in checkpoints_in(directory)]


@pytest.fixture(scope="module")
def straight(tmp_path_factory):
    trainer = small_trainer(tmp_path_factory.mktemp("straight"))
    trainer.train()
    return trainer


@pytest.mark.parametrize("name", ["model.safetensors", "optimizer.pt", "rng_state.pth", MANIFEST])
def test_a_full_disk_keeps_the_previous_checkpoint(straight, tmp_path, monkeypatch, name):
    """The disk takes one byte less than this file, and files that are larger neither."""
    most = (Path(straight.args.output_dir) / "checkpoint-4" / name).stat().st_size - 1
    full_while_saving(monkeypatch, (4, 6), most)
    trainer = small_trainer(tmp_path / "run")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer.train()
    lines = [str(w.message) for w in caught if w.category is GrowthWarning]
    assert len(lines) == 2
    for step, line in zip((4, 6), lines, strict=True):
        assert line.startswith(f"{tmp_path / 'run' / f'checkpoint-{step}'} was not saved (")
        assert line.endswith("checkpoint-2; training continues")
        assert "\n" not in line
    assert names(tmp_path / "run") == ["checkpoint-8", "checkpoint-2"]
    assert not (tmp_path / "run" / STAGING).exists()
    assert all(damage(path) is None for path in checkpoints_in(tmp_path / "run"))
    assert_same(weights_of(trainer), weights_of(straight))


@pytest.mark.parametrize("is_there", [True, False])
def test_the_output_may_be_a_link(tmp_path, is_there):
    """To a directory, or to one that will be made; it stays a link."""
    (tmp_path / "link").symlink_to("disk")
    if is_there:
        (tmp_path / "disk").mkdir()
    trainer = small_trainer(tmp_path / "link", args={"save_total_limit": 1})
    trainer.train()
    trainer.save_final_model(torch.float32)
    assert names(tmp_path / "disk") == ["checkpoint-8"]
    assert damage(tmp_path / "disk") is None and damage(tmp_path / "disk/checkpoint-8") is None
    again = small_trainer(tmp_path / "link", args={"save_total_limit": 1, "max_steps": 10})
    again.train(resume_from_checkpoint=True)
    assert names(tmp_path / "disk") == ["checkpoint-10"]
    assert (tmp_path / "link").readlink() == Path("disk")
    assert not (tmp_path / "disk" / STAGING).exists()


def test_a_full_disk_at_the_end_is_one_line(tmp_path):
    trainer = small_trainer(tmp_path)
    trainer.train()
    trainer.saver.hint = "growkern train run.toml"
    with small_files(1000), pytest.raises(GrowthError, match="the model was not saved") as caught:
        trainer.save_final_model(trainer.model.dtype)
    assert str(caught.value).endswith("checkpoint-8; to resume: growkern train run.toml")
    assert not (tmp_path / STAGING).exists()
    assert not (tmp_path / "config.json").exists()
    trainer.save_final_model(trainer.model.dtype)
    assert damage(tmp_path) is None


def test_a_tokenizer_that_cannot_be_written_is_a_full_disk_too(tmp_path, monkeypatch):
    """The tokenizers library raises a plain Exception, with the words of the system."""

    class Tokenizer(TinyTokenizer):
        def save_pretrained(self, *_, **__):
            raise Exception("No space left on device (os error 28)")

    trainer = small_trainer(tmp_path, processing_class=Tokenizer())
    words = r"checkpoint-2 was not saved \(No space left on device\)"
    with pytest.warns(GrowthWarning, match=words):
        trainer.train()
    assert trainer.state.global_step == 8


def test_other_errors_while_saving_are_not_swallowed(tmp_path, monkeypatch):
    def fail(*args):
        raise RuntimeError("CUDA error: device-side assert triggered")

    monkeypatch.setattr(TwoStageTrainer, "_save_rng_state", fail)
    with pytest.raises(RuntimeError, match="device-side assert"):
        small_trainer(tmp_path).train()


def test_only_the_newest_checkpoints_are_kept(tmp_path):
    seen = {}
    at = [At(n, lambda model, n=n: seen.update({n: names(tmp_path)})) for n in (3, 5, 7)]
    small_trainer(tmp_path, callbacks=at, args={"save_total_limit": 2}).train()
    assert list(seen.values()) == [
        ["checkpoint-2"],
        ["checkpoint-4", "checkpoint-2"],
        ["checkpoint-6", "checkpoint-4"],
    ]
    assert names(tmp_path) == ["checkpoint-8", "checkpoint-6"]
    assert not (tmp_path / STAGING).exists()


def test_the_best_checkpoint_is_kept_and_loaded(tmp_path):
    """The loss of one evaluation is made the lowest: that checkpoint outlives the rotation."""
    args = {
        "save_total_limit": 2, "eval_strategy": "steps", "eval_steps": 2,
        "load_best_model_at_end": True, "metric_for_best_model": "eval_loss",
    }  # fmt: skip
    trainer = small_trainer(tmp_path, args=args)
    best = {}

    def evaluate(*_):
        if trainer.state.global_step == 4:
            best.update(weights_of(trainer))
        return {"eval_loss": abs(trainer.state.global_step - 4.0)}

    trainer._evaluate = evaluate
    trainer.train()
    assert names(tmp_path) == ["checkpoint-8", "checkpoint-4"]
    assert trainer.state.best_model_checkpoint == str(tmp_path / "checkpoint-4")
    assert_same(weights_of(trainer), best)


@pytest.mark.parametrize("best", [4, 7])
def test_the_best_model_is_loaded_after_a_kill_at_the_end_too(tmp_path, best):
    """The last checkpoint is whole, and the final model was not saved. 7 is the last step."""
    args = {
        "eval_strategy": "steps", "eval_steps": 2, "max_steps": 7,
        "load_best_model_at_end": True, "metric_for_best_model": "eval_loss",
    }  # fmt: skip

    def trainer_in(path):
        trainer = small_trainer(path, args=args)
        trainer._evaluate = lambda *_: {"eval_loss": abs(trainer.state.global_step - best)}
        return trainer

    whole = trainer_in(tmp_path / "run")
    whole.train()
    # a folder may move
    moved = (tmp_path / "run").rename(tmp_path / "moved")
    again = trainer_in(moved)
    assert _train_from(again, again.saver.newest_whole()) is None
    assert again.state.best_model_checkpoint == str(moved / f"checkpoint-{best}")
    assert_same(weights_of(again), weights_of(whole))


def test_checkpoints_by_the_clock(tmp_path):
    clock = {"save_steps": 100}
    small_trainer(tmp_path / "often", args=clock, save_minutes=1e-9).train()
    assert names(tmp_path / "often") == [f"checkpoint-{n}" for n in range(8, 0, -1)]
    small_trainer(tmp_path / "never", args=clock, save_minutes=60).train()
    assert names(tmp_path / "never") == ["checkpoint-8"]


def test_new_intervals_hold_for_a_resumed_run(tmp_path):
    small_trainer(tmp_path, args={"save_steps": 3}).train()
    assert names(tmp_path) == ["checkpoint-8", "checkpoint-6", "checkpoint-3"]
    again = small_trainer(tmp_path / "again", args={"save_steps": 1, "logging_steps": 5})
    again.train(resume_from_checkpoint=tmp_path / "checkpoint-3")
    assert names(tmp_path / "again") == [f"checkpoint-{n}" for n in range(8, 3, -1)]
    new = [line["step"] for line in again.state.log_history if "loss" in line]
    # the last step too
    assert new == [1, 2, 3, 5, 8]


def test_a_full_disk_ends_the_tensorboard_log_and_not_the_run(straight, tmp_path, capfd):
    """The thread that writes the log fails in silence; its error is one warning."""
    with contextlib.ExitStack() as stack:
        # the log is larger by now, and the captured output stays smaller
        fill = At(3, lambda _: stack.enter_context(small_files(4000)))
        args = {"report_to": "tensorboard", "save_strategy": "no"}
        trainer = small_trainer(tmp_path, callbacks=[fill], args=args)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            assert trainer.train().global_step == 8
    lines = [str(w.message) for w in caught if "TensorBoard" in str(w.message)]
    assert len(lines) == 1
    assert lines[0].endswith("; training continues")
    assert not [w for w in caught if "thread" in str(w.message).lower()]
    assert "Traceback" not in capfd.readouterr().err
    assert_same(weights_of(trainer), weights_of(straight))
