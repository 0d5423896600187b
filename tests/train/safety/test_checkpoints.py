"""Whole checkpoints are found, damaged ones are passed over, good ones are never deleted."""

import os
import shutil
import stat
import warnings

import pytest
from safetensors.torch import load_file

from growkern import GrowthError
from growkern.errors import GrowthWarning
from growkern.publish import calls
from growkern.publish.manifest import MANIFEST
from growkern.train.safety import staging
from growkern.train.safety.checkpoints import checkpoints_in, damage, last_checkpoint, newest_whole
from growkern.train.safety.staging import close_staging, open_staging, publish, rotate
from tests.train.safety.runs import assert_same, small_trainer, weights_of

FILES = ("model.safetensors", "optimizer.pt", "scheduler.pt", "rng_state.pth", "trainer_state.json")


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A directory with checkpoint-2, -4, -6 and -8 of a real run."""
    path = tmp_path_factory.mktemp("trained")
    small_trainer(path).train()
    return path


def make(directory, step, contents=b"abc"):
    staged = open_staging(directory) / f"checkpoint-{step}"
    (staged / "inner").mkdir(parents=True)
    (staged / "trainer_state.json").write_bytes(b"{}")
    (staged / "inner" / "file").write_bytes(contents)
    publish(staged, directory / staged.name)
    return directory / staged.name


def flip(path, at=None):
    data = bytearray(path.read_bytes())
    data[len(data) // 2 if at is None else at] ^= 1
    path.write_bytes(data)


def cut(path):
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


DAMAGE = {
    "flipped": flip,
    "cut": cut,
    "empty": lambda path: path.write_bytes(b""),
    "missing": os.remove,
}


@pytest.mark.parametrize("how", DAMAGE)
@pytest.mark.parametrize("name", [*FILES, MANIFEST])
def test_a_damaged_newest_checkpoint_is_passed_over(trained, tmp_path, name, how):
    run = tmp_path / "run"
    shutil.copytree(trained, run)
    DAMAGE[how](run / "checkpoint-8" / name)
    with pytest.warns(GrowthWarning, match=r"checkpoint-8 is damaged .* resumes from checkpoint-6"):
        assert newest_whole(run) == run / "checkpoint-6"
    assert (run / "damaged-checkpoint-8").is_dir()
    assert newest_whole(run) == run / "checkpoint-6"


@pytest.mark.parametrize(
    "name, how", [*((name, "flipped") for name in (*FILES, MANIFEST)), (FILES[1], "missing")]
)
def test_a_run_falls_back_and_ends_the_same(trained, tmp_path, name, how):
    """As a user does it: one warning, and the weights of the run that nothing happened to."""
    shutil.copytree(trained, tmp_path / "run")
    shutil.rmtree(tmp_path / "run" / "checkpoint-8")
    DAMAGE[how](tmp_path / "run" / "checkpoint-6" / name)
    again = small_trainer(tmp_path / "run")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        again.train(resume_from_checkpoint=True)
    lines = [str(w.message) for w in caught if w.category is GrowthWarning]
    assert len(lines) == 1 and "\n" not in lines[0]
    # a manifest with another name or checksum in it says that a file is missing or was changed
    of_others = any(words in lines[0] for words in ("is missing", "was changed"))
    assert name in lines[0] or (name == MANIFEST and of_others)
    saved, weights = load_file(trained / "checkpoint-8" / "model.safetensors"), weights_of(again)
    # without the head, which is tied
    assert_same({key: weights[key] for key in saved}, saved)


def test_any_changed_byte_of_any_file_is_found(tmp_path):
    checkpoint = make(tmp_path, 1, b"some bytes")
    assert damage(checkpoint) is None
    for path in (checkpoint / "trainer_state.json", checkpoint / "inner" / "file"):
        whole = path.read_bytes()
        for at in range(len(whole)):
            flip(path, at)
            assert path.name in damage(checkpoint)
            path.write_bytes(whole)
    whole = (checkpoint / MANIFEST).read_bytes()
    for at in range(len(whole)):
        flip(checkpoint / MANIFEST, at)
        # spaces between the entries carry nothing
        assert damage(checkpoint) or whole[at : at + 1].isspace()
    (checkpoint / MANIFEST).write_bytes(b'{"algorithm": "xxh3_128", "files": {}}')
    assert damage(checkpoint)


def test_if_all_are_damaged_it_says_so_in_one_line(trained, tmp_path):
    run = tmp_path / "run"
    shutil.copytree(trained, run)
    for checkpoint in checkpoints_in(run):
        flip(checkpoint / "optimizer.pt")
    before = sorted(run.rglob("*"))
    with pytest.raises(GrowthError, match=r"no checkpoint in .* is whole") as caught:
        newest_whole(run)
    assert "checkpoint-8: optimizer.pt was changed" in str(caught.value)
    assert "\n" not in str(caught.value)
    assert sorted(run.rglob("*")) == before
    with pytest.raises(GrowthError, match="is whole"):
        small_trainer(run).train(resume_from_checkpoint=True)


def test_a_damaged_checkpoint_that_is_named_is_refused(trained, tmp_path):
    shutil.copytree(trained / "checkpoint-4", tmp_path / "checkpoint-4")
    flip(tmp_path / "checkpoint-4" / "rng_state.pth")
    with pytest.raises(GrowthError, match=r"is damaged: rng_state.pth was changed"):
        small_trainer(tmp_path).train(resume_from_checkpoint=tmp_path / "checkpoint-4")


def test_a_directory_without_checkpoints_has_none(tmp_path):
    assert newest_whole(tmp_path) is None
    assert last_checkpoint(tmp_path) is None
    (tmp_path / "checkpoint-best").mkdir()
    assert newest_whole(tmp_path) is None
    with pytest.raises(GrowthError, match="no checkpoint to resume from"):
        small_trainer(tmp_path).train(resume_from_checkpoint=True)


def test_steps_are_compared_as_numbers(tmp_path):
    make(tmp_path, 9)
    make(tmp_path, 10)
    assert newest_whole(tmp_path).name == last_checkpoint(tmp_path).name == "checkpoint-10"


@pytest.mark.parametrize("can_exchange", [True, False])
def test_a_checkpoint_written_again_replaces_the_old_one(tmp_path, monkeypatch, can_exchange):
    if not can_exchange:
        monkeypatch.setattr(calls, "exchange", lambda *_: False)
    make(tmp_path, 2, b"old")
    checkpoint = make(tmp_path, 2, b"new")
    assert (checkpoint / "inner" / "file").read_bytes() == b"new"
    assert newest_whole(tmp_path) == checkpoint
    close_staging(tmp_path)
    assert [p.name for p in tmp_path.iterdir()] == ["checkpoint-2"]


def test_rotation_keeps_the_newest_and_the_best(tmp_path):
    for step in (2, 4, 6, 8):
        newest = make(tmp_path, step)
    rotate(newest, 2, tmp_path / "checkpoint-2")
    assert [p.name for p in checkpoints_in(tmp_path)] == ["checkpoint-8", "checkpoint-2"]
    rotate(newest, 1, None)
    assert [p.name for p in checkpoints_in(tmp_path)] == ["checkpoint-8"]
    rotate(newest, None, None)
    assert newest.exists()


def test_rotation_goes_by_time_not_by_step(tmp_path):
    """A run that begins anew in the same directory finds later steps of the earlier run."""
    for step in (6, 8, 2, 4):
        newest = make(tmp_path, step)
    rotate(newest, 2, None)
    assert [p.name for p in checkpoints_in(tmp_path)] == ["checkpoint-4", "checkpoint-2"]


def test_a_planted_staging_folder_is_neither_used_nor_followed(tmp_path):
    """A save would fail with a link in its place, and the run would lose its last steps."""
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.tex").write_text("years of work")
    run = tmp_path / "run"
    run.mkdir()
    (run / staging.STAGING).symlink_to(tmp_path / "mine")
    checkpoint = make(run, 2)
    close_staging(run)
    assert damage(checkpoint) is None
    assert (tmp_path / "mine" / "thesis.tex").read_text() == "years of work"
    assert [path.name for path in run.iterdir()] == ["checkpoint-2"]


def test_the_staging_folder_is_private(tmp_path):
    assert stat.S_IMODE(open_staging(tmp_path / "run").stat().st_mode) == 0o700
    # what appears from it has the usual mode
    (tmp_path / "usual").mkdir()
    checkpoint = make(tmp_path / "run", 2)
    assert checkpoint.stat().st_mode == (tmp_path / "usual").stat().st_mode
    staged = tmp_path / "staged"
    staged.mkdir()
    (staged / "usual").touch()
    (staged / "weights").touch(mode=0o600)
    published = tmp_path / "run" / "checkpoint-4"
    publish(staged, published)
    assert (published / "weights").stat().st_mode == (published / "usual").stat().st_mode


def test_the_manifest_of_a_finished_run_covers_its_marker(tmp_path):
    run = tmp_path / "run"
    run.mkdir()
    (run / staging.MARKER).write_text("{}")
    staged = open_staging(run) / "model"
    staged.mkdir()
    (staged / "trainer_state.json").write_text("{}")
    staging.publish_into(staged, run)
    assert damage(run) is None
    (run / staging.MARKER).write_text("{ }")
    assert damage(run) == "run.json has 3 of 2 bytes"
