"""The commands' safety, from end to end: pipes, checksums, killed workers.

Truth: the files themselves, changed by hand.
"""

import os
import shutil
import subprocess
import sys

import pytest
from torch.distributed import DistBackendError

from growkern.publish.manifest import write_manifest
from growkern.train.safety.staging import open_staging, publish_into
from tests.cli.test_commands import RUN, SIZES, assert_bad_input, checkpoint, run

__all__ = ["checkpoint", "run"]


def test_a_pipe_in_place_of_a_file_is_refused(run, checkpoint, tmp_path):
    """Nobody writes to it: a command that opened it would wait for ever."""
    os.mkfifo(tmp_path / "pipe")
    grow = ("grow", checkpoint, tmp_path / "large", "--hidden-size", 24)
    assert_bad_input(run(*grow, "--optimizer", tmp_path / "pipe"), "not a regular file")
    assert_bad_input(run(*grow, "--text", tmp_path / "pipe"), "not a regular file")
    cache = ("cache-teacher", checkpoint, tmp_path / "pipe", "--out", tmp_path / "cache")
    assert_bad_input(
        run(*cache, "--k", 4, "--temperature", 2, "--sequence-length", 8), "not a regular file"
    )


def test_names_that_are_not_utf8_are_printed_as_they_are(checkpoint, tmp_path):
    """To a terminal or a file, whose encoding is UTF-8: the bytes are those of the names."""
    small, large = tmp_path / os.fsdecode(b"mod\xe8le"), tmp_path / os.fsdecode(b"gro\xdf")
    shutil.copytree(checkpoint, small)
    words = [sys.executable, "-m", "growkern", "grow", small, large, *map(str, SIZES)]
    done = subprocess.run(words, capture_output=True, env={**os.environ, "PYTHONUTF8": "1"})
    assert done.returncode == 0, done.stderr
    assert b"mod\xe8le" in done.stdout and b"gro\xdf" in done.stdout


def test_names_that_the_output_cannot_encode_do_not_fail_a_growth(checkpoint, tmp_path):
    words = [sys.executable, "-m", "growkern", "grow", checkpoint, tmp_path / "größer"]
    environment = {**os.environ, "PYTHONUTF8": "1", "PYTHONIOENCODING": "ascii"}
    done = subprocess.run([*words, *map(str, SIZES)], capture_output=True, env=environment)
    assert done.returncode == 0, done.stderr
    assert rb"gr\xf6\xdfer" in done.stdout and (tmp_path / "größer" / "config.json").exists()


def test_a_file_without_a_checksum_is_named(run, checkpoint, tmp_path):
    shutil.copytree(checkpoint, tmp_path / "back")
    write_manifest(tmp_path / "back")
    code, out, _ = run("verify", "--checksums", tmp_path / "back")
    assert code == 0 and ": 0 changed" in out and "not covered" not in out
    (tmp_path / "back" / "pytorch_model.bin").write_bytes(b"more")
    code, out, _ = run("verify", "--checksums", tmp_path / "back")
    assert code == 1 and "pytorch_model.bin is not in manifest.json" in out


def test_checksums_of_a_run(run, tmp_path):
    """Files outside of its manifests are named; a manifest that was moved away is a difference."""
    out = tmp_path / "out"
    staged = open_staging(out) / "model"
    staged.mkdir()
    (out / "run.json").write_text("{}")
    (staged / "model.safetensors").write_bytes(b"weights")
    (staged / "trainer_state.json").write_text("{}")
    publish_into(staged, out)
    (out / "runs").mkdir()
    (out / "runs" / "events.out.tfevents.1").touch()
    code, said, _ = run("verify", "--checksums", out)
    assert code == 0 and "3 files: 0 changed" in said
    assert "not covered by checksums: runs/events.out.tfevents.1" in said
    (out / "run.json").write_text("[]")
    code, said, _ = run("verify", "--checksums", out)
    assert code == 1 and "run.json was changed" in said
    (out / "manifest.json").rename(out / "checkpoint-2.json")
    (out / "checkpoint-2").mkdir()
    code, said, _ = run("verify", "--checksums", out)
    assert code == 1 and f"{out}: manifest.json is missing" in said


@pytest.mark.parametrize(
    "error, why",
    [
        (RuntimeError("DataLoader worker (pid(s) 123) exited"), "a data worker was killed"),
        (RuntimeError("[gloo/transport/pair.cc:5] Closed [::1]:5. Look"), "(Closed [::1]:5); last"),
        (DistBackendError("NCCL"), "cannot be reached (NCCL)"),
    ],
)
def test_another_process_that_ended_is_one_line(run, checkpoint, tmp_path, monkeypatch, error, why):
    def killed(*_, **__):
        raise error

    monkeypatch.setattr("growkern.train.run.start.resolve", killed)
    (tmp_path / "small").symlink_to(checkpoint)
    (tmp_path / "text").write_text("a small model grows")
    (tmp_path / "run.toml").write_text(RUN)
    said = run("train", tmp_path / "run.toml")
    assert_bad_input(said, why, f"growkern train {tmp_path}")
