"""Interrupted growth: nothing half done is seen or trusted, and the end is the same to the byte."""

import ctypes
import errno
import json
import os
from pathlib import Path

import pytest
import torch

import growkern
from growkern.growth.disk import stream
from growkern.growth.disk.staging import staging
from growkern.growth.disk.stream import ShardLayout, TargetFile
from growkern.growth.plan import growth_plan, pieces
from growkern.growth.plan.exactness import Finding
from growkern.growth.source import formats
from growkern.growth.source.files import read_headers
from testbed import warm
from testbed.models import LLAMA, random_model
from tests.growth.disk.small_pieces import BYTES, cut_small
from tests.shared import walks

HOW = {"hidden_size": 24, "max_shard_size": "30kB", "progress": False}


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch):
    cut_small(monkeypatch.setattr)


def save_source(directory, model_class="LlamaForCausalLM", **config):
    model = random_model(model_class, LLAMA | config, dtype=torch.float32)
    model.save_pretrained(directory, max_shard_size="8kB")
    (directory / "tokenizer.json").write_text("{}")
    return directory


@pytest.fixture
def source(tmp_path):
    return save_source(tmp_path / "source")


@pytest.fixture
def expected(source, tmp_path):
    growkern.grow_checkpoint(source, tmp_path / "expected", **HOW)
    return snapshot(tmp_path / "expected")


def snapshot(directory):
    return {p.name: p.read_bytes() for p in directory.iterdir()}


def staging_of(target):
    return target.parent / f".{target.name}.growing"


def interrupt(monkeypatch, source, target, *, after, error=KeyboardInterrupt, **how):
    """Grow until `after` pieces are built, then fail with `error`."""
    build, count = stream.build_tensor, []

    def build_until(*args, **kwargs):
        count.append(1)
        if len(count) > after:
            raise error
        return build(*args, **kwargs)

    with monkeypatch.context() as patched:
        patched.setattr(stream, "build_tensor", build_until)
        with pytest.raises((KeyboardInterrupt, growkern.GrowthError)) as raised:
            growkern.grow_checkpoint(source, target, **{**HOW, **how})
    assert not target.exists()
    return raised


# ------------------------------------------------------------------ killed


@pytest.mark.parametrize("kind", ["dense", "mixture"])
def test_killed_at_any_moment_it_ends_the_same(kind, tmp_path):
    """Kills (SIGKILL) spread over the whole run, each followed by a run to the end.

    With more walks, the mixture has 20,000 tensors of experts.
    """
    source, kills = tmp_path / "source", 12 * walks.times
    if kind == "dense":
        save_source(source)
    else:
        layers, experts = (2, 8) if walks.times == 1 else (52, 128)
        sizes = {"num_hidden_layers": layers, "num_experts": experts, "moe_intermediate_size": 4}
        save_source(source, "Qwen3MoeForCausalLM", **sizes, num_experts_per_tok=2)
        kills //= 4
    growkern.grow_checkpoint(source, tmp_path / "expected", **HOW)
    expected = snapshot(tmp_path / "expected")
    arguments = source, tmp_path, kills, walks.start or 0
    done = warm.run("tests.growth.disk.killer", *arguments, limit_s=300 * walks.times)
    assert done.returncode == 0, done.stderr
    rounds = json.loads(done.stdout)
    assert len(rounds) == 1 + kills
    for name, killed, kept in rounds:
        assert snapshot(tmp_path / name) == expected, (name, killed)
        assert kept is not None, name
    assert sum(killed for _, killed, _ in rounds) >= kills // 2
    assert sum(kept > 0 for _, _, kept in rounds) >= kills // 4
    left = {p.name for p in tmp_path.iterdir()} - {name for name, *_ in rounds}
    assert left == {"source", "expected"}


# ------------------------------------------------------------- what is kept


@pytest.mark.parametrize("after", [0, 1, 40])
def test_interrupted_it_goes_on(source, expected, tmp_path, monkeypatch, after):
    target = tmp_path / "grown"
    interrupt(monkeypatch, source, target, after=after)
    assert staging_of(target).exists() == (after > 0)
    built = []
    build = stream.build_tensor
    monkeypatch.setattr(stream, "build_tensor", lambda *a, **k: built.append(1) or build(*a, **k))
    report = growkern.grow_checkpoint(source, target, **HOW)
    assert snapshot(target) == expected
    count = len(pieces.pieces_of(report.plan))
    # what was in other workers' hands at that moment is done again
    assert count - after <= len(built) <= count - after + pieces.MOST_WORKERS
    assert (report.bytes_kept > 0) == (after > 0)
    assert not staging_of(target).exists()


def flip_bits(shard):
    raw = bytearray(shard.read_bytes())
    # from the length of the header on, and in nearly every piece
    raw[5 :: BYTES + 7] = bytes(byte ^ 1 for byte in raw[5 :: BYTES + 7])
    shard.write_bytes(raw)


def cut_short(shard):
    shard.write_bytes(shard.read_bytes()[: shard.stat().st_size // 2])


@pytest.mark.parametrize("damage", [flip_bits, cut_short])
def test_what_lies_there_is_not_trusted(source, expected, tmp_path, monkeypatch, damage):
    target = tmp_path / "grown"
    interrupt(monkeypatch, source, target, after=60)
    marks = len((staging_of(target) / "journal.jsonl").read_text().splitlines())
    assert marks > 40
    damage(min(staging_of(target).glob("new/*.safetensors")))
    (staging_of(target) / "new" / "tokenizer.json").write_text("half")
    growkern.grow_checkpoint(source, target, **HOW)
    assert snapshot(target) == expected


@pytest.mark.parametrize(
    "damage",
    [
        lambda raw: raw[:-7],
        lambda raw: raw + b'["target", "lm_head.weight", 0, 1, ',
        lambda raw: raw + b"\0" * 100,
        lambda raw: raw + b'["target", "lm_head.weight", "0", 1, ""]\n',
        lambda raw: raw + b"[]\n[[[\n",
        lambda raw: raw.split(b"\n", 1)[0],
        lambda raw: b"",
    ],
)
def test_a_torn_journal(source, expected, tmp_path, monkeypatch, damage):
    target = tmp_path / "grown"
    interrupt(monkeypatch, source, target, after=30)
    journal = staging_of(target) / "journal.jsonl"
    journal.write_bytes(damage(journal.read_bytes()))
    interrupt(monkeypatch, source, target, after=30)
    growkern.grow_checkpoint(source, target, **HOW)
    assert snapshot(target) == expected


def test_data_is_on_disk_before_its_mark(source, tmp_path, monkeypatch):
    """Of power failures only the order of calls can be tested."""
    calls, unsynced = [], set()
    write, sync, add = TargetFile.write, TargetFile.sync, stream.Journal.add
    files, layouts = {}, []

    def watch_write(self, data, at):
        write(self, data, at)
        unsynced.add((self, at))

    def watch_sync(self):
        now = {entry for entry in unsynced if entry[0] is self}
        sync(self)
        unsynced.difference_update(now)

    def watch_add(self, marks, sources):
        for name, start, _ in marks:
            header = layouts[0].tensors[name]
            row = header.nbytes // max(1, header.shape[0])
            assert (files[header.file], header.start + start * row) not in unsynced
        calls.append(len(marks))
        add(self, marks, sources)

    open_files = ShardLayout.open

    def watch_open(self, directory, stack):
        files.update(open_files(self, directory, stack))
        layouts.append(self)
        return files

    monkeypatch.setattr(TargetFile, "write", watch_write)
    monkeypatch.setattr(TargetFile, "sync", watch_sync)
    monkeypatch.setattr(stream.Journal, "add", watch_add)
    monkeypatch.setattr(ShardLayout, "open", watch_open)
    growkern.grow_checkpoint(source, tmp_path / "grown", **HOW)
    assert sum(calls) > 50


# ------------------------------------------------------------- what is refused


def touch(source):
    file = min(source.glob("*.safetensors"))
    os.utime(file, ns=(1, 1))


def edit_config(source):
    file = source / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "rms_norm_eps": 5.0}))


@pytest.mark.parametrize(
    "change, message",
    [
        (lambda source: {"seed": 1}, r"in options \(seed: 0, now 1\):"),
        (lambda source: {"num_hidden_layers": 4, "seed": 1}, r"now 1\), sizes .*_layers\):"),
        (lambda source: {"dtype": torch.bfloat16}, "in dtype: float32, now bfloat16:"),
        (lambda source: {"max_shard_size": "1MB"}, "in max_shard_size: 30000, now 1000000:"),
        (lambda source: {"backend": "reference"}, "in backend"),
        (lambda source: touch(source), r"in source \(model-00001\S* \(time of change\)\)"),
        (lambda source: edit_config(source), r"in target config \(rms_norm_eps: .*, now 5.0"),
    ],
)
def test_another_growth_does_not_go_on(source, tmp_path, monkeypatch, change, message):
    target = tmp_path / "grown"
    interrupt(monkeypatch, source, target, after=30)
    how = {**HOW, **(change(source) or {})}
    left = snapshot(staging_of(target) / "new")
    with pytest.raises(growkern.GrowthError, match=message + r".*--no-resume"):
        growkern.grow_checkpoint(source, target, **how)
    assert snapshot(staging_of(target) / "new") == left
    assert growkern.grow_checkpoint(source, target, resume=False, **how).bytes_kept == 0


def test_memory_limit_and_progress_may_change(source, expected, tmp_path, monkeypatch):
    target = tmp_path / "grown"
    interrupt(monkeypatch, source, target, after=30, memory_limit="2GB")
    assert growkern.grow_checkpoint(source, target, **HOW, memory_limit="500MB").bytes_kept > 0
    assert snapshot(target) == expected


def test_another_kind_of_cpu_may_measure_another_bound(source, expected, tmp_path, monkeypatch):
    """Findings describe the result, and decide no byte of the weights."""
    target = tmp_path / "grown"
    interrupt(monkeypatch, source, target, after=30)
    made = growth_plan.findings
    one = Finding("approximate", "the outputs", "measured", bound=1e-3)
    monkeypatch.setattr(growth_plan, "findings", lambda plan: (*made(plan), one))
    report = growkern.grow_checkpoint(source, target, **HOW)
    assert report.bytes_kept > 0 and not report.plan.exact
    found = snapshot(target)
    differ = {name for name in found if found[name] != expected[name]}
    assert differ == {"lineage.json", "checksums.json", "README.md"}


@pytest.fixture
def unstamped(monkeypatch):
    """A file system without times of changes: checksums alone notice them."""
    monkeypatch.setattr(formats.Stamps, "identity", lambda self: {})


def change_unseen(source, name):
    """A bit of one tensor, with size and time of the file as they were."""
    header = read_headers(source)[name]
    file = Path(header.file)
    before, raw = file.stat(), bytearray(file.read_bytes())
    raw[header.start + header.nbytes - 4] ^= 1
    file.write_bytes(raw)
    os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))


@pytest.mark.usefixtures("unstamped")
def test_a_source_changed_unseen_is_noticed_when_it_is_read(source, tmp_path, monkeypatch):
    target = tmp_path / "grown"
    interrupt(monkeypatch, source, target, after=1)
    change_unseen(source, "model.embed_tokens.weight")
    with pytest.raises(growkern.GrowthError, match="has changed since the interrupted run read it"):
        growkern.grow_checkpoint(source, target, **HOW)


@pytest.mark.usefixtures("unstamped")
def test_a_source_changed_unseen_is_noticed_where_all_of_it_was_read(source, tmp_path, monkeypatch):
    """No piece of the first tensor is left to build: nothing else would read it again."""
    target = tmp_path / "grown"
    interrupt(monkeypatch, source, target, after=60)
    lines = (staging_of(target) / "journal.jsonl").read_text().splitlines()
    marks = [json.loads(line) for line in lines[1:]]
    name = marks[0][1]
    assert marks[0][0] == "source" and sum(m[:2] == ["target", name] for m in marks) > 5
    change_unseen(source, name)
    left = snapshot(staging_of(target) / "new")
    with pytest.raises(growkern.GrowthError, match=rf"{name} has changed since .*--no-resume"):
        growkern.grow_checkpoint(source, target, **HOW)
    assert not target.exists() and snapshot(staging_of(target) / "new") == left


def test_strays_are_not_published(source, expected, tmp_path, monkeypatch):
    target = tmp_path / "grown"
    interrupt(monkeypatch, source, target, after=30)
    checkpoint = staging_of(target) / "new"
    (checkpoint / "generation_config.json").write_text("{}")
    (checkpoint / "other.safetensors").write_text("stray")
    (checkpoint / "folder").mkdir()
    (checkpoint / "folder" / "file").write_text("stray")
    (checkpoint / "link").symlink_to(source)
    growkern.grow_checkpoint(source, target, **HOW)
    assert snapshot(target) == expected
    assert (source / "config.json").is_file()


def test_one_run_at_a_time(source, expected, tmp_path):
    target = tmp_path / "grown"
    with (
        staging(target, resume=True),
        pytest.raises(growkern.GrowthError, match=rf"process {os.getpid()} on \S+ is growing it"),
    ):
        growkern.grow_checkpoint(source, target, **HOW)
    growkern.grow_checkpoint(source, target, **HOW)
    assert snapshot(target) == expected


# ------------------------------------------------------------------ the disk


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EIO, errno.EDQUOT])
def test_a_disk_that_fails_midway(source, expected, tmp_path, monkeypatch, code):
    target = tmp_path / "grown"
    pwrite, count = os.pwrite, []

    def failing(*args):
        count.append(1)
        if len(count) > 30:
            raise OSError(code, os.strerror(code))
        return pwrite(*args)

    monkeypatch.setattr(os, "pwrite", failing)
    with pytest.raises(growkern.GrowthError, match=rf"{os.strerror(code)}; finished work is kept"):
        growkern.grow_checkpoint(source, target, **HOW)
    assert not target.exists()
    monkeypatch.undo()
    cut_small(monkeypatch.setattr)
    assert growkern.grow_checkpoint(source, target, **HOW).bytes_kept > 0
    assert snapshot(target) == expected


def test_a_disk_takes_a_write_in_bites(source, expected, tmp_path, monkeypatch):
    pwrite = os.pwrite
    monkeypatch.setattr(os, "pwrite", lambda file, data, at: pwrite(file, data[:101], at))
    growkern.grow_checkpoint(source, tmp_path / "grown", **HOW)
    assert snapshot(tmp_path / "grown") == expected


def test_a_file_system_that_cannot_reserve(source, expected, tmp_path, monkeypatch):
    monkeypatch.setattr(ctypes, "CDLL", lambda *args, **kwargs: object())
    growkern.grow_checkpoint(source, tmp_path / "grown", **HOW)
    assert snapshot(tmp_path / "grown") == expected


def test_places_that_cannot_be_written_to(source, tmp_path):
    for target in (source / "config.json" / "grown", Path("/proc/growkern")):
        with pytest.raises(growkern.GrowthError, match=str(target)):
            growkern.grow_checkpoint(source, target, **HOW)


# ---------------------------------------------------- what counts as on disk


def failing_once(monkeypatch, name, after, condition=lambda *args: True):
    """The call `name` of os fails once, `after` calls that meet the condition; gives the count."""
    call, count = getattr(os, name), []

    def fails(*args):
        count.append(condition(*args))
        if count[-1] and sum(count) == after + 1:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return call(*args)

    monkeypatch.setattr(os, name, fails)
    return count


def is_journal(file, *_):
    return os.readlink(f"/proc/self/fd/{file}").endswith("journal.jsonl")


@pytest.mark.parametrize("name", ["write", "fsync"])
def test_sources_of_rows_are_noted_after_a_failed_append(source, tmp_path, monkeypatch, name):
    """A source that changes unseen between two runs is noticed, whatever the first one lost."""
    target = tmp_path / "grown"
    with monkeypatch.context() as patched:
        failing_once(patched, name, 1, is_journal)
        with pytest.raises(growkern.GrowthError, match="Input/output error"):
            growkern.grow_checkpoint(source, target, **HOW)
    file = staging_of(target) / "journal.jsonl"
    lines = [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []
    sources = {line[1] for line in lines[1:] if line[0] == "source"}
    for line in lines[1:]:
        assert line[0] == "source" or sources, "rows without the source they were made of"
    growkern.grow_checkpoint(source, target, **HOW)
    checksums = json.loads((target / "checksums.json").read_text())
    assert checksums["source"].keys() == read_headers(source).keys()


def marks_in(target):
    lines = (staging_of(target) / "journal.jsonl").read_text().splitlines()[1:]
    return {tuple(mark[1:4]) for mark in map(json.loads, lines) if mark[0] == "target"}


def watch_writes(monkeypatch):
    """(file name, byte) of each write of rows."""
    writes, write = set(), TargetFile.write

    def watched(self, data, at):
        writes.add((os.path.basename(os.readlink(f"/proc/self/fd/{self._cached}")), at))
        write(self, data, at)

    monkeypatch.setattr(TargetFile, "write", watched)
    return writes


@pytest.mark.parametrize("after", [0, 1, 5])
def test_what_a_failed_sync_covered_is_rewritten(source, expected, tmp_path, monkeypatch, after):
    """The page cache still answers for it, and a second sync would succeed: neither is asked."""
    target = tmp_path / "grown"
    with monkeypatch.context() as patched:
        before = watch_writes(patched)
        synced = failing_once(patched, "fdatasync", after)
        with pytest.raises(growkern.GrowthError, match="Input/output error"):
            growkern.grow_checkpoint(source, target, **HOW)
    # nothing was synced after the failure
    assert len(synced) == after + 1
    noted = marks_in(target) if staging_of(target).exists() else set()
    with monkeypatch.context() as patched:
        again = watch_writes(patched)
        growkern.grow_checkpoint(source, target, **HOW)
    assert snapshot(target) == expected
    assert len(before - again) <= len(noted)


def test_rows_repaired_and_lost_again_are_not_trusted(source, expected, tmp_path, monkeypatch):
    """Their old line speaks of the same sum: after the failed sync it must not count any more."""
    target = tmp_path / "grown"
    interrupt(monkeypatch, source, target, after=60)
    for shard in staging_of(target).glob("new/*.safetensors"):
        flip_bits(shard)
    noted = marks_in(target)
    with monkeypatch.context() as patched:
        before = watch_writes(patched)
        failing_once(patched, "fdatasync", 0)
        with pytest.raises(growkern.GrowthError, match="Input/output error"):
            growkern.grow_checkpoint(source, target, **HOW)
    assert before and len(noted) > 40
    with monkeypatch.context() as patched:
        again = watch_writes(patched)
        growkern.grow_checkpoint(source, target, **HOW)
    assert before <= again
    assert snapshot(target) == expected


def test_a_call_that_was_interrupted_is_made_again(source, expected, tmp_path, monkeypatch):
    """EINTR, from the calls that Python does not repeat itself."""
    calls, library = [], ctypes.CDLL(None, use_errno=True)

    class Interrupted:
        def __getattr__(self, name):
            def call(*args):
                calls.append(name)
                if calls.count(name) == 1:
                    ctypes.set_errno(errno.EINTR)
                    return -1
                return getattr(library, name)(*args)

            return call

    monkeypatch.setattr(ctypes, "CDLL", lambda *args, **kwargs: Interrupted())
    growkern.grow_checkpoint(source, tmp_path / "grown", **HOW)
    assert snapshot(tmp_path / "grown") == expected
    assert calls.count("fallocate") > 1 and calls.count("renameat2") == 2
