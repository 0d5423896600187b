"""Compares measured errors with the plan's predictions."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from growkern.growth.plan.exactness import NEW_TOKENS, OUTPUT_ERROR
from growkern.growth.plan.growth_plan import GrowthPlan

GENERATION_ERROR = "generation error"
# errors inside a model may be this much larger in its outputs
AMPLIFIED = 16.0


def rounding(dtype: torch.dtype) -> float:
    """The largest relative error of outputs that rounding in this dtype explains.

    Shares of `symmetry="split"` and the layers of a model amplify it. A wrong tensor of a float32
    model gives 1e-3 or more.
    """
    return {torch.float64: 1e-9, torch.float32: 1e-4}.get(dtype, 16 * torch.finfo(dtype).eps)


def measured_level(
    plan: GrowthPlan, outputs: Mapping[str, float], dtype: torch.dtype
) -> tuple[str, str]:
    """The word for the measured outputs, and why it contradicts the plan.

    Args:
        outputs: of `record.outputs.compare_outputs`.
        dtype: whose rounding the outputs carry.

    Returns:
        "exact", "approximate" or "changed", as in `Finding.level`.
        The contradiction in one line; "" if there is none.
    """
    errors = {OUTPUT_ERROR: 0.0, GENERATION_ERROR: 0.0, NEW_TOKENS: 0.0, **outputs}
    noise = rounding(dtype)
    allowed = {
        OUTPUT_ERROR: AMPLIFIED * _bound(plan, OUTPUT_ERROR) + noise,
        NEW_TOKENS: _bound(plan, NEW_TOKENS) + noise,
    }
    allowed[GENERATION_ERROR] = allowed[OUTPUT_ERROR]
    # `not <=` also holds for NaN
    beyond = [name for name, most in allowed.items() if not errors[name] <= most]
    if not beyond:
        is_exact = all(errors[name] <= noise for name in allowed)
        return ("exact" if is_exact else "approximate"), ""
    changed = [finding for finding in plan.findings if finding.level == "changed"]
    name = beyond[0]
    if not changed:
        word = "exact" if plan.exact else f"approximate within {allowed[name]:.1e}"
        return "changed", f"planned {word}, but {_words(name)} by {errors[name]:.1e}"
    if any(finding.asked for finding in changed):
        return "changed", ""
    lost = changed[0]
    return "changed", f"{_words(name)} by {errors[name]:.1e}, as planned: {lost.what} ({lost.why})"


def _bound(plan: GrowthPlan, measure: str) -> float:
    return sum(f.bound or 0.0 for f in plan.findings if f.measure == measure)


def _words(measure: str) -> str:
    return {
        OUTPUT_ERROR: "outputs differ",
        GENERATION_ERROR: "cached generation differs",
        NEW_TOKENS: "new tokens raise the loss",
    }[measure]
