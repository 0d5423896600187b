"""The example of fine-tuning learns to tell texts apart, from the weights of a checkpoint."""

import numpy as np
import pytest

from examples.finetune import accuracy
from testbed.tiny import build
from tests.train.dataset.data import WORDS, tokenizer


@pytest.mark.parametrize("family", ["bert", "gpt2"])
def test_two_texts_are_told_apart(family, tmp_path):
    build(family, layers=1, width=32).save_pretrained(tmp_path / "model")
    tokenizer().save_pretrained(tmp_path / "model")
    (tmp_path / "b").mkdir()
    # some words are in both sources
    for seed, (name, words) in enumerate({"a": WORDS[5:30], "b/one": WORDS[20:45]}.items()):
        text = " ".join(np.random.default_rng(seed).choice(words, 1200))
        (tmp_path / f"{name}.txt").write_text(text)
    sources = [str(tmp_path / "a.txt"), str(tmp_path / "b" / "*.txt")]
    how = {"length": 16, "learning_rate": 3e-3, "epochs": 4}
    assert accuracy(str(tmp_path / "model"), sources, **how) > 0.75
