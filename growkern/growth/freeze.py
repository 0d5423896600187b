"""`growkern.freeze_old`: train only the layers that a growth inserted."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from growkern.errors import GrowthError
from growkern.growth.optimizer import growth_lr_multipliers
from growkern.growth.record import growth_plan_of

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from growkern.growth.plan import GrowthPlan


def freeze_old(model: PreTrainedModel) -> tuple[str, ...]:
    """Freeze all of a grown model but its inserted layers, as LLaMA-Pro trains.

    The inserted layers may stand anywhere between the others: `model.growth_plan.inserted` lists
    them. Give the optimizer only the parameters that stay trainable. Entries of a growth before
    this one are frozen too: train them first.

    Args:
        model: from `growkern.grow`, or loaded by `from_pretrained` from a grown directory.

    Returns:
        The names of the parameters that stay trainable.

    Raises:
        GrowthError: the model was not grown, or its growth inserted no layers that add nothing. Or
            the old layers grew too: their new entries would be frozen. The model is then unchanged.
    """
    plan = growth_plan_of(model)
    if plan is None:
        raise GrowthError("the model was not grown: give a model from growkern.grow")
    if not plan.inserted:
        raise GrowthError(
            f"the growth with depth={plan.options.depth!r} inserted no layers that add nothing: "
            'give more layers, with depth="identity"'
        )
    layers = {t.name for t in plan.large.tensors if (t.stack, t.layer) in plan.inserted}
    if widened := {k: n for k, n in _new_entries(plan).items() if k not in layers}:
        first = next(iter(widened))
        raise GrowthError(
            f"the growth also made {sum(widened.values())} new entries in parameters of the source "
            f"(the first {widened[first]} in {first}), and they would be frozen too. Grow the "
            "width first and train it, then add layers with a growth of their own"
        )
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name in layers)
    return tuple(name for name, p in model.named_parameters() if p.requires_grad)


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
