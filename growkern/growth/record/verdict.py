"""Compares errors with the plan's predictions, and the settings of generation and token ids."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any, Literal

import torch
import transformers

from growkern.errors import listed
from growkern.growth.plan import NEW_TOKENS, OUTPUT_ERROR, Finding, GrowthPlan, token_ids
from growkern.growth.source import Source

Level = Literal["exact", "approximate", "changed"]
GENERATION_ERROR = "generation error"
# the error of outputs of the source itself, with its weights rounded (`record.compare`)
ROUNDING_ERROR = "error of a rounded source"
# how far arithmetic in 16 bits moves the outputs of the source itself
ARITHMETIC_ERROR = "error of 16-bit arithmetic"
# the error of outputs of the source itself, with the errors of the target's norms and positions
PLANNED_ERROR = "error of inexact norms"
# how far the source's logits move when its weights are rounded to 16 bits, nats
ROUNDED_LOGITS = "rounded logits (nats)"
# A grown model rounds other numbers than these samples do, so its error may be larger
ROUNDING_ROOM = 2.0
# Errors of norms excuse outputs that differ by up to this share of the largest output, and rounded
# rows a rise of the loss by this share of what guessing costs
LARGEST_EXCUSED = 0.1
# settings of generation that decide how fast it is or what else it returns, but no token
NO_TOKENS = {
    *("transformers_version", "use_cache", "max_cache_len", "low_memory"),
    *("alignment_heads", "return_dict_in_generate"),
    *("compile_config", "disable_compile", "prefill_chunk_size", "continuous_batching_config"),
    *("output_attentions", "output_hidden_states", "output_logits", "output_scores"),
}
WORDS = {
    OUTPUT_ERROR: "outputs differ",
    GENERATION_ERROR: "generation differs",
    NEW_TOKENS: "new tokens raise the loss",
}
# settings named in an error
MOST_NAMED = 4


def rounding(dtype: torch.dtype) -> float:
    """The largest relative error of outputs that rounding in float32 or float64 explains.

    Shares of `symmetry="split"` and the layers of a model amplify it. A wrong tensor of a float32
    model gives 1e-3 or more.
    """
    return {torch.float64: 1e-9, torch.float32: 1e-4}[dtype]


def measured_level(
    plan: GrowthPlan, outputs: Mapping[str, float], dtype: torch.dtype
) -> tuple[Level, str]:
    """The word for the measured outputs, as in `Finding.level`, and why it contradicts the plan.

    The word is "exact" only if the plan is; a line of "" is no contradiction. A change that was
    asked for excuses the outputs if the plan calls nothing else changed. It never excuses outputs
    or generation that fail, or new tokens that cost more than planned.

    `outputs` are those of `record.compare.compare_outputs`, with the samples of rounding beside
    them. `dtype`, float32 or float64, is whose rounding they carry beside that of 16 bits.
    """
    errors = {OUTPUT_ERROR: 0.0, GENERATION_ERROR: 0.0, NEW_TOKENS: 0.0, **outputs}
    allowed, noise = _allowed(plan, errors, dtype), _noise(errors, dtype)
    # `not <=` also holds for NaN
    beyond = [name for name, most in allowed.items() if not errors[name] <= most]
    if not beyond:
        is_exact = plan.exact and all(errors[name] <= noise for name in allowed)
        return ("exact" if is_exact else "approximate"), ""
    if failed := [name for name in beyond if not math.isfinite(errors[name])]:
        return "changed", f"{WORDS[failed[0]]} by {errors[failed[0]]}: the grown model fails"
    name = beyond[0]
    if all(finding.level != "changed" for finding in plan.findings):
        word = "exact" if plan.exact else f"approximate within {allowed[name]:.1e}"
        return "changed", f"planned {word}, but {WORDS[name]} by {errors[name]:.1e}"
    if lost := unasked_change(plan):
        forced = f"the sizes force this change, which was not asked for: {lost.what} ({lost.why})"
        return "changed", f"failed: {WORDS[name]} by {errors[name]:.1e}; {forced}"
    if NEW_TOKENS in beyond and _bounds(plan, NEW_TOKENS):
        planned = f"planned at most {allowed[NEW_TOKENS]:.1e}"
        return "changed", f"{planned}, but {WORDS[NEW_TOKENS]} by {errors[NEW_TOKENS]:.1e}"
    return "changed", ""


def unasked_change(plan: GrowthPlan) -> Finding | None:
    """The first change that the sizes force and nobody asked for; None if there is none."""
    return next((f for f in plan.findings if f.level == "changed" and not f.asked), None)


def stated_bound(plan: GrowthPlan, outputs: Mapping[str, float], dtype: torch.dtype) -> float:
    """The relative error of outputs that the plan allows."""
    return _allowed(plan, outputs, dtype)[OUTPUT_ERROR]


def _noise(errors: Mapping[str, float], dtype: torch.dtype) -> float:
    """The largest relative error of outputs that rounding, and errors of norms, explain."""
    measured = sum(errors.get(name, 0.0) for name in (ARITHMETIC_ERROR, ROUNDING_ERROR))
    planned = min(ROUNDING_ROOM * errors.get(PLANNED_ERROR, 0.0), LARGEST_EXCUSED)
    return rounding(dtype) + ROUNDING_ROOM * measured + planned


def _allowed(plan: GrowthPlan, errors: Mapping[str, float], dtype: torch.dtype) -> dict[str, float]:
    """The largest error of every measure that the plan allows.

    How far rounding to 16 bits, and errors of norms, move the outputs depends on the model. So it
    is measured on the source.
    """
    # a change that nobody asked for must not hide in the room for 16 bits
    noise = rounding(dtype) if unasked_change(plan) else _noise(errors, dtype)
    rounded = ROUNDING_ROOM * errors.get(ROUNDED_LOGITS, 0.0)
    rounded = rounded and min(rounded, LARGEST_EXCUSED * math.log(plan.small.size("vocab")))
    tokens = sum(_bounds(plan, NEW_TOKENS)) + rounding(dtype) + rounded
    return {OUTPUT_ERROR: noise, NEW_TOKENS: tokens, GENERATION_ERROR: noise}


def _bounds(plan: GrowthPlan, measure: str) -> list[float]:
    return [f.bound for f in plan.findings if f.measure == measure and f.bound is not None]


def differences(source: Source, grown: Source) -> str:
    """What differs between two models beside their functions, in one line; "" if nothing does.

    With other settings of generation a model chooses other tokens from the same logits. With other
    ids of tokens, the same text gives other outputs.
    """
    if source.generation is not None and getattr(transformers, source.class_name).can_generate():
        old, new = _token_settings(source.generation), _token_settings(grown.generation)
        if differ := [key for key in sorted({*old, *new}) if old.get(key) != new.get(key)]:
            return (
                "the generation_config is not the source's, so other tokens may be generated: "
                f"{listed(differ, MOST_NAMED)}; copy the source's generation_config"
            )
    ids, others = token_ids(source.directory), token_ids(grown.directory)
    count = sum(others.get(token, number) != number for token, number in ids.items())
    words = "tokenizer.json is not the source's, so the same text gives other outputs: other ids"
    return f"{words} for {count} tokens; copy the source's tokenizer" if count else ""


def _token_settings(generation: Any) -> dict[str, str]:
    """The settings that decide which tokens are generated, as JSON; without default values."""
    config = generation or transformers.GenerationConfig()
    usual = {key: json.dumps(x) for key, x in config._get_default_generation_params().items()}
    values = {
        key: json.dumps(value, default=str)
        for key, value in config.to_dict().items()
        if value is not None and key not in NO_TOKENS and not key.startswith(("_", "cache_"))
    }
    return {key: value for key, value in values.items() if value != usual.get(key)}
