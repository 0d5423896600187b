"""Inputs that change while they are read: nothing is published, and one line names the file."""

import json
import os
import shutil

import pytest
import torch
import torch.distributed.checkpoint as dcp

import growkern
import growkern.growth.grow as grow_module
from growkern import GrowthError
from growkern.files import checksum
from growkern.growth.disk.stream import Stream
from growkern.growth.optimizer import file as optimizer_file
from growkern.growth.source import loading
from growkern.train.model.language_model import load_language_model
from testbed.models import LLAMA, random_model

HOW = {"num_hidden_layers": 4, "progress": False}


@pytest.fixture
def source(tmp_path):
    """A checkpoint with a tokenizer, chat templates and an optimizer, all of some size."""
    model = random_model("LlamaForCausalLM", LLAMA, dtype=torch.float32)
    model.save_pretrained(tmp_path / "source")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    model(torch.arange(8)[None], labels=torch.arange(8)[None]).loss.backward()
    optimizer.step()
    torch.save(optimizer.state_dict(), tmp_path / "optimizer.pt")
    for name in ("tokenizer.json", "tokenizer_config.json", "additional_chat_templates/tool.jinja"):
        (tmp_path / "source" / name).parent.mkdir(exist_ok=True)
        (tmp_path / "source" / name).write_text(json.dumps({"of": name}))
    return tmp_path / "source"


def during(monkeypatch, change, owner=Stream, name="run"):
    """Call `change` when a step of the work has ended."""
    step = getattr(owner, name)

    def changed(*args, **options):
        found = step(*args, **options)
        change()
        return found

    monkeypatch.setattr(owner, name, changed)


def rewrite(file, at=-8):
    """Other bytes of the same number, with the time of the last modification as it was."""
    before = file.stat()
    data = bytearray(file.read_bytes())
    data[at] ^= 1
    file.write_bytes(data)
    os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))


def replace(file):
    """Other bytes in another file, as programs write that never leave half a file."""
    shutil.copy2(file, file.with_suffix(".new"))
    rewrite(file.with_suffix(".new"))
    file.with_suffix(".new").rename(file)


def cut(file):
    os.truncate(file, file.stat().st_size // 2)


CHANGES = {"rewrite": rewrite, "replace": replace, "cut": cut, "delete": os.unlink}
FILES = ["tokenizer.json", "tokenizer_config.json", "additional_chat_templates/tool.jinja"]
FILES += ["config.json", "generation_config.json", "model.safetensors"]


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("name", FILES)
def test_a_source_file_that_changes_is_not_published(source, tmp_path, monkeypatch, name, change):
    during(monkeypatch, lambda: CHANGES[change](source / name))
    with pytest.raises(GrowthError) as refused:
        growkern.grow_checkpoint(source, tmp_path / "large", **HOW)
    assert name.partition(".")[0] in str(refused.value) and "\n" not in str(refused.value)
    assert not (tmp_path / "large").exists()


def test_a_file_that_comes_to_the_source_is_not_published(source, tmp_path, monkeypatch):
    during(monkeypatch, lambda: (source / "spiece.model").write_text("new"))
    with pytest.raises(GrowthError, match=r"spiece\.model was changed while it was read"):
        growkern.grow_checkpoint(source, tmp_path / "large", **HOW)
    assert not (tmp_path / "large").exists()


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("step", ["check", "weights", "piece"])
def test_an_optimizer_that_changes_is_not_grown(source, tmp_path, monkeypatch, change, step):
    """A file that is cut would end the process, as it is mapped."""
    file = tmp_path / "optimizer.pt"
    owner, name = {
        "check": (optimizer_file, "state_by_name"),
        "weights": (Stream, "run"),
        "piece": (optimizer_file, "release_pages"),
    }[step]
    calls = iter([*[None] * (200 if step == "piece" else 0), file])

    def once():
        if (found := next(calls, None)) is not None:
            CHANGES[change](found)

    if step == "check" and change == "cut":
        # the values are looked at next
        owner, name = optimizer_file, "archive_size"
    during(monkeypatch, once, owner, name)
    with pytest.raises(GrowthError, match=r"optimizer\.pt was changed while it was read"):
        growkern.grow_checkpoint(source, tmp_path / "large", optimizer=file, **HOW)
    assert not (tmp_path / "large").exists()


def test_the_data_of_a_distributed_source_counts_too(source, tmp_path, monkeypatch):
    model = random_model("LlamaForCausalLM", LLAMA, dtype=torch.float32)
    dcp.save(model.state_dict(), checkpoint_id=str(tmp_path / "dcp" / "weights"), no_dist=True)
    shutil.copy(source / "config.json", tmp_path / "dcp")
    (data,) = (tmp_path / "dcp" / "weights").glob("*.distcp")
    during(monkeypatch, lambda: rewrite(data, data.stat().st_size // 2))
    # every piece has a checksum of its own
    with pytest.raises(GrowthError, match="is damaged, as its checksum differs"):
        growkern.grow_checkpoint(tmp_path / "dcp" / "weights", tmp_path / "large", **HOW)


def test_in_memory_nothing_is_returned(source, monkeypatch):
    during(monkeypatch, lambda: rewrite(source / "model.safetensors"), grow_module, "_build_all")
    with pytest.raises(GrowthError, match=r"model\.safetensors was changed while it was read"):
        growkern.grow(source, num_hidden_layers=4)


def test_a_model_that_is_grown_in_place_is_refused(source, monkeypatch):
    import growkern.growth.sharded as into

    model = growkern.grow(source, num_hidden_layers=4)
    during(monkeypatch, lambda: rewrite(source / "model.safetensors"), into, "_fill")
    with pytest.raises(GrowthError, match=r"model\.safetensors was changed while it was read"):
        growkern.grow_into(model, source)


def test_an_optimizer_that_is_grown_in_place_is_refused(source, tmp_path, monkeypatch):
    import growkern.growth.optimizer.into as into

    model = growkern.grow(source, num_hidden_layers=4)
    adam = torch.optim.AdamW(model.parameters())
    during(monkeypatch, lambda: rewrite(tmp_path / "optimizer.pt"), into, "_part_of_entry")
    with pytest.raises(GrowthError, match=r"optimizer\.pt was changed while it was read"):
        growkern.grow_optimizer_into(model, adam, tmp_path / "optimizer.pt")
    assert not adam.state


def test_a_model_that_changes_while_it_is_loaded_is_refused(source, monkeypatch):
    during(monkeypatch, lambda: rewrite(source / "model.safetensors"), loading, "_own_memory")
    with pytest.raises(GrowthError, match=r"model\.safetensors was changed while it was read"):
        load_language_model(source)


def test_the_checksums_are_those_of_what_was_read(source, tmp_path, monkeypatch):
    """A copy that the disk changed is found, also if it did so before the record was written."""
    expected = {name: checksum(source / name) for name in FILES[:3]}
    during(
        monkeypatch,
        lambda: rewrite(next(tmp_path.glob(".large.growing/new/tokenizer.json"))),
        grow_module,
        "write_modules",
    )
    growkern.grow_checkpoint(source, tmp_path / "large", **HOW)
    recorded = json.loads((tmp_path / "large" / "checksums.json").read_text())["files"]
    assert {name: recorded[name] for name in expected} == expected
    assert checksum(tmp_path / "large" / "tokenizer.json") != expected["tokenizer.json"]


@pytest.mark.parametrize("name", ["model.safetensors", "tokenizer.json"])
def test_after_a_kill_a_source_with_time_set_back_is_refused(source, tmp_path, monkeypatch, name):
    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        during(patched, lambda: os.kill(os.getpid(), 2), grow_module, "write_modules")
        growkern.grow_checkpoint(source, tmp_path / "large", **HOW)
    rewrite(source / name)
    message = {
        "model.safetensors": r"model\.safetensors: \S+ has changed since the interrupted run",
        "tokenizer.json": r"differs in input \(tokenizer\.json\)",
    }[name]
    with pytest.raises(GrowthError, match=f"{message}.*--no-resume"):
        growkern.grow_checkpoint(source, tmp_path / "large", **HOW)
    growkern.grow_checkpoint(source, tmp_path / "large", resume=False, **HOW)


def link(file):
    """As `cp -al` makes them: the time of the last change is a new one."""
    os.link(file, file.parent.parent / f"linked-{file.name}")


def copy_again(file):
    """As a backup restores it."""
    shutil.copy2(file, file.with_suffix(".new"))
    file.with_suffix(".new").rename(file)


def foreign(source):
    """What nobody reads: a card, another program's weights, the state of a training, notes."""
    (source / "README.md").write_text("edited")
    (source / "pytorch_model.bin").unlink()
    (source / "optimizer.pt").write_text("rewritten")
    (source / "notes.txt").write_text("new")
    (source / "checkpoint-3").mkdir()
    (source / "checkpoint-3" / "model.safetensors").write_text("new")
    (source / "runs").mkdir()
    (source / ".lock").touch()


HARMLESS = {
    "foreign": foreign,
    **{
        f"{how.__name__}-{name}": lambda source, how=how, name=name: how(source / name)
        for how in (link, copy_again, lambda file: file.chmod(0o640))
        for name in ("model.safetensors", "tokenizer.json", "config.json")
    },
}


@pytest.fixture
def crowded(source):
    for name in ("README.md", "pytorch_model.bin", "optimizer.pt"):
        (source / name).write_text("old")
    return source


@pytest.mark.parametrize("how", HARMLESS)
def test_what_is_not_read_and_what_keeps_its_bytes_may_change(crowded, tmp_path, monkeypatch, how):
    """A run may go on in a folder of the source, and a backup may link its files."""
    growkern.grow_checkpoint(crowded, tmp_path / "expected", **HOW)
    during(monkeypatch, lambda: HARMLESS[how](crowded))
    growkern.grow_checkpoint(crowded, tmp_path / "large", **HOW)
    assert sums_of(tmp_path / "large") == sums_of(tmp_path / "expected")


@pytest.mark.parametrize("how", HARMLESS)
def test_after_a_kill_they_may_change_too(crowded, tmp_path, monkeypatch, how):
    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        during(patched, lambda: os.kill(os.getpid(), 2), grow_module, "write_modules")
        growkern.grow_checkpoint(crowded, tmp_path / "large", **HOW)
    HARMLESS[how](crowded)
    assert growkern.grow_checkpoint(crowded, tmp_path / "large", **HOW).bytes_kept > 0


def sums_of(directory):
    """Nothing is copied that came while the growth went on."""
    return json.loads((directory / "checksums.json").read_text())


def test_weights_with_a_new_link_are_compared(source, tmp_path, monkeypatch):
    """Size and time are as before: only the bytes tell."""

    def change():
        link(source / "model.safetensors")
        rewrite(source / "model.safetensors")

    during(monkeypatch, change)
    with pytest.raises(GrowthError, match=r"model\.safetensors was changed while it was read"):
        growkern.grow_checkpoint(source, tmp_path / "large", **HOW)
