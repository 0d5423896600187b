"""A directory resumes the run that it holds, and no other one; the error names the difference."""

import os

import pytest
import torch

from growkern import GrowthError, run as train
from growkern.train.dataset import cache as fingerprints
from growkern.train.dataset.cache import MOST_READ, fingerprint
from growkern.train.run.resolve import changes
from testbed.tiny import build
from tests.train.run.test_run import RUN, save_tokenizer, workplace  # noqa: F401

ONE = pytest.mark.parametrize("workplace", ["bert"], indirect=True)


def killed(*_):
    raise KeyboardInterrupt


@pytest.fixture
def begun(workplace, monkeypatch):  # noqa: F811
    """A run that was killed before its first step."""
    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr("growkern.train.run.start._train_from", killed)
        train(workplace / "run.toml", progress=False)
    assert (workplace / "out" / "run.json").is_file()
    monkeypatch.setattr("growkern.train.run.start._train_from", killed)
    return workplace


@ONE
@pytest.mark.parametrize("name", ["model", "teacher"])
def test_other_weights_of_the_same_size(begun, name):
    file = begun / name / "model.safetensors"
    before = file.stat().st_size
    layers, width = (3, 16) if name == "model" else (1, 8)
    build("bert", layers=layers, width=width, seed=7).save_pretrained(begun / name)
    assert file.stat().st_size == before
    with pytest.raises(GrowthError, match=rf"the files of \S*{name} changed\)"):
        train(begun / "run.toml", progress=False)


@ONE
def test_another_tokenizer_of_the_same_name(workplace, monkeypatch):  # noqa: F811
    """The ids of the text would change in the middle of the run."""
    text = RUN.replace('path = "model"', 'path = "model"\ntokenizer = "words"')
    (workplace / "run.toml").write_text(text)
    save_tokenizer(workplace / "words")
    monkeypatch.setattr("growkern.train.run.start._train_from", killed)
    with pytest.raises(KeyboardInterrupt):
        train(workplace / "run.toml", progress=False)
    file = workplace / "words" / "tokenizer.json"
    file.write_text(file.read_text() + " ")
    with pytest.raises(GrowthError, match="the files of words changed"):
        train(workplace / "run.toml", progress=False)


@ONE
def test_what_changes_no_step_may_change(begun):
    text = RUN.replace("eval_every = 3", "eval_every = 2").replace("log_every = 1", "log_every = 3")
    text = text.replace("save_every = 2", 'save_every = 3\nsave_minutes = 5\non_nonfinite = "skip"')
    (begun / "run.toml").write_text(text)
    with pytest.raises(KeyboardInterrupt):
        train(begun / "run.toml", progress=False)
    without = RUN.replace('[inheritance]\nend_step = 4\n[teacher]\npaths = ["teacher"]\n', "")
    (begun / "run.toml").write_text(without.replace("warmup_steps = 2\n", ""))
    with pytest.raises(GrowthError) as refused:
        train(begun / "run.toml", progress=False)
    found = "(training.warmup_steps 2 -> 0; [inheritance] is left out; [teacher] is left out)"
    assert found in str(refused.value)
    assert "\n" not in str(refused.value)


def test_an_old_identity_that_says_nothing():
    assert "another version" in changes({"run": {}, "inputs": {}}, {"run": {}, "inputs": {}})


@pytest.mark.parametrize("size", [MOST_READ, MOST_READ + 1, 5 * MOST_READ + 12345])
def test_a_change_of_any_byte_shows(tmp_path, monkeypatch, size):
    monkeypatch.setenv("GROWKERN_TOKENS", str(tmp_path / "cache"))
    monkeypatch.setattr(fingerprints, "SETTLED", -1.0)
    file = tmp_path / "file"
    contents = bytearray(torch.arange(size, dtype=torch.uint8).numpy().tobytes())
    file.write_bytes(contents)
    before, times = fingerprint(file), file.stat()
    places = torch.randint(size, (6,), generator=torch.Generator().manual_seed(size)).tolist()
    for place in (0, size // 2, size - 1, *places):
        contents[place] ^= 1
        file.write_bytes(contents)
        # a program may set the time back
        os.utime(file, ns=(times.st_atime_ns, times.st_mtime_ns))
        assert fingerprint(file) != before, place
        contents[place] ^= 1
    file.write_bytes(contents)
    assert fingerprint(file) == before
    file.write_bytes(contents + b"x")
    assert fingerprint(file) != before


def test_a_large_file_is_read_once(tmp_path, monkeypatch):
    monkeypatch.setenv("GROWKERN_TOKENS", str(tmp_path / "cache"))
    reads = []

    def count(file, real=fingerprints.checksum):
        reads.append(file)
        return real(file)

    monkeypatch.setattr(fingerprints, "checksum", count)
    file = tmp_path / "file"
    file.write_bytes(bytes(MOST_READ + 1))
    before = fingerprint(file)
    # it was written a moment ago: a second write might leave the times as they are
    assert fingerprint(file) == before and len(reads) == 2
    monkeypatch.setattr(fingerprints, "SETTLED", -1.0)
    assert [fingerprint(file) for _ in range(3)] == [before] * 3 and len(reads) == 3
    (note,) = (tmp_path / "cache" / "checksums").iterdir()
    note.write_bytes(b"x" * 1000)
    assert fingerprint(file) == before and len(reads) == 4
    # where nothing can be noted, the file is read each time
    monkeypatch.setenv("GROWKERN_TOKENS", str(file / "none"))
    assert [fingerprint(file) for _ in range(2)] == [before] * 2 and len(reads) == 6
