"""Forecasts what a growth saves in training, from published savings.

A forecast is the range of the savings that papers report for growth along the same axes. It starts
at 0 where a paper or a run of ours says that gains shrink or vanish. It is no promise: few papers
measure this, on other models and texts.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from growkern.growth.plan.advice.evidence import (
    CHINCHILLA,
    EARLY,
    LEAST_STACKED,
    MOMENTS,
    MOST_STACKED,
    RELIABLE_FACTOR,
    SAVINGS,
    Saving,
    check_tokens,
    is_past_chinchilla,
    stacking_tokens,
)
from growkern.growth.plan.blueprint import Blueprint
from growkern.units import human


@dataclass(frozen=True)
class Forecast:
    """The expected cost of training a target, and what growth may save of it.

    Savings are shares of the FLOPs that training from scratch needs to the same loss. They are
    negative where growth costs more.

    Attributes:
        flops: of training the target on all tokens, from scratch.
        source_flops: of training the source; None if its tokens are not known.
        low: lowest expected saving, the source not counted.
        high: highest expected saving, the source not counted.
        saves: whether any publication has a gain at such a factor and number of tokens.
        papers: that report savings along these axes.
        reasons: sentences, each from a publication or from our own runs.
    """

    flops: float
    source_flops: float | None
    low: float
    high: float
    saves: bool
    papers: tuple[Saving, ...]
    reasons: tuple[str, ...]

    @property
    def with_source(self) -> tuple[float, float] | None:
        """`low` and `high` if the source is trained for this growth alone; None: cost unknown."""
        if self.source_flops is None:
            return None
        share = self.source_flops / self.flops
        return self.low - share, self.high - share

    @property
    def verdict(self) -> str:
        """What to do, in one sentence."""
        if not self.papers:
            return "unknown: no publication measures growth of these sizes alone"
        if not self.saves:
            return "train from scratch: so large a growth for so long a training gained nowhere"
        if self.with_source is not None and self.with_source[1] <= 0:
            return "grow if the source exists already; do not train one for this"
        return f"grow: {self.low:.0%} to {self.high:.0%} of the training FLOPs may be saved"


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
    axes = _axes(plan)
    papers = tuple(one for one in SAVINGS if one.axis in axes)
    doubts = (*_doubts(plan, tokens, source_tokens), *_early(axes, tokens, source_tokens))
    shares = [one.share for one in papers]
    flops = plan.flops_per_token() * tokens
    spent = None if source_tokens is None else plan.flops_per_token("source") * source_tokens
    reasons = doubts + tuple(_timing(plan, axes, flops, source_tokens))
    return Forecast(
        flops=flops,
        source_flops=spent,
        low=0.0 if doubts or not papers else min(shares),
        high=max(shares, default=0.0),
        saves=bool(papers) and not _is_beyond(plan, tokens),
        papers=papers,
        reasons=reasons,
    )


def _axes(plan: Blueprint) -> set[str]:
    """The axes along which the target is larger: "width", "depth"."""
    family = plan.small.family
    is_deeper = any(plan.large.size(key) > plan.small.size(key) for key in family.stacks.values())
    is_wider = any(new > old for old, new in map(plan.layout.sizes, ("stream", *family.unit_sizes)))
    return {name for name, grows in (("width", is_wider), ("depth", is_deeper)) if grows}


def _factor(plan: Blueprint) -> float:
    return plan.parameters() / plan.parameters("source")


def _is_beyond(plan: Blueprint, tokens: float) -> bool:
    """Whether the factor is above all published ones, and the training long as well."""
    return _factor(plan) > MOST_STACKED and is_past_chinchilla(tokens, plan.parameters())


def _doubts(plan: Blueprint, tokens: float, source_tokens: float | None) -> Iterator[str]:
    """Reasons why this growth may save less than the published ones."""
    factor, per = _factor(plan), tokens / plan.parameters()
    if is_past_chinchilla(tokens, plan.parameters()):
        yield (
            f"the target sees {per:.3g} tokens per parameter; gains were largest below "
            f"{CHINCHILLA} and shrank above (Mallik et al., 2026)"
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
            "less each further token gains (Liew and Kato, 2025)"
        )


def _early(axes: set[str], tokens: float, source_tokens: float | None) -> Iterator[str]:
    """A reason why a source that has seen little may save less than the published ones."""
    if source_tokens is None or source_tokens >= EARLY * tokens or "width" not in axes:
        return
    *some, last = (f"{share:.0%}" for share in MOMENTS)
    *gains, most = (f"{saved:.0%}" for saved in MOMENTS.values())
    yield (
        f"the source saw {source_tokens / tokens:.2g} times the tokens that the target will see; a "
        f"small GPT-2 that grew after {', '.join(some)} and {last} of them saved "
        f"{', '.join(gains)} and {most} (growkern's own runs)"
    )


def _timing(
    plan: Blueprint, axes: set[str], flops: float, source_tokens: float | None
) -> Iterator[str]:
    is_known = plan.parameters() >= LEAST_STACKED
    if "depth" in axes and plan.options.depth == "stack" and is_known:
        best = stacking_tokens(plan.parameters(), flops)
        seen = "" if source_tokens is None else f"; yours saw {human(source_tokens)}"
        yield f"stacking is best after {human(best)} tokens of the source (Du et al., 2024){seen}"
