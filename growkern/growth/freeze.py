"""`growkern.freeze_old`: train only the layers that a growth inserted."""

from __future__ import annotations

import math
from contextlib import suppress
from typing import TYPE_CHECKING

from growkern.errors import GrowthError, warn
from growkern.growth.optimizer import growth_lr_multipliers
from growkern.growth.record import growth_plan_of, plan_of_source

if TYPE_CHECKING:
    from collections.abc import Iterator

    from transformers import PreTrainedModel

    from growkern.growth.plan import GrowthPlan


def freeze_old(model: PreTrainedModel) -> tuple[str, ...]:
    """Freeze all of a grown model but its inserted layers, as LLaMA-Pro trains.

    The inserted layers may stand anywhere between the others: `model.growth_plan.inserted` lists
    them. Give the optimizer only the parameters that stay trainable.

    Args:
        model: from `growkern.grow`, or loaded by `from_pretrained` from a grown directory.

    Returns:
        The names of the parameters that stay trainable.

    Raises:
        GrowthError: the model was not grown, or its growth inserted no layers that add nothing. Or
            the old layers grew too: their new entries would be frozen. The model is then unchanged.

    Warns:
        GrowthWarning: the source was grown itself, and has new entries of that growth. They are
            frozen, whether they were trained or not.
    """
    plan = growth_plan_of(model)
    if plan is None:
        raise GrowthError("the model was not grown: give a model from growkern.grow")
    if not plan.inserted:
        raise GrowthError(
            f"the growth with depth={plan.options.depth!r} inserted no layers that add nothing: "
            'give more layers, with depth="identity"'
        )
    new = _inserted(plan)
    if widened := {k: n for k, n in _new_entries(plan).items() if k not in new}:
        first = next(iter(widened))
        raise GrowthError(
            f"the growth also made {sum(widened.values())} new entries in parameters of the source "
            f"(the first {widened[first]} in {first}), and they would be frozen too. Grow the "
            "width first and train it, then add layers with a growth of their own"
        )
    if earlier := sum(
        sum(_new_entries(p).values()) + sum(map(math.prod, _inserted(p).values()))
        for p in _growths_before(plan)
    ):
        warn(
            f"the source was grown before: {earlier} new entries of that growth are frozen too. "
            "If they are untrained, train the source before its layers are added"
        )
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name in new)
    return tuple(name for name, p in model.named_parameters() if p.requires_grad)


def _inserted(plan: GrowthPlan) -> dict[str, tuple[int, ...]]:
    """The shapes of the parameters of inserted layers, by their names."""
    shapes = plan.large.shapes
    return {
        t.name: shapes[t.name] for t in plan.large.tensors if (t.stack, t.layer) in plan.inserted
    }


def _growths_before(plan: GrowthPlan) -> Iterator[GrowthPlan]:
    """The growths that made the source, the newest first, as far as they are known."""
    with suppress(GrowthError):
        while before := plan_of_source(plan):
            yield before
            plan = before


def _new_entries(plan: GrowthPlan) -> dict[str, int]:
    """The number of new entries of each tensor that has some, by its name."""
    old, found = plan.small.shapes, {}
    factors = growth_lr_multipliers(plan)
    for task in plan.tasks:
        # the norms beside an inserted block have no entry of the source, and no new size either
        if task.identity is None and task.shape != old.get(task.source) and task.name in factors:
            kept = math.prod(int(axis.sum()) for axis in factors[task.name].old)
            if new := math.prod(task.shape) - kept:
                found[task.name] = new
    return found
