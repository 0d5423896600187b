"""Packed text, and masks that depend on nothing but seed, epoch and row."""

import numpy as np
import pytest
import torch

from growkern import GrowthError
from growkern.train.data import CausalLMCollator, MaskedLMCollator, TokenBlocks, pack_text
from tests.train.tiny import VOCAB, TinyTokenizer

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
    for text in ("first", "second text", "third, long enough"):
        stream += TOKENIZER([text])["input_ids"][0] + [TOKENIZER.sep_token_id]
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
