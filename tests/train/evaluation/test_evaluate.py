"""The loss of `evaluate` is that of transformers on the same batches."""

import json
import math
from dataclasses import fields
from typing import get_type_hints

import pytest
import torch
import transformers

import growkern
from growkern import DataSection
from growkern.train.dataset.training_data import pack_text
from growkern.train.evaluation.evaluate import FOR_TRAINING, TextKeywords
from growkern.train.objectives.language_modeling import CausalLMCollator, MaskedLMCollator
from testbed.tiny import build
from tests.train.dataset.data import texts, tokenizer, write_jsonl

TOKENIZER, LENGTH, BATCH = tokenizer(), 16, 4


@pytest.fixture
def text(tmp_path):
    file = tmp_path / "text.txt"
    file.write_text("\n".join(texts(60)))
    return file


@pytest.fixture
def measure(tmp_path):
    def call(model, **options):
        how = {"sequence_length": LENGTH, "batch_size": BATCH, "cache": str(tmp_path / "cache")}
        return growkern.evaluate(model, tokenizer=TOKENIZER, progress=False, **how | options)

    return call


@pytest.mark.parametrize("family", ["bert", "gpt2", "llama"])
def test_the_loss_is_that_of_transformers(family, text, measure):
    """Batches weighted by their labels; the masks are those of the seed."""
    model = build(family, layers=2).eval()
    causal = family != "bert"
    collator = CausalLMCollator(TOKENIZER) if causal else MaskedLMCollator(TOKENIZER, 0.3, 7)
    blocks = pack_text([text], TOKENIZER, LENGTH)
    total, labels = 0.0, 0
    for start in range(0, len(blocks), BATCH):
        rows = [blocks[i] for i in range(start, min(start + BATCH, len(blocks)))]
        batch = collator(rows)
        here = (batch["labels"][:, 1:] if causal else batch["labels"]).ne(-100).sum().item()
        with torch.no_grad():
            total += model(**batch).loss.item() * here
        labels += here
    report = measure(model, text=text, seed=7, masking_probability=0.3)
    assert (report.labels, report.blocks, report.causal) == (labels, len(blocks), causal)
    assert report.loss == pytest.approx(total / labels, rel=1e-6)
    assert report.low < report.loss < report.high
    expected = math.exp(report.loss) if causal else None
    assert report.perplexity == expected
    assert json.loads(json.dumps(report.to_dict()))["perplexity"] == expected


def test_a_model_with_a_second_head_is_measured_by_its_masked_tokens(text, measure):
    """As the model with the same weights and the first head alone."""
    model = build("bert", layers=1, tied=True)
    both = transformers.BertForPreTraining(model.config)
    both.load_state_dict(model.state_dict(), strict=False)
    assert measure(both, text=text) == measure(model, text=text)


def test_batches_do_not_matter_but_seeds_of_masks_do(text, measure):
    model = build("bert", layers=2)
    model.train()
    first = measure(model, text=[text])
    assert model.training, "the model is left as it was"
    assert measure(model, text=[text], batch_size=3).loss == pytest.approx(first.loss, rel=1e-6)
    assert measure(model, text=[text]) == first
    assert measure(model, text=[text], seed=1).loss != first.loss
    wide = measure(model, text=[text], confidence=0.99)
    assert wide.low < first.low and wide.high > first.high


def test_records_and_a_directory_give_the_same(text, measure, tmp_path):
    model = build("gpt2", layers=2)
    records = [{"t": x} for x in texts(60)]
    (tmp_path / "data").mkdir()
    file = write_jsonl(tmp_path / "data" / "d.jsonl", records)
    of_file = measure(model, text=[file], text_column="t")
    assert measure(model, dataset=str(tmp_path / "data"), text_column="t") == of_file
    assert of_file.blocks > 10


def test_padded_rows_count_their_real_tokens(measure, tmp_path):
    """Rows of token ids, one per record: padding has no label."""
    model, rows = build("gpt2", layers=2).eval(), [[1, 5, 6, 7], [1, 9], [1, 8, 7]]
    file = write_jsonl(tmp_path / "ids.jsonl", [{"ids": row} for row in rows])
    report = measure(model, text=[file], input_ids_column="ids")
    losses = []
    for row in rows:
        ids = torch.tensor([row])
        with torch.no_grad():
            losses.append(model(input_ids=ids, labels=ids).loss.item() * (len(row) - 1))
    assert report.labels == 6 and report.blocks == 3
    assert report.loss == pytest.approx(sum(losses) / 6, rel=1e-6)


@pytest.mark.parametrize(
    "options, words",
    [
        ({}, "nothing to read: give text"),
        ({"text": ["a.txt"], "dataset": "d"}, "text is given beside dataset"),
        ({"text": ["no.txt"]}, "no file matches no.txt"),
        ({"text": ["a.txt"], "streaming": True}, "no option 'streaming'"),
        ({"text": ["a.txt"], "batch_size": 0}, "batch_size is 0"),
        ({"text": ["a.txt"], "confidence": 95}, "confidence is 95"),
    ],
)
def test_calls_that_make_no_sense_are_refused(options, words, measure):
    with pytest.raises(growkern.GrowthError, match=words):
        measure(build("bert", layers=1), **options)


def test_an_empty_text_is_named_as_the_caller_named_it(measure, tmp_path):
    (tmp_path / "empty.txt").touch()
    with pytest.raises(growkern.GrowthError, match=r"^text has fewer tokens than one row"):
        measure(build("bert", layers=1), text=tmp_path / "empty.txt")


def test_a_model_that_is_broken_is_named(text, measure):
    model = build("bert", layers=1)
    with torch.no_grad():
        model.get_output_embeddings().bias[3] = math.nan
    with pytest.raises(growkern.GrowthError, match="the loss is not finite"):
        measure(model, text=text)
    with pytest.raises(growkern.GrowthError, match="needs its tokenizer"):
        growkern.evaluate(model, text=text)


def test_the_keywords_are_the_options_of_the_data():
    """What type checkers and editors see is what `evaluate` takes."""
    options = {field.name for field in fields(DataSection)} - FOR_TRAINING
    assert get_type_hints(TextKeywords).keys() == options


@pytest.mark.parametrize("place", ["", "checkpoint-3"])
def test_a_run_is_evaluated_at_its_own_length(place, text, tmp_path, measure):
    directory = tmp_path / "run" / place
    build("gpt2", layers=1).save_pretrained(directory)
    record = tmp_path / "run" / "run.json"
    record.write_text(json.dumps({"run": {"data": {"sequence_length": 8}}}))
    how = {"text": text, "tokenizer": TOKENIZER, "progress": False}
    assert growkern.evaluate(directory, **how).sequence_length == 8
    assert growkern.evaluate(directory, **how, sequence_length=16) == measure(directory, text=text)
    record.write_text("[]")
    with pytest.raises(growkern.GrowthError, match="128"):
        growkern.evaluate(directory, **how)
