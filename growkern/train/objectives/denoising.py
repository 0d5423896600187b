"""BART's denoising (Lewis et al. 2020): sentences change places, and spans become one mask each.

The sentences of each text of a row are put into random order. Then spans with Poisson lengths are
taken out until a share of the tokens is gone. One mask token stands for each span. A span of length
0 inserts a mask. The model restores the whole row.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from growkern.errors import GrowthError
from growkern.train.model.load import separator_of
from growkern.train.objectives.language_modeling import DrawingCollator, check_probability, pad_rows
from growkern.train.objectives.names import check_spans
from growkern.train.objectives.span_corruption import decoder_columns


def full_stops(tokenizer: Any) -> np.ndarray:
    """Which tokens end a sentence, (V,) bool.

    Args:
        tokenizer: of transformers.
    """
    special = set(tokenizer.all_special_ids)
    names = tokenizer.convert_ids_to_tokens(list(range(len(tokenizer))))
    return np.asarray(
        [i not in special and str(name).endswith(".") for i, name in enumerate(names)]
    )


class DenoisingCollator(DrawingCollator):
    """Makes {input_ids, attention_mask, labels, decoder_attention_mask} from rows, for BART.

    The rows are plain text without special tokens at their ends; special tokens inside separate
    texts and stay where they are. The labels are the row between the first and the last token of
    the tokenizer (<s>, </s>). The inputs are shorter and padded.

    Args:
        tokenizer: with a mask token, a first token (cls, else bos) and a last one (eos, else sep).
        share: of the tokens that are taken out, in (0, 1].
        mean_span: mean tokens per span, the lambda of the Poisson distribution.
        permute: whether sentences change places.
        seed: of the order and the spans.

    Raises:
        GrowthError: the tokenizer has no such tokens, or a value is out of range.
    """

    def __init__(
        self,
        tokenizer: Any,
        share: float = 0.3,
        mean_span: float = 3.0,
        seed: int = 0,
        *,
        permute: bool = True,
    ) -> None:
        super().__init__(tokenizer, seed)
        check_probability(share)
        check_spans(mean_span)
        first, last = tokenizer.cls_token_id, separator_of(tokenizer)
        first = getattr(tokenizer, "bos_token_id", None) if first is None else first
        if first is None or not last or tokenizer.mask_token_id is None:
            raise GrowthError(
                "denoising needs a tokenizer with a mask token, a cls or bos token, and an eos or "
                "sep token, such as BART's: choose one, or data.objective = 'span_corruption'"
            )
        self.share, self.mean_span, self.permute = share, mean_span, permute
        self.first, self.last, self.mask_id = [first], last, tokenizer.mask_token_id
        self.special_ids = np.asarray(tokenizer.all_special_ids, np.int64)
        self.full_stops = full_stops(tokenizer)

    def __call__(self, features: Sequence[dict[str, Any]]) -> dict[str, torch.Tensor]:
        rows = [np.asarray(feature["input_ids"], np.int64) for feature in features]
        noisy = [self._framed(self.corrupt(feature)) for feature in features]
        batch = pad_rows(noisy, self.pad_id)
        return {**batch, **decoder_columns([self._framed(row) for row in rows])}

    def _framed(self, tokens_S: np.ndarray) -> np.ndarray:
        return np.concatenate([self.first, tokens_S, self.last]).astype(np.int64)

    def corrupt(self, feature: dict[str, Any]) -> np.ndarray:
        """The corrupted tokens of a row, without a first and a last token; int64."""
        tokens_S = np.asarray(feature["input_ids"], np.int64)
        random = np.random.Generator(np.random.Philox(key=self.key_of(feature)))
        if self.permute:
            tokens_S = self.permuted(tokens_S, random)
        return self._infilled(tokens_S, random)

    def permuted(self, tokens_S: np.ndarray, random: np.random.Generator) -> np.ndarray:
        """The sentences of each text in random order."""
        is_end_S = np.isin(tokens_S, self.special_ids)
        pieces = []
        for text in np.split(tokens_S, np.flatnonzero(np.diff(is_end_S.astype(np.int8))) + 1):
            if len(text) == 0 or text[0] in self.special_ids:
                pieces.append(text)
                continue
            stops = np.flatnonzero(self.full_stops[text]) + 1
            sentences = [one for one in np.split(text, stops) if len(one)]
            pieces += [sentences[i] for i in random.permutation(len(sentences))]
        return np.concatenate(pieces)

    def _infilled(self, tokens_S: np.ndarray, random: np.random.Generator) -> np.ndarray:
        """The tokens with spans replaced by one mask each."""
        places = np.flatnonzero(~np.isin(tokens_S, self.special_ids))
        lengths, inserted = self._spans(round(self.share * len(places)), random)
        gone_S = np.zeros(len(tokens_S), bool)
        starts = _starts(random, len(places) - sum(lengths), lengths)
        for start, length in zip(starts, lengths, strict=True):
            gone_S[places[start : start + length]] = True
        first_S = gone_S & ~np.concatenate([[False], gone_S[:-1]])
        found = np.where(first_S, self.mask_id, tokens_S)[first_S | ~gone_S]
        return np.insert(found, random.integers(0, len(found) + 1, inserted), self.mask_id)

    def _spans(self, budget: int, random: np.random.Generator) -> tuple[list[int], int]:
        """The lengths of spans that add up to a number of tokens, and the spans of length 0."""
        lengths: list[int] = []
        inserted, left = 0, budget
        while left > 0:
            length = min(int(random.poisson(self.mean_span)), left)
            inserted += length == 0
            lengths += [length] if length else []
            left -= length
        return lengths, inserted


def _starts(random: np.random.Generator, kept: int, lengths: Sequence[int]) -> np.ndarray:
    """Where spans start, if tokens that are kept separate them wherever there are enough.

    Args:
        random: gives the places.
        kept: number of tokens that are kept.
        lengths: of the spans.
    """
    count = len(lengths)
    apart = int(kept >= count - 1)
    # kept tokens before each span, in addition to one between two spans
    free = np.sort(random.integers(0, kept - apart * max(count - 1, 0) + 1, count))
    before = np.concatenate([[0], np.cumsum(lengths)[:-1]]) if count else np.zeros(0, np.int64)
    return (free + before + apart * np.arange(count)).astype(np.int64)
