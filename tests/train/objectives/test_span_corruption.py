"""T5's corruption against its definition: what is taken out can be put back."""

import numpy as np
import pytest
import torch

from growkern import GrowthError
from growkern.train.objectives.spans import SpanCorruptionCollator
from growkern.train.sections import input_length, raw_length, span_counts
from tests.train.objectives.places import rows_of, tokenizer

TOKENIZER = tokenizer("t5")
SENTINELS = [TOKENIZER.convert_tokens_to_ids(f"<extra_id_{i}>") for i in range(20)]
EOS = TOKENIZER.eos_token_id


def spans_of(target):
    """Sentinel -> its span, read from a target without the collator's help."""
    *body, end = target
    assert end == EOS
    found, current = {}, None
    for token in body:
        if token in SENTINELS:
            current = found.setdefault(token, [])
        else:
            current.append(token)
    return found


def restored(inputs, target):
    spans, *body = spans_of(target), *inputs[:-1]
    assert inputs[-1] == EOS
    return [x for token in body for x in spans.get(token, [token])]


def test_the_spans_of_the_target_put_the_text_back():
    rows = rows_of("t5", 60)
    collator = SpanCorruptionCollator(TOKENIZER)
    for i in range(50):
        inputs, target = (x.tolist() for x in collator.corrupt(rows[i]))
        assert restored(inputs, target) == rows[i]["input_ids"].tolist()
        spans = spans_of(target)
        # in order, each with tokens, and a last sentinel that ends the target
        assert list(spans) == SENTINELS[: len(spans)]
        *taken, last = spans.values()
        assert last == [] and all(taken)
        assert [x for x in inputs if x in SENTINELS] == SENTINELS[: len(taken)]
        # 15 % of 60 tokens, in spans of 3
        assert sum(map(len, taken)) == 9 and len(taken) == 3


def test_the_share_and_the_mean_length_of_spans():
    rows = rows_of("t5", 400)
    collator = SpanCorruptionCollator(TOKENIZER, 0.15, 5.0)
    lengths = [
        len(span)
        for i in range(len(rows))
        for span in list(spans_of(collator.corrupt(rows[i])[1].tolist()).values())[:-1]
    ]
    assert sum(lengths) / (400 * len(rows)) == pytest.approx(0.15, abs=1e-3)
    assert np.mean(lengths) == pytest.approx(5.0, abs=0.05)
    assert min(lengths) == 1 and max(lengths) > 10


def test_every_token_but_the_first_is_taken_out_about_equally_often():
    """All ways to cut are equally likely, as in the paper's code."""
    collator = SpanCorruptionCollator(TOKENIZER, 0.5, 2.0)
    row = {"input_ids": np.arange(100, 112)}
    gone = np.zeros(12)
    for epoch in range(600):
        collator.set_epoch(epoch)
        inputs = set(collator.corrupt(row)[0].tolist())
        gone += [token not in inputs for token in row["input_ids"]]
    assert gone[0] == 0 and gone[-1] == 600
    assert (gone[2:-1] > 150).all() and (gone[1:-2] < 450).all()


@pytest.mark.parametrize("length", [8, 48, 64, 128, 512, 513, 1024])
@pytest.mark.parametrize(("share", "mean"), [(0.15, 3.0), (0.5, 1.0), (0.3, 10.0)])
def test_inputs_are_full(length, share, mean):
    raw = raw_length(length, share, mean)
    # one short at most where spans fill half of the row
    assert length - input_length(raw, share, mean) in ((0,) if share < 0.5 else (0, 1))
    assert input_length(raw + 1, share, mean) > length
    if length <= 64 and span_counts(raw, share, mean).spans < 20:
        row = {"input_ids": np.arange(100, 100 + raw)}
        inputs, target = SpanCorruptionCollator(TOKENIZER, share, mean).corrupt(row)
        assert len(inputs) == input_length(raw, share, mean)
        assert len(target) == span_counts(raw, share, mean).target


def test_t5s_own_numbers():
    """512 tokens of input are made of 568, with a target of 114 and our last sentinel."""
    assert raw_length(512, 0.15, 3.0) == 568
    assert span_counts(568, 0.15, 3.0).target == 114 + 1


def test_rows_depend_on_the_seed_the_epoch_and_themselves():
    rows = rows_of("t5", 60)
    one, other = (SpanCorruptionCollator(TOKENIZER, seed=seed) for seed in (0, 1))
    first = one([rows[0], rows[1]])
    again = one([rows[1], rows[0]])
    assert torch.equal(first["input_ids"], again["input_ids"].flip(0))
    assert torch.equal(first["labels"], again["labels"].flip(0))
    assert not torch.equal(first["input_ids"], other([rows[0], rows[1]])["input_ids"])
    frozen = one.frozen()
    one.set_epoch(1)
    assert not torch.equal(first["input_ids"], one([rows[0], rows[1]])["input_ids"])
    assert torch.equal(first["input_ids"], frozen([rows[0], rows[1]])["input_ids"])


def test_rows_of_unequal_length_are_padded():
    rows = [{"input_ids": np.arange(100, 100 + n)} for n in (60, 20)]
    batch = SpanCorruptionCollator(TOKENIZER)(rows)
    assert batch["attention_mask"].sum(1).tolist() == [input_length(n, 0.15, 3.0) for n in (60, 20)]
    assert torch.equal(batch["labels"] != -100, batch["decoder_attention_mask"].bool())
    assert (batch["labels"][1] != -100).sum() == span_counts(20, 0.15, 3.0).target


def test_too_few_sentinels_and_other_tokenizers_are_refused():
    with pytest.raises(GrowthError, match=r"has 75 spans, which need 76 sentinels, but .* has 20"):
        SpanCorruptionCollator(TOKENIZER).check_rows(1500)
    with pytest.raises(GrowthError, match="needs a tokenizer with the tokens <extra_id_0>"):
        SpanCorruptionCollator(tokenizer("bart"))
    with pytest.raises(GrowthError, match="mean_span_length is 0"):
        SpanCorruptionCollator(TOKENIZER, mean_span=0.0)
    with pytest.raises(GrowthError, match="a row has 1 tokens"):
        SpanCorruptionCollator(TOKENIZER)([{"input_ids": np.ones(1, np.int32)}])
