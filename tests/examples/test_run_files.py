"""The run files in examples/run_files train as they are, on real text and small models."""

import json
import math
import shutil
import warnings
from pathlib import Path

import pytest
import torch
import transformers
from typer.testing import CliRunner

import examples
import growkern
from examples.objectives import TEXTS, make_tokenizer
from growkern import run as train
from growkern.cli.commands import app
from growkern.errors import GrowthWarning
from growkern.train.evaluation.evaluate import read_arguments
from growkern.train.run.file import load_run

RUNS = sorted((Path(examples.__file__).parent / "run_files").glob("*.toml"))
# folder -> layers and width
MODELS = {"small": (2, 24), "shallow": (1, 48), "large": (4, 48)}
# other files begin with these, in this order
FIRST = ("source", "inheritance", "teacher_of_law")
TRAINED = 30_000  # characters of a text that runs train on; the next ones are held out


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """The folder that the files speak of, with the runs that others begin with."""
    folder = tmp_path_factory.mktemp("runs")
    tokenizer = make_tokenizer("bert")
    for name, (layers, width) in MODELS.items():
        transformers.set_seed(layers)
        config = transformers.BertConfig(
            vocab_size=len(tokenizer), num_hidden_layers=layers, hidden_size=width,
            num_attention_heads=width // 8, intermediate_size=2 * width, initializer_range=0.1,
            max_position_embeddings=32, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
        )  # fmt: skip
        transformers.BertForMaskedLM(config).save_pretrained(folder / name)
        tokenizer.save_pretrained(folder / name)
    words = make_tokenizer("gpt2")
    config = transformers.Qwen3Config(
        vocab_size=len(words), num_hidden_layers=2, hidden_size=24, intermediate_size=48,
        num_attention_heads=3, num_key_value_heads=1, head_dim=8, max_position_embeddings=32,
    )  # fmt: skip
    transformers.Qwen3ForCausalLM(config).save_pretrained(folder / "dense")
    words.save_pretrained(folder / "dense")
    for name, files in (("text", TEXTS[:1]), ("law", TEXTS[1:2])):
        for where, part in ((name, slice(TRAINED)), (f"held_out/{name}", slice(TRAINED, 36_000))):
            (folder / where).mkdir(parents=True)
            for file in files:
                (folder / where / f"{file.stem}.txt").write_text(file.read_text()[part])
    for file in RUNS:
        shutil.copy(file, folder)
    for name in FIRST:
        train(folder / f"{name}.toml", progress=False)
    options = ["--run", folder / "cached_teacher.toml", "--out", folder / "kept", "--k", 16]
    command = ["cache-teacher", folder / "runs" / "small", *options]
    result = CliRunner().invoke(app, list(map(str, command)))
    assert result.exit_code == 0, result.output
    return folder


# what the comments of a file offer in place of a line of it
OTHERS = [
    ("two_stage", 'method = "aki"', f'method = "{method}"') for method in ("fpi", "random")
] + [
    ("inheritance", 'decay = "linear"', 'decay = "switch"'),
    ("progressive", 'depth = "random"', 'depth = "stack"'),
]


@pytest.mark.parametrize(("name", "line", "other"), OTHERS, ids=[x[2] for x in OTHERS])
def test_what_the_comments_offer_trains_too(name, line, other, place, monkeypatch):
    monkeypatch.setenv("GROWKERN_TOKENS", str(place / "tokens"))
    text = (place / f"{name}.toml").read_text()
    assert line in text and other.split('"')[1] in text
    run = place / "other.toml"
    run.write_text(text.replace(line, other).replace(f"runs/{name}", "runs/other"))
    assert train(run, overwrite=True, progress=False).global_step == 40
    log = log_of(place / "runs" / "other")
    losses = [line["label_loss"] for line in log if "label_loss" in line]
    assert losses[-1] < losses[0]
    if name == "inheritance":
        # of a line that the switch falls into alpha is a mean
        alpha, end = load_run(run).inheritance.alpha, load_run(run).inheritance.end_step
        before = [line["alpha"] for line in log if "alpha" in line and line["step"] <= end]
        assert len(before) > 1 and before == pytest.approx([alpha] * len(before))
        assert next(line["alpha"] for line in reversed(log) if "alpha" in line) == 0


def log_of(folder):
    return json.loads((folder / "trainer_state.json").read_text())["log_history"]


@pytest.mark.parametrize("file", RUNS, ids=lambda file: file.stem)
def test_a_run_file_trains_and_its_loss_falls(file, place, monkeypatch):
    monkeypatch.setenv("GROWKERN_TOKENS", str(place / "tokens"))
    if file.stem not in FIRST:
        with warnings.catch_warnings():
            warnings.simplefilter("error", GrowthWarning)
            assert train(place / file.name, progress=False).global_step == 40
    folder = place / "runs" / ("small" if file.stem == "source" else file.stem)
    folders = sorted(folder.glob("generation-*")) or [folder]
    for one in folders:
        losses = [line["label_loss"] for line in log_of(one) if "label_loss" in line]
        assert len(losses) >= 5 and losses[-1] < losses[0], (one.name, losses)
    layers = {"source": 2, "teacher_of_law": 2, "mslt": 3, "upcycling": 2}.get(file.stem, 4)
    model = transformers.AutoModel.from_pretrained(folders[-1])
    assert model.config.num_hidden_layers == layers


def test_the_file_of_an_evaluation_measures_what_it_says(place, monkeypatch):
    """On the trained source: better than guessing."""
    monkeypatch.setenv("GROWKERN_TOKENS", str(place / "tokens"))
    file = shutil.copy(Path(examples.__file__).parent / "evaluation.toml", place)
    report = growkern.evaluate(**read_arguments(file), progress=False)
    assert report.loss < math.log(len(make_tokenizer("bert")))


def test_a_teacher_of_a_domain_has_learned_it_and_is_not_measured_by_its_text(place, monkeypatch):
    monkeypatch.setenv("GROWKERN_TOKENS", str(place / "tokens"))
    run, before = (load_run(place / f"{name}.toml") for name in ("domain", "teacher_of_law"))
    assert run.teacher.paths == (before.output.directory,)
    assert run.data.train == before.data.train
    held_out = run.data.validation
    files = {name: list(place.glob(patterns[0])) for name, patterns in held_out.items()}
    assert all(files.values())
    trained = {file for one in ("law", "text") for file in (place / one).iterdir()}
    assert not trained & {file for found in files.values() for file in found}
    small, teacher = (
        growkern.evaluate(place / name, text=files["law"], sequence_length=32, progress=False).loss
        for name in (before.model.path, before.output.directory)
    )
    assert teacher < small


def test_the_files_do_what_they_say(place):
    """Facts that no loss shows; the runs are there after the test above."""
    runs = place / "runs"
    depths = [line["depth"] for line in log_of(runs / "two_stage") if "depth" in line]
    assert min(depths) < 4 and depths[-1] == 4
    sizes = [line["parameters"] for line in log_of(runs / "stackbert") if "parameters" in line]
    assert len(set(sizes)) == 3 and sizes == sorted(sizes)
    for name in ("inheritance", "cached_teacher"):
        alphas = [line["alpha"] for line in log_of(runs / name) if "alpha" in line]
        assert alphas[0] == 0.9 and alphas[-1] == 0
    lines = [line for line in log_of(runs / "domain") if any("eval" in key for key in line)]
    law = [line["eval_law_loss"] for line in lines if "eval_law_loss" in line]
    general = [line["eval_general_loss"] for line in lines if "eval_general_loss" in line]
    # before the first step too
    assert len(law) == len(general) == 3 and law != general
    assert law == [line["eval_loss"] for line in lines if "eval_loss" in line]
    assert law[1] < law[0] and law[1] < math.log(len(make_tokenizer("bert")))
    moe = transformers.AutoModelForCausalLM.from_pretrained(runs / "upcycling")
    first, second = moe.model.layers[1].mlp.experts.down_proj[:2]
    assert not torch.equal(first, second) and not hasattr(moe.model.layers[0].mlp, "experts")
    lines = (line for line in log_of(runs / "recipe") if "label_loss" in line)
    rates = {line["step"]: line["learning_rate"] for line in lines}
    assert rates[22] < min(rates[20], rates[26]), "it rises again after the growth at step 20"
    file = runs / "recipe" / "checkpoint-40" / "optimizer.pt"
    assert torch.load(file, weights_only=True)["state"][0]["step"] == 80
