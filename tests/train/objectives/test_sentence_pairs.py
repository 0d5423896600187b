"""Pairs of passages: half of them belong together, and none runs across the end of a text."""

import numpy as np
import pytest
import torch
from transformers import BertConfig, BertForPreTraining, TrainingArguments

from growkern import GrowthError, TwoStageTrainer
from growkern.train.dataset.load import TokenBlocks
from growkern.train.objectives.language_modeling import SentencePairCollator
from tests.train.objectives.places import rows_of, tokenizer

TOKENIZER = tokenizer("bert")
CLS, SEP = TOKENIZER.cls_token_id, TOKENIZER.sep_token_id
LENGTH = 45


def collator(rows=None, **options):
    return SentencePairCollator(TOKENIZER, rows or rows_of("bert", LENGTH), **options)


def unmasked(batch):
    return torch.where(batch["labels"] == -100, batch["input_ids"], batch["labels"])


def test_pairs_that_follow_are_the_row_and_the_others_come_from_another_one():
    rows = rows_of("bert", LENGTH)
    flat = [row["input_ids"].tolist() for row in map(rows.__getitem__, range(len(rows)))]
    text = " ".join(str(token) for row in flat for token in row)
    # nothing is masked, so that all tokens can be read
    make, labels = collator(probability=1e-9), []
    for i in range(0, 200):
        batch = make([rows[i]])
        (ids,) = unmasked(batch).tolist()
        label, types = int(batch["next_sentence_label"][0]), batch["token_type_ids"][0].tolist()
        labels.append(label)
        cut = ids.index(SEP)
        assert ids[0] == CLS and ids[-1] == SEP and ids.count(SEP) == 2
        assert types == [0] * (cut + 1) + [1] * (len(ids) - cut - 1)
        first, second = ids[1:cut], ids[cut + 1 : -1]
        assert flat[i][: len(first)] == first
        assert (first + second == flat[i]) == (label == 0)
        assert " ".join(map(str, second)) in text
    assert sum(labels) == pytest.approx(100, abs=25)


def test_pairs_are_cut_at_full_stops_where_there_are_some():
    stop = TOKENIZER.convert_tokens_to_ids(".")
    row = {"input_ids": np.asarray([200, 201, stop, 203, 204, stop, 206, stop])}
    make, cuts = collator(), set()
    for epoch in range(50):
        make.set_epoch(epoch)
        cuts.add(len(make.pair(row)[0]))
    assert cuts == {3, 6}


def test_a_pair_stays_inside_one_text():
    row = np.asarray([200, 201, SEP, 210, 211, 212, 213, SEP, 220])
    make = collator(TokenBlocks(np.stack([row, row + (row != SEP)])))
    for epoch in range(30):
        make.set_epoch(epoch)
        first, second, label = make.pair({"input_ids": row})
        assert set(first) <= set(range(210, 214))
        assert set(second) <= set(range(210, 215))
        assert label == 1 or [*first, *second] == [210, 211, 212, 213]


def test_texts_without_a_second_passage_get_a_random_one():
    make = collator()
    first, second, label = make.pair({"input_ids": np.asarray([200])})
    assert first.tolist() == [200] and len(second) == 1 and label == 1
    assert len(make.pair({"input_ids": np.asarray([SEP])})[0]) == 1


def test_masks_and_pairs_depend_on_the_seed_the_epoch_and_the_row():
    rows, make = rows_of("bert", LENGTH), collator()
    both, alone = make([rows[0], rows[1]]), make([rows[1]])
    length = alone["input_ids"].shape[1]
    for name in ("input_ids", "labels", "token_type_ids"):
        assert torch.equal(both[name][1, :length], alone[name][0]), name
    frozen, pairs = make.frozen(), []
    for epoch in range(12):
        make.set_epoch(epoch)
        pairs.append(make([rows[1]])["input_ids"][0].tolist())
        assert torch.equal(frozen([rows[1]])["input_ids"], alone["input_ids"])
    assert len(set(map(tuple, pairs))) == 12


@pytest.mark.parametrize("several", [False, True])
def test_an_evaluation_reads_no_text_of_the_training_data(tmp_path, several):
    def blocks(least):
        ids = np.random.default_rng(least).integers(least, least + 20, (24, 12))
        return TokenBlocks(ids.astype(np.int32))

    seen, held_out = blocks(100), {"one": blocks(200), "two": blocks(300)}
    sizes = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1}
    config = BertConfig(vocab_size=len(TOKENIZER), intermediate_size=8, **sizes)
    trainer = TwoStageTrainer(
        BertForPreTraining(config),
        TrainingArguments(str(tmp_path), max_steps=1, use_cpu=True, report_to="none"),
        train_dataset=seen,
        eval_dataset=held_out if several else held_out["one"],
        data_collator=collator(seen),
    )
    special = {*TOKENIZER.all_special_ids}
    for name in held_out if several else [None]:
        least = 300 if name == "two" else 200
        batches = list(trainer.get_eval_dataloader(name))
        assert 0 in batches[0]["next_sentence_label"] and 1 in batches[0]["next_sentence_label"]
        read = {*torch.cat([unmasked(batch).flatten() for batch in batches]).tolist()}
        assert read - special <= set(range(least, least + 20))
    read = {*unmasked(next(iter(trainer.get_train_dataloader()))).flatten().tolist()}
    assert read - special <= set(range(100, 120))


def test_streams_and_other_tokenizers_are_refused():
    with pytest.raises(GrowthError, match=r"rows with an index.*set data.streaming to false"):
        SentencePairCollator(TOKENIZER, iter(()))
    with pytest.raises(GrowthError, match="no mask token"):
        SentencePairCollator(tokenizer("gpt2"), rows_of("bert", LENGTH))
