"""An export publishes a model's own files alone, and records their checksums."""

import shutil

import pytest
import torch

import growkern
from growkern.errors import GrowthError, GrowthWarning
from growkern.publish.manifest import differences, write_manifest
from growkern.train.model.language_model import load_language_model
from growkern.train.safety.export import export
from testbed.tiny import build
from tests.train.run.test_run import save_tokenizer


@pytest.fixture
def checkpoint(tmp_path):
    path = tmp_path / "run" / "checkpoint-2"
    build("llama", layers=1, width=8).save_pretrained(path)
    save_tokenizer(path)
    for name in ("trainer_state.json", "scheduler.pt", "training_args.bin", "rng_state.pth"):
        (path / name).write_bytes(b"{}")
    write_manifest(path)
    return path


def test_the_files_of_the_model_alone(checkpoint, tmp_path):
    (tmp_path / "secret").write_text("of somebody else")
    (checkpoint / "vocab.txt").symlink_to(tmp_path / "secret")
    (checkpoint / "added.py").write_text("not of the checkpoint")
    (checkpoint / "tokenizer.json").chmod(0o4755)
    with pytest.warns(UserWarning, match="outside of the checkpoint"):
        export(checkpoint.parent, tmp_path / "model")
    names = {path.name for path in (tmp_path / "model").iterdir()}
    model = {"config.json", "generation_config.json", "model.safetensors", "manifest.json"}
    assert names == model | {"tokenizer.json", "tokenizer_config.json"}
    assert (tmp_path / "model" / "tokenizer.json").stat().st_mode & 0o7111 == 0
    state = load_language_model(tmp_path / "model").state_dict()
    expected = load_language_model(checkpoint).state_dict()
    assert all(torch.equal(state[name], tensor) for name, tensor in expected.items())


def test_the_card_says_that_the_model_was_trained_since(tmp_path):
    build("gpt2", layers=1).save_pretrained(tmp_path / "small")
    checkpoint = tmp_path / "run" / "checkpoint-7"
    growkern.grow_checkpoint(tmp_path / "small", checkpoint, n_embd=32, progress=False)
    (checkpoint / "trainer_state.json").write_text("{}")
    write_manifest(checkpoint)
    export(checkpoint.parent, tmp_path / "model")
    card = (tmp_path / "model" / "README.md").read_text()
    assert "was grown from small, and trained until step 7 of its run.\n" in card
    # no directory has that name where the model lies now
    assert "growkern grow SOURCE TARGET --n-embd 32" in card


def test_its_checksums_find_a_changed_byte(checkpoint, tmp_path, capsys):
    capsys.readouterr()
    export(checkpoint.parent, tmp_path / "model")
    # no bar where stderr is no terminal
    assert capsys.readouterr().err == ""
    found = differences(tmp_path / "model")
    assert (found.checked, found.wrong, found.uncovered) == ({"files": 5}, (), ())
    data = bytearray((tmp_path / "model" / "model.safetensors").read_bytes())
    data[-1] ^= 1
    (tmp_path / "model" / "model.safetensors").write_bytes(data)
    assert len(differences(tmp_path / "model").wrong) == 1


def test_that_an_older_checkpoint_is_exported_is_said(checkpoint, tmp_path):
    later = shutil.copytree(checkpoint, checkpoint.with_name("checkpoint-4"))
    with (later / "model.safetensors").open("r+b") as file:
        file.truncate(100)
    said = r"checkpoint-4 is damaged \(model.safetensors has 100 of \d+ bytes\): exporting .*-2$"
    with pytest.warns(GrowthWarning, match=said):
        assert export(checkpoint.parent, tmp_path / "model") == checkpoint


@pytest.mark.parametrize("dtype", ["int8", "bool", "os", "float8_e4m3fn"])
def test_dtypes_that_are_none_are_refused(checkpoint, tmp_path, dtype):
    with pytest.raises(GrowthError, match="dtype is"):
        export(checkpoint.parent, tmp_path / "model", dtype=dtype)
    assert [path.name for path in tmp_path.iterdir()] == ["run"]


def test_a_run_of_generations_names_its_last(tmp_path):
    for number in (9, 10):
        (tmp_path / f"generation-{number}").mkdir()
    with pytest.raises(GrowthError, match="generation-10"):
        export(tmp_path, tmp_path / "model")
