"""Optimizer state from file to file: the same as in memory, whole or not there, in a limit."""

import os
import re
import signal
import zipfile
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import transformers

import growkern
from growkern.growth import grow as grow_module
from growkern.growth.disk import checksums
from growkern.growth.optimizer import file as file_module, into
from growkern.growth.optimizer.file import archive_size, check_archive, write_archive
from growkern.publish import workplace
from testbed import warm
from testbed.models import BERT, GPT2, LLAMA, random_model
from testbed.tiny import arguments
from tests.growth.disk.peak import measured

CASES = {
    "GPT2LMHeadModel": (GPT2, {"n_embd": 20, "n_layer": 3, "depth": "identity"}),
    "BertForMaskedLM": (BERT, {"hidden_size": 24, "num_hidden_layers": 3, "method": "aki"}),
    "LlamaForCausalLM": (LLAMA, {"hidden_size": 24, "vocab_size": 60}),
}


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch):
    """A few rows per piece, as of large models."""
    blocks = checksums.row_blocks
    monkeypatch.setattr(file_module, "row_blocks", lambda shape, size, _: blocks(shape, size, 300))


def saved(tmp_path, class_name="GPT2LMHeadModel", sizes=GPT2, dtype=torch.float32, **options):
    """A checkpoint of one model after two steps, as the Trainer leaves it."""
    model = random_model(class_name, sizes, std=0.2, dtype=dtype)
    decays = growkern.decay_groups(model, 0.1)
    optimizer = torch.optim.AdamW(decays, **options)
    rng = torch.Generator().manual_seed(2)
    for _ in range(2):
        for p in model.parameters():
            p.grad = torch.randn(p.shape, generator=rng, dtype=torch.float64).to(dtype)
        optimizer.step()
    model.save_pretrained(tmp_path / "source")
    torch.save(optimizer.state_dict(), tmp_path / "source" / "optimizer.pt")
    return tmp_path / "source"


def grow(source, target, *, optimizer=None, **how):
    if not how.keys() - {"moments"}:
        how["n_embd"] = 20
    return growkern.grow_checkpoint(
        source, target, optimizer=optimizer or source / "optimizer.pt", progress=False, **how
    )


def load(directory):
    return torch.load(directory / "optimizer.pt", weights_only=True)


def assert_same_state(actual, expected):
    assert actual.keys() == expected.keys()
    assert actual["param_groups"] == expected["param_groups"]
    assert actual["state"].keys() == expected["state"].keys() and expected["state"]
    for key, entry in expected["state"].items():
        assert actual["state"][key].keys() == entry.keys()
        for name, x in entry.items():
            y = actual["state"][key][name]
            assert (y.dtype, y.shape, y.stride()) == (x.dtype, x.shape, x.stride())
            assert torch.equal(x, y), (key, name)


# -------------------------------------------------------------- what is written


@pytest.mark.parametrize(
    "class_name, moments",
    [
        *((name, "grow") for name in CASES),
        *(("GPT2LMHeadModel", x) for x in ("old_slices", "reset")),
    ],
)
def test_the_file_holds_what_grow_optimizer_makes(tmp_path, class_name, moments):
    sizes, how = CASES[class_name]
    source = saved(tmp_path, class_name, sizes, amsgrad=class_name == "GPT2LMHeadModel")
    report = grow(source, tmp_path / "grown", moments=moments, **how)
    expected = growkern.grow_optimizer(load(source), report.plan, moments=moments)
    assert_same_state(load(tmp_path / "grown"), expected)
    # on disk as in memory, and mapped too
    mapped = torch.load(tmp_path / "grown" / "optimizer.pt", weights_only=True, mmap=True)
    assert_same_state(mapped, expected)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_moments_keep_their_dtype(tmp_path, dtype):
    source = saved(tmp_path, dtype=torch.float64)
    state = load(source)
    for entry in state["state"].values():
        entry["exp_avg"] = entry["exp_avg"].to(dtype)
    torch.save(state, source / "optimizer.pt")
    report = grow(source, tmp_path / "grown", optimizer=source)
    assert_same_state(load(tmp_path / "grown"), growkern.grow_optimizer(state, report.plan))


def test_the_trainer_resumes_from_it(tmp_path):
    source = saved(tmp_path, "BertForMaskedLM", BERT)
    grow(source, tmp_path / "grown" / "checkpoint-2", hidden_size=24)
    data = [{"input_ids": list(range(3, 12)), "labels": list(range(3, 12))}] * 8
    target = tmp_path / "grown" / "checkpoint-2"
    args = arguments(tmp_path, max_steps=3, per_device_train_batch_size=8, use_cpu=True)
    model = transformers.BertForMaskedLM.from_pretrained(target)
    trainer = transformers.Trainer(model, args, train_dataset=data)
    transformers.TrainerState(global_step=2, max_steps=3, train_batch_size=8).save_to_json(
        str(target / "trainer_state.json")
    )
    trainer.create_optimizer_and_scheduler(3)
    torch.save(trainer.lr_scheduler.state_dict(), target / "scheduler.pt")
    trainer.train(resume_from_checkpoint=str(target))
    steps = {float(entry["step"]) for entry in trainer.optimizer.state.values()}
    assert trainer.state.global_step == 3 and steps == {3.0}


def test_archives_of_any_content_come_back(tmp_path):
    twice = torch.arange(6.0)
    state = {
        "a": [1, 2.5, None, True, "text", (torch.tensor(3), torch.zeros(0, 4))],
        "b": {0: twice, 1: twice, 2: torch.arange(12).reshape(3, 4).T},
        "c": torch.ones(2, dtype=torch.bfloat16),
    }
    write_archive(state, tmp_path / "file", lambda x: [x])
    found = torch.load(tmp_path / "file", weights_only=True)
    assert found["a"][:5] == state["a"][:5]
    assert torch.equal(found["a"][5][0], state["a"][5][0]) and found["a"][5][1].shape == (0, 4)
    assert torch.equal(found["b"][1], twice) and torch.equal(found["b"][2], state["b"][2])
    assert torch.equal(found["c"], state["c"])
    check_archive(tmp_path / "file")
    assert (tmp_path / "file").stat().st_size <= archive_size(state)
    with pytest.raises(growkern.GrowthError, match="complex64"):
        write_archive({"a": torch.ones(1, dtype=torch.complex64)}, tmp_path / "file", list)


@pytest.mark.parametrize("is_large", [False, True])
def test_every_record_is_aligned_and_summed(tmp_path, monkeypatch, is_large):
    """Also with the longer header that records of more than 4 GB have."""
    if is_large:
        record = file_module._record
        monkeypatch.setattr(file_module, "_record", lambda *a: (record(*a[:2], 1 << 31)[0], True))
    state = {n: torch.full((n,), float(n)) for n in range(1, 40)}
    write_archive(state, tmp_path / "file", lambda x: [x])
    with zipfile.ZipFile(tmp_path / "file") as archive:
        assert archive.testzip() is None
        raw = (tmp_path / "file").read_bytes()
        for info in archive.infolist():
            if "/data/" in info.filename:
                at = info.header_offset
                names, extra = (
                    int.from_bytes(raw[at + i : at + i + 2], "little") for i in (26, 28)
                )
                assert (at + 30 + names + extra) % 64 == 0
                assert info.compress_type == zipfile.ZIP_STORED
    for mmap in (False, True):
        found = torch.load(tmp_path / "file", weights_only=True, mmap=mmap)
        assert all(torch.equal(found[n], x) for n, x in state.items())


# ------------------------------------------------------------------- interrupted


def test_killed_while_it_is_written_the_same_line_goes_on(tmp_path):
    source, target = saved(tmp_path), tmp_path / "grown"
    command = ["grow", source, target, "--n-embd", "20", "--optimizer", source / "optimizer.pt"]
    done = warm.run("tests.growth.optimizer.killed", *command)
    assert done.returncode == -signal.SIGKILL, done.stderr
    staging = tmp_path / ".grown.growing"
    assert not target.exists()
    assert (staging / "new" / "optimizer.pt").stat().st_size > 0
    done = warm.run("growkern", *command)
    assert done.returncode == 0, done.stderr
    assert "of it by an earlier run" in done.stdout
    assert not staging.exists()
    report = grow(source, tmp_path / "expected")
    assert_same_state(load(target), growkern.grow_optimizer(load(source), report.plan))
    names = {p.name for p in target.iterdir()}
    assert names == {p.name for p in (tmp_path / "expected").iterdir()}


def test_half_a_file_of_a_killed_run_is_not_published(tmp_path, monkeypatch):
    """Neither where the next run has no optimizer."""
    source, target = saved(tmp_path), tmp_path / "grown"

    def interrupted(*args, **kwargs):
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(file_module, "grow_moment", interrupted)
        with pytest.raises(KeyboardInterrupt):
            grow(source, target)
    assert (tmp_path / ".grown.growing" / "new" / "optimizer.pt").exists()
    growkern.grow_checkpoint(source, target, n_embd=20, progress=False)
    assert "optimizer.pt" not in {p.name for p in target.iterdir()}


def test_it_is_on_disk_before_it_is_seen(tmp_path, monkeypatch):
    source, target, synced = saved(tmp_path), tmp_path / "grown", []
    fsync, rename = os.fsync, workplace.rename_new

    def watch_rename(*names):
        assert any(name.endswith("new/optimizer.pt") for name in synced)
        synced.append("renamed")
        rename(*names)

    def watch_fsync(file):
        synced.append(os.readlink(f"/proc/self/fd/{file}"))
        fsync(file)

    monkeypatch.setattr(workplace, "rename_new", watch_rename)
    monkeypatch.setattr(os, "fsync", watch_fsync)
    grow(source, target)
    assert "renamed" in synced


def test_a_full_disk_is_seen_before_any_work(tmp_path, monkeypatch):
    source, asked = saved(tmp_path), []
    monkeypatch.setattr(grow_module, "check_space", lambda target, size: asked.append(size))
    growkern.grow_checkpoint(source, tmp_path / "weights", n_embd=20, progress=False)
    grow(source, tmp_path / "grown")
    more = asked[1] - asked[0]
    size = (tmp_path / "grown" / "optimizer.pt").stat().st_size
    assert size <= more <= size + 70_000


# -------------------------------------------------------------------- memory


def test_memory_stays_within_its_limit(tmp_path):
    """By the system's own account, with a state of twelve times that."""
    config = transformers.GPT2Config(n_embd=512, n_layer=2, n_head=8, vocab_size=60_000)
    model = transformers.GPT2LMHeadModel(config)
    optimizer = torch.optim.AdamW(model.parameters())
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    optimizer.step()
    model.save_pretrained(tmp_path / "source")
    torch.save(optimizer.state_dict(), tmp_path / "source" / "optimizer.pt")
    places = tmp_path / "source", tmp_path / "grown", "90MB", tmp_path / "source" / "optimizer.pt"
    peak = measured(*places, n_embd=1024, n_layer=3)
    assert (tmp_path / "grown" / "optimizer.pt").stat().st_size > 780e6
    assert peak < 90


def test_too_small_a_limit_names_the_least(tmp_path, monkeypatch):
    source = saved(tmp_path)
    monkeypatch.setattr(file_module, "FIXED_BYTES", 2 << 30)
    with pytest.raises(growkern.GrowthError, match=r"limit=1073.*MB.* optimizer .*at least 2148MB"):
        grow(source, tmp_path / "grown")
    assert {p.name for p in tmp_path.iterdir()} == {"source"}


# ----------------------------------------------------------------- refusals


# transformer.h.0.attn.c_proj.weight, the fourth that decays
NUMBER = 3


def spoil(key, value):
    def change(state):
        state["state"][NUMBER][key] = (
            value(state["state"][NUMBER][key]) if callable(value) else value
        )

    return change


def with_value(value):
    def change(x):
        x.view(-1)[-1] = value
        return x

    return change


def without(key):
    return lambda state: state["state"][NUMBER].pop(key)


SPOILT = [
    (lambda state: state.update(state=[]), "'state' is a list"),
    (lambda state: state.update(param_groups=None), "'param_groups' is a NoneType"),
    (lambda state: state.update(param_groups=[1]), 'group 0 has no "params"'),
    (lambda s: s["param_groups"][0].update(params=3), "group 0: 'params' must be a list, all int"),
    (lambda s: s["param_groups"][0].update(params=[0, "a"]), "'params' must be a list, all int or"),
    (lambda s: s["param_groups"][1].update(param_names=[[1]]), "'param_names' must be a list"),
    (lambda state: state["state"].update({NUMBER: [1]}), "attn.c_proj.weight: .* is a list, not a"),
    (spoil("step", "two"), "c_proj.weight: its step count is a str"),
    (spoil("step", -5), "step count is -5, expected a number of 0 or more"),
    (spoil("step", torch.ones(2)), r"step count is \[1.0, 1.0\]"),
    (spoil("step", float("nan")), "step count is nan"),
    (spoil("growth_step", "two"), "step count is a str"),
    (spoil("exp_avg", [1.0]), "c_proj.weight: exp_avg is a list, expected a tensor"),
    (spoil("exp_avg", lambda x: x.long()), "exp_avg is torch.int64; growth handles torch.float32"),
    (spoil("exp_avg", lambda x: x[1:]), "exp_avg has shape .*, but the parameter"),
    (without("exp_avg"), "c_proj.weight: no exp_avg in"),
    (without("exp_avg_sq"), "no exp_avg_sq in"),
    (spoil("exp_avg", with_value(float("nan"))), "c_proj.weight: exp_avg holds NaN or Inf:"),
    (spoil("exp_avg_sq", with_value(float("inf"))), "exp_avg_sq holds NaN or Inf"),
    (spoil("exp_avg_sq", with_value(-1.0)), "c_proj.weight: exp_avg_sq holds a negative mean"),
]


@pytest.mark.parametrize("spoilt, message", SPOILT, ids=[message for _, message in SPOILT])
def test_states_that_are_none_are_refused(tmp_path, spoilt, message):
    source = saved(tmp_path)
    state = load(source)
    spoilt(state)
    torch.save(state, source / "optimizer.pt")
    plan = growkern.plan(source, n_embd=20)
    with pytest.raises(growkern.GrowthError, match=message):
        grow(source, tmp_path / "grown")
    with pytest.raises(growkern.GrowthError, match=message):
        growkern.grow_optimizer(state, plan)
    target = growkern.grow(source, n_embd=20)
    with pytest.raises(growkern.GrowthError, match=message):
        growkern.grow_optimizer_into(target, torch.optim.AdamW(target.parameters()), source)
    assert {p.name for p in tmp_path.iterdir()} == {"source"}


def test_what_is_no_state_dict_is_refused(tmp_path):
    plan = growkern.plan(saved(tmp_path), n_embd=20)
    for given in ([], None, 3, {"state": {}}):
        with pytest.raises(growkern.GrowthError, match=r"pass optimizer\.state_dict"):
            growkern.grow_optimizer(given, plan)


def test_nan_can_be_left_behind(tmp_path):
    source = saved(tmp_path)
    state = load(source)
    state["state"][NUMBER]["exp_avg"].fill_(float("nan"))
    torch.save(state, source / "optimizer.pt")
    grow(source, tmp_path / "grown", moments="reset")
    assert not any(e["exp_avg"].any() for e in load(tmp_path / "grown")["state"].values())


def test_flipped_bits_are_seen(tmp_path):
    source = saved(tmp_path)
    file = source / "optimizer.pt"
    raw = file.read_bytes()
    with zipfile.ZipFile(file) as archive:
        infos = [i for i in archive.infolist() if "/data/" in i.filename and i.file_size > 64]
    for info in infos[::7]:
        at = raw.index(info.filename.encode()) + 64 + info.file_size // 2
        file.write_bytes(raw[:at] + bytes([raw[at] ^ 1]) + raw[at + 1 :])
        with pytest.raises(growkern.GrowthError, match=f"damaged: the bytes of {info.filename}"):
            grow(source, tmp_path / "grown")
    file.write_bytes(raw)
    grow(source, tmp_path / "grown")


def test_records_that_claim_to_be_compressed_are_refused(tmp_path):
    source = saved(tmp_path)
    raw = bytearray((source / "optimizer.pt").read_bytes())
    for at in [found.start() for found in re.finditer(b"PK\x01\x02", raw)][::7]:
        # the compression method of an entry of the central directory
        spoilt = raw[: at + 10] + b"\x08" + raw[at + 11 :]
        (source / "optimizer.pt").write_bytes(spoilt)
        with pytest.raises(growkern.GrowthError, match=r"optimizer\.pt"):
            grow(source, tmp_path / "grown")


def test_compressed_archives_are_called_that(tmp_path):
    """PyTorch reads them; mapped, their bytes would be taken for numbers."""
    source = saved(tmp_path)
    file = source / "optimizer.pt"
    with zipfile.ZipFile(file) as archive:
        records = {name: archive.read(name) for name in archive.namelist()}
    with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, data in records.items():
            archive.writestr(name, data)
    assert load(source)["state"]
    with pytest.raises(growkern.GrowthError, match=r"records are compressed.*save it again"):
        grow(source, tmp_path / "grown")


def test_every_byte_of_the_grown_state_is_summed(tmp_path):
    source = saved(tmp_path)
    grow(source, tmp_path / "grown")
    assert checksums.verify_checksums(tmp_path / "grown", source).ok
    file = tmp_path / "grown" / "optimizer.pt"
    whole = bytearray(file.read_bytes())
    whole[len(whole) // 2] ^= 1
    file.write_bytes(whole)
    (wrong,) = checksums.verify_checksums(tmp_path / "grown", source).wrong
    assert str(file) in wrong
    file.unlink()
    (wrong,) = checksums.verify_checksums(tmp_path / "grown", source).wrong
    assert "optimizer.pt is missing" in wrong


@pytest.mark.parametrize("key", ["exp_avg", "step"])
@pytest.mark.parametrize(
    "spoil",
    [lambda x: x.to("meta"), lambda x: x.reshape(x.shape or (1,)).to_sparse()],
    ids=["meta", "sparse"],
)
def test_states_without_numbers_in_memory_are_refused(tmp_path, spoil, key):
    source = saved(tmp_path)
    state = load(source)
    state["state"][0][key] = spoil(state["state"][0][key])
    plan = growkern.plan(source, n_embd=24)
    with pytest.raises(growkern.GrowthError, match=r"meta device|sparse|in memory"):
        growkern.grow_optimizer(state, plan)


def test_archives_without_sums_are_taken(tmp_path):
    source = saved(tmp_path)
    state = load(source)
    torch.serialization.set_crc32_options(False)
    try:
        torch.save(state, source / "optimizer.pt")
    finally:
        torch.serialization.set_crc32_options(True)
    report = grow(source, tmp_path / "grown")
    assert_same_state(load(tmp_path / "grown"), growkern.grow_optimizer(state, report.plan))


def test_files_that_cannot_be_streamed_are_refused(tmp_path, monkeypatch):
    source = saved(tmp_path)
    state = load(source)
    torch.save(state, source / "old.pt", _use_new_zipfile_serialization=False)
    with pytest.raises(growkern.GrowthError, match=r"old\.pt: cannot be streamed: .*save it again"):
        grow(source, tmp_path / "grown", optimizer=source / "old.pt")
    with monkeypatch.context() as patched:
        patched.setattr(file_module, "sys", SimpleNamespace(byteorder="big"))
        write_archive(state, source / "optimizer.pt", list)
    with pytest.raises(growkern.GrowthError, match="another byte order"):
        grow(source, tmp_path / "grown")


def mapped_bytes(file):
    """How much of a file is in the memory of this process."""
    found, is_file = 0, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if re.match(r"[0-9a-f]+-[0-9a-f]+ ", line):
            is_file = line.endswith(str(file))
        elif is_file and line.startswith("Rss:"):
            found += int(line.split()[1]) * 1024
    return found


def test_growth_into_an_optimizer_keeps_no_pages_of_the_file(tmp_path, monkeypatch):
    source = random_model("GPT2LMHeadModel", {**GPT2, "n_embd": 120, "n_layer": 6})
    optimizer, file = torch.optim.AdamW(source.named_parameters()), tmp_path / "optimizer.pt"
    for p in source.parameters():
        p.grad = torch.ones_like(p)
    optimizer.step()
    torch.save(optimizer.state_dict(), file)
    target, seen, make = growkern.grow(source, n_embd=240), [], into._part_of_entry

    def watched(*arguments):
        entry = make(*arguments)
        seen.append(mapped_bytes(file))
        return entry

    monkeypatch.setattr(into, "_part_of_entry", watched)
    growkern.grow_optimizer_into(target, torch.optim.AdamW(target.parameters()), file)
    assert 0 < max(seen) < file.stat().st_size / 4
