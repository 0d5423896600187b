"""The names of the objectives, the models that each of them trains, and the rows that it needs."""

from __future__ import annotations

import math
from typing import Literal, NamedTuple, get_args

from transformers.models.auto.modeling_auto import (
    MODEL_FOR_MASKED_LM_MAPPING_NAMES as MASKED,
)
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES as SEQ_TO_SEQ,
)

from growkern.arguments import Limit
from growkern.errors import GrowthError, nearest
from growkern.train.model import CAUSAL

Objective = Literal["auto", "mlm", "clm", "span_corruption", "denoising", "pairs"]
# special tokens that the collator adds to a row
ADDED = {"denoising": 2}
# share of the tokens that are masked, in the papers of BERT and T5, and in that of BART
SHARE, DENOISING_SHARE = 0.15, 0.3


def row_length(objective: Objective, length: int, share: float, mean_span: float) -> int:
    """The tokens of a row of text, of which the collator makes an input of `length` tokens.

    An input of "denoising" is shorter, its labels are not.
    """
    if objective == "span_corruption":
        return raw_length(length, share, mean_span)
    return length - ADDED.get(objective, 0)


def objectives_of(cls: type) -> tuple[Objective, ...]:
    """The objectives that a class of transformers can be trained with; the first is its default."""
    names = {base.__name__ for base in cls.__mro__}
    if names & set(SEQ_TO_SEQ.values()):
        is_t5 = any("T5" in name for name in names)
        first: tuple[Objective, ...] = ("span_corruption", "denoising")
        return (*(first if is_t5 else first[::-1]), "pairs")
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


class SpanCounts(NamedTuple):
    """The numbers of a corrupted row."""

    noise: int  # tokens that are taken out
    spans: int

    @property
    def target(self) -> int:
        """Tokens of the target: equation (2) of `spans.py`."""
        return self.noise + self.spans + 2


def span_counts(tokens: int, share: float, mean_span: float) -> SpanCounts:
    """The numbers of tokens and spans that are taken out of a row of 2 tokens or more."""
    noise = min(max(round(tokens * share), 1), tokens - 1)
    spans = min(max(round(noise / mean_span), 1), noise, tokens - noise)
    return SpanCounts(noise, spans)


def input_length(tokens: int, share: float, mean_span: float) -> int:
    """The tokens of the input that a row becomes: equation (1) of `spans.py`."""
    noise, spans = span_counts(tokens, share, mean_span)
    return tokens - noise + spans + 1


def raw_length(length: int, share: float, mean_span: float) -> int:
    """The longest row whose input has at most `length` tokens; 0 if there is none."""
    low, high = 1, length
    while input_length(high, share, mean_span) <= length:
        high *= 2
    # the length of the input never falls when a row gets longer
    while high - low > 1:
        middle = (low + high) // 2
        fits = input_length(middle, share, mean_span) <= length
        low, high = (middle, high) if fits else (low, middle)
    return low if low > 1 else 0


SPANS = Limit(lambda x: 1 <= x < math.inf, "be 1 or more")


def check_spans(mean_span: float) -> None:
    """Refuse a mean length of spans that is not a number of 1 or more."""
    if not SPANS.inside(mean_span):
        raise GrowthError(f"mean_span_length is {mean_span}: it must {SPANS.must}")
