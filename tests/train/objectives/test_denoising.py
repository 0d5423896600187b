"""BART's noise against its definition."""

from collections import Counter
from itertools import chain, pairwise, permutations

import numpy as np
import pytest

from growkern import GrowthError
from growkern.train.objectives.spans import DenoisingCollator
from tests.train.objectives.places import rows_of, tokenizer

TOKENIZER = tokenizer("bart")
MASK, EOS, BOS = TOKENIZER.mask_token_id, TOKENIZER.eos_token_id, TOKENIZER.cls_token_id
LENGTH = 200


def distinct(length=LENGTH):
    """A row whose tokens are all different, none of them a full stop or special."""
    return {"input_ids": np.arange(150, 150 + length)}


@pytest.mark.parametrize("epoch", range(20))
def test_spans_become_one_mask_each(epoch):
    collator = DenoisingCollator(TOKENIZER, permute=False)
    collator.set_epoch(epoch)
    row = distinct()["input_ids"].tolist()
    noisy = collator.corrupt(distinct()).tolist()
    kept = [token for token in noisy if token != MASK]
    assert kept == sorted(kept), "the rest keeps its order"
    assert LENGTH - len(kept) == round(0.3 * LENGTH)
    # between two tokens that were neighbours there are inserted masks only, else one more
    at = [-1, *(i for i, token in enumerate(noisy) if token != MASK), len(noisy)]
    ends = [row[0] - 1, *kept, row[-1] + 1]
    for (i, j), (a, b) in zip(pairwise(at), pairwise(ends), strict=True):
        assert (j - i - 1 >= 1) == (b - a > 1) or b - a == 1


def test_lengths_of_spans_follow_the_poisson_distribution():
    collator = DenoisingCollator(TOKENIZER)
    found = Counter()
    for seed in range(400):
        lengths, inserted = collator._spans(600, np.random.default_rng(seed))
        assert sum(lengths) == 600
        found.update(lengths[:-1])  # the last one is cut
        found[0] += inserted
    total = sum(found.values())
    expected = np.exp(-3.0)
    for length in range(8):
        assert found[length] / total == pytest.approx(expected, abs=0.004), length
        expected *= 3.0 / (length + 1)


def test_sentences_change_places_within_their_text():
    stop = TOKENIZER.convert_tokens_to_ids(".")
    texts = [[[200, 201, stop], [210, stop], [220, 221]], [[300, stop], [310, 311, stop]]]
    row = [EOS, *chain(*texts[0]), EOS, *chain(*texts[1]), EOS]
    collator = DenoisingCollator(TOKENIZER)
    seen = set()
    for seed in range(100):
        found = collator.permuted(np.asarray(row), np.random.default_rng(seed)).tolist()
        assert [i for i, x in enumerate(found) if x == EOS] == [0, 8, 14]
        for text, part in zip(texts, (found[1:8], found[9:14]), strict=True):
            orders = {tuple(chain(*order)) for order in permutations(text)}
            assert tuple(part) in orders
        seen.add(tuple(found))
    assert len(seen) == 6 * 2


def test_labels_are_the_whole_text_and_inputs_are_padded():
    rows = rows_of("bart", 60)
    batch = DenoisingCollator(TOKENIZER, seed=2)([rows[i] for i in range(8)])
    for i in range(8):
        expected = [BOS, *rows[i]["input_ids"].tolist(), EOS]
        assert batch["labels"][i].tolist() == expected
    real = batch["attention_mask"].bool()
    assert (batch["input_ids"][~real] == TOKENIZER.pad_token_id).all()
    assert (batch["input_ids"][:, 0] == BOS).all()
    last = real.sum(1) - 1
    assert (batch["input_ids"].gather(1, last[:, None]) == EOS).all()
    assert batch["decoder_attention_mask"].all()


def test_other_tokenizers_are_refused():
    with pytest.raises(GrowthError, match="denoising needs a tokenizer with a mask token"):
        DenoisingCollator(tokenizer("t5"))
