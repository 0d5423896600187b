"""`growkern.freeze_old`: train only the layers that a growth inserted."""

from __future__ import annotations

from typing import TYPE_CHECKING

from growkern.errors import GrowthError
from growkern.growth.record.recorded import growth_plan_of

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def freeze_old(model: PreTrainedModel) -> tuple[str, ...]:
    """Freeze all of a grown model but its inserted layers, as LLaMA-Pro trains.

    The inserted layers may stand anywhere between the others: `model.growth_plan.inserted` lists
    them. Give the optimizer only the parameters that stay trainable.

    Args:
        model: from `growkern.grow`, or loaded by `from_pretrained` from a grown directory.

    Returns:
        The names of the parameters that stay trainable.

    Raises:
        GrowthError: the model was not grown, or its growth inserted no layers that add nothing.
    """
    plan = growth_plan_of(model)
    if plan is None:
        raise GrowthError("the model was not grown: give a model from growkern.grow")
    if not plan.inserted:
        raise GrowthError(
            f"the growth with depth={plan.options.depth!r} inserted no layers that add nothing: "
            'give more layers, with depth="identity"'
        )
    new = {t.name for t in plan.large.tensors if (t.stack, t.layer) in plan.inserted}
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name in new)
    return tuple(name for name, p in model.named_parameters() if p.requires_grad)
