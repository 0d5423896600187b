"""`growkern.GrowthMuon`: Muon with step sizes that fit the matrices of a grown model.

Muon steps along an odd polynomial of the momentum, which keeps singular vectors. Growth in even
numbers scales all singular values alike, and Muon divides by their norm first. So the step of the
grown model is the grown step times one number per matrix, (5) of `optimizer.moments`. This class
divides by that number. `CombinedOptimizer` makes one optimizer of Muon and that of the rest.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer, _muon

from growkern.arguments import check_kind
from growkern.errors import GrowthError
from growkern.growth.models import local_tensor
from growkern.growth.optimizer.adamw import NAMED, factors_of, loss_of
from growkern.growth.optimizer.checks import check_state_dict
from growkern.growth.optimizer.moments import growth_lr_multipliers, warn_of_unknown_growth
from growkern.growth.plan import PlanOfModel

# PyTorch's own step without its wrappers: GrowthMuon.step has them already, and hooks run once
_STEP = inspect.unwrap(torch.optim.Muon.step)


class Muon(torch.optim.Muon):
    """`torch.optim.Muon`, which also takes the stacked experts of a mixture.

    Parameters are matrices, and stacks of them with the experts on the first axis. The matrix of
    each expert takes a step of its own. The state is that of `torch.optim.Muon`.
    """

    def __init__(
        self, params: Iterable[Any], lr: float = 1e-3, weight_decay: float = 0.1, **options: Any
    ) -> None:
        # PyTorch checks the options, and refuses parameters of three axes
        checked = torch.optim.Muon([torch.empty(0, 0)], lr, weight_decay, **options)
        torch.optim.Optimizer.__init__(self, params, checked.defaults)
        for p in (p for group in self.param_groups for p in group["params"]):
            if p.ndim not in (2, 3):
                raise GrowthError(
                    f"Muon got a parameter of shape {list(p.shape)}: give it matrices, and the "
                    "stacked matrices of experts"
                )

    def _init_group(self, group: Any, params: Any, grads: Any, buffers: Any) -> bool:
        """PyTorch's. Stacks take their step here, and PyTorch's function the matrices."""
        columns: tuple[list[Tensor], ...] = ([], [], [])
        is_complex = super()._init_group(group, *columns)
        for tensors in zip(*columns, strict=True):
            if tensors[0].ndim == 3:
                _step_of_experts(group, tensors)
            else:
                for column, x in zip((params, grads, buffers), tensors, strict=True):
                    column.append(x)
        return is_complex


def _step_of_experts(group: Mapping[str, Any], stacks: tuple[Tensor, ...]) -> None:
    """PyTorch's step for each matrix of a parameter, a gradient and a momentum."""
    parameter = stacks[0]
    if isinstance(parameter, DTensor):
        if any(x.is_shard() and not x.is_shard(0) for x in parameter.placements):
            raise GrowthError(
                f"Muon got stacked experts of shape {list(parameter.shape)} that are cut within a "
                "matrix: shard them on their first axis"
            )
        stacks = tuple(local_tensor(x) for x in stacks)
    p, gradient, momentum = stacks
    if not len(p):
        return
    lr, rate = float(group["lr"]), group["momentum"]
    momentum.lerp_(gradient, 1 - rate)
    update = gradient.lerp(momentum, rate) if group["nesterov"] else momentum
    settings = group["ns_coefficients"], group["ns_steps"], group["eps"]
    update = torch.vmap(lambda x: _muon._zeropower_via_newtonschulz(x, *settings))(update)
    p.mul_(1 - lr * group["weight_decay"])
    p.add_(update, alpha=-_muon._adjust_lr(lr, group["adjust_lr_fn"], p.shape[1:]))


class GrowthMuon(Muon):
    """Muon with a learning rate of its own for every matrix of a grown model.

    With `matched`, the learning rate is multiplied by the factor of `growth_lr_multipliers` for the
    rule `adjust_lr_fn`. With the momentum of `growkern.grow_optimizer`, the target then takes the
    steps that the source would have taken, up to the rounding of PyTorch's bfloat16 polynomial.
    This holds for growth by whole multiples with symmetry="none" and stream="copies". Elsewhere the
    grown momentum is a start value.
    `moment_findings(plan, optimizer="muon")` says which case this is.

    Muon takes matrices only, and the stacked experts of a mixture as one matrix for each expert.
    Use `GrowthAdamW` for the rest, and grow the state of each optimizer by itself. The state is
    that of `torch.optim.Muon`.

    Args:
        params: named matrices of the grown model: pairs as in `model.named_parameters()`, or groups
            of them, which the optimizer completes as in `GrowthAdamW`.
        plan: `growkern.growth_plan_of(model)`, for a loaded model too.
        lr: learning rate, that of the source.
        weight_decay: fraction per unit of learning rate, as in `torch.optim.Muon`.
        matched: False: plain Muon.
        options: momentum, nesterov, ns_coefficients, eps, ns_steps and adjust_lr_fn, as in
            `torch.optim.Muon`.

    Raises:
        GrowthError: parameters without names, or a parameter that the plan does not know.

    Source: derived; the steps of `torch.optim.Muon`.
    """

    def __init__(
        self,
        params: Iterable[Any],
        plan: PlanOfModel = None,
        lr: float = 1e-3,
        weight_decay: float = 0.1,
        *,
        matched: bool = True,
        **options: Any,
    ) -> None:
        check_kind("params", params, Iterable, NAMED)
        factors = growth_lr_multipliers(plan)
        super().__init__(params, lr, weight_decay, **options)
        self.plan, self.matched = plan, matched
        if matched:
            warn_of_unknown_growth(plan)
        self._factors: dict[Tensor, Mapping[str, float]] = {}
        for group in self.param_groups:
            if "param_names" not in group:
                raise GrowthError(f"GrowthMuon needs named parameters: {NAMED}")
            for name, p in zip(group["param_names"], group["params"], strict=True):
                self._factors[p] = factors_of(factors, name, p).muon

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """As in `torch.optim.Muon`; all settings of the groups take effect.

        Raises:
            GrowthError: the state is of another optimizer.
        """
        check_state_dict(state_dict)
        for number, group in enumerate(state_dict["param_groups"]):
            if "ns_coefficients" not in group:
                raise GrowthError(
                    f"the loaded group {number} is not of Muon: give each optimizer its own state"
                )
        super().load_state_dict(state_dict)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One step; `closure` as in `torch.optim.Muon`."""
        loss = loss_of(closure)
        groups = self.param_groups
        try:
            self.param_groups = [part for group in groups for part in self._parts(group)]
            _STEP(self)
        finally:
            self.param_groups = groups
        return loss

    def _parts(self, group: dict[str, Any]) -> list[dict[str, Any]]:
        """The group, split by the factors. Weight decay does not follow the factor."""
        if not self.matched:
            return [group]
        parts: dict[float, list[Tensor]] = {}
        for p in group["params"]:
            factor = self._factors[p][group["adjust_lr_fn"] or "original"]
            parts.setdefault(factor, []).append(p)
        return [
            {
                **group,
                "params": params,
                "lr": group["lr"] * factor,
                "weight_decay": group["weight_decay"] / factor,
            }
            for factor, params in parts.items()
        ]


def products(shape: Sequence[int], ns_steps: int) -> int:
    """FLOPs of Muon's own products in a step of a matrix, or of a stack of matrices.

    Each of the `ns_steps` iterations on X (m, n) with m <= n takes X X^T, the square of that, and
    its product with X.

    Source: `torch.optim.Muon`.
    """
    *stack, rows, columns = shape
    m, n = sorted((rows, columns))
    return math.prod(stack) * ns_steps * (4 * m * m * n + 2 * m**3)


class _States(dict[Tensor, Any]):
    """The states of optimizers by parameter; a new one is put into the parameter's optimizer."""

    def __init__(self, optimizers: Sequence[Optimizer]) -> None:
        super().__init__(item for optimizer in optimizers for item in optimizer.state.items())
        self._optimizers = optimizers

    def __missing__(self, p: Tensor) -> Any:
        for optimizer in self._optimizers:
            if any(p is own for group in optimizer.param_groups for own in group["params"]):
                self[p] = optimizer.state[p]
                return self[p]
        raise KeyError(p)


class CombinedOptimizer(Optimizer):
    """Optimizers over different, named parameters of a model, as one optimizer.

    Groups and states are those of the optimizers, one after the other. So a learning-rate schedule
    reaches all of them, and a state dict holds all of them. `growkern.grow_optimizer` and
    `grow_optimizer_into` read it.
    """

    def __init__(self, *optimizers: Optimizer) -> None:
        # PyTorch's constructor collects the groups again, and finds none yet
        self.optimizers: tuple[Optimizer, ...] = ()
        super().__init__(
            [group for optimizer in optimizers for group in optimizer.param_groups], {}
        )
        self.optimizers = optimizers

    @property
    def param_groups(self) -> Any:
        """The groups of all optimizers; to change one is to change it in its optimizer."""
        return [group for optimizer in self.optimizers for group in optimizer.param_groups]

    @param_groups.setter
    def param_groups(self, value: Any) -> None:
        """Ignored: PyTorch's constructor sets an empty list."""

    @property
    def state(self) -> Any:
        """The states of all optimizers. As in these, a parameter that is asked for gets one."""
        return _States(self.optimizers)

    @state.setter
    def state(self, value: Any) -> None:
        """Ignored: PyTorch's constructor sets an empty state."""

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """As in PyTorch's constructor only."""
        if self.optimizers:
            raise GrowthError("add the group to one of the optimizers before they are combined")
        super().add_param_group(param_group)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Give every optimizer its groups and their states."""
        check_state_dict(state_dict)
        groups, state = list(state_dict["param_groups"]), state_dict["state"]
        if len(groups) != len(self.param_groups):
            kinds = " and ".join(type(optimizer).__name__ for optimizer in self.optimizers)
            raise GrowthError(
                f"the loaded state has {len(groups)} parameter groups, but {kinds} have "
                f"{len(self.param_groups)}: is it of another optimizer?"
            )
        for optimizer in self.optimizers:
            count = len(optimizer.param_groups)
            mine, groups = groups[:count], groups[count:]
            keys = [key for group in mine for key in group["params"]]
            entries = {key: state[key] for key in keys if key in state}
            optimizer.load_state_dict({"state": entries, "param_groups": mine})

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One step of every optimizer; `closure` is called once."""
        loss = loss_of(closure)
        for optimizer in self.optimizers:
            optimizer.step()
        return loss
