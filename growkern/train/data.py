"""Text to training batches: packed blocks, masked or causal.

Masks are drawn from a hash, not from a generator: the mask of a block is a pure function of
(seed, epoch, the block's own tokens). Data workers, resumed runs and shuffled orders therefore
agree with no state to save.
"""

import hashlib
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils.data import Dataset

from growkern.errors import GrowthError
from growkern.train.head import IGNORE_INDEX

_TEXTS_PER_CALL = 256


# ------------------------------------------------------------------ packing


class TokenBlocks(Dataset[dict[str, np.ndarray]]):
    """Blocks of tokens of one length: `blocks[i]` is {"input_ids": (S,) int32}."""

    def __init__(self, tokens_NS: np.ndarray) -> None:
        self.tokens_NS = tokens_NS

    def __len__(self) -> int:
        return len(self.tokens_NS)

    def __getitem__(self, index: int) -> dict[str, np.ndarray]:
        return {"input_ids": self.tokens_NS[index]}


def pack_text(texts: Iterable[str | Path], tokenizer: Any, sequence_length: int) -> TokenBlocks:
    """Tokenise, join and cut text into blocks of one length.

    texts: a `Path` is read as a UTF-8 file, a `str` is the text itself. The texts are joined in
        order with the tokenizer's separator (eos, else sep) after each; every block starts with
        the cls token where the tokenizer has one. The tail shorter than a block is dropped.
    returns: the blocks; `.tokens_NS` is their (N, sequence_length) int32 array. There is no
        attention mask: nothing is padded.
    raises: GrowthError when a file cannot be read or the text fills no block.
    """
    head = [] if tokenizer.cls_token_id is None else [tokenizer.cls_token_id]
    body = sequence_length - len(head)
    if body < 1:
        raise GrowthError(f"sequence_length is {sequence_length}: it must be at least 2")

    stream_T = np.concatenate([np.empty(0, np.int32), *_token_runs(texts, tokenizer)])
    blocks = len(stream_T) // body
    if blocks == 0:
        raise GrowthError(
            f"the text holds {len(stream_T)} tokens, fewer than one block of {body}: "
            "give more text or a smaller sequence_length"
        )
    tokens_NS = np.empty((blocks, sequence_length), np.int32)
    tokens_NS[:, : len(head)] = head
    tokens_NS[:, len(head) :] = stream_T[: blocks * body].reshape(blocks, body)
    return TokenBlocks(tokens_NS)


def _token_runs(texts: Iterable[str | Path], tokenizer: Any) -> Iterator[np.ndarray]:
    """The tokens of each text, each run ended by the separator."""
    separator = tokenizer.eos_token_id
    if separator is None:
        separator = tokenizer.sep_token_id
    end = [] if separator is None else [separator]
    for chunk in _chunks((_read(text) for text in texts), _TEXTS_PER_CALL):
        encoded = tokenizer(
            chunk, add_special_tokens=False, return_attention_mask=False, verbose=False
        )
        for ids in encoded["input_ids"]:
            yield np.asarray(ids + end, np.int32)


def _read(text: str | Path) -> str:
    if isinstance(text, str):
        return text
    try:
        return text.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise GrowthError(f"cannot read the text file {text}: {error}") from error


def _chunks(items: Iterable[str], size: int) -> Iterator[list[str]]:
    chunk: list[str] = []
    for item in items:
        chunk.append(item)
        if len(chunk) == size:
            yield chunk
            chunk = []
    if chunk:
        yield chunk


# ---------------------------------------------------------------- collators


class CausalLMCollator:
    """Blocks to {input_ids, labels}: every real token is a label (the shift is the trainer's).

    Rows of unequal length are padded on the right, with an attention_mask; labels there are -100.
    """

    def __init__(self, tokenizer: Any) -> None:
        self.pad_id = tokenizer.pad_token_id

    def __call__(self, features: Sequence[dict[str, Any]]) -> dict[str, torch.Tensor]:
        batch = _pad([feature["input_ids"] for feature in features], self.pad_id)
        labels_BS = batch["input_ids"].clone()
        if "attention_mask" in batch:
            labels_BS[batch["attention_mask"] == 0] = IGNORE_INDEX
        return {**batch, "labels": labels_BS}


class MaskedLMCollator:
    """Blocks to {input_ids, labels} with BERT's masking, drawn anew in every epoch.

    A token is chosen with `probability`; of the chosen, 80 % become the mask token, 10 % a random
    token, 10 % stay. Special tokens are never chosen. Labels are -100 elsewhere. The draw is a pure
    function of (seed, epoch, the row's tokens); `set_epoch` reaches running data workers too.
    """

    def __init__(self, tokenizer: Any, probability: float = 0.15, seed: int = 0) -> None:
        if tokenizer.mask_token_id is None:
            raise GrowthError("the tokenizer has no mask token: masked-LM training needs one")
        if not 0 < probability <= 1:
            raise GrowthError(f"masking probability is {probability}: it must be in (0, 1]")
        self.probability, self.seed = probability, seed
        self.pad_id, self.mask_id = tokenizer.pad_token_id, tokenizer.mask_token_id
        self.vocab_size = len(tokenizer)
        self.special_ids = np.asarray(tokenizer.all_special_ids, np.int64)
        # shared memory: a persistent data worker, forked or spawned, sees the next epoch's number
        self._epoch = torch.zeros((), dtype=torch.int64).share_memory_()

    def set_epoch(self, epoch: int) -> None:
        """The epoch whose masks the next batches get."""
        self._epoch.fill_(epoch)

    def frozen(self) -> "MaskedLMCollator":
        """A copy for evaluation: the same masks every time, whatever epoch training is in."""
        twin = object.__new__(type(self))
        twin.__dict__.update(self.__dict__)
        twin._epoch = torch.zeros((), dtype=torch.int64)
        return twin

    def __call__(self, features: Sequence[dict[str, Any]]) -> dict[str, torch.Tensor]:
        batch = _pad([feature["input_ids"] for feature in features], self.pad_id)
        input_BS = batch["input_ids"].numpy()
        # unpadded rows are hashed: a row's mask does not depend on its neighbours' lengths
        key_B = np.asarray([self._key(feature["input_ids"]) for feature in features], np.uint64)
        counter_S = np.arange(1, input_BS.shape[1] + 1, dtype=np.uint64) * _GOLDEN
        bits_BS = _mix(key_B[:, None] + counter_S)

        maskable_BS = ~np.isin(input_BS, self.special_ids)
        if "attention_mask" in batch:
            maskable_BS &= batch["attention_mask"].numpy().astype(bool)
        chosen_BS = maskable_BS & ((bits_BS >> np.uint64(32)) < int(self.probability * 2**32))
        kind_BS = bits_BS & np.uint64(0xFFFFFFFF)
        random_BS = (_mix(bits_BS) % np.uint64(self.vocab_size)).astype(np.int64)

        labels_BS = np.where(chosen_BS, input_BS, IGNORE_INDEX)
        replaced_BS = np.where(kind_BS < int(0.8 * 2**32), self.mask_id, random_BS)
        replaced_BS = np.where(kind_BS < int(0.9 * 2**32), replaced_BS, input_BS)
        batch["input_ids"] = torch.from_numpy(np.where(chosen_BS, replaced_BS, input_BS))
        return {**batch, "labels": torch.from_numpy(labels_BS)}

    def _key(self, input_ids: Any) -> int:
        digest = hashlib.blake2b(np.asarray(input_ids, np.int64).tobytes(), digest_size=8)
        digest.update(f"{self.seed}:{int(self._epoch)}".encode())
        return int.from_bytes(digest.digest(), "little")


_GOLDEN = np.uint64(0x9E3779B97F4A7C15)


def _mix(x: np.ndarray) -> np.ndarray:
    """Finaliser of the splitmix64 generator: 64 well-mixed bits for each counter."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def _pad(rows: Sequence[Any], pad_id: int | None) -> dict[str, torch.Tensor]:
    """Stack token rows; a mask appears only when their lengths differ."""
    lengths = {len(row) for row in rows}
    if len(lengths) == 1:
        return {"input_ids": torch.from_numpy(np.stack(rows).astype(np.int64))}
    if pad_id is None:
        raise GrowthError("rows of unequal length need a tokenizer with a pad token")
    input_BS = torch.full((len(rows), max(lengths)), pad_id, dtype=torch.int64)
    mask_BS = torch.zeros_like(input_BS)
    for row, inputs_S, mask_S in zip(rows, input_BS, mask_BS, strict=True):
        inputs_S[: len(row)] = torch.as_tensor(np.asarray(row, np.int64))
        mask_S[: len(row)] = 1
    return {"input_ids": input_BS, "attention_mask": mask_BS}
