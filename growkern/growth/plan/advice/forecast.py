"""Forecasts what a growth saves in training, from published savings and from our own runs.

A forecast is the range of the savings that were measured for growth along the same axes, in the
same way. They are single figures of papers and means of our own runs, with the interval of the
mean: one training may lie outside. The range starts at 0 where a paper or a run of ours says that
gains shrink or vanish, and where nothing like the growth was measured. It is no promise: few papers
measure this, on other models and texts.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from growkern.errors import GrowthError
from growkern.growth.plan.advice.evidence import (
    CHEAP,
    CHINCHILLA,
    DIRECT_COPY,
    EARLY,
    FAR_FACTOR,
    FAR_LAYERS,
    FARTHEST_FACTOR,
    FREE_ABOVE,
    LEAST_FACTOR,
    LEAST_SEEN,
    LEAST_SEEN_LATER,
    LEAST_STACKED,
    LONG_SOURCE,
    MOMENTS,
    MOST_FACTOR,
    NEAR_OURS,
    OUR_LARGEST,
    OURS,
    RELIABLE_FACTOR,
    SAVINGS,
    Saving,
    check_tokens,
    is_past_chinchilla,
    percent,
    stacking_tokens,
)
from growkern.growth.plan.advice.kind import (
    axes_of,
    deepening,
    factor_of,
    has_equal_copies,
    ways_of,
)
from growkern.growth.plan.blueprint import Blueprint
from growkern.units import human

# the beginning of each verdict that advises it
FROM_SCRATCH = "train from scratch"


@dataclass(frozen=True)
class Forecast:
    """The expected cost of training a target, and what growth may save of it.

    Savings are shares of the FLOPs that training from scratch needs to the same loss. They are
    negative where growth costs more.

    Attributes:
        flops: of training the target on all tokens, from scratch.
        source_flops: of training the source; None if its tokens are not known.
        low: lowest of the measured savings, the source not counted; 0 without evidence.
        high: highest of the measured savings, the source not counted; 0 without evidence.
        saves: whether any evidence has a gain for such a growth.
        from_scratch: whether to train from scratch, even where the source exists already.
        against: why not to grow so, in one sentence; empty if nothing forbids it.
        must_be_free: whether no source should be trained for this target, which sees so many
            tokens that little may be saved.
        papers: the savings that the forecast rests on.
        is_untried: whether the target is far larger, or the source far younger, than in any
            measurement that had a gain.
        reasons: sentences, each from a publication or from our own runs.
    """

    flops: float
    source_flops: float | None
    low: float
    high: float
    saves: bool
    from_scratch: bool
    against: str
    must_be_free: bool
    papers: tuple[Saving, ...]
    is_untried: bool
    reasons: tuple[str, ...]

    @property
    def with_source(self) -> tuple[float, float] | None:
        """`low` and `high` if the source is trained for this growth alone; None: not known."""
        if self.source_flops is None or not self.papers:
            return None
        share = self.source_flops / self.flops
        return self.low - share, self.high - share

    @property
    def needs_free_source(self) -> bool:
        """Whether to grow only if the source exists already."""
        with_source = self.with_source
        return self.saves and (
            self.must_be_free or (with_source is not None and with_source[1] <= 0)
        )

    @property
    def range(self) -> str:
        """The range of the measured savings in percent, or that there is no evidence."""
        if not self.papers:
            return "no evidence"
        found = span(self.low, self.high)
        if len(self.papers) > 1:
            return found
        (one,) = self.papers
        is_its_own = one.bound and self.low == one.low
        return f"{one.text if is_its_own else found} (one measurement)"

    @property
    def verdict(self) -> str:
        """What to do, in one sentence."""
        if self.against:
            return self.against
        if not self.papers:
            return "unknown: no paper and no run of ours measures growth of these sizes in this way"
        if not self.saves:
            return f"{FROM_SCRATCH}: in every measurement such growth cost more than it saved"
        if self.must_be_free:
            return f"{FROM_SCRATCH}, unless the source exists already: then {self._gain}"
        if self.needs_free_source:
            return f"grow if the source exists already: {self._gain}; do not train one for this"
        if self.is_untried or any(one.share < 0 for one in self.papers):
            return f"try it on a small scale first: {self._gain}"
        return f"grow: {self._gain}"

    @property
    def _gain(self) -> str:
        loses = "; below 0% it costs more" if round(100 * self.low) < 0 else ""
        return f"{self.range} of the training FLOPs may be saved{loses}"


def span(low: float, high: float) -> str:
    """Two shares as a range in percent, or as one number if they round to the same."""
    ends = percent(low), percent(high)
    return f"about {ends[0]}" if ends[0] == ends[1] else " to ".join(ends)


def forecast_if_asked(
    plan: Blueprint, tokens: float | None, source_tokens: float | None
) -> Forecast | None:
    """The forecast for a number of tokens; None without one.

    Raises:
        GrowthError: only `source_tokens` is given, or see `forecast`.
    """
    if tokens is not None:
        return forecast(plan, tokens, source_tokens)
    if source_tokens is not None:
        raise GrowthError(
            f"source_tokens={source_tokens:g} is for the forecast: give tokens too, those that the "
            "target will be trained on"
        )
    return None


def forecast(plan: Blueprint, tokens: float, source_tokens: float | None = None) -> Forecast:
    """Forecast the saving of a growth.

    Args:
        plan: of the growth.
        tokens: number of tokens that the target will be trained on.
        source_tokens: number of tokens that the source was trained on, if known.

    Raises:
        GrowthError: a number of tokens is not positive or not finite.
    """
    check_tokens("tokens", tokens)
    check_tokens("source_tokens", source_tokens)
    axes, scratch = axes_of(plan), _for_scratch(plan, tokens, source_tokens)
    against = f"{FROM_SCRATCH}: {scratch}" if scratch else _against_options(plan, tokens)
    ways = set() if against else ways_of(plan, tokens, source_tokens)
    papers = _papers(axes, ways)
    if ways and not papers and _papers(axes, ways | {"young"}):
        against = (
            "unknown: such growth was measured only from sources that had seen fewer than half of "
            "the tokens that the target was to see"
        )
    untried = tuple(_untried(plan, papers, tokens, source_tokens))
    early = _early(axes, tokens, source_tokens)
    doubts = (*untried, *_doubts(plan, tokens, source_tokens), *early)
    ends = [0.0] if doubts or not papers else []
    flops = plan.flops_per_token() * tokens
    spent = None if source_tokens is None else plan.flops_per_token("source") * source_tokens
    is_cheap = spent is not None and spent < CHEAP * flops
    timing = () if against else _timing(plan, tokens, source_tokens)
    most = _most_in_width(tokens, source_tokens)
    high = max(
        (one.high if one.axis == "depth" else min(one.high, most) for one in papers), default=0.0
    )
    return Forecast(
        flops=flops,
        source_flops=spent,
        low=min([*ends, *(one.low for one in papers)]),
        high=high,
        saves=high > 0,
        from_scratch=bool(scratch) or (bool(papers) and high <= 0),
        against=against,
        must_be_free=tokens > FREE_ABOVE * plan.parameters() and not is_cheap,
        papers=papers,
        is_untried=bool(untried),
        # a baseline and equal copies lose for reasons of their own
        reasons=(*doubts, *timing) if papers else (),
    )


def _papers(axes: set[str], ways: set[str]) -> tuple[Saving, ...]:
    """The savings of growth along some axes in some ways."""
    return tuple(one for one in SAVINGS if one.axis in axes and ways.issuperset(one.ways))


def _most_in_width(tokens: float, source_tokens: float | None) -> float:
    """The most that growth in width may save from a source that saw fewer tokens than the target.

    No paper measured such growth, so the upper ends of our own runs bound it, and the straight
    lines between them. A younger source than theirs is bounded as their youngest one is.
    """
    if source_tokens is None or source_tokens >= tokens:
        return math.inf
    ends = [gain + half for gain, half in MOMENTS.values()]
    return float(np.interp(source_tokens / tokens, list(MOMENTS), ends))


def _for_scratch(plan: Blueprint, tokens: float, source_tokens: float | None) -> str:
    """Why to train from scratch, in one sentence, or an empty string."""
    factor, axes = factor_of(plan), axes_of(plan)
    if source_tokens is not None and source_tokens < LEAST_SEEN * plan.parameters("source"):
        return (
            f"the source saw fewer than {LEAST_SEEN:g} tokens per parameter, far fewer than any "
            "source that saved something (measured by us)"
        )
    is_long = source_tokens is not None and source_tokens >= LONG_SOURCE * tokens
    if "width" in axes and factor > (FARTHEST_FACTOR if is_long else FAR_FACTOR):
        measured = (
            f"no gain was measured above {FARTHEST_FACTOR:g} times"
            if is_long
            else "a small BERT that grew to 14 times saved much only from a source that had seen "
            f"{LONG_SOURCE:g} times the tokens (measured by us)"
        )
        return (
            f"the model grows to {factor:,.0f} times its parameters; there is a factor above which "
            f"that is better (Mallik et al., 2026), and {measured}"
        )
    if deepening(plan) > FAR_LAYERS:
        return (
            f"the layers grow {deepening(plan):.0f} times, and the farthest gain in our evidence "
            f"is {FAR_LAYERS:g} times (Bu, 2025)"
        )
    if "width" in axes and factor > MOST_FACTOR and is_past_chinchilla(tokens, plan.parameters()):
        return (
            f"the model grows to {factor:.1f} times its parameters and sees more than "
            f"{CHINCHILLA} tokens per parameter, and gains shrink with both (Mallik et al., 2026)"
        )
    return ""


def _against_options(plan: Blueprint, tokens: float) -> str:
    """Why to choose other options, or more tokens, in one sentence, or an empty string."""
    if plan.options.method == "random":
        return "choose method='fpi': method='random' is a baseline that takes nothing over"
    if plan.options.method == "direct_copy":
        return (
            "unknown: method='direct_copy' is a baseline, so the papers' figures are not its; "
            f"a small GPT-2 saved {DIRECT_COPY.text} with it (measured by us)"
        )
    if has_equal_copies(plan):
        return (
            "choose symmetry='routing': with equal copies a small GPT-2 did not reach the loss "
            "from scratch (measured by us)"
        )
    if tokens < LEAST_SEEN_LATER * plan.parameters():
        return (
            f"unknown: the target sees fewer than {LEAST_SEEN_LATER:g} tokens per parameter, "
            "fewer than in any measurement that is used here"
        )
    return ""


def _untried(
    plan: Blueprint, papers: tuple[Saving, ...], tokens: float, source_tokens: float | None
) -> Iterator[str]:
    """Reasons why no measurement is like this growth."""
    gains = [one for one in papers if one.share > 0]
    times = plan.parameters() / OUR_LARGEST
    if gains and times > NEAR_OURS and all(one.paper == OURS for one in gains):
        yield (
            f"such growth saved something only in small models of ours; this one has {times:,.0f} "
            f"times the {human(OUR_LARGEST)} parameters of the largest"
        )
    factor = factor_of(plan)
    if factor > MOST_FACTOR and any(one.axis != "depth" for one in papers):
        yield (
            f"the model grows to {factor:.1f} times its parameters; these savings were measured "
            f"at {MOST_FACTOR:g} times or less"
        )
    if factor > FAR_FACTOR and any(one.axis != "depth" for one in papers):
        yield (
            "at such a factor only one small BERT saved much: AKI in every seed, direct_copy in "
            "most, and FPI was not tried from such a source (measured by us)"
        )
    youngest = min(MOMENTS)
    is_young = source_tokens is not None and source_tokens < youngest * tokens
    # when to stack alone has a law, and `_timing` tells it
    is_timed = _is_timed(plan) and all(one.axis == "depth" for one in papers)
    if is_young and papers and not is_timed:
        yield (
            "the source saw a smaller share of the target's tokens than in any measurement of such "
            f"a model, where it is {youngest:g} or more"
        )


def _doubts(plan: Blueprint, tokens: float, source_tokens: float | None) -> Iterator[str]:
    """Reasons why this growth may save less than the published ones."""
    factor, per = factor_of(plan), tokens / plan.parameters()
    if is_past_chinchilla(tokens, plan.parameters()):
        yield (
            f"the target sees {per:.3g} tokens per parameter; gains were largest below "
            f"{CHINCHILLA} and shrank above (Mallik et al., 2026)"
        )
    if factor < LEAST_FACTOR:
        yield (
            f"the model grows to {factor:.2f} times its parameters, less than in any measurement"
        )
    # embeddings grow less than the rest: twice the size is rarely 2.0 times the parameters
    if factor > 1.25 * RELIABLE_FACTOR:
        yield (
            f"the model grows to {factor:.1f} times its parameters; {RELIABLE_FACTOR:g} times was "
            "most reliable, and far above it training from scratch was faster (Mallik et al., 2026)"
        )
    if source_tokens is not None and is_past_chinchilla(source_tokens, plan.parameters("source")):
        per = source_tokens / plan.parameters("source")
        yield (
            f"the source saw {per:.3g} tokens per parameter; the more a source was trained, the "
            "less each further token gains (Liew and Kato, 2025; for mixtures of experts also Liew "
            "et al., 2025)"
        )


def _early(axes: set[str], tokens: float, source_tokens: float | None) -> Iterator[str]:
    """A reason why a source that has seen little may save less than the published ones."""
    if source_tokens is None or source_tokens >= EARLY * tokens or "width" not in axes:
        return
    *some, last = (f"{share:.0%}" for share in MOMENTS)
    *gains, most = (f"{saved:.0%}" for saved, _ in MOMENTS.values())
    yield (
        f"the source saw {source_tokens / tokens:.2g} times the tokens that the target will see; a "
        f"small GPT-2 that had seen {', '.join(some)} and {last} of them saved "
        f"{', '.join(gains)} and {most} (measured by us)"
    )


def _is_timed(plan: Blueprint) -> bool:
    """Whether the law of when to stack is about this growth."""
    is_stack = "depth" in axes_of(plan) and plan.options.depth == "stack"
    return is_stack and plan.parameters() >= LEAST_STACKED


def _timing(plan: Blueprint, tokens: float, source_tokens: float | None) -> Iterator[str]:
    if _is_timed(plan):
        law = "(Du et al., 2024)"
        best = stacking_tokens(plan.parameters(), plan.flops_per_token() * tokens)
        seen = "" if source_tokens is None else f"; yours saw {human(source_tokens)}"
        if best < tokens:
            yield f"stacking is best after {human(best)} tokens of the source {law}{seen}"
        else:
            yield (
                f"the law of when to stack {law} does not hold for so short a training: it names "
                f"more than the {human(tokens)} tokens of the target"
            )
