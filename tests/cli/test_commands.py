"""The command line: exit codes, one-line errors, and the main job from end to end."""

import importlib.util
import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import time
from importlib import metadata
from pathlib import Path

import pytest
import torch
import transformers
import typer
from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

import growkern
from growkern import package
from growkern.cli.commands import GROUPS, app, collect
from growkern.cli.growing import LISTED, growth_options
from growkern.cli.main import main
from growkern.growth.options import GrowthKeywords
from growkern.publish.manifest import write_manifest
from growkern.train.distributed.shard import join_processes
from growkern.train.model import language_model
from testbed import warm
from testbed.families import T5
from testbed.models import BERT, GPT2, LLAMA, random_model

WORDS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "a", "small", "model", "grows"]


@pytest.fixture
def run(monkeypatch, capsys):
    """Runs `growkern ARGUMENTS` here; returns exit code, stdout and stderr."""

    def call(*arguments: object) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["growkern", *map(str, arguments)])
        with pytest.raises(SystemExit) as stopped:
            main()
        out, err = capsys.readouterr()
        return int(stopped.value.code or 0), out, err

    return call


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory) -> Path:
    """A tiny BERT with its tokenizer, every parameter random."""
    directory = tmp_path_factory.mktemp("cli") / "small"
    sizes = {**BERT, "vocab_size": len(WORDS)}
    model = random_model("BertForMaskedLM", sizes, dtype=torch.float32)
    model.save_pretrained(directory)
    vocabulary = {word: i for i, word in enumerate(WORDS)}
    transformers.BertTokenizer(vocab=vocabulary).save_pretrained(directory)
    return directory


def assert_bad_input(result: tuple[int, str, str], *words: str) -> None:
    code, out, err = result
    assert (code, out) == (2, ""), err
    assert err.startswith("growkern: ")
    assert err.count("\n") == 1
    for word in words:
        assert word in err


# ------------------------------------------------------------------ help and usage


def test_help_names_every_command(run):
    _, said, _ = run("--help")
    page = (Path(growkern.__file__).parents[1] / "docs" / "commands.md").read_text()
    place = 0
    for group, names in GROUPS.items():
        assert f"{group}:" in page
        place = said.index(f" {group} ", place)
        for name in names:
            place = said.index(f" {name} ", place)


def test_version_and_help():
    assert warm.run("growkern", "--version").stdout == f"growkern {growkern.__version__}\n"
    alone = warm.run("growkern")
    assert (alone.returncode, alone.stderr) == (2, "") and "Usage: growkern" in alone.stdout


def test_a_table_of_ones_own_is_checked_and_gives_its_sizes(run, checkpoint, tmp_path, monkeypatch):
    table = tmp_path / "own.toml"
    table.write_text('extends = "bert"\nmodel_type = "bert"\n[config]\nffn = "inner_units"\n')
    code, out, _ = run("family", "draft", checkpoint, "--table", table, "--json")
    assert code == 1
    assert json.loads(out)["faults"][0].startswith("config.ffn: a bert has no field 'inner_units'")
    for given in (["--family", str(table)], [f"--family={table}"]):
        monkeypatch.setattr(sys, "argv", ["growkern", "plan", "small", *given])
        assert "inner_units" in [name for name, _, _ in growth_options()]
    table.write_text('extends = "bret"\nmodel_type = "bert"\n')
    assert "extends: 'bret'; did you mean 'bert'?" in run("plan", "a", "--family", table)[2]
    table.write_text('extends = "bert"\nmodel_typo = "bert"\nstacks = 3\n')
    code, _, err = run("family", "draft", checkpoint, "--table", table)
    assert code == 2
    assert err.splitlines() == [
        f"growkern: {table}: unknown key 'model_typo'; did you mean 'model_type'?",
        f"growkern: {table}.stacks: 3 must be a table, such as {{ key = value }}",
    ]


def test_help_is_short_and_a_shell_completes_the_sizes_of_all_families(run, monkeypatch):
    code, out, _ = run("plan", "--help")
    assert code == 0
    for option in ("--hidden-size", "--num-key-value-heads", "--to", "--family", "--n-embd"):
        assert option in out
    # those that few families have are options that help does not list
    assert "--n-layer" not in out and LISTED.keys() < GrowthKeywords.__annotations__.keys()
    code, _, err = run("plan", "nowhere", "--n-layer", 8)
    assert code == 2 and "nowhere" in err
    monkeypatch.setenv("_GROWKERN_COMPLETE", "complete_bash")
    monkeypatch.setenv("COMP_WORDS", "growkern plan --n-la")
    monkeypatch.setenv("COMP_CWORD", "2")
    script = Path(sys.executable).with_name("growkern")
    done = subprocess.run([script], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["--n-layer", "--n-layers"]


def test_no_warning_of_another_library_stands_before_the_line(tmp_path):
    """Transformers warns of ids beyond a small vocabulary as soon as it reads the config."""
    source, target = tmp_path / "small", tmp_path / "large"
    random_model("GPT2LMHeadModel", GPT2).save_pretrained(source, max_shard_size="20KB")
    next(source.glob("model-00002-*")).unlink()
    command = [sys.executable, "-m", "growkern", "grow", str(source), str(target), "--n-embd=24"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert_bad_input((done.returncode, done.stdout, done.stderr), "model-00002-", "missing")
    assert [path.name for path in tmp_path.iterdir()] == ["small"]


def _exhaust_python():
    raise MemoryError


def _exhaust_torch():
    torch.empty(2**50, dtype=torch.uint8)


@pytest.mark.parametrize("exhaust", [_exhaust_python, _exhaust_torch])
def test_a_lack_of_memory_is_one_line(run, checkpoint, monkeypatch, exhaust):
    monkeypatch.setattr("growkern.cli.main._run", lambda _: exhaust())
    assert_bad_input(run("plan", checkpoint), "growkern: out of memory")


def test_debug_shows_where_an_error_came_from(run, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["growkern", "plan", "not-there", "--debug"])
    with pytest.raises((ValueError, OSError), match="not-there"):
        main()


def test_torchrun_repeats_the_line_of_an_error(run, monkeypatch, tmp_path):
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / "error.json"))
    _, _, line = run("train", "no.toml")
    failure = ProcessFailure(0, 1, 2, str(tmp_path / "error.json"))
    assert failure.message["extraInfo"]["py_callstack"] == line.strip() and "no.toml" in line


def test_of_several_processes_the_first_tells_of_a_wrong_file(run, monkeypatch):
    waits = []
    monkeypatch.setattr(time, "sleep", waits.append)
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        assert_bad_input(run("train", "no.toml"), "no.toml")
        monkeypatch.setenv("LOCAL_RANK", "0")
        assert_bad_input(run("train", "no.toml"), "no.toml")
        assert not waits
        # what this one alone has found it tells later
        monkeypatch.setenv("LOCAL_RANK", "1")
        assert_bad_input(run("train", "no.toml"), "no.toml")
        assert len(waits) == 1
        # as torchrun does when the first has ended
        monkeypatch.setattr(time, "sleep", lambda _: os.kill(os.getpid(), signal.SIGTERM))
        assert run("train", "no.toml") == (2, "", "")
        # with a group each has work of its own
        monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
        assert_bad_input(run("train", "no.toml"), "no.toml")
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


# ------------------------------------------------------------------ cache-teacher


def test_cache_teacher_writes_what_training_reads(run, checkpoint, tmp_path):
    from growkern import TeacherCache
    from growkern.train.dataset.training_data import pack_text
    from growkern.train.objectives.language_modeling import MaskedLMCollator

    for name in "ab":
        (tmp_path / f"{name}.txt").write_text(" ".join(["a small model grows"] * 40))
    texts, out = [tmp_path / "a.txt", tmp_path / "b.txt"], tmp_path / "cache"
    options = ["--out", out, "--k", 4, "--temperature", 2, "--sequence-length", 8, "--seed", 3]
    code, printed, _ = run("cache-teacher", checkpoint, *texts, *options, "--epochs", 2)
    assert code == 0 and "bytes/token" in printed and str(out) in printed

    tokenizer = transformers.AutoTokenizer.from_pretrained(checkpoint)
    blocks = pack_text(texts, tokenizer, 8)
    collator = MaskedLMCollator(tokenizer, 0.15, 3)
    cache = TeacherCache(out)
    assert len(cache) == 2 * len(blocks) and cache.header.temperature == 2.0
    for epoch in range(2):
        collator.set_epoch(epoch)
        ids, _ = cache.batch(collator([blocks[i] for i in range(len(blocks))]))
        assert ids.shape[-1] == 4 and (ids != 0).any()
    assert_bad_input(run("cache-teacher", checkpoint, *texts, *options), str(out), "exists")


def test_checksums_of_a_teacher_cache(run, checkpoint, tmp_path):
    text, cache = tmp_path / "a.txt", tmp_path / "cache"
    text.write_text("a small model grows " * 40)
    options = ["--k", 4, "--temperature", 2, "--sequence-length", 8]
    assert run("cache-teacher", checkpoint, text, "--out", cache, *options)[0] == 0
    code, out, err = run("verify", cache, "--checksums")
    assert code == 0 and "3 files: 0 changed" in out, out + err
    for name in ("cache.json", "index.safetensors", "rows-00000.safetensors"):
        raw = bytearray((cache / name).read_bytes())
        raw[-1] ^= 1
        (cache / name).write_bytes(raw)
        code, out, _ = run("verify", cache, "--checksums")
        assert code == 1 and "1 changed" in out and f"{cache}: {name} was changed" in out
        raw[-1] ^= 1
        (cache / name).write_bytes(raw)
    (cache / "rows-00001.safetensors").write_bytes(b"")
    code, out, _ = run("verify", cache, "--checksums")
    assert code == 1 and "rows-00001.safetensors is not in manifest.json" in out
    (cache / "manifest.json").unlink()
    assert_bad_input(run("verify", cache, "--checksums"), str(cache), "no checksums were recorded")
    assert_bad_input(run("verify", cache), "no DST")


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (["--dtype", "flaot16"], ["did you mean 'float16'"]),
        (["--rows", "label"], ["did you mean 'labels'"]),
        (["--epochs", 0], ["epochs is 0"]),
        ([], ["c exists"]),
        (["--overwrite"], ["c exists", "other is no file of a teacher cache"]),
    ],
    ids=str,
)
def test_nothing_is_read_for_a_refused_cache(run, checkpoint, tmp_path, monkeypatch, change, words):
    (tmp_path / "c").mkdir()
    for empty in (tmp_path / "c" / "other", tmp_path / "a.txt"):
        empty.touch()
    for name in ("load_language_model", "load_tokenizer"):
        monkeypatch.setattr(language_model, name, None)
    options = ["--out", tmp_path / "c", "--k", 2, "--temperature", 1, "--sequence-length", 8]
    result = run("cache-teacher", checkpoint, tmp_path / "a.txt", *options, *change)
    assert_bad_input(result, *words)


# ------------------------------------------------------------------ eval


def test_a_gpu_build_of_pytorch_without_a_gpu(run, checkpoint, tmp_path, monkeypatch):
    """It names the device that it was built for, unless it is asked what is there."""

    def current(check_available=False):
        return None if check_available else torch.device("cuda")

    with monkeypatch.context() as patch:
        patch.setattr(torch.accelerator, "current_accelerator", current)
        (tmp_path / "text").write_text("a small model grows " * 40)
        options = ["--text", tmp_path / "text", "--sequence-length", 8, "--cache", tmp_path]
        code, _, err = run("eval", checkpoint, *options)
        assert code == 0, err
        patch.setattr(torch.distributed, "is_initialized", lambda: True)
        assert join_processes() == "cpu"


def test_eval_prints_the_loss_as_table_and_as_json(run, checkpoint, tmp_path):
    for name in "ab":
        (tmp_path / f"{name}.txt").write_text("a small model grows " * 40)
    options = ["--sequence-length", 8, "--cache", tmp_path / "cache", "--seed", 3]
    # a shell puts all files of a pattern behind one --text
    files = ["--text", tmp_path / "a.txt", tmp_path / "b.txt"]
    code, table, _ = run("eval", checkpoint, *files, *options)
    assert code == 0 and "masked-LM loss" in table and "perplexity" not in table
    code, out, _ = run("eval", checkpoint, *files, *options, "--json")
    found = json.loads(out)
    assert code == 0 and found["low"] < found["loss"] < found["high"]
    assert f"{found['loss']:.4f}" in table
    again = run("eval", checkpoint, "--text", tmp_path / "[ab].txt", *options, "--json")
    assert json.loads(again[1]) == found
    how = {"text": files[1:], "cache": str(tmp_path / "cache"), "progress": False}
    expected = growkern.evaluate(checkpoint, seed=3, sequence_length=8, **how)
    assert expected.to_dict() == found


def test_options_of_an_evaluation_come_from_a_file(run, checkpoint, tmp_path):
    for name, words in (("a", "small model "), ("b", "grows a ")):
        (tmp_path / f"{name}.txt").write_text(words * 30)
    file = tmp_path / "how.toml"
    file.write_text(
        f"[evaluate]\nmodel = {json.dumps(str(checkpoint))}\ntext = ['a.txt', 'b.txt']\n"
        f"sequence_length = 8\nseed = 3\n"
        f"cache = {json.dumps(str(tmp_path / 'cache'))}"
    )
    code, out, err = run("eval", file, "--json")
    assert code == 0, err
    files = [tmp_path / "a.txt", tmp_path / "b.txt"]
    given = ["--text", *files, "--cache", tmp_path / "cache"]
    expected = run("eval", checkpoint, *given, "--sequence-length", 8, "--seed", 3, "--json")
    assert json.loads(out) == json.loads(expected[1])
    refused = run("eval", file, "--seed", 4)
    assert_bad_input(refused, f"seed is given beside {file}")


# ------------------------------------------------------------------ plan, grow, verify


SIZES = ["--hidden-size", 24, "--num-hidden-layers", 3, "--depth", "identity"]


def test_plan_as_table_and_as_json(run, checkpoint):
    code, out, err = run("plan", checkpoint, *SIZES)
    assert code == 0, err
    assert out.startswith("exact: ") and "24" in out
    assert run("plan", checkpoint, *SIZES, "--vocab-size", 99)[1].startswith("approximate: ")
    assert "in short" not in out and "layers from" not in out
    assert "layers from: 0 0* 1" in run("plan", checkpoint, *SIZES, "--verbose")[1]
    code, out, err = run("plan", checkpoint, *SIZES, "--identity-gain", 1e-8, "--json")
    assert code == 0, err
    assert json.loads(out)["exact"] is True and json.loads(out)["estimate"]["flops"] is None
    tokens = ["--tokens", "1e4", "--source-tokens", "1e3"]
    code, out, err = run("plan", checkpoint, *SIZES, "--json", *tokens)
    assert code == 0, err
    plan, found = growkern.plan(checkpoint, hidden_size=24, num_hidden_layers=3), json.loads(out)
    expected = plan.estimate(1, 1e4, 1e3)
    assert found["estimate"] == expected
    assert found["measurements"] == list(plan.measurements())
    assert found["advice"] == list(plan.advice())
    half = json.loads(run("plan", checkpoint, *SIZES, "--dtype", "bfloat16", "--json")[1])
    assert 2 * half["estimate"]["disk_bytes"] == expected["disk_bytes"]
    assert found["verdict"] == list(plan.verdict(1e4))
    code, out, err = run("plan", checkpoint, *SIZES, *tokens)
    assert code == 0 and "in short, at" in out, err


def test_grow_then_verify(run, checkpoint, tmp_path):
    target, text = tmp_path / "large", tmp_path / "text"
    text.write_text("a small model grows\n" * 20)
    code, out, err = run("grow", checkpoint, target, *SIZES)
    assert (code, err) == (0, "")
    assert str(target) in out
    assert transformers.AutoConfig.from_pretrained(target).hidden_size == 24
    code, out, err = run("verify", checkpoint, target, "--text", text)
    assert code == 0, out + err
    assert "source loss" in out and "grown loss" in out
    code, out, err = run("grow", checkpoint, target, *SIZES, "--overwrite", "--text", text)
    assert code == 0, out + err
    assert "grown loss" in out
    again = ["--overwrite", "--text", text, "--json"]
    code, out, err = run("grow", checkpoint, target, *SIZES, *again)
    grown, checked = json.loads(out), json.loads(run("verify", checkpoint, target, "--json")[1])
    assert code == 0 and grown["directory"] == str(target) and grown["bytes_written"] > 0, err
    assert grown["verified"]["ok"] and "grown loss" in grown["verified"]["outputs"]
    assert checked["ok"] and checked["plan"] == grown["plan"]


def test_checksums_find_a_flipped_bit(run, checkpoint, tmp_path):
    target = tmp_path / "large"
    assert_bad_input(run("grow", checkpoint, target, *SIZES, "--memory-limit", "1MB"), "at least")
    assert_bad_input(run("grow", checkpoint, target, *SIZES, "--memory-limit", "much"), "512MB")
    code, _, err = run("grow", checkpoint, target, *SIZES, "--memory-limit", "100MB")
    assert code == 0, err
    code, out, err = run("verify", checkpoint, target, "--checksums")
    assert code == 0 and "0 changed" in out, out + err
    assert "source tensors" in out
    code, out, err = run("verify", target, "--checksums")
    assert code == 0 and "target tensors" in out and "source" not in out, out + err
    file = target / "model.safetensors"
    raw = bytearray(file.read_bytes())
    raw[-1] ^= 1
    file.write_bytes(raw)
    code, out, _ = run("verify", checkpoint, target, "--checksums")
    assert code == 1 and "1 changed" in out and str(file) in out
    code, out, _ = run("verify", checkpoint, target, "--checksums", "--json")
    assert code == 1 and str(file) in json.loads(out)["changed"][0]
    code, out, _ = run("verify", checkpoint, target, "--json")
    assert code == 1 and json.loads(out)["ok"] is False


def test_the_printed_command_checks_the_result(run, checkpoint, tmp_path):
    """As it stands, whatever the names of the directories."""
    source, target = tmp_path / "my small", tmp_path / "it's large"
    shutil.copytree(checkpoint, source)
    code, out, err = run("grow", source, target, *SIZES)
    assert code == 0, err
    command = out.splitlines()[-1].removeprefix("check the result with: growkern ")
    assert run(*shlex.split(command))[0] == 0


def test_checksums_need_a_source_that_is_there(run, checkpoint, tmp_path):
    large, back = tmp_path / "large", tmp_path / "back"
    assert run("grow", checkpoint, large, *SIZES)[0] == 0
    shutil.copytree(checkpoint, back)
    write_manifest(back)
    for place in (large, back):
        missing = run("verify", tmp_path / "gone", place, "--checksums")
        assert_bad_input(missing, f"{tmp_path / 'gone'}: no such directory", f"{place} alone")
        on_hub = run("verify", "acme/gone", place, "--checksums")
        assert_bad_input(on_hub, "acme/gone is no directory", "Hub")
        one = run("verify", place, "--checksums", "--revision", "main")
        assert_bad_input(one, "--revision has no effect")
    other = run("verify", large, back, "--checksums")
    assert_bad_input(other, "SRC has no effect", f"{back} alone")
    revision = run("verify", checkpoint, large, "--checksums", "--revision", "main")
    assert_bad_input(revision, "is for models on the Hub")
    for places in ((checkpoint, tmp_path / "gone"), (tmp_path / "gone",)):
        assert_bad_input(run("verify", *places, "--checksums"), "gone: no such directory")


@pytest.mark.parametrize(
    "class_name, sizes, width",
    [
        ("T5ForConditionalGeneration", T5, ["--d-model", 24]),
        ("LlamaForCausalLM", LLAMA, ["--hidden-size", 24]),
        ("RobertaForMaskedLM", {**BERT, "pad_token_id": 0}, ["--hidden-size", 24]),
    ],
)
def test_text_is_compared_whatever_the_positions(run, tmp_path, class_name, sizes, width):
    """Relative positions have no end, RoBERTa's begin after the padding's."""
    source, target, text = tmp_path / "small", tmp_path / "large", tmp_path / "text"
    model = random_model(class_name, {**sizes, "vocab_size": len(WORDS)}, dtype=torch.float32)
    model.save_pretrained(source)
    vocabulary = {word: i for i, word in enumerate(WORDS)}
    transformers.BertTokenizer(vocab=vocabulary).save_pretrained(source)
    text.write_text("a small model grows\n" * 200)
    code, out, err = run("grow", source, target, *width, "--text", text)
    assert code == 0, err
    assert "grown loss" in out and "passed: the same function" in out
    assert run("verify", source, target, "--text", text)[0] == 0


def test_grow_takes_the_optimizer_along(run, checkpoint, tmp_path):
    model = transformers.BertForMaskedLM.from_pretrained(checkpoint)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.25)
    model(input_ids=torch.tensor([[5, 6, 7]])).logits.sum().backward()
    optimizer.step()
    file, target = tmp_path / "optimizer.pt", tmp_path / "large"
    torch.save(optimizer.state_dict(), file)
    code, out, err = run("grow", checkpoint, target, *SIZES, "--optimizer", file)
    assert (code, err) == (0, "")
    assert "moments" in out
    state = torch.load(target / "optimizer.pt", weights_only=True)
    grown = transformers.BertForMaskedLM.from_pretrained(target)
    new = torch.optim.AdamW(grown.parameters())
    new.load_state_dict(state)
    assert new.param_groups[0]["lr"] == 0.25
    assert all(new.state[p]["exp_avg"].shape == p.shape for p in grown.parameters())


def test_optimizers_that_do_not_fit_stop_everything(run, checkpoint, tmp_path):
    target, file = tmp_path / "large", tmp_path / "optimizer.pt"

    def grow(*more):
        return run("grow", checkpoint, target, *SIZES, "--optimizer", file, *more)

    assert_bad_input(grow(), "optimizer.pt", "does not exist")
    file.write_bytes(b"no pickle")
    assert_bad_input(grow(), "optimizer.pt", "not a file of optimizer state")
    torch.save({"state": Path("anything")}, file)
    assert_bad_input(grow(), "optimizer.pt", "never unpickled")
    torch.save([1], file)
    assert_bad_input(grow(), "holds a list")
    torch.save({"state": {}, "param_groups": []}, file)
    assert_bad_input(grow("--moments", "all"), "moments='all'")
    assert_bad_input(grow(), "0 groups")
    assert not target.exists()


# ------------------------------------------------------------------ train


RUN = """
[model]
path = "small"
[data]
train = ["text"]
sequence_length = 8
[training]
steps = 2
batch_size = 2
[two_stage]
layers_per_block = 1
stage1_steps = 1
[output]
directory = "out"
tensorboard = false
"""


def test_train_from_a_file(run, checkpoint, tmp_path, monkeypatch):
    (tmp_path / "small").symlink_to(checkpoint)
    (tmp_path / "text").write_text("a small model grows\n" * 40)
    file = tmp_path / "run.toml"
    file.write_text(RUN)
    code, out, err = run("train", file)
    assert code == 0, err
    assert "2 steps" in out
    transformers.BertForMaskedLM.from_pretrained(tmp_path / "out")
    assert "finished" in run("train", file)[1]
    if importlib.util.find_spec("matplotlib"):
        picture = tmp_path / "out" / "loss_vs_flops.png"
        out = run("plot", tmp_path / "out", "--json")[1]
        assert json.loads(out)["out"] == str(picture)
        (row,) = json.loads(out)["runs"]
        assert row["run"] == "out" and row["saved_size"] is None
        # nothing was measured before the first step
        assert row["start_loss"] is None and row["flops"][0] >= 0
        assert picture.read_bytes().startswith(b"\x89PNG")
        assert_bad_input(run("plot", tmp_path / "text"), "text")
        # it has no validation set
        assert "no validation loss" in run("plot", tmp_path / "out", "--out", picture)[2]
    file.write_text(RUN.replace("batch_size", "batchsize"))
    assert_bad_input(run("train", file), "'batchsize'", "'batch_size'")
    file.write_text(RUN.replace("false", "true"))
    monkeypatch.setitem(sys.modules, "tensorboard", None)
    assert_bad_input(run("train", file), "TensorBoard is not installed")
    # by default it is no need
    file.write_text(RUN.replace("tensorboard = false\n", "").replace('"out"', '"bare"'))
    code, _, err = run("train", file)
    assert code == 0, err
    assert not list((tmp_path / "bare").glob("runs/*/events*"))


# ------------------------------------------------------------------ info


def test_info_says_what_is_live_and_why(run):
    code, out, _ = run("info", "--json")
    facts = json.loads(out)
    assert code == 0
    assert facts["versions"]["torch"] == metadata.version("torch")
    reference = facts["backends"][0]
    assert reference["name"] == "reference" and reference["live"]
    assert all(backend["reason"] for backend in facts["backends"])
    printed = run("info")[1]
    assert "backend triton" in printed
    assert "live: " in printed, "colours are no part of the text"


def test_info_knows_a_source_tree_that_is_not_installed(monkeypatch):
    real = metadata.version

    def version_of(package):
        if package == "growkern":
            raise metadata.PackageNotFoundError(package)
        return real(package)

    monkeypatch.setattr(metadata, "version", version_of)
    said = collect()["versions"]["growkern"]
    folder = Path(growkern.__file__).parent
    assert said == f"{package.version()}, not installed: runs from {folder}"


@pytest.mark.parametrize(
    "option, start, found",
    [
        ("--depth", "st", ["stack"]),
        ("--method", "", ["fpi", "fresh", "aki", "direct_copy", "random"]),
        ("--scheme", "p", ["paper"]),
        ("--symmetry", "no", ["noise", "none"]),
        ("--maps", "b", ["balanced"]),
        ("--aki", "eq", ["eq16"]),
        ("--dtype", "b", ["bfloat16"]),
    ],
)
def test_a_shell_completes_values(option, start, found):
    command = typer.main.get_command(app).commands["grow"]
    context = command.context_class(command)
    parameter = next(one for one in command.get_params(context) if option in one.opts)
    assert [item.value for item in parameter.shell_complete(context, start)] == found
