"""The example of fine-tuning learns to tell texts apart, from the weights of a checkpoint."""

import re

import numpy as np
import pytest

from examples.finetune import accuracy, blocks
from growkern.train.dataset.training_data import pack_text
from testbed import warm
from testbed.tiny import build
from tests.train.dataset.data import WORDS, tokenizer


def stored(family, folder):
    """A model and two texts without a common word."""
    build(family, layers=1, width=32).save_pretrained(folder / "model")
    tokenizer().save_pretrained(folder / "model")
    (folder / "b").mkdir()
    for seed, (name, words) in enumerate({"a": WORDS[5:25], "b/one": WORDS[25:45]}.items()):
        text = " ".join(np.random.default_rng(seed).choice(words, 1200))
        (folder / f"{name}.txt").write_text(text)
    return str(folder / "model"), [str(folder / "a.txt"), str(folder / "b" / "*.txt")]


@pytest.mark.parametrize("family", ["bert", "gpt2"])
def test_two_texts_are_told_apart(family, tmp_path):
    model, sources = stored(family, tmp_path)
    # after 4 epochs at 3e-3 most seeds of BERT still guess; here ten seeds of each had all right
    how = {"length": 16, "learning_rate": 1e-2, "epochs": 10}
    assert min(accuracy(model, sources, seed, **how) for seed in range(2)) > 0.9


def test_the_command_says_the_accuracy_of_each_seed(tmp_path):
    model, sources = stored("bert", tmp_path)
    done = warm.run("examples.finetune", model, *sources, "--seeds", 2, "--length", 16)
    assert done.returncode == 0, done.stderr
    found = re.findall(r"^seed (\d): ([\d.]+) %, by chance 50.0 %$", done.stdout, re.MULTILINE)
    assert [seed for seed, _ in found] == ["0", "1"]
    assert len(done.stdout.splitlines()) == 2 and all(0 <= float(x) <= 100 for _, x in found)


def test_passages_are_the_blocks_that_runs_train_on(tmp_path):
    _, (one, _) = stored("bert", tmp_path)
    files = [tmp_path / "a.txt", tmp_path / "b" / "one.txt"]
    expected = pack_text(files, tokenizer(), 16).tokens_NS
    np.testing.assert_array_equal(blocks(files, tokenizer(), 16), expected)
    (tmp_path / "a.txt").write_text("w1")
    with pytest.raises(ValueError, match="16 tokens"):
        accuracy(str(tmp_path / "model"), [one, one], length=16)
