"""Packed text, masks that depend on seed, epoch and row only, and collators of users."""

import os

import numpy as np
import pytest
import torch
from torch.utils.data import IterableDataset

from growkern import GrowthError, InheritanceSchedule, TeacherCache, TwoStageTrainer
from growkern.errors import GrowthWarning
from growkern.files import matching_files
from growkern.train.dataset import source
from growkern.train.dataset.training_data import TokenBlocks, pack_text
from growkern.train.objectives.language_modeling import CausalLMCollator, MaskedLMCollator
from growkern.train.topk_teacher.teacher import TopKTeacher
from testbed.tiny import VOCAB, Batches, TinyTokenizer, arguments, build, losses_of
from tests.train.topk_teacher.test_teacher_cache import blocks_of, collator_of, make

TOKENIZER = TinyTokenizer()


def rows(n=64, length=32, seed=0):
    tokens = np.random.default_rng(seed).integers(5, VOCAB, (n, length)).astype(np.int32)
    tokens[:, 0] = TOKENIZER.cls_token_id
    return TokenBlocks(tokens)


def test_packing_keeps_every_token_in_order(tmp_path):
    file = tmp_path / "a.txt"
    file.write_text("second text")
    blocks = pack_text(["first", file, "third, long enough"], TOKENIZER, 8)
    stream = []
    for written in ("first", "second text", "third, long enough"):
        stream += TOKENIZER([written])["input_ids"][0] + [TOKENIZER.sep_token_id]
    assert (blocks.tokens_NS[:, 0] == TOKENIZER.cls_token_id).all()
    assert blocks.tokens_NS[:, 1:].ravel().tolist() == stream[: len(blocks) * 7]
    assert len(stream) - len(blocks) * 7 < 7
    assert blocks[0]["input_ids"].shape == (8,)


def test_packing_refuses_too_little_text_and_a_missing_file(tmp_path):
    with pytest.raises(GrowthError, match="fewer than one block"):
        pack_text(["abc"], TOKENIZER, 64)
    with pytest.raises(GrowthError, match="cannot read the text file"):
        pack_text([tmp_path / "none.txt"], TOKENIZER, 8)
    with pytest.raises(GrowthError, match="at least 2"):
        pack_text(["abc"], TOKENIZER, 1)


def test_masks_follow_berts_shares():
    blocks = rows(2000)
    batch = MaskedLMCollator(TOKENIZER, 0.15)([blocks[i] for i in range(2000)])
    tokens = torch.from_numpy(blocks.tokens_NS.astype(np.int64))
    chosen = batch["labels"] != -100
    assert torch.equal(batch["labels"][chosen], tokens[chosen])
    assert torch.equal(batch["input_ids"][~chosen], tokens[~chosen])
    assert not chosen[:, 0].any(), "special tokens are never chosen"
    # 62000 maskable tokens: the standard deviation of the share is 0.0014
    assert abs(chosen[:, 1:].float().mean() - 0.15) < 0.006
    masked = batch["input_ids"][chosen] == TOKENIZER.mask_token_id
    kept = batch["input_ids"][chosen] == tokens[chosen]
    assert abs(masked.float().mean() - 0.8) < 0.02
    assert abs(kept.float().mean() - 0.1) < 0.02


def test_mask_of_a_row_does_not_depend_on_its_batch():
    blocks = rows(8)
    collate = MaskedLMCollator(TOKENIZER, 0.3, seed=3)
    together = collate([blocks[i] for i in range(8)])
    for i in range(8):
        alone = collate([blocks[i]])
        assert torch.equal(alone["labels"][0], together["labels"][i])
        assert torch.equal(alone["input_ids"][0], together["input_ids"][i])


def test_masks_change_with_epoch_and_seed_and_a_frozen_copy_does_not():
    features = [rows(8)[i] for i in range(8)]
    collate, other = MaskedLMCollator(TOKENIZER, 0.3), MaskedLMCollator(TOKENIZER, 0.3, seed=1)
    first, frozen = collate(features)["labels"], collate.frozen()
    assert not torch.equal(other(features)["labels"], first)
    collate.set_epoch(1)
    assert not torch.equal(collate(features)["labels"], first)
    assert torch.equal(frozen(features)["labels"], first)
    collate.set_epoch(0)
    assert torch.equal(collate(features)["labels"], first)


@pytest.mark.parametrize("persistent", [False, True])
def test_data_workers_agree_and_see_the_epoch(persistent):
    blocks, collate = rows(16), MaskedLMCollator(TOKENIZER, 0.3)
    options = {"batch_size": 4, "collate_fn": collate, "num_workers": 2}
    loader = torch.utils.data.DataLoader(blocks, persistent_workers=persistent, **options)
    for epoch in (0, 1):
        collate.set_epoch(epoch)
        expected = collate([blocks[i] for i in range(16)])["labels"]
        assert torch.equal(torch.cat([b["labels"] for b in loader]), expected)


def test_ragged_rows_are_padded_masked_and_unlabelled():
    features = [{"input_ids": np.arange(5, 5 + n)} for n in (7, 4)]
    batch = CausalLMCollator(TOKENIZER)(features)
    assert batch["attention_mask"].sum(1).tolist() == [7, 4]
    assert (batch["labels"][1, 4:] == -100).all()
    assert torch.equal(batch["labels"][0], batch["input_ids"][0])
    masked = MaskedLMCollator(TOKENIZER, 1.0)(features)
    assert ((masked["labels"] != -100).sum(1)).tolist() == [7, 4]
    assert (masked["input_ids"][1, 4:] == TOKENIZER.pad_token_id).all()


def test_collators_refuse_what_they_cannot_do():
    with pytest.raises(GrowthError, match="probability"):
        MaskedLMCollator(TOKENIZER, 0.0)
    maskless = TinyTokenizer()
    maskless.mask_token_id = maskless.pad_token_id = None
    with pytest.raises(GrowthError, match="no mask token"):
        MaskedLMCollator(maskless)
    with pytest.raises(GrowthError, match="pad token"):
        CausalLMCollator(maskless)([{"input_ids": [5, 6]}, {"input_ids": [5]}])


# ------------------------------------------------------- collators of users


def stack(rows):
    return {name: torch.stack([row[name] for row in rows]) for name in rows[0]}


class Following:
    """Notes the epochs it is told; has no base class and no frozen form."""

    def __init__(self):
        self.epochs = []

    def set_epoch(self, epoch):
        self.epochs.append(epoch)

    def __call__(self, rows):
        return stack(rows)


def test_a_plain_function_and_an_object_train_alike(tmp_path):
    following, losses = Following(), []
    for collator in (stack, following):
        trainer = TwoStageTrainer(
            build("bert"),
            arguments(tmp_path, max_steps=5),
            train_dataset=Batches(4),
            eval_dataset=Batches(2),
            data_collator=collator,
        )
        trainer.train()
        assert trainer.data_collator is collator
        losses.append((losses_of(trainer), trainer.evaluate()["eval_loss"]))
    assert losses[0] == losses[1]
    # 2 steps per epoch
    assert following.epochs == [0, 1, 2]


class Stream(IterableDataset):
    def __iter__(self):
        yield from iter([])


def test_data_without_an_index_is_not_looked_up_beforehand(tmp_path):
    make(tmp_path / "c", k=4)
    cache = TeacherCache(tmp_path / "c")
    teacher = TopKTeacher(cache, InheritanceSchedule(end_step=2))
    asked = []
    cache.batch = lambda batch: asked.append(1) or (torch.zeros(1), torch.zeros(1))
    teacher.trained(collator_of("bert"), Stream())
    assert not asked
    teacher.trained(collator_of("bert"), blocks_of())
    assert len(asked) == 2


def test_nul_characters_are_named(tmp_path):
    file = tmp_path / "text"
    file.write_bytes("a text".encode("utf-16-le"))
    with pytest.warns(GrowthWarning, match="NUL .*UTF-16"):
        assert source.read_text(file) == "a\0 \0t\0e\0x\0t\0"
    with pytest.warns(GrowthWarning, match=str(file)):
        list(source.text_pieces(file))


def test_pipes_are_refused_unopened(tmp_path):
    """Nobody writes to this one: a reader would wait for ever."""
    os.mkfifo(tmp_path / "pipe.txt")
    with pytest.raises(GrowthError, match="not a regular file"):
        pack_text([tmp_path / "pipe.txt"], TOKENIZER, 8)


def test_a_pattern_of_too_many_names_is_refused(tmp_path, monkeypatch):
    for i in range(5):
        (tmp_path / f"{i}.txt").touch()
    assert len(matching_files(tmp_path, "*.txt")) == 5
    monkeypatch.setattr("growkern.files.MOST_NAMES", 4)
    with pytest.raises(GrowthError, match="more than 4 names"):
        matching_files(tmp_path, "**")
