"""Every wrong use of `wrong_uses.py` is one line that names the fix, and leaves no trace."""

import json
import re
import shlex
import shutil

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

import growkern
from testbed.families import T5
from testbed.models import BERT, GPT2, LLAMA, random_model
from tests.cli.test_commands import RUN, WORDS, assert_bad_input, run
from tests.cli.wrong_uses import USES

__all__ = ["run"]
MODELS = {
    "bert": ("BertForMaskedLM", BERT),
    "gpt2": ("GPT2LMHeadModel", GPT2),
    "llama": ("LlamaForCausalLM", LLAMA),
    "t5": ("T5ForConditionalGeneration", T5),
}


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A folder with all that the commands name."""
    folder = tmp_path_factory.mktemp("wrong")
    vocabulary = {word: i for i, word in enumerate(WORDS)}
    for name, (kind, sizes) in MODELS.items():
        model = random_model(kind, {**sizes, "vocab_size": len(WORDS)}, dtype=torch.float32)
        model.save_pretrained(folder / name)
        transformers.BertTokenizer(vocab=vocabulary).save_pretrained(folder / name)
    growkern.grow_checkpoint(folder / "bert", folder / "large", hidden_size=24, progress=False)
    (folder / "text").write_text("a small model grows\n" * 40)
    (folder / "empty").mkdir()
    (folder / "trained").mkdir()
    (folder / "trained" / "notes.txt").write_text("mine")
    (folder / "nothing").write_text("")
    (folder / "binary").write_bytes(bytes(range(256)) * 40)
    damage(folder)
    return folder


def damage(folder):
    """Copies of the Llama with one thing wrong in each."""
    names = ("noweights", "notype", "cut", "wide", "odd", "extra", "lack")
    for name in names:
        shutil.copytree(folder / "llama", folder / name)
    (folder / "noweights" / "model.safetensors").unlink()
    for name, change in (
        ("notype", {"model_type": None}),
        ("wide", {"intermediate_size": 24}),
        ("odd", {"num_attention_heads": 5}),
    ):
        file = folder / name / "config.json"
        file.write_text(json.dumps({**json.loads(file.read_text()), **change}))
    weights = folder / "cut" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[: weights.stat().st_size // 2])
    tensors = load_file(folder / "llama" / "model.safetensors")
    fewer = {name: x for name, x in tensors.items() if name != "model.norm.weight"}
    save_file({**tensors, "foo.bar": torch.zeros(2)}, folder / "extra" / "model.safetensors")
    save_file(fewer, folder / "lack" / "model.safetensors")


def contents(folder):
    return {
        path.relative_to(folder): path.read_bytes() if path.is_file() else None
        for path in folder.rglob("*")
    }


@pytest.mark.parametrize("use", USES, ids=lambda use: f"{use.line[:60]} {use.edit[1][:30]}")
def test_is_one_line_and_leaves_no_trace(run, place, monkeypatch, use):
    if use.line.startswith("plot"):
        pytest.importorskip("matplotlib")
    monkeypatch.chdir(place)
    text = RUN.replace('"small"', '"bert"')
    assert use.edit[0] in text
    (place / "run.toml").write_text(text.replace(*use.edit))
    names = set(re.findall(r"{(\w+)}", use.line))
    paths = {name: str(name) for name in names} | {"run": "run.toml"}
    before = contents(place)
    assert_bad_input(run(*shlex.split(use.line.format(**paths))), *use.words)
    assert contents(place) == before
