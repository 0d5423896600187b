"""Collators of masked and causal language models: rows of tokens become a batch with labels.

Masks are drawn from a hash, not from a random generator. The mask of a block depends only on the
seed, the epoch and the tokens of the block. Data workers, resumed runs and shuffled orders
therefore draw the same masks, and no generator state has to be saved.

BERT (Devlin et al. 2019) has a second objective: whether two passages belong together.

    [CLS] A [SEP] B [SEP]

A and B come from one text. In half of the pairs B follows A; in the others it is a passage from
another row. The loss is the mean over the masked tokens plus the mean over the pairs.
"""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Callable, Sequence
from typing import Any, Protocol, TypeVar, runtime_checkable

import numpy as np
import torch
from torch.nn.utils.rnn import pad_sequence

from growkern.arguments import check_seed
from growkern.errors import GrowthError
from growkern.train.model.head import IGNORE_INDEX


def check_probability(probability: float) -> None:
    """Refuse a masking probability that is not in (0, 1]."""
    if not 0 < probability <= 1:
        raise GrowthError(f"masking probability is {probability}: it must be in (0, 1]")


FOLLOWS, RANDOM = 0, 1
# rows that are looked at for a random passage
TRIES = 8
# keys of a row: the number of the pass through a data set that is read without an end, and the name
# of the source that it is from
PASS, SOURCE = "pass", "source"
# rows of a data set to a batch: {input_ids, labels, ...}, tensors of one leading size
Collator = Callable[[Sequence[dict[str, Any]]], dict[str, Any]]


@runtime_checkable
class EpochCollator(Protocol):
    """A collator whose batches depend on the epoch, such as masks drawn anew in each epoch."""

    def set_epoch(self, epoch: int) -> None:
        """Switch to an epoch, counted from 0. The trainer calls this when the epoch begins."""


@runtime_checkable
class FreezableCollator(Protocol):
    """A collator with a variant for evaluation, which gives the same batches every time."""

    def frozen(self) -> Collator:
        """The variant for evaluation."""


@runtime_checkable
class PassageCollator(Protocol):
    """A collator that completes rows with passages of other rows."""

    def drawing_from(self, passages: Any) -> Collator:
        """A copy that takes the passages from other rows."""


def evaluation_collator(collator: Collator, rows: Any = None) -> Collator:
    """The variant for evaluation if it has one, which takes passages of the evaluated rows only."""
    if isinstance(collator, FreezableCollator):
        collator = collator.frozen()
    if rows is not None and isinstance(collator, PassageCollator):
        collator = collator.drawing_from(rows)
    return collator


class OuterCollator:
    """Changes the batches of another collator, whose epochs and variant for evaluation it has."""

    def __init__(self, collator: Collator) -> None:
        self.inner = collator

    def set_epoch(self, epoch: int) -> None:
        """Switch to an epoch, counted from 0."""
        if isinstance(self.inner, EpochCollator):
            self.inner.set_epoch(epoch)

    def frozen(self) -> Collator:
        """The variant for evaluation."""
        return evaluation_collator(self.inner)


@runtime_checkable
class IndexedDataset(Protocol):
    """A data set with a length whose examples are read by their index."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> Any: ...


class CausalLMCollator:
    """Makes {input_ids, labels} from blocks for causal models.

    Every real token is a label, at its own position: the trainer shifts labels. Rows of unequal
    length are padded on the right and get an attention_mask. Labels of the padding are -100.
    """

    def __init__(self, tokenizer: Any) -> None:
        self.pad_id = tokenizer.pad_token_id

    def __call__(self, features: Sequence[dict[str, Any]]) -> dict[str, torch.Tensor]:
        batch = pad_rows([feature["input_ids"] for feature in features], self.pad_id)
        labels_BS = batch["input_ids"].clone()
        if "attention_mask" in batch:
            labels_BS[batch["attention_mask"] == 0] = IGNORE_INDEX
        return {**batch, "labels": labels_BS}


class DrawingCollator:
    """A collator whose random numbers for a row depend only on the seed, the epoch and the row."""

    def __init__(self, tokenizer: Any, seed: int = 0) -> None:
        check_seed(seed)
        self.seed, self.pad_id = seed, tokenizer.pad_token_id
        # shared memory: a persistent data worker, forked or spawned, sees the next epoch's number
        self._epoch = torch.zeros((), dtype=torch.int64).share_memory_()

    def set_epoch(self, epoch: int) -> None:
        """Draw the numbers of this epoch from now on, in data workers that already run too."""
        self._epoch.fill_(epoch)

    def frozen(self: DrawingT) -> DrawingT:
        """A copy for evaluation, which draws as in epoch 0 whatever epoch training is in."""
        twin = object.__new__(type(self))
        twin.__dict__.update(self.__dict__)
        twin._epoch = torch.zeros((), dtype=torch.int64)
        return twin

    def key_of(self, feature: dict[str, Any]) -> int:
        """64 bits that all random numbers of a row follow from."""
        ids = np.asarray(feature["input_ids"], np.int64)
        epoch = int(self._epoch) + feature.get(PASS, 0)
        digest = hashlib.blake2b(ids.tobytes(), digest_size=8)
        digest.update(f"{self.seed}:{epoch}".encode())
        return int.from_bytes(digest.digest(), "little")

    def bits_of(self, features: Sequence[dict[str, Any]], length: int) -> np.ndarray:
        """64 random bits for each place of each row, (B, length) uint64."""
        key_B = np.asarray([self.key_of(feature) for feature in features], np.uint64)
        counter_S = np.arange(1, length + 1, dtype=np.uint64) * _GOLDEN
        return mix(key_B[:, None] + counter_S)


DrawingT = TypeVar("DrawingT", bound=DrawingCollator)


class MaskedLMCollator(DrawingCollator):
    """Makes {input_ids, labels} from blocks with BERT's masking, drawn anew in every epoch.

    Of the tokens that are chosen, with the given probability, 80 % become the mask token, 10 % a
    random token, and 10 % stay. Special tokens are never chosen. Labels are -100 where no token was
    chosen.
    """

    def __init__(self, tokenizer: Any, probability: float = 0.15, seed: int = 0) -> None:
        super().__init__(tokenizer, seed)
        if tokenizer.mask_token_id is None:
            raise GrowthError("the tokenizer has no mask token: masked-LM training needs one")
        check_probability(probability)
        self.probability, self.mask_id = probability, tokenizer.mask_token_id
        self.vocab_size = len(tokenizer)
        self.special_ids = np.asarray(tokenizer.all_special_ids, np.int64)

    def __call__(self, features: Sequence[dict[str, Any]]) -> dict[str, torch.Tensor]:
        batch = pad_rows([feature["input_ids"] for feature in features], self.pad_id)
        input_BS = batch["input_ids"].numpy()
        # unpadded rows are hashed: a row's mask does not depend on its neighbours' lengths
        bits_BS = self.bits_of(features, input_BS.shape[1])

        maskable_BS = ~np.isin(input_BS, self.special_ids)
        if "attention_mask" in batch:
            maskable_BS &= batch["attention_mask"].numpy().astype(bool)
        chosen_BS = maskable_BS & ((bits_BS >> np.uint64(32)) < int(self.probability * 2**32))
        kind_BS = bits_BS & np.uint64(0xFFFFFFFF)
        random_BS = (mix(bits_BS) % np.uint64(self.vocab_size)).astype(np.int64)

        labels_BS = np.where(chosen_BS, input_BS, IGNORE_INDEX)
        replaced_BS = np.where(kind_BS < int(0.8 * 2**32), self.mask_id, random_BS)
        replaced_BS = np.where(kind_BS < int(0.9 * 2**32), replaced_BS, input_BS)
        batch["input_ids"] = torch.from_numpy(np.where(chosen_BS, replaced_BS, input_BS))
        return {**batch, "labels": torch.from_numpy(labels_BS)}


class SentencePairCollator(MaskedLMCollator):
    """Makes {input_ids, token_type_ids, labels, next_sentence_label} from rows, for BERT.

    A row is cut in two, at the end of a sentence if it has one. A passage never runs across the end
    of a text: of a row with several texts the longest is taken. The rows are plain text without
    special tokens at their ends. Random passages come from `passages`, which are rows with an
    index.
    """

    def __init__(
        self, tokenizer: Any, passages: Any, probability: float = 0.15, seed: int = 0
    ) -> None:
        super().__init__(tokenizer, probability, seed)
        if tokenizer.cls_token_id is None or tokenizer.sep_token_id is None:
            raise GrowthError("sentence pairs need a tokenizer with a cls and a sep token")
        self.passages = _indexed(passages)
        self.cls, self.sep = tokenizer.cls_token_id, tokenizer.sep_token_id
        self.full_stops = full_stops(tokenizer)

    def __call__(self, features: Sequence[dict[str, Any]]) -> dict[str, torch.Tensor]:
        pairs = [self.pair(feature) for feature in features]
        rows = [
            {
                "input_ids": np.asarray([self.cls, *first, self.sep, *second, self.sep], np.int64),
                PASS: feature.get(PASS, 0),
            }
            for feature, (first, second, _) in zip(features, pairs, strict=True)
        ]
        batch = super().__call__(rows)
        types_BS = torch.zeros_like(batch["input_ids"])
        for types_S, (first, second, _) in zip(types_BS, pairs, strict=True):
            types_S[len(first) + 2 : len(first) + len(second) + 3] = 1
        labels_B = torch.tensor([label for _, _, label in pairs])
        return {**batch, "token_type_ids": types_BS, "next_sentence_label": labels_B}

    def drawing_from(self, passages: Any) -> SentencePairCollator:
        """A copy that takes random passages from other rows, such as those of an evaluation."""
        twin = copy.copy(self)
        twin.passages = _indexed(passages)
        return twin

    def pair(self, feature: dict[str, Any]) -> tuple[np.ndarray, np.ndarray, int]:
        """Two passages, and whether the second follows the first (0) or is random (1)."""
        random = np.random.Generator(np.random.Philox(key=self.key_of(feature)))
        text = self._longest(feature["input_ids"])
        if len(text) < 2:
            return text, self._random_passage(random, feature, 1), RANDOM
        ends = np.flatnonzero(self.full_stops[text[:-1]]) + 1
        cut = int(random.choice(ends) if len(ends) else random.integers(1, len(text)))
        first, second = text[:cut], text[cut:]
        if random.random() < 0.5:
            return first, second, FOLLOWS
        return first, self._random_passage(random, feature, len(second)), RANDOM

    def _random_passage(
        self, random: np.random.Generator, feature: dict[str, Any], length: int
    ) -> np.ndarray:
        """At most `length` tokens of a text of another row."""
        for _ in range(TRIES):
            row = self.passages[int(random.integers(len(self.passages)))]["input_ids"]
            if not np.array_equal(row, feature["input_ids"]):
                break
        text = self._longest(row)
        start = int(random.integers(max(1, len(text) - length + 1)))
        return text[start : start + length]

    def _longest(self, ids: Any) -> np.ndarray:
        """The longest run of tokens without a special one; the row itself if there is none."""
        tokens_S = np.asarray(ids, np.int64)
        cuts = np.flatnonzero(np.isin(tokens_S, self.special_ids))
        runs = np.split(tokens_S, cuts)
        longest = max((run[1:] if i else run for i, run in enumerate(runs)), key=len)
        return longest if len(longest) else tokens_S


def _indexed(passages: Any) -> IndexedDataset:
    if not isinstance(passages, IndexedDataset):
        raise GrowthError(
            "sentence pairs need rows with an index, to choose random passages: set "
            "data.streaming to false"
        )
    return passages


_GOLDEN = np.uint64(0x9E3779B97F4A7C15)


def mix(x: np.ndarray) -> np.ndarray:
    """Finaliser of the splitmix64 generator: 64 well-mixed bits for each counter."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def full_stops(tokenizer: Any) -> np.ndarray:
    """Which tokens of a tokenizer end a sentence, (V,) bool."""
    special = set(tokenizer.all_special_ids)
    names = tokenizer.convert_ids_to_tokens(list(range(len(tokenizer))))
    return np.asarray(
        [i not in special and str(name).endswith(".") for i, name in enumerate(names)]
    )


def pad_rows(rows: Sequence[Any], pad_id: int | None) -> dict[str, torch.Tensor]:
    """Stack token rows; a mask appears only when their lengths differ."""
    lengths = {len(row) for row in rows}
    if len(lengths) == 1:
        return {"input_ids": torch.from_numpy(np.stack(rows).astype(np.int64))}
    if pad_id is None:
        raise GrowthError(
            "the rows have unequal lengths and the tokenizer has no pad token to fill them up with"
        )
    ids = [torch.as_tensor(np.asarray(row, np.int64)) for row in rows]
    return {
        "input_ids": pad_sequence(ids, batch_first=True, padding_value=pad_id),
        "attention_mask": pad_sequence([torch.ones_like(x) for x in ids], batch_first=True),
    }
