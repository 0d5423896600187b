"""T5's span corruption (Raffel et al. 2020, section 3.1.4): the model restores spans of tokens.

Of a row of L tokens, n = round(share L) are taken out, in k = round(n / mean_span) spans. In the
input a sentinel stands for each span. The target is each sentinel followed by its span, and a
final sentinel:

    input    kept_1 <0> kept_2 <1> ... kept_k <k-1> </s>      L - n + k + 1 tokens        (1)
    target   <0> span_1 <1> span_2 ... <k-1> span_k <k> </s>      n + k + 2 tokens        (2)

Every kept part and every span has at least one token. Both lengths follow from L alone, so all
rows of a batch are full.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from growkern.errors import GrowthError
from growkern.train.model.head import IGNORE_INDEX
from growkern.train.objectives.language_modeling import DrawingCollator, check_probability, pad_rows
from growkern.train.objectives.names import check_spans, span_counts

SENTINEL = "<extra_id_{}>"


class SpanCorruptionCollator(DrawingCollator):
    """Makes {input_ids, labels, decoder_attention_mask} from rows, for T5 and its relatives.

    The rows are plain text without special tokens at their ends. A row of `raw_length` tokens
    makes an input of the length that was asked for.

    Args:
        tokenizer: with the tokens <extra_id_0>, <extra_id_1> ... and an eos token.
        share: of the tokens that are taken out, in (0, 1).
        mean_span: mean tokens per span.
        seed: of the spans.

    Raises:
        GrowthError: the tokenizer has no such tokens, or a value is out of range.
    """

    def __init__(
        self, tokenizer: Any, share: float = 0.15, mean_span: float = 3.0, seed: int = 0
    ) -> None:
        super().__init__(tokenizer, seed)
        check_probability(share)
        check_spans(mean_span)
        vocabulary = tokenizer.get_vocab()
        names = (SENTINEL.format(i) for i in range(len(vocabulary)))
        self.sentinels: list[int] = []
        for name in names:
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
        """Check that there are enough sentinels for rows of a length.

        Raises:
            GrowthError: there are not.
        """
        spans = span_counts(length, self.share, self.mean_span).spans
        if spans >= len(self.sentinels):
            raise GrowthError(
                f"a row of {length} tokens has {spans} spans, which need {spans + 1} sentinels, "
                f"but the tokenizer has {len(self.sentinels)}: give a smaller data.sequence_length "
                "or data.masking_probability, or a larger data.mean_span_length"
            )

    def __call__(self, features: Sequence[dict[str, Any]]) -> dict[str, torch.Tensor]:
        pairs = [self.corrupt(feature) for feature in features]
        batch = pad_rows([one for one, _ in pairs], self.pad_id)
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
        taken = _parts(random, noise, spans)
        ends = np.cumsum(np.stack([kept, taken], 1).ravel())[:-1]
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


def decoder_columns(targets: Sequence[np.ndarray]) -> dict[str, torch.Tensor]:
    """The labels of a decoder and the mask of its real tokens, (B, S) each.

    Args:
        targets: the tokens of each row.
    """
    longest = max(map(len, targets))
    labels_BS = torch.full((len(targets), longest), IGNORE_INDEX, dtype=torch.int64)
    for labels_S, target in zip(labels_BS, targets, strict=True):
        labels_S[: len(target)] = torch.from_numpy(target)
    mask_BS = (labels_BS != IGNORE_INDEX).to(torch.int64)
    return {"labels": labels_BS, "decoder_attention_mask": mask_BS}
