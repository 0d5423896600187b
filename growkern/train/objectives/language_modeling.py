"""Objectives: their names and models, and the collators of masked and causal language models.

A collator makes rows of tokens into a batch with labels.

Masks are drawn from a hash, not from a random generator. The mask of a block depends only on the
seed, the epoch and the tokens of the block. Data workers, resumed runs and shuffled orders
therefore draw the same masks, and no generator state has to be saved.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from typing import Any, Protocol, TypeVar, get_args, runtime_checkable

import numpy as np
import torch
from torch.nn.utils.rnn import pad_sequence
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_MASKED_LM_MAPPING_NAMES as MASKED,
    MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES as SEQ_TO_SEQ,
)

from growkern.arguments import check_seed
from growkern.errors import GrowthError, nearest
from growkern.train.model import CAUSAL, IGNORE_INDEX
from growkern.train.sections import SPANS, Objective


def objectives_of(cls: type) -> tuple[Objective, ...]:
    """The objectives that a class of transformers can be trained with; the first is its default."""
    names = {base.__name__ for base in cls.__mro__}
    if names & set(SEQ_TO_SEQ.values()):
        first: tuple[Objective, ...] = ("span_corruption", "denoising")
        return (*(first if any("T5" in name for name in names) else first[::-1]), "pairs")
    if names & CAUSAL:
        return ("clm",)
    if names & set(MASKED.values()):
        return ("mlm",)
    raise GrowthError(
        f"{cls.__name__} has no objective to be trained with: use a ...ForMaskedLM, "
        "...ForCausalLM, ...ForConditionalGeneration or ...ForPreTraining model (BERT, ELECTRA)"
    )


def choose(wanted: Objective, cls: type, *, targets: bool = False) -> Objective:
    """The objective of a run. "auto" takes the default of the model's class.

    Args:
        targets: whether the data says what a decoder beside an encoder is to write.
    """
    known = get_args(Objective)
    if wanted not in known:
        raise GrowthError(f"data.objective is {wanted!r}{nearest(wanted, known)}")
    possible = objectives_of(cls)
    if wanted == "auto":
        return "pairs" if targets and "pairs" in possible else possible[0]
    if wanted not in possible:
        raise GrowthError(
            f"data.objective is {wanted!r}, but {cls.__name__} is trained with "
            f"{' or '.join(map(repr, possible))}: set that, or choose a model of another class"
        )
    return wanted


def check_spans(mean_span: float) -> None:
    """Refuse a mean length of spans that is not a number of 1 or more."""
    if not SPANS.inside(mean_span):
        raise GrowthError(f"mean_span_length is {mean_span}: it must {SPANS.must}")


def check_probability(probability: float) -> None:
    """Refuse a masking probability that is not in (0, 1]."""
    if not 0 < probability <= 1:
        raise GrowthError(f"masking probability is {probability}: it must be in (0, 1]")


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


def evaluation_collator(collator: Collator) -> Collator:
    """The variant for evaluation, if it has one."""
    return collator.frozen() if isinstance(collator, FreezableCollator) else collator


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
        digest = hashlib.blake2b(ids.tobytes(), digest_size=8)
        digest.update(f"{self.seed}:{int(self._epoch) + feature.get(PASS, 0)}".encode())
        return int.from_bytes(digest.digest(), "little")

    def bits_of(self, features: Sequence[dict[str, Any]], length: int) -> np.ndarray:
        """64 random bits for each place of each row, (B, length) uint64."""
        key_B = np.asarray([self.key_of(feature) for feature in features], np.uint64)
        return mix(key_B[:, None] + np.arange(1, length + 1, dtype=np.uint64) * _GOLDEN)


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

        replaced_BS = np.where(kind_BS < int(0.8 * 2**32), self.mask_id, random_BS)
        replaced_BS = np.where(kind_BS < int(0.9 * 2**32), replaced_BS, input_BS)
        batch["input_ids"] = torch.from_numpy(np.where(chosen_BS, replaced_BS, input_BS))
        return {**batch, "labels": torch.from_numpy(np.where(chosen_BS, input_BS, IGNORE_INDEX))}


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
    if len({len(row) for row in rows}) == 1:
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
