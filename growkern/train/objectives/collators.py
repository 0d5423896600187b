"""The collator of an objective."""

from __future__ import annotations

from typing import Any

from growkern.train.objectives.denoising import DenoisingCollator
from growkern.train.objectives.language_modeling import CausalLMCollator, MaskedLMCollator
from growkern.train.objectives.names import Objective
from growkern.train.objectives.replaced_tokens import ReplacedTokenCollator
from growkern.train.objectives.sentence_pairs import SentencePairCollator
from growkern.train.objectives.span_corruption import SpanCorruptionCollator


def collator_of(
    objective: Objective,
    tokenizer: Any,
    rows: Any,
    *,
    share: float,
    mean_span: float,
    length: int,
    seed: int,
) -> Any:
    """Makes batches of rows.

    Args:
        objective: any but "auto".
        tokenizer: of the run.
        rows: the data set; pairs take random passages from it.
        share: of the tokens that are masked.
        mean_span: mean tokens per masked span.
        length: tokens per row.
        seed: of all that is drawn.

    Raises:
        GrowthError: the tokenizer lacks a token that the objective needs, or the rows do not fit.
    """
    if objective == "clm":
        return CausalLMCollator(tokenizer)
    if objective == "mlm+nsp":
        return SentencePairCollator(tokenizer, rows, share, seed)
    if objective == "span_corruption":
        corrupting = SpanCorruptionCollator(tokenizer, share, mean_span, seed)
        corrupting.check_rows(length)
        return corrupting
    if objective == "denoising":
        return DenoisingCollator(tokenizer, share, mean_span, seed)
    if objective == "rtd":
        return ReplacedTokenCollator(tokenizer, share, seed)
    return MaskedLMCollator(tokenizer, share, seed)
