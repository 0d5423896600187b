"""Several optimizers that a trainer uses as one, such as Muon and AdamW."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from growkern.errors import GrowthError
from growkern.growth.optimizer.checks import check_state_dict
from growkern.growth.optimizer.steps import loss_of


class _States(dict[Tensor, Any]):
    """The states of optimizers by parameter; a new one is put into the parameter's optimizer."""

    def __init__(self, optimizers: Sequence[Optimizer]) -> None:
        super().__init__(item for optimizer in optimizers for item in optimizer.state.items())
        self._optimizers = optimizers

    def __missing__(self, p: Tensor) -> Any:
        for optimizer in self._optimizers:
            if any(p is one for group in optimizer.param_groups for one in group["params"]):
                self[p] = optimizer.state[p]
                return self[p]
        raise KeyError(p)


class CombinedOptimizer(Optimizer):
    """Optimizers over different parameters of a model, as one optimizer.

    Groups and states are those of the optimizers, one after the other. So a learning-rate schedule
    reaches all of them, and a state dict holds all of them. `growkern.grow_optimizer` and
    `grow_optimizer_into` read it.

    Args:
        optimizers: with named parameters.
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
