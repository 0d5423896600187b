"""Compares a grown model with its source and its plan: its record, its tensors and its outputs.

A grown weight is brought into the source's shape again, W = P_out U E_in, by the inverse of its
kind (`growkern.growth.plan.tensors.gather`).
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import nll_loss

from growkern.errors import GrowthError, reason
from growkern.growth.outputs import (
    all_outputs,
    largest_difference,
    longest_of,
    random_inputs,
)
from growkern.growth.plan import (
    NEW_TOKENS,
    OUTPUT_ERROR,
    WEIGHT_ROUNDINGS,
    Blueprint,
    GrowthPlan,
    Task,
    add_errors,
    build_each,
    has_errors,
    kind_of,
    predicts_tokens,
    source_coordinates,
)
from growkern.growth.record.lineage import (
    TRAINED,
    Lineage,
    record_of,
    source_files,
    versions,
    without_times,
)
from growkern.growth.source import Source
from growkern.package import version

# config fields that tell how a model was saved or loaded, and do not change the model
NOT_THE_MODEL = ("transformers_version", "architectures", "dtype")
# the measure that `compare_outputs` adds where both models compute NaN or infinity
FAILING = "share of outputs not finite"
# fields that do not decide the result: the version, and sentences about it
NOT_COMPARED = {"growkern", "findings", "condition"}


def notes_of(lineage: Lineage) -> list[str]:
    """One line if the weights are not those of the growth, and one per package that changed."""
    then = lineage.data.get("versions", {})
    lines = ["the weights were trained or changed after the growth"]
    lines = lines if lineage.data.get(TRAINED) else []
    for name, now in versions().items():
        if then.get(name) != now:
            lines.append(f"grown with {name} {then.get(name)}, this is {now}")
    return [f"{lineage.file}: {line}" for line in lines]


def contradictions(lineage: Lineage, plan: GrowthPlan) -> list[str]:
    """Places where a lineage disagrees with a new plan or with the source's files.

    There is one line per top-level key, with the path of its first difference.
    """
    data, now = lineage.data, record_of(plan)
    # {}: a model in memory was grown
    if plan.source.directory is not None and data.get("source_files") != {}:
        now["source_files"] = without_times(source_files(plan.source))
    elif plan.source.directory is None:
        # a model in memory may have been loaded with another dtype than its file's
        del now["source_dtype"]
    left_out = {*NOT_COMPARED, *({"exact"} - data.keys())}
    if data.get("versions", {}).get("growkern") != version():
        # another version may judge differently
        left_out.add("exact")
    result = []
    for key in now.keys() - left_out:
        where = next(_differences(data.get(key), now[key], key.endswith("_config")), None)
        if where is not None:
            result.append(f"{lineage.file}: {key}{where}")
    return sorted(result)


def _differences(then: Any, now: Any, is_config: bool) -> Iterator[str]:
    """Paths, as `.name.name`, at which two JSON values differ.

    Of configs, fields that do not change the model or exist on one side only do not count.
    """
    if not isinstance(then, dict) or not isinstance(now, dict):
        if then != now:
            yield ""
        return
    for name in {**now, **then}:
        if is_config and (name in NOT_THE_MODEL or name not in then or name not in now):
            continue
        if name not in then or name not in now:
            yield f".{name}"
        for rest in _differences(then.get(name), now.get(name), is_config):
            yield f".{name}{rest}"


@dataclass(frozen=True)
class TensorGroup:
    """All tensors of one kind (the same row of the family table)."""

    kind: str  # the row, a name with the layer left open
    count: int
    rebuilt_error: float  # largest difference to the rebuilt tensors, over their largest element
    # largest relative difference of the source's weight to the inverse of the grown one
    # (`WEIGHT_ERROR` of `plan.finding`); None if it has none (norms, AKI, random weights)
    inverse_error: float | None
    worst: str
    ok: bool  # rounding explains all errors


class _Compared(NamedTuple):
    """One tensor: its errors as in `TensorGroup`, and whether rounding explains them."""

    name: str
    rebuilt: float
    inverse: float | None
    within: bool


def compare_tensors(plan: GrowthPlan, grown: Source) -> tuple[TensorGroup, ...]:
    """Compare every tensor of a grown model with the plan's, and by the inverse with the source."""
    by_kind: dict[str, list[_Compared]] = {}

    def compare(task: Task, expected: Tensor) -> None:
        compared = _compared(plan, task, grown.read(task.name).cpu(), expected)
        by_kind.setdefault(task.tensor.template, []).append(compared)

    build_each(plan, compare, device=torch.device("cpu"), backend="reference")
    return tuple(
        TensorGroup(
            kind,
            len(found),
            max(x.rebuilt for x in found),
            max((x.inverse for x in found if x.inverse is not None), default=None),
            # those that fail come above those with larger errors that rounding explains
            max(found, key=lambda x: (not x.within, max(x.rebuilt, x.inverse or 0), x.name)).name,
            all(x.within for x in found),
        )
        for kind, found in by_kind.items()
    )


def _compared(plan: GrowthPlan, task: Task, actual: Tensor, expected: Tensor) -> _Compared:
    rebuilt, within = _rebuilt_error(actual, expected, _copies_of(plan, task))
    back = _inverse_error(plan, task, actual)
    if back is not None:
        allowed = WEIGHT_ROUNDINGS if actual.dtype.itemsize == 2 else 16
        within &= back <= allowed * torch.finfo(actual.dtype).eps
    return _Compared(task.name, rebuilt, back, within)


def _copies_of(plan: GrowthPlan, task: Task) -> Tensor:
    """True for entries that are copies, which have the same bits on every machine; broadcasts.

    Sums, as of new tokens and extra coordinates, may be rounded otherwise. So may a source in
    another dtype, before it was grown, and random numbers.
    """
    is_rounded = plan.source.dtypes.get(task.source) != plan.dtypes[task.name]
    kind = kind_of(plan, task)
    result = torch.tensor(kind.holds == "copies" and not is_rounded)
    for axis, new in zip(task.tensor.axes, task.shape, strict=True):
        result = result[..., None] & _gathered(plan, task, axis, new)
    for dim, drawn in enumerate(kind.drawn()):
        result = result & ~drawn.view((-1, *(1 for _ in task.shape[dim + 1 :])))
    return result


def _gathered(plan: GrowthPlan, task: Task, axis: str, new: int) -> Tensor:
    """Which entries of an axis are gathered from the source, or hold nothing, (new,) bool."""
    role, _, names = axis.partition(":")
    if not names:
        return torch.arange(new) < plan.small.axis_size(axis)
    pieces = []
    for space in (plan.layout.space(name, task.source_layer) for name in names.split("|")):
        index = space.read_index if role == "read" else space.write_index
        # padding under RMSNorm is 0
        is_sum = (index >= space.source) & (plan.small.family.norm.centres or role != "write")
        pieces.append(~is_sum)
    return torch.cat(pieces)


def _rebuilt_error(actual: Tensor, expected: Tensor, copies: Tensor) -> tuple[float, bool]:
    """The largest difference, relative to the largest element, and whether rounding explains it.

    It explains none where `copies` is True. NaN equals NaN, and an infinity itself.
    """
    eps = torch.finfo(actual.dtype).eps
    actual64, expected64 = actual.double(), expected.double()
    is_same = (actual == expected) | (actual.isnan() & expected.isnan())
    # 0 where both are the same infinity, and infinity where one alone is not finite
    difference = (actual64 - expected64).abs().masked_fill(is_same, 0.0).nan_to_num(math.inf)
    sizes = expected64.abs().masked_fill(~expected64.isfinite(), 0.0)
    # allow 4 units in the last place, as products round twice, but only 1 for 16-bit types. In
    # bfloat16 that is up to 1 %, so the mean error is limited too: rounding moves few elements
    is_narrow = actual.dtype.itemsize == 2
    allowed = (1 if is_narrow else 4) * eps * sizes.clamp(min=torch.finfo(actual.dtype).tiny)
    mean = difference.norm() / (sizes.norm() or 1.0)
    is_shifted = is_narrow and bool(mean > eps / 4)
    within = is_same | (~copies & (difference <= allowed))
    scale = sizes.max().clamp(min=torch.finfo(torch.float64).tiny)
    return (difference.max() / scale).item(), bool(within.all()) and not is_shifted


def _inverse_error(plan: GrowthPlan, task: Task, grown: Tensor) -> float | None:
    """`WEIGHT_ERROR` of a grown weight; None if not all of it comes from one source tensor.

    Over the source's finite entries. Infinity if others are finite, or these are not.
    """
    kind = kind_of(plan, task)
    if not kind.has_inverse:
        return None
    back = kind.inverse(grown)
    truth = plan.source.read(task.source).cpu().double()
    if bool((back.isfinite() != truth.isfinite()).any()):
        return math.inf
    # a copy below the smallest normal number is rounded as coarsely as that number
    tiny = torch.full_like(grown, torch.finfo(grown.dtype).tiny)
    least = torch.maximum(truth.abs(), kind.inverse(tiny).abs())
    finite = truth.isfinite()
    back, truth, least = back[finite], truth[finite], least[finite]
    if not truth.numel():
        return 0.0
    # in units of the largest, as squares of the smallest numbers are 0
    unit = least.max()
    return (((back - truth) / unit).norm() / (least / unit).norm()).item()


# tokens that are generated to compare the caches of both models
STEPS = 6
# how often the source is rounded to see how far rounding moves its outputs
ROUNDINGS = 2
# seed and number of the random texts that outputs on a few tokens are compared beside
SEED, FEW_TEXTS = 1, 16


def check_tokens(source: Source, tokens: Tensor) -> None:
    """Refuse tokens that are not ids, images or spectrograms that the source accepts."""
    if (what := source.spec.input) != "tokens":
        expected = source.spec.input_shape
        if not len(tokens) or tuple(tokens.shape[1:]) != expected:
            raise GrowthError(
                f"tokens are {list(tokens.shape)}; expected {what}, (batch, "
                f"{', '.join(map(str, expected))})"
            )
        if not tokens.is_floating_point():
            raise GrowthError(f"tokens are {tokens.dtype}; expected {what} of floating numbers")
        return
    vocabulary, longest = source.spec.size("vocab"), longest_of(source.spec)
    if tokens.ndim != 2 or not tokens.numel() or tokens.shape[1] > longest:
        raise GrowthError(
            f"tokens are {list(tokens.shape)}; expected (batch, length) with length 1 to {longest}"
        )
    if not 0 <= int(tokens.min()) <= int(tokens.max()) < vocabulary:
        raise GrowthError(f"tokens hold ids outside 0 .. {vocabulary - 1}")


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
    """Compare the outputs of both models in evaluation mode, and generation if it is wanted.

    Args:
        tokens: ids, (batch, length) int64.
        labels: target of every token, (batch, length) int64, -100 to ignore one.

    Returns: "relative error": largest absolute difference over the largest absolute output. Where
    norms or positions err, outputs on random texts count too. Models with a vocabulary head also
    have "KL (nats)" and "top-1 agreement", and with labels "source loss" and "grown loss". With a
    larger vocabulary "new tokens (nats)" is the largest rise of the loss by them. Models that
    generate have "generation error", see `generation_error`. Outputs that are not finite in both
    models are left out; `FAILING` is their share, if there are any.
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
    # both compute NaN or infinity there: nothing to compare
    failing = ~old.isfinite() & ~new.isfinite()
    result = {OUTPUT_ERROR: largest_difference(new, old, least)}
    if predicts_tokens(plan.small):
        log_p, log_q = old.log_softmax(-1), new.log_softmax(-1)
        # rounding may make the sum of a row negative, which no divergence is
        divergence = (log_p.exp() * (log_p - log_q)).sum(-1).clamp_min(0.0)
        result["KL (nats)"] = divergence.masked_fill(failing.any(-1), 0.0).mean().item()
        result["top-1 agreement"] = (old.argmax(-1) == new.argmax(-1)).double().mean().item()
        if whole.shape[-1] > old.shape[-1]:
            rise = whole.logsumexp(-1) - new.logsumexp(-1)
            result[NEW_TOKENS] = rise.masked_fill(failing.any(-1), 0.0).max().item()
        if labels is not None:
            for name, log_probs in (("source loss", log_p), ("grown loss", log_q)):
                result[name] = nll_loss(log_probs.flatten(0, 1), labels.flatten()).item()
    if generates and source.can_generate():
        result |= generation_error(plan, source, grown, tokens)
    if failing.any():
        result[FAILING] = failing.double().mean().item()
    return result


@torch.no_grad()
def rounding_error(plan: GrowthPlan, source: Any, tokens: Tensor) -> float:
    """How far rounding of weights moves the outputs of the source, with a cache or without.

    Every weight moves up or down, at random, by a unit in the last place of the plan's dtype. The
    source is float64, or float32 if it is large, and is left as it is. The largest of `ROUNDINGS`
    relative errors counts.
    """
    rng = torch.Generator().manual_seed(0)
    limits, worst = torch.finfo(plan.dtype), 0.0
    for _ in range(ROUNDINGS):
        moved = copy.deepcopy(source)
        for weight in moved.parameters():
            up = torch.randint(0, 2, weight.shape, generator=rng).to(weight) * 2 - 1
            weight += up * limits.eps * weight.abs().clamp(min=limits.tiny)
        worst = max(worst, moved_error(plan, source, moved, tokens))
    return worst


@torch.no_grad()
def planned_error(plan: GrowthPlan, source: Any, tokens: Tensor) -> float:
    """How far errors of norms and positions, as the target has, move the outputs of the source."""
    moved = copy.deepcopy(source)
    add_errors(plan, moved)
    return moved_error(plan, source, moved, tokens)


@torch.no_grad()
def moved_error(plan: GrowthPlan, source: Any, moved: Any, *texts: Tensor) -> float:
    """The relative error of a source that was moved, with a cache or without.

    The largest change on any of the texts counts, relative to the largest output on the first.
    """
    olds = [_outputs(source, text) for text in texts]
    pairs = zip(olds, texts, strict=True)
    change = max((_outputs(moved, text) - old).abs().max().item() for old, text in pairs)
    largest = max(olds[0].abs().max().item(), _least_output(plan, source))
    errors = [change / largest if change else 0.0]
    if source.can_generate():
        errors += generation_error(plan, source, moved, texts[0]).values()
    return max(errors)


def generation_error(plan: Blueprint, source: Any, grown: Any, tokens: Tensor) -> dict[str, float]:
    """Compare greedy generation, with a cache of keys and values unless the target has none.

    The prompts, `tokens`, are cut so that the models have positions for `STEPS` more tokens.
    "generation error" is the largest difference of a step's logits over the largest logit, over the
    steps before the two models choose different tokens; infinity if the grown model fails to
    generate. There is none if the source fails.
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
    old, new = old[:, :count][is_same], new[:, :count, :size][is_same]
    return {"generation error": largest_difference(new, old)}


def _generated(model: Any, prompts: Tensor, steps: int, has_cache: bool) -> tuple[Tensor, Tensor]:
    """Logits of every step, (batch, steps, vocabulary), and the tokens with their prompts."""
    prompts = prompts.to(model.device)
    output = model.eval().generate(
        prompts,
        attention_mask=torch.ones_like(prompts),
        pad_token_id=0,
        use_cache=has_cache,
        return_dict_in_generate=True,
        output_logits=True,
        max_new_tokens=steps,
        min_new_tokens=steps,
        do_sample=False,
        num_beams=1,
    )
    return torch.stack(output.logits, 1).double().cpu(), output.sequences.cpu()


def _least_output(plan: GrowthPlan, source: Any) -> float:
    """The least size that errors are relative to: the largest output on texts, where norms err.

    A model with few outputs, such as one label, may have a small one on a single text.
    """
    if not has_errors(plan):
        return 0.0
    return _outputs(source, random_inputs(plan.source, SEED, FEW_TEXTS)).abs().max().item()


def _outputs(model: Any, tokens: Tensor) -> Tensor:
    """The main output of `all_outputs`."""
    return next(iter(all_outputs(model, tokens).values()))
