"""Fine-tuning learns to tell texts apart, and starts from the weights of the language model."""

import json
import math
import random

import numpy as np
import pytest
import torch

import growkern
from growkern.train.evaluation.finetune import classifier_of
from testbed.tiny import build
from tests.train.dataset.data import WORDS, tokenizer

OPTIONS = {"sequence_length": 16, "learning_rate": 3e-3, "epochs": 8, "progress": False}


def write(file, words, count=1200, seed=0):
    """Random words; each source uses some of its own."""
    rng = np.random.default_rng(seed)
    file.parent.mkdir(exist_ok=True)
    file.write_text(" ".join(rng.choice(words, count)))
    return file


@pytest.fixture
def sources(tmp_path):
    """A file and a folder of two; some words are in both."""
    first = write(tmp_path / "a.txt", WORDS[5:30])
    write(tmp_path / "b" / "one.txt", WORDS[20:45], seed=1)
    write(tmp_path / "b" / "two.txt", WORDS[20:45], seed=2)
    return [first, tmp_path / "b"]


def tune(model, text, **options):
    return growkern.finetune(model, text, tokenizer=tokenizer(), **OPTIONS | options)


@pytest.mark.parametrize("family", ["bert", "gpt2"])
def test_two_texts_are_told_apart(family, sources):
    model = build(family, layers=1, width=32)
    before = {key: x.clone() for key, x in model.state_dict().items()}
    report = tune(model, sources, seeds=2, batch_size=8)
    assert report.chance == 0.5 and len(report.accuracies) == 2
    assert min(report.accuracies) > 0.75
    assert report.accuracy == pytest.approx(sum(report.accuracies) / 2)
    assert report.low <= report.accuracy <= report.high
    # the shorter source gives 1,200 words: 80 passages of 15 words
    assert (report.train, report.test) == (2 * 64, 2 * 16)
    assert all(torch.equal(before[key], x) for key, x in model.state_dict().items())
    assert json.loads(json.dumps(report.to_dict()))["accuracy"] == report.accuracy


def test_the_same_call_gives_the_same_numbers_and_leaves_the_generators(sources):
    model = build("gpt2", layers=1, width=32)
    before = torch.are_deterministic_algorithms_enabled()
    states = torch.get_rng_state(), random.getstate(), np.random.get_state()[1]  # noqa: NPY002
    options = {"epochs": 3, "passages": 60}
    first = tune(model, sources, seeds=3, **options)
    assert len(set(first.accuracies)) > 1, "seeds do not matter"
    assert tune(model, sources, seeds=3, **options) == first
    assert tune(model, sources, seeds=1, seed=2, **options).accuracies == first.accuracies[2:]
    assert torch.equal(states[0], torch.get_rng_state()) and states[1] == random.getstate()
    assert np.array_equal(states[2], np.random.get_state()[1])  # noqa: NPY002
    assert torch.are_deterministic_algorithms_enabled() == before


def test_the_progress_bar_ends_at_its_total(sources, capsys):
    """Also where the last batch of an epoch is smaller: 128 passages in batches of 50."""
    model = build("bert", layers=1)
    tune(model, sources, seeds=2, batch_size=50, epochs=3, progress=True)
    shown = capsys.readouterr().err.replace("\r", "\n").splitlines()
    assert [line for line in shown if "fine-tuning" in line][-1].count("18/18") == 1


def test_the_interval_of_a_share_is_inside_0_and_1(sources, monkeypatch):
    found = iter([0.2, 1.0, 1.0])
    monkeypatch.setattr("growkern.train.evaluation.finetune._accuracy", lambda *args: next(found))
    model = build("bert", layers=1)
    report = tune(model, sources, seeds=2)
    assert (report.low, report.accuracy, report.high) == (0, 0.6, 1)
    assert math.isnan(tune(model, sources, seeds=1).high)


def test_texts_without_a_difference_stay_at_chance(tmp_path):
    """The test above would see a task that gives its answer away."""
    texts = [write(tmp_path / f"{seed}.txt", WORDS[5:], seed=seed) for seed in range(2)]
    report = tune(build("bert", layers=1), texts, seeds=2)
    assert 0.2 < report.accuracy < 0.8


@pytest.mark.parametrize("family", ["bert", "gpt2", "llama"])
def test_the_classifier_has_the_weights_of_the_language_model(family):
    model = build(family, layers=2).eval()
    classifier = classifier_of(model, 3).eval()
    ids = torch.tensor([[2, 8, 9, 10]])
    hidden = [
        x(input_ids=ids, output_hidden_states=True).hidden_states[-1] for x in (model, classifier)
    ]
    assert torch.equal(*hidden)
    assert classifier(input_ids=ids).logits.shape == (1, 3)


def test_a_model_that_is_broken_is_named(sources):
    model = build("gpt2", layers=1)
    with torch.no_grad():
        model.transformer.ln_f.weight[0] = torch.nan
    with pytest.raises(growkern.GrowthError, match="the logits are not finite"):
        tune(model, sources, seeds=1, passages=4)


def test_tasks_that_cannot_be_made_are_refused(sources, tmp_path):
    model = build("bert", layers=1)
    for text, options, words in (
        (sources[:1], {}, "two or more sources"),
        ([sources[0]] * 2, {}, "given twice"),
        ([sources[0], tmp_path / "none.txt"], {}, "no file matches .*none.txt"),
        (sources, {"seeds": 0}, "seeds is 0: it must be positive"),
        (sources, {"learning_rate": -1.0}, "learning_rate is -1.0"),
        (sources, {"passages": 1}, "passages is 1: give 2 or more"),
        (sources, {"sequence_length": 900}, "at least 2 are needed: give more text"),
        (sources, {"seed": -1}, "the seeds are -1 to 1: they must be in 0 .. 4294967295"),
        (sources, {"seed": 2**32 - 1, "seeds": 2}, "the seeds are 4294967295 to 4294967296"),
        (sources, {"confidence": 2}, "confidence is 2"),
    ):
        with pytest.raises(growkern.GrowthError, match=words):
            tune(model, text, **options)
    with pytest.raises(growkern.GrowthError, match="an encoder and a decoder"):
        tune(build("t5", layers=1), sources)
