"""Recommends a method, and names the runs or the paper that it rests on."""

from __future__ import annotations

from growkern.growth.plan.advice.evidence import OURS, SAVINGS, is_past_chinchilla
from growkern.growth.plan.advice.forecast import FROM_SCRATCH, Forecast
from growkern.growth.plan.advice.kind import axes_of
from growkern.growth.plan.blueprint import Blueprint


def recommendation(
    plan: Blueprint, source_tokens: float | None = None, forecast: Forecast | None = None
) -> str:
    """The method, the stream and the depth that the evidence favours, each with its source.

    Args:
        plan: of the growth.
        source_tokens: number of tokens that the source was trained on, if known.
        forecast: of the growth, if there is one. Where it says so, the recommendation is to train
            from scratch.
    """
    growth = _growth(plan, source_tokens)
    if forecast is None:
        return growth
    if forecast.from_scratch:
        return f"{FROM_SCRATCH} (see the forecast)"
    if forecast.saves and forecast.must_be_free:
        return f"if the source exists already, {growth}"
    return growth


def _growth(plan: Blueprint, source_tokens: float | None) -> str:
    axes, parts = axes_of(plan), []
    if "width" in axes:
        padded, copies = (_own("fpi", stream) for stream in ("padded", "copies"))
        parts.append(
            f"method fpi, stream padded (a small GPT-2 saved {padded}, with copies {copies}; "
            "measured by us)"
            if plan.small.family.pads_exactly
            else "method fpi (a small BERT saved more than with aki in all 3 seeds; measured by "
            "us), stream copies (exact at multiples of the width)"
        )
    else:
        parts.append("method fpi (keeps the function; no evidence that it trains faster)")
    if "depth" in axes:
        parts.append(_depth(plan, source_tokens))
    return ", ".join(parts)


def _depth(plan: Blueprint, source_tokens: float | None) -> str:
    if source_tokens is None or is_past_chinchilla(source_tokens, plan.parameters("source")):
        return (
            "depth identity (keeps the function; in a small GPT-2 stack and interleave ended "
            "within 0.03 of it; measured by us, one seed)"
        )
    return (
        "depth stack (the fastest of several ways, Du et al., 2024; in a small GPT-2 it ended "
        "within 0.03 of identity, measured by us, one seed; the loss rises at first)"
    )


def _own(*ways: str) -> str:
    """The saving of our own runs that grew in these ways alone, in percent."""
    return next(one.text for one in SAVINGS if one.paper == OURS and one.ways == ways)
