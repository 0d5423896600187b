"""What growth refuses of an optimizer's state, and why."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from growkern.errors import GrowthError, nearest
from growkern.growth.optimizer.moments import MOMENTS
from growkern.growth.plan.growth_plan import GrowthPlan
from growkern.growth.source.stored import StoredTensor
from growkern.ops.expand.checks import DTYPES

CHOICES = ("grow", "old_slices", "reset")
# what else a state may hold: the count of steps, and that of GrowthAdamW since the last growth
COUNTS = ("step", "growth_step")
NEEDED = ("step", "exp_avg", "exp_avg_sq")


def check_moments(moments: str) -> None:
    if moments not in CHOICES:
        raise GrowthError(f"moments={moments!r}{nearest(moments, CHOICES)}")


def check_state_dict(state_dict: Any) -> None:
    """GrowthError unless it has the form of `optimizer.state_dict()`; entries are not looked at."""
    if not isinstance(state_dict, Mapping) or not {"state", "param_groups"} <= state_dict.keys():
        raise GrowthError(
            'the optimizer state has no "state" and "param_groups"; pass optimizer.state_dict()'
        )
    for key, kind in (("state", Mapping), ("param_groups", (list, tuple))):
        if not isinstance(state_dict[key], kind):
            raise GrowthError(
                f"the optimizer's {key!r} is a {type(state_dict[key]).__name__}; pass "
                "optimizer.state_dict() as it is"
            )
    for number, group in enumerate(state_dict["param_groups"]):
        _check_group(f"the optimizer's group {number}", group)


def _check_group(what: str, group: Any) -> None:
    if not isinstance(group, Mapping) or "params" not in group:
        raise GrowthError(f'{what} has no "params"; pass optimizer.state_dict() as it is')
    for key, kinds in (("params", (int, str)), ("param_names", (str,))):
        keys = group.get(key, [])
        is_list = isinstance(keys, (list, tuple))
        if not is_list or not any(all(isinstance(x, kind) for x in keys) for kind in kinds):
            allowed = " or all ".join(kind.__name__ for kind in kinds)
            raise GrowthError(f"{what}: {key!r} must be a list, all {allowed}")


def check_entries(plan: GrowthPlan, state: Mapping[str, Any]) -> None:
    """GrowthError unless every state is one of Adam for the source's parameter."""
    for name, entry in state.items():
        if not isinstance(entry, Mapping):
            raise GrowthError(f"{name}: its optimizer state is a {type(entry).__name__}, no dict")
        _check_entry(name, entry, plan.small.shapes[name])


def _check_entry(name: str, entry: Mapping[str, Any], shape: tuple[int, ...]) -> None:
    for key, value in entry.items():
        if key in COUNTS:
            # stored and distributed tensors are checked when they are read
            if not isinstance(value, (DTensor, StoredTensor)):
                count_of(name, value)
        elif key not in MOMENTS:
            raise GrowthError(
                f"{name}: no rule for the optimizer's {key!r}; growkern grows the state of Adam "
                "and AdamW"
            )
        else:
            _check_moment(name, key, value, shape)
    for key in NEEDED:
        if key not in entry:
            what = "step count" if key == "step" else key
            raise GrowthError(
                f"{name}: no {what} in the optimizer's state; save it with optimizer.state_dict()"
            )


def _check_moment(name: str, key: str, value: Any, shape: tuple[int, ...]) -> None:
    if not isinstance(value, (Tensor, StoredTensor)):
        raise GrowthError(f"{name}: {key} is a {type(value).__name__}, expected a tensor")
    if tuple(value.shape) != shape:
        raise GrowthError(
            f"{name}: {key} is {list(value.shape)}, the parameter {list(shape)}; is this the "
            "source's optimizer, and are its groups the Trainer's?"
        )
    if value.dtype not in DTYPES:
        allowed = ", ".join(map(str, DTYPES))
        raise GrowthError(f"{name}: {key} is {value.dtype}; growth handles {allowed}")


def count_of(name: str, value: Any) -> Tensor:
    """A count of steps as a tensor of one number, 0 or more.

    Raises:
        GrowthError: it is something else.
    """
    if not isinstance(value, (Tensor, int, float)):
        raise GrowthError(f"{name}: its step count is a {type(value).__name__}, expected a number")
    count = torch.as_tensor(value)
    count = count.full_tensor() if isinstance(count, DTensor) else count
    is_number = count.numel() == 1 and not count.is_complex()
    if not is_number or not 0 <= count.item() < math.inf:
        raise GrowthError(
            f"{name}: its step count is {count.tolist()}, expected a number of 0 or more"
        )
    return count
