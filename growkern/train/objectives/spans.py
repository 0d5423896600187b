"""Collators that take spans of tokens out of a row, for a model that writes: T5 and BART.

T5's span corruption (Raffel et al. 2020, section 3.1.4): of a row of L tokens, n = round(share L)
are taken out, in k = round(n / mean_span) spans. In the input a sentinel stands for each span. The
target is each sentinel followed by its span, and a final sentinel:

    input    kept_1 <0> kept_2 <1> ... kept_k <k-1> </s>      L - n + k + 1 tokens        (1)
    target   <0> span_1 <1> span_2 ... <k-1> span_k <k> </s>      n + k + 2 tokens        (2)

Every kept part and every span has at least one token. Both lengths follow from L alone, so all
rows of a batch are full.

BART's denoising (Lewis et al. 2020): the sentences of each text of a row are put into random order.
Then spans with Poisson lengths are taken out until a share of the tokens is gone. One mask token
stands for each span. A span of length 0 inserts a mask. The model restores the whole row.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch.nn.utils.rnn import pad_sequence

from growkern.errors import GrowthError
from growkern.train.model import IGNORE_INDEX, separator_of
from growkern.train.objectives.language_modeling import (
    DrawingCollator,
    check_probability,
    check_spans,
    full_stops,
    pad_rows,
)
from growkern.train.sections import span_counts

SENTINEL = "<extra_id_{}>"


class SpanCorruptionCollator(DrawingCollator):
    """Makes {input_ids, labels, decoder_attention_mask} from rows, for T5 and its relatives.

    The rows are plain text without special tokens at their ends. A row of `raw_length` tokens makes
    an input of the length that was asked for.

    Args:
        tokenizer: with the tokens <extra_id_0>, <extra_id_1> ... and an eos token.
        share: of the tokens that are taken out, in (0, 1).
        mean_span: mean tokens per span.
    """

    def __init__(
        self, tokenizer: Any, share: float = 0.15, mean_span: float = 3.0, seed: int = 0
    ) -> None:
        super().__init__(tokenizer, seed)
        check_probability(share)
        check_spans(mean_span)
        vocabulary = tokenizer.get_vocab()
        self.sentinels: list[int] = []
        for name in (SENTINEL.format(i) for i in range(len(vocabulary))):
            if name not in vocabulary:
                break
            self.sentinels.append(vocabulary[name])
        if len(self.sentinels) < 2 or tokenizer.eos_token_id is None:
            raise GrowthError(
                "span corruption needs a tokenizer with the tokens <extra_id_0>, <extra_id_1> ... "
                "and an eos token, such as T5's: choose one, or data.objective = 'denoising'"
            )
        self.share, self.mean_span, self.eos = share, mean_span, tokenizer.eos_token_id

    def check_rows(self, length: int) -> None:
        """Check that there are enough sentinels for rows of a length."""
        spans = span_counts(length, self.share, self.mean_span).spans
        if spans >= len(self.sentinels):
            raise GrowthError(
                f"a row of {length} tokens has {spans} spans, which need {spans + 1} sentinels, "
                f"but the tokenizer has {len(self.sentinels)}: give a smaller data.sequence_length "
                "or data.masking_probability, or a larger data.mean_span_length"
            )

    def __call__(self, features: Sequence[dict[str, Any]]) -> dict[str, torch.Tensor]:
        pairs = [self.corrupt(feature) for feature in features]
        batch = pad_rows([tokens for tokens, _ in pairs], self.pad_id)
        return {**batch, **decoder_columns([target for _, target in pairs])}

    def corrupt(self, feature: dict[str, Any]) -> tuple[np.ndarray, np.ndarray]:
        """The input and the target of a row, int64."""
        tokens_S = np.asarray(feature["input_ids"], np.int64)
        if len(tokens_S) < 2:
            raise GrowthError(
                f"a row has {len(tokens_S)} tokens, but span corruption needs at least 2"
            )
        self.check_rows(len(tokens_S))
        noise, spans = span_counts(len(tokens_S), self.share, self.mean_span)
        random = np.random.Generator(np.random.Philox(key=self.key_of(feature)))
        kept = _parts(random, len(tokens_S) - noise, spans)
        ends = np.cumsum(np.stack([kept, _parts(random, noise, spans)], 1).ravel())[:-1]
        pieces = np.split(tokens_S, ends)
        inputs, target = [], []
        for sentinel, before, span in zip(self.sentinels, pieces[::2], pieces[1::2], strict=False):
            inputs += [before, [sentinel]]
            target += [[sentinel], span]
        target.append([self.sentinels[spans]])
        end = np.asarray([self.eos], np.int64)
        return np.concatenate([*inputs, end]), np.concatenate([*target, end])


def _parts(random: np.random.Generator, total: int, count: int) -> np.ndarray:
    """Lengths of at least 1 that add up to `total`; all ways to cut are equally likely."""
    cuts = np.sort(random.choice(total - 1, count - 1, replace=False)) + 1
    return np.diff(np.concatenate([[0], cuts, [total]]))


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
        batch = pad_rows([self._framed(self.corrupt(feature)) for feature in features], self.pad_id)
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
            sentences = [sentence for sentence in np.split(text, stops) if len(sentence)]
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
        kept = np.where(first_S, self.mask_id, tokens_S)[first_S | ~gone_S]
        return np.insert(kept, random.integers(0, len(kept) + 1, inserted), self.mask_id)

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
    """Where spans start, if tokens that are kept separate them wherever there are enough."""
    count = len(lengths)
    apart = int(kept >= count - 1)
    # kept tokens before each span, in addition to one between two spans
    free = np.sort(random.integers(0, kept - apart * max(count - 1, 0) + 1, count))
    before = np.concatenate([[0], np.cumsum(lengths)[:-1]]) if count else np.zeros(0, np.int64)
    return (free + before + apart * np.arange(count)).astype(np.int64)


def decoder_columns(targets: Sequence[np.ndarray]) -> dict[str, torch.Tensor]:
    """The labels of a decoder and the mask of its real tokens, (B, S) each."""
    labels = [torch.from_numpy(target) for target in targets]
    labels_BS = pad_sequence(labels, batch_first=True, padding_value=IGNORE_INDEX)
    mask_BS = (labels_BS != IGNORE_INDEX).to(torch.int64)
    return {"labels": labels_BS, "decoder_attention_mask": mask_BS}
