"""BERT's two objectives (Devlin et al. 2019): masked tokens, and whether two passages belong
together.

    [CLS] A [SEP] B [SEP]

A and B come from one text. In half of the pairs B follows A; in the others it is a passage from
another row. The loss is the mean over the masked tokens plus the mean over the pairs.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from growkern.errors import GrowthError
from growkern.train.objectives.language_modeling import (
    PASS,
    IndexedDataset,
    MaskedLMCollator,
    full_stops,
)

FOLLOWS, RANDOM = 0, 1
# rows that are looked at for a random passage
TRIES = 8


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
        found = max((run[1:] if i else run for i, run in enumerate(runs)), key=len)
        return found if len(found) else tokens_S


def _indexed(passages: Any) -> IndexedDataset:
    if not isinstance(passages, IndexedDataset):
        raise GrowthError(
            "sentence pairs need rows with an index, to choose random passages: set "
            "data.streaming to false"
        )
    return passages
