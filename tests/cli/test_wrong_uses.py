"""Every wrong use of `wrong_uses.py` is one line that names the fix, and leaves no trace."""

import shlex

import pytest
import torch
import transformers

import growkern
from tests.cli.test_commands import RUN, WORDS, assert_bad_input, run
from tests.cli.wrong_uses import USES
from tests.growth.models import BERT, GPT2, LLAMA, random_model

__all__ = ["run"]
T5 = {"d_model": 12, "num_heads": 3, "d_kv": 4, "d_ff": 20, "num_layers": 2}
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
    return folder


def contents(folder):
    return {
        path.relative_to(folder): path.read_bytes() if path.is_file() else None
        for path in folder.rglob("*")
    }


def test_there_are_enough():
    assert len(USES) >= 60 and len(set(USES)) == len(USES)


@pytest.mark.parametrize("use", USES, ids=lambda use: f"{use.line[:60]} {use.edit[1][:30]}")
def test_is_one_line_and_leaves_no_trace(run, place, monkeypatch, use):
    monkeypatch.chdir(place)
    text = RUN.replace('"small"', '"bert"')
    assert use.edit[0] in text
    (place / "run.toml").write_text(text.replace(*use.edit))
    names = ("bert", "gpt2", "llama", "t5", "large", "text", "empty", "trained", "new")
    paths = {name: str(name) for name in names} | {"run": "run.toml"}
    before = contents(place)
    assert_bad_input(run(*shlex.split(use.line.format(**paths))), *use.words)
    assert contents(place) == before
