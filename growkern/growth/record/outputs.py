"""Compares the outputs of a source and its grown model on the same tokens."""

from __future__ import annotations

import copy
import math
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import nll_loss

from growkern.errors import GrowthError, reason
from growkern.growth.plan.blueprint import Blueprint
from growkern.growth.plan.finding import NEW_TOKENS, OUTPUT_ERROR
from growkern.growth.plan.growth_plan import GrowthPlan
from growkern.growth.plan.probe import FEW_TEXTS, SEED, largest_output
from growkern.growth.plan.tensors.change import source_coordinates
from growkern.growth.plan.vocabulary import predicts_tokens
from growkern.growth.source.runs import (
    all_outputs,
    as_model,
    image_shape,
    largest_difference,
    longest_of,
    random_inputs,
)
from growkern.growth.source.source import Source

# tokens that are generated to compare the caches of both models
STEPS = 6
# how often the source is rounded to see how far rounding moves its outputs
ROUNDINGS = 2


def check_tokens(source: Source, tokens: Tensor) -> None:
    """Refuse tokens that are not (batch, length) ids, or images, that the source accepts."""
    if source.spec.family.reads_images:
        expected = image_shape(source.config)
        if tokens.ndim != 4 or not len(tokens) or tuple(tokens.shape[1:]) != expected:
            raise GrowthError(
                f"tokens are {list(tokens.shape)}; expected images, (batch, channels, height, "
                f"width), of {' x '.join(map(str, expected))}"
            )
        if not tokens.is_floating_point():
            raise GrowthError(f"tokens are {tokens.dtype}; expected images of floating numbers")
        return
    vocabulary, longest = source.spec.size("vocab"), longest_of(source.spec)
    if tokens.ndim != 2 or not tokens.numel() or tokens.shape[1] > longest:
        raise GrowthError(
            f"tokens are {list(tokens.shape)}; expected (batch, length) with length 1 to {longest}"
        )
    if not 0 <= int(tokens.min()) <= int(tokens.max()) < vocabulary:
        raise GrowthError(f"tokens hold ids outside 0 .. {vocabulary - 1}")


def load_model(source: Source, given: Any) -> Any:
    """A source as a float32 model; a model that was given is returned as it is.

    Args:
        given: what it was opened from: a model, or a checkpoint directory of any format.
    """
    return as_model(source, torch.float32) if isinstance(given, (str, Path)) else given


@torch.no_grad()
def compare_outputs(
    plan: GrowthPlan,
    source: Any,
    grown: Any,
    tokens: Tensor,
    labels: Tensor | None = None,
    *,
    generates: bool = True,
) -> dict[str, float]:
    """Compare the outputs of both models in evaluation mode.

    Args:
        tokens: ids, (batch, length) int64.
        labels: target of every token, (batch, length) int64, -100 to ignore one.
        generates: whether to compare generation as well.

    Returns:
        "relative error": largest absolute difference over the largest absolute output. Where the
        plan bounds it, the output on the plan's random texts counts too. Models with a vocabulary
        head also have "KL (nats)" and "top-1 agreement", and with labels "source loss" and "grown
        loss". With a larger vocabulary "new tokens (nats)" is the largest rise of the loss by
        them. Models that generate have "generation error", see `generation_error`.
    """
    try:
        old = _outputs(source, tokens)
    except Exception as error:
        # classes of transformers that need other inputs raise errors of any type
        raise GrowthError(
            f"{type(source).__name__}, the source, fails on these tokens, so outputs cannot be "
            f"compared: {reason(error)}"
        ) from error
    whole = _outputs(grown, tokens)
    least = _least_output(plan, source)
    new = source_coordinates(plan, whole, old.shape[-1])
    result = {OUTPUT_ERROR: largest_difference(new, old, least)}
    if predicts_tokens(plan.small):
        log_p, log_q = old.log_softmax(-1), new.log_softmax(-1)
        result["KL (nats)"] = (log_p.exp() * (log_p - log_q)).sum(-1).mean().item()
        result["top-1 agreement"] = (old.argmax(-1) == new.argmax(-1)).double().mean().item()
        if whole.shape[-1] > old.shape[-1]:
            rise = whole.logsumexp(-1) - new.logsumexp(-1)
            result[NEW_TOKENS] = rise.max().item()
        if labels is not None:
            for name, log_probs in (("source loss", log_p), ("grown loss", log_q)):
                result[name] = nll_loss(log_probs.flatten(0, 1), labels.flatten()).item()
    if generates and source.can_generate():
        result |= generation_error(plan, source, grown, tokens)
    return result


@torch.no_grad()
def rounding_error(plan: GrowthPlan, source: Any, tokens: Tensor) -> float:
    """How far rounding of weights moves the outputs of the source, with a cache or without.

    Every weight moves up or down, at random, by a unit in the last place of the plan's dtype.

    Args:
        source: the source, float64, or float32 if it is large. It is left as it is.

    Returns:
        The largest of `ROUNDINGS` relative errors.
    """
    rng = torch.Generator().manual_seed(0)
    limits, worst = torch.finfo(plan.dtype), 0.0
    old, least = _outputs(source, tokens), _least_output(plan, source)
    for _ in range(ROUNDINGS):
        moved = copy.deepcopy(source)
        for weight in moved.parameters():
            up = torch.randint(0, 2, weight.shape, generator=rng).to(weight) * 2 - 1
            weight += up * limits.eps * weight.abs().clamp(min=limits.tiny)
        errors = [largest_difference(_outputs(moved, tokens), old, least)]
        if source.can_generate():
            errors += generation_error(plan, source, moved, tokens).values()
        worst = max(worst, *errors)
    return worst


@torch.no_grad()
def arithmetic_error(plan: GrowthPlan, narrow: Any, wide: Any, tokens: Tensor) -> float:
    """How far arithmetic in 16 bits moves the outputs of the source, with a cache or without.

    Args:
        narrow, wide: the source in 16 bits and in float32.

    Returns:
        The largest change of an output on these tokens and on random texts, relative to the largest
        output on these tokens. A few outputs alone may change little by chance.
    """
    texts = (tokens, random_inputs(plan.source, SEED, FEW_TEXTS))
    change = max((_outputs(narrow, t) - _outputs(wide, t)).abs().max().item() for t in texts)
    largest = max(_outputs(wide, tokens).abs().max().item(), _least_output(plan, wide))
    errors = [change / largest if change else 0.0]
    if narrow.can_generate():
        errors += generation_error(plan, wide, narrow, tokens).values()
    return max(errors)


def generation_error(plan: Blueprint, source: Any, grown: Any, tokens: Tensor) -> dict[str, float]:
    """Compare greedy generation, with a cache of keys and values unless the target has none.

    Args:
        tokens: the prompts, (batch, length) int64. They are cut so that the models have positions
            for `STEPS` more tokens.

    Returns:
        "generation error": largest difference of a step's logits over the largest logit, over the
        steps before the two models choose different tokens; infinity if the grown model fails to
        generate. Nothing if the source fails.
    """
    room = longest_of(plan.small)
    steps = min(STEPS, room - 1)
    prompts = tokens[:, : max(1, room - steps)]
    # a target whose cache would be too short says in its config that it uses none
    has_cache = plan.large.short_cache is None or bool(grown.config.use_cache)
    try:
        old, chosen = _generated(source, prompts, steps, has_cache)
    except Exception:
        # transformers cannot generate with every model that has the method
        return {}
    try:
        new, others = _generated(grown, prompts, steps, has_cache)
    except Exception:
        return {"generation error": math.inf}
    count = min(old.shape[1], new.shape[1])
    start = chosen.shape[1] - old.shape[1]
    differ = (chosen[:, start : start + count] != others[:, start : start + count]).long()
    # the step at which the choice differs still has the same inputs
    is_same = differ.cumsum(1) - differ == 0
    size = old.shape[-1]
    return {
        "generation error": largest_difference(
            new[:, :count, :size][is_same], old[:, :count][is_same]
        )
    }


def _generated(model: Any, prompts: Tensor, steps: int, has_cache: bool) -> tuple[Tensor, Tensor]:
    """Logits of every step, (batch, steps, vocabulary), and the tokens with their prompts."""
    prompts = prompts.to(model.device)
    how = {"max_new_tokens": steps, "min_new_tokens": steps, "do_sample": False, "num_beams": 1}
    found = model.eval().generate(
        prompts,
        attention_mask=torch.ones_like(prompts),
        pad_token_id=0,
        use_cache=has_cache,
        return_dict_in_generate=True,
        output_logits=True,
        **how,
    )
    return torch.stack(found.logits, 1).double().cpu(), found.sequences.cpu()


def _least_output(plan: GrowthPlan, source: Any) -> float:
    """The output that the plan's bound on outputs is relative to; 0 if there is no bound."""
    bounded = any(f.measure == OUTPUT_ERROR and f.bound for f in plan.findings)
    return largest_output(plan, source) if bounded else 0.0


def _outputs(model: Any, tokens: Tensor) -> Tensor:
    """The main output of `all_outputs`."""
    return next(iter(all_outputs(model, tokens).values()))
