"""Creates the optimizer state of all parameters before the first step."""

from collections.abc import Sequence
from typing import Any

import torch
from torch.optim import Adam, AdamW, Optimizer

from growkern.growth.optimizer.adamw import GrowthAdamW
from growkern.growth.optimizer.checks import COUNTS


@torch.no_grad()
def create_optimizer_state(optimizer: Optimizer) -> None:
    """Give each parameter that has no optimizer state the state of zero steps, and missing counts.

    Without this, a checkpoint of stage 1 lacks the parameters that no sub-model has reached yet,
    and a sharded load fills the gap with step = 1. The parameters do not change.

    Args:
        optimizer: Adam, AdamW or GrowthAdamW. Others, also classes derived from these, are left
            alone: for them a state of zeros is not always the state before the first step.
    """
    if type(optimizer) not in (Adam, AdamW, GrowthAdamW):
        return
    counts = COUNTS if isinstance(optimizer, GrowthAdamW) else COUNTS[:1]
    for group in optimizer.param_groups:
        for p in group["params"]:
            if not p.requires_grad:
                continue
            if not optimizer.state.get(p):
                optimizer.state[p] = _zero_state(group, p, counts)
            # a state that was grown has no count of steps since the growth
            for key in counts:
                optimizer.state[p].setdefault(key, torch.tensor(0.0))


def _zero_state(
    group: dict[str, Any], p: torch.Tensor, counts: Sequence[str]
) -> dict[str, torch.Tensor]:
    """The state that the optimizer makes for a parameter in its first step, before it counts.

    A step of length 0 would make it too. Its temporary tensors then leave gaps in the memory of a
    process that are as large as the parameters.
    """
    on_device = group["capturable"] or group["fused"]
    is_wide = torch.get_default_dtype() == torch.float64 and not group["fused"]
    count = torch.zeros(
        (),
        dtype=torch.float64 if is_wide else torch.float32,
        device=p.device if on_device else "cpu",
    )
    moments = ["exp_avg", "exp_avg_sq"] + ["max_exp_avg_sq"] * group["amsgrad"]
    return {
        **{key: count.clone() for key in counts},
        **{key: torch.zeros_like(p, memory_format=torch.preserve_format) for key in moments},
    }
