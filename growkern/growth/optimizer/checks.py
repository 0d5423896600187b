"""Checks an optimizer's state before it is grown; every error names the parameter.

Values such as NaN are checked where they are read (`check_values`).
"""

from __future__ import annotations

import math
import reprlib
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from growkern.errors import GrowthError, a_kind
from growkern.families import ModelSpec
from growkern.growth.plan import GrowthPlan
from growkern.growth.stored import StoredTensor
from growkern.ops.expand import DTYPES

# moment in the state of Adam, AdamW and Muon -> power of the gradient that it averages
MUON = "momentum_buffer"
MOMENTS = {"exp_avg": 1, "exp_avg_sq": 2, "max_exp_avg_sq": 2, MUON: 1}

# the other entries of a state: the step count, and that of GrowthAdamW since the last growth
COUNTS = ("step", "growth_step")
NEEDED = ("step", "exp_avg", "exp_avg_sq")
# of Adafactor in PyTorch and in transformers
FACTORED = ("row_var", "col_var", "variance", "exp_avg_sq_row", "exp_avg_sq_col", "RMS")
NO_RULE = "growkern grows only the state of Adam, AdamW and Muon"

ADAFACTOR = (
    "Adafactor keeps means over rows and columns of the squared gradients, but growth gives each "
    'entry a factor of its own: use moments="reset" (--moments reset), or train the source with '
    "AdamW"
)


def check_state_dict(state_dict: Any) -> None:
    """Refuse a state that is not in the form of `optimizer.state_dict()`.

    `check_entries` checks the states of single parameters.
    """
    if not isinstance(state_dict, Mapping) or not {"state", "param_groups"} <= state_dict.keys():
        raise GrowthError(
            'the optimizer state has no "state" and "param_groups": pass optimizer.state_dict()'
        )
    for key, kind in (("state", Mapping), ("param_groups", (list, tuple))):
        if not isinstance(state_dict[key], kind):
            raise GrowthError(
                f"the optimizer's {key!r} is {a_kind(state_dict[key])}: pass "
                "optimizer.state_dict() as it is"
            )
    for number, group in enumerate(state_dict["param_groups"]):
        what = f"the optimizer's group {number}"
        if not isinstance(group, Mapping) or "params" not in group:
            raise GrowthError(f'{what} has no "params": pass optimizer.state_dict() as it is')
        for key, kinds in (("params", (int, str)), ("param_names", (str,))):
            keys = group.get(key, [])
            is_list = isinstance(keys, (list, tuple))
            if not is_list or not any(all(isinstance(x, kind) for x in keys) for kind in kinds):
                allowed = " or all ".join(kind.__name__ for kind in kinds)
                raise GrowthError(f"{what}: {key!r} must be a list, all {allowed}")


def check_keys(state_dict: Mapping[str, Any]) -> None:
    """Raise GrowthError unless every state belongs to one parameter of one group."""
    counts = Counter(key for group in state_dict["param_groups"] for key in group["params"])
    for key, count in counts.items():
        if count > 1:
            raise GrowthError(f"parameter {reprlib.repr(key)} is {count} times in the groups")
    for key in state_dict["state"]:
        if key not in counts:
            raise GrowthError(
                f"the optimizer has state for parameter {reprlib.repr(key)}, which is in none of "
                "its groups: pass optimizer.state_dict() as it is"
            )


def check_decay(state_dict: Mapping[str, Any], moments: str) -> None:
    """Refuse to grow moments that weight decay was mixed into, and those of RAdam.

    `torch.optim.Adam` adds weight decay to the gradients. The gradient and the weight grow by
    different factors, so their mean cannot be grown.
    """
    for number, group in enumerate(state_dict["param_groups"] if moments != "reset" else ()):
        _refuse_rectified(f"the optimizer's group {number}", group)
        if _is_coupled(group):
            raise GrowthError(
                f"the optimizer's group {number} is of torch.optim.Adam with weight_decay="
                f"{group['weight_decay']}: it adds the decay to the gradients, so its moments "
                'cannot be grown: use moments="reset" (--moments reset), and AdamW from here on. '
                "If it is of AdamW, set the group's decoupled_weight_decay to True"
            )


def check_loaded_group(number: int, group: Mapping[str, Any], entries: Sequence[Any]) -> None:
    """Refuse settings of a loaded group that `GrowthAdamW` cannot follow.

    `entries` are the loaded states of its parameters; empty if a parameter has none.
    """
    what = f"the loaded group {number}"
    if any(entries):
        _refuse_rectified(what, group)
    check_group(what, group)
    if group.get("amsgrad") and any(entry and "max_exp_avg_sq" not in entry for entry in entries):
        raise GrowthError(
            f"{what} has amsgrad=True, but its state lacks max_exp_avg_sq: set amsgrad to False, "
            "or load the state of an optimizer that was made with amsgrad=True"
        )


def check_group(what: str, group: Mapping[str, Any]) -> None:
    """Refuse settings of a group that `GrowthAdamW` cannot follow."""
    if _is_coupled(group):
        raise GrowthError(
            f"{what} is of torch.optim.Adam with weight_decay={group['weight_decay']}, which is "
            "added to the gradient; GrowthAdamW decays weights directly. To continue with "
            "decoupled decay, set the group's decoupled_weight_decay to True"
        )
    if group.get("differentiable"):
        raise GrowthError(f"{what} has differentiable=True, which GrowthAdamW lacks: set it False")


def _is_coupled(group: Mapping[str, Any]) -> bool:
    """True if weight decay was added to the gradients, as Adam does and AdamW does not."""
    if not group.get("weight_decay"):
        return False
    if "decoupled_weight_decay" in group:
        return not group["decoupled_weight_decay"]
    # PyTorch before 2.7 wrote no such key, but its AdamW had "foreach" before "maximize"
    return [key for key in group if key in ("maximize", "foreach")] == ["maximize", "foreach"]


def _refuse_rectified(what: str, group: Mapping[str, Any]) -> None:
    """Refuse RAdam: of PyTorch's optimizers with both moments, it alone has no amsgrad."""
    if "decoupled_weight_decay" in group and "amsgrad" not in group:
        raise GrowthError(
            f"{what} is of torch.optim.RAdam, which takes other steps than AdamW from the same "
            'moments: use moments="reset" (--moments reset), and AdamW from here on'
        )


def trained(plan: GrowthPlan) -> ModelSpec:
    """The model whose parameters the optimizer has: a dense one, if that becomes a mixture."""
    return plan.source.stored.spec


def check_entries(plan: GrowthPlan, state: Mapping[str, Any]) -> None:
    """Refuse a state that is not one of Adam or Muon, or does not fit its parameter."""
    for name, entry in state.items():
        if not isinstance(entry, Mapping):
            raise GrowthError(f"{name}: its optimizer state is {a_kind(entry)}, not a dict")
        for key, value in entry.items():
            if key in COUNTS:
                # stored and distributed tensors are checked later, when they are read
                if not isinstance(value, (DTensor, StoredTensor)):
                    count_of(name, value)
            elif key not in MOMENTS:
                why = ADAFACTOR if key in FACTORED else NO_RULE
                raise GrowthError(f"{name}: no rule for the optimizer's {key!r}; {why}")
            else:
                _check_moment(name, key, value, trained(plan).shapes[name])
        for key in () if MUON in entry else NEEDED:
            if key not in entry:
                what = "step count" if key == "step" else key
                raise GrowthError(
                    f"{name}: no {what} in the optimizer's state: save it with "
                    "optimizer.state_dict()"
                )


def _check_moment(name: str, key: str, value: Any, shape: tuple[int, ...]) -> None:
    if not isinstance(value, (Tensor, StoredTensor)):
        raise GrowthError(f"{name}: {key} is {a_kind(value)}, expected a tensor")
    if isinstance(value, Tensor) and (value.is_meta or value.layout != torch.strided):
        kind = "on the meta device" if value.is_meta else "sparse"
        raise GrowthError(f"{name}: {key} is {kind}, expected a tensor with numbers in memory")
    if tuple(value.shape) != shape:
        raise GrowthError(
            f"{name}: {key} has shape {list(value.shape)}, but the parameter has {list(shape)}: is "
            "this the source's optimizer, with groups as the Trainer makes them?"
        )
    if value.dtype not in DTYPES:
        allowed = ", ".join(map(str, DTYPES))
        raise GrowthError(f"{name}: {key} is {value.dtype}; growth handles {allowed}")


def count_of(name: str, value: Any) -> Tensor:
    """A step count as a tensor of one number."""
    if not isinstance(value, (Tensor, int, float)):
        raise GrowthError(f"{name}: its step count is {a_kind(value)}, expected a number")
    if isinstance(value, Tensor) and (value.is_meta or value.layout != torch.strided):
        raise GrowthError(f"{name}: its step count has no number in memory")
    if isinstance(value, int) and value.bit_length() > 62:
        raise GrowthError(f"{name}: its step count has {value.bit_length()} bits")
    count = torch.as_tensor(value)
    count = count.full_tensor() if isinstance(count, DTensor) else count
    is_number = count.numel() == 1 and not count.is_complex()
    if not is_number or not 0 <= count.item() < math.inf:
        raise GrowthError(
            f"{name}: its step count is {count.tolist()}, expected a number of 0 or more"
        )
    return count


def check_planned_shape(name: str, shape: Iterable[int], planned: Iterable[int]) -> None:
    """Refuse a parameter whose shape is not that of the plan."""
    if tuple(shape) != tuple(planned):
        raise GrowthError(f"{name} has shape {list(shape)}, but the plan says {list(planned)}")


def check_values(name: str, key: str, values: Tensor) -> None:
    """Refuse values that Adam never writes: NaN, Inf, a negative mean of squares."""
    if not values.numel():
        return
    low, high = (x.item() for x in values.aminmax())
    if not (math.isfinite(low) and math.isfinite(high)):
        wrong = "NaN or Inf"
    elif MOMENTS[key] == 2 and low < 0:
        wrong = "a negative mean of squares"
    else:
        return
    raise GrowthError(
        f"{name}: {key} holds {wrong}: use an optimizer state that was saved earlier, or start "
        'from zero with moments="reset" (--moments reset)'
    )
