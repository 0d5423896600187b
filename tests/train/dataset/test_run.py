"""Runs on data sets: one run file with records, weights of tokens, streams, and [trainer]."""

import dataclasses
import json
import re
import shutil
import typing

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import TrainingArguments

from growkern import GrowthError, run as train
from growkern.errors import GrowthWarning
from growkern.train.run import start as module
from growkern.train.run.arguments import OWNED, REFUSED, checked_arguments, reports_of
from growkern.train.run.file import OutputSection, Run
from growkern.train.safety.signals import Terminated
from testbed.forked_ranks import on_ranks
from testbed.tiny import build
from tests.train.dataset import data
from tests.train.dataset.data import texts, write_jsonl
from tests.train.distributed import run_ranks
from tests.train.run.test_run import save_tokenizer

# a run on records of a .jsonl file, each with a "text" and a "quality"
RUN = """
[model]
path = "model"

[data]
train = ["part*.jsonl"]
validation = ["held_out.jsonl"]
text_column = "text"
sequence_length = 16
cache = "tokens"

[loss]
row_weights = "quality"

[training]
steps = 6
batch_size = 4
log_every = 1
eval_every = 3
learning_rate = 1e-2

[trainer]
adam_beta2 = 0.95
lr_scheduler_kwargs = { num_cycles = 1 }

[output]
directory = "out"
report_to = "none"
"""
PLAIN = RUN.replace("lr_scheduler_kwargs = { num_cycles = 1 }\n", "")
TAUGHT = '[teacher]\npaths = ["teacher"]\n[inheritance]\nend_step = 4\n'
GROWN = PLAIN.replace(
    '[model]\npath = "model"\n', f'[growth]\nsource = "model"\nnum_hidden_layers = 4\n{TAUGHT}'
)
STREAM = PLAIN.replace("cache =", "streaming = true\nshuffle_window = 20\ncache =")


@pytest.fixture
def workplace(tmp_path):
    build("gpt2", layers=2).save_pretrained(tmp_path / "model")
    save_tokenizer(tmp_path / "model")
    for i in range(3):
        records = [{"text": text, "quality": j % 3} for j, text in enumerate(texts(40, seed=i))]
        write_jsonl(tmp_path / f"part{i}.jsonl", records)
    write_jsonl(tmp_path / "held_out.jsonl", [{"text": text} for text in texts(20, seed=9)])
    return tmp_path


def write(folder, text, name="run.toml", **changes):
    for old, new in changes.items():
        text = text.replace(f'{old} = "out"', f'{old} = "{new}"')
    (folder / name).write_text(text)
    return folder / name


def history(directory):
    lines = json.loads((directory / "trainer_state.json").read_text())["log_history"]
    keys = ("loss", "eval_loss", "label_loss", "epoch", "step")
    return [{key: line[key] for key in keys if key in line} for line in lines]


def weights(directory):
    return load_file(directory / "model.safetensors")


def assert_same(one, other):
    assert history(one) == history(other)
    for name, value in weights(one).items():
        assert torch.equal(value, weights(other)[name]), name


def test_a_run_on_records(workplace, capsys):
    file = write(workplace, PLAIN)
    assert train(file).global_step == 6
    said = capsys.readouterr().out
    assert "trainer    adam_beta2 = 0.95" in said
    assert re.search(r"data       \d+ rows, [\d.]+ k tokens in .*tokens.*; \d+ rows for", said)
    assert sum("eval_loss" in line for line in history(workplace / "out")) == 3
    # one for training, one for the evaluation, which has no weights
    columns = sorted(
        sorted(path.name for path in one.glob("*.bin")) for one in workplace.glob("tokens/[!.]*")
    )
    rows = ["input_ids.bin", "starts.bin"]
    assert columns == [rows, [*rows, "weights.bin"]]
    with pytest.raises(GrowthError, match=r"another run \(trainer.adam_beta2 0.95 -> 0.9\)"):
        train(write(workplace, PLAIN.replace("0.95", "0.9")), progress=False)
    write_jsonl(workplace / "part1.jsonl", [{"text": "w1", "quality": 1}])
    with pytest.raises(GrowthError, match=r"the files of data.train changed"):
        train(write(workplace, PLAIN), progress=False)


def test_weights_of_records_weigh_the_loss(workplace, monkeypatch):
    """Against the cross-entropy of the logits, weighted row by row."""
    found = []

    def compute(self, model, inputs, *args, inner=module.TwoStageTrainer.compute_loss, **options):
        batch = {name: x.clone() for name, x in inputs.items() if isinstance(x, torch.Tensor)}
        with torch.no_grad():
            logits = model(input_ids=batch["input_ids"]).logits[:, :-1].double()
        labels, scale = batch["labels"][:, 1:], batch["quality"][:, 1:].double()
        losses = torch.nn.functional.cross_entropy(
            logits.flatten(0, 1), labels.flatten(), reduction="none"
        )
        if model.training:
            found.append(float((losses * scale.flatten()).sum() / labels.numel()))
        return inner(self, model, inputs, *args, **options)

    monkeypatch.setattr(module.TwoStageTrainer, "compute_loss", compute)
    train(write(workplace, PLAIN), progress=False)
    logged = [line["loss"] for line in history(workplace / "out") if "loss" in line]
    np.testing.assert_allclose(logged, found, rtol=1e-5)
    assert len({round(x, 3) for x in found}) > 1


# -------------------------------------------------------------------- streams


def stop_after(monkeypatch, step):
    build_trainer, stopping = run_ranks.stopped_after(step)
    monkeypatch.setattr(module, "build_trainer", stopping)
    return build_trainer


def test_places_and_sections_that_do_not_fit(workplace):
    cached = '[inheritance]\nend_step = 4\n[teacher]\ncache = "kept"\n[output]'
    with pytest.raises(GrowthError, match="a teacher cache needs rows that repeat"):
        train(write(workplace, STREAM.replace("[output]", cached)), progress=False)
    inside = PLAIN.replace('cache = "tokens"', 'cache = "out/tokens"')
    with pytest.raises(GrowthError, match=r"output.directory .* contains .*tokens, which the run"):
        train(write(workplace, inside), progress=False)
    (workplace / "held_out.jsonl").rename(workplace / "model" / "held_out.jsonl")
    inside = PLAIN.replace("held_out", "model/held_out").replace('"out"', '"model"')
    with pytest.raises(GrowthError, match=r"output.directory .* contains"):
        train(write(workplace, inside), progress=False)


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("accumulation", [1, 2])
def test_a_stopped_stream_ends_as_one_that_was_not(workplace, workers, accumulation, monkeypatch):
    more = f"data_workers = {workers}\naccumulation = {accumulation}\nlog_every"
    text = STREAM.replace("log_every", more)
    straight = write(workplace, text, "straight.toml", directory="straight")
    stopped = write(workplace, text, "stopped.toml", directory="stopped")
    train(straight, progress=False)
    with monkeypatch.context() as patched, pytest.raises(Terminated):
        stop_after(patched, 3)
        train(stopped, progress=False)
    assert train(stopped, progress=False).global_step == 6
    assert_same(workplace / "straight", workplace / "stopped")


def test_a_masked_model_masks_each_pass_anew(workplace):
    """All rows of a pass are the same here, and so are their masks."""
    build("bert", layers=2).save_pretrained(workplace / "model")
    save_tokenizer(workplace / "model")
    write_jsonl(workplace / "part0.jsonl", [{"text": "w1 " * 200, "quality": 1}])
    for i in (1, 2):
        (workplace / f"part{i}.jsonl").unlink()
    text = STREAM.replace("learning_rate = 1e-2", "learning_rate = 0.0").replace("= 20", "= 0")
    train(write(workplace, text), progress=False)
    losses = [line["loss"] for line in history(workplace / "out") if "loss" in line]
    # of 13 rows: three batches, then one with rows of both passes
    assert losses[0] == losses[1] == losses[2] != losses[4] == losses[5]


def test_data_workers_order_a_stream(workplace):
    train(write(workplace, PLAIN.replace("steps = 6", "steps = 1")), progress=False)
    more = PLAIN.replace("steps = 6", "steps = 1\ndata_workers = 2")
    train(write(workplace, more), progress=False)
    shutil.rmtree(workplace / "out")
    train(write(workplace, STREAM), progress=False)
    with pytest.raises(GrowthError, match=r"another run \(training.data_workers 0 -> 2\)"):
        changed = STREAM.replace("steps = 6", "steps = 6\ndata_workers = 2")
        train(write(workplace, changed), progress=False)


def test_two_processes(workplace):
    """A stopped stream, a whole one, a cached run, one that grows and has a teacher, and data that
    the first process refuses.
    """
    script, stream = [["stopped.toml", 3]], STREAM.replace("window = 20", "window = 5")
    for name, text in (("straight", stream), ("stopped", stream), ("cached", PLAIN)):
        write(workplace, text, f"{name}.toml", directory=name)
        script.append([f"{name}.toml", None])
    write(workplace, PLAIN.replace('"text"', '"txt"'), "refused.toml", directory="refused")
    build("gpt2", layers=1).save_pretrained(workplace / "teacher")
    save_tokenizer(workplace / "teacher")
    write(workplace, GROWN, "grown.toml", directory="grown")
    (workplace / "script.json").write_text(json.dumps(script))
    on_ranks(2, data.__name__, workplace)
    assert_same(workplace / "straight", workplace / "stopped")
    states = [
        json.loads((workplace / "straight" / "checkpoint-6" / f"stream_{rank}.json").read_text())
        for rank in (0, 1)
    ]
    assert [state["batches"] for state in states] == [6, 6]
    assert states[0]["last"] != states[1]["last"]
    # one process reads the inputs, and the model of a finished run
    first, second = (json.loads((workplace / f"opened-{rank}.json").read_text()) for rank in (0, 1))
    assert all(first["cached"][name] for name in ("part0.jsonl", "model/model.safetensors"))
    assert first["cached"]["cached/model.safetensors"] and not any(second["cached"].values())
    # small text is hashed for the run and for its tokens; each process loads the weights itself
    both = [f"{name}/model.safetensors" for name in ("model", "teacher")]
    text = ["held_out.jsonl", *(f"part{i}.jsonl" for i in range(3))]
    for read, files, times in ((first, text + both, 2), (second, both, 1)):
        assert {k: n for k, n in read["grown"].items() if n} == dict.fromkeys(files, times)
    # the two processes tokenised once, and trained as one
    assert len([*workplace.glob("tokens/[!.]*")]) == 2
    train(write(workplace, PLAIN, "one.toml", directory="one"), progress=False)
    assert len([*workplace.glob("tokens/[!.]*")]) == 2
    for two, one in zip(history(workplace / "cached"), history(workplace / "one"), strict=True):
        assert two == pytest.approx(one, rel=1e-4)
    said = [(workplace / f"refused-{rank}").read_text() for rank in (0, 1)]
    assert said[0] == said[1] and "no column 'txt'" in said[0]
    assert not (workplace / "refused").exists()
    # on one process: as if it had been killed after the stop
    for name in ("model.safetensors", "manifest.json"):
        (workplace / "stopped" / name).unlink()
    shutil.rmtree(workplace / "stopped" / "checkpoint-6")
    with pytest.warns(GrowthWarning, match=r"saved by 2 processes .* so a new pass begins"):
        assert train(workplace / "stopped.toml", progress=False).global_step == 6


# --------------------------------------------------------- [trainer], report_to


@pytest.mark.parametrize(
    ("table", "match"),
    [
        ({"adam_beta3": 0.9}, r"\[trainer\] has no key 'adam_beta3'; did you mean 'adam_beta"),
        ({"zzzz": 1}, r"no key 'zzzz'; see transformers.TrainingArguments"),
        ({"max_steps": 3}, r"trainer.max_steps is set by training.steps"),
        ({"learning_rate": 1.0}, "set by training.learning_rate"),
        ({"fsdp": "full_shard"}, "set by distributed.sharding"),
        ({"save_only_model": True}, "trainer.save_only_model cannot be given"),
        ({"adam_beta1": "high"}, r"adam_beta1 is 'high' \(str\): it must be float"),
        ({"adam_beta1": True}, r"adam_beta1 is True \(bool\): it must be float"),
        ({"ddp_timeout": 1.5}, r"ddp_timeout is 1.5 \(float\): it must be int"),
        ({"optim": "adamw_tuch"}, "trainer.optim is 'adamw_tuch'; did you mean 'adamw_torch'"),
        ({"optim": 5}, r"optim is 5 \(int\): it must be a name, such as 'adamw_torch'$"),
        (
            {"gradient_checkpointing_kwargs": {"use_reentrant": True}},
            "set by distributed.activation_checkpointing",
        ),
        ({"label_names": "labels"}, r"label_names is 'labels' \(str\): it must be list"),
        ({"full_determinism": 1}, "must be bool"),
    ],
)
def test_arguments_that_cannot_be_passed_on(table, match):
    with pytest.raises(GrowthError, match=match):
        checked_arguments(table)


def test_arguments_that_are_passed_on(workplace, monkeypatch):
    table = {
        "adam_beta2": 0.9,
        "adam_epsilon": 1,
        "optim": "adamw_torch_fused",
        "run_name": "mine",
        "lr_scheduler_kwargs": {"num_cycles": 1},
        "label_names": ["labels"],
        "tf32": False,
        "hub_strategy": "end",
    }
    assert checked_arguments(table) == table
    text = PLAIN.replace("adam_beta2 = 0.95", 'adam_beta2 = 0.9\nrun_name = "mine"')
    write(workplace, text)
    made = []
    begin = module.TwoStageTrainer._begin

    def watched(self, run):
        made.append(run.args)
        begin(self, run)

    monkeypatch.setattr(module.TwoStageTrainer, "_begin", watched)
    train(workplace / "run.toml", progress=False)
    assert (made[0].adam_beta2, made[0].run_name, made[0].max_steps) == (0.9, "mine", 6)


def test_arguments_that_transformers_refuses(workplace):
    text = PLAIN.replace("adam_beta2 = 0.95", "load_best_model_at_end = true\neval_delay = -1")
    text = text.replace('validation = ["held_out.jsonl"]', "").replace("eval_every = 3", "")
    with pytest.raises(GrowthError, match=r"\[trainer\] cannot be used: .*load_best_model_at_end"):
        train(write(workplace, text), progress=False)
    assert not (workplace / "out").exists()


def test_owned_keys_exist():
    sections = typing.get_type_hints(Run)
    for name in OWNED.values():
        section, key = name.split(".")
        kinds = typing.get_args(sections[section]) or (sections[section],)
        assert key in {field.name for field in dataclasses.fields(kinds[0])}, name
    known = {field.name for field in dataclasses.fields(TrainingArguments)}
    # the first was there until version 5.0, and the others are names of [loss]
    of_loss = {"label_smoothing", "z_loss", "z_loss_factor"}
    assert (OWNED.keys() | REFUSED.keys()) - known <= {"warmup_ratio", *of_loss}


@pytest.mark.parametrize(
    ("output", "names"),
    [
        ({}, ("tensorboard",)),
        ({"tensorboard": False}, ()),
        ({"report_to": "none"}, ()),
        ({"report_to": ()}, ()),
        ({"report_to": ("tensorboard",)}, ("tensorboard",)),
    ],
)
def test_where_logs_go(output, names):
    assert reports_of(OutputSection("out", **output)) == names


@pytest.mark.parametrize(
    ("output", "match"),
    [
        ({"report_to": "wandbb"}, "'wandbb'; did you mean 'wandb'"),
        ({"report_to": ("mlflow",)}, "'mlflow', which is not installed: pip install mlflow"),
        ({"report_to": "tensorboard", "tensorboard": False}, "but tensorboard is false"),
        ({"report_to": ["none", "mlflow"]}, '"none" or "all" alone'),
        ({"report_to": 1}, r'report_to is 1: it must be the name .*"wandb", or a list of names'),
        ({"report_to": ["tensorboard", 1]}, "it must be the name"),
    ],
)
def test_where_logs_cannot_go(output, match):
    with pytest.raises(GrowthError, match=match):
        reports_of(OutputSection("out", **output))
