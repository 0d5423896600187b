"""Creates the optimizer state of all parameters before the first step."""

import contextlib
from collections.abc import Iterator

import torch
from torch.optim import Adam, AdamW, Optimizer


@torch.no_grad()
def create_optimizer_state(optimizer: Optimizer) -> None:
    """Give each parameter that has no optimizer state the state of zero steps.

    Without this, a checkpoint of stage 1 lacks the parameters that no sub-model has reached yet,
    and a sharded load fills the gap with step = 1. The parameters do not change.

    Args:
        optimizer: Adam or AdamW. Other optimizers are left alone: for them a state of zeros is
            not always the state before the first step.
    """
    if not isinstance(optimizer, Adam | AdamW):
        return
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    gradients = [p.grad for p in parameters]
    for p in parameters:
        p.grad = None
    with _no_movement(optimizer):
        for p in parameters:
            if p.requires_grad and not optimizer.state.get(p):
                _step_alone(optimizer, p)
    for p, gradient in zip(parameters, gradients, strict=True):
        p.grad = gradient


def _step_alone(optimizer: Optimizer, p: torch.nn.Parameter) -> None:
    """Let the optimizer make its own state for one parameter, in a step of length 0.

    The values themselves take part: a stand-in for `p.data` would not reach the local part of a
    parameter that is sharded.
    """
    p.grad = torch.zeros_like(p)
    # the class's step: a scheduler counts the calls of the instance's
    type(optimizer).step(optimizer)
    p.grad = None
    for value in optimizer.state[p].values():
        if isinstance(value, torch.Tensor):
            value.zero_()


@contextlib.contextmanager
def _no_movement(optimizer: Optimizer) -> Iterator[None]:
    """While active, the steps of an optimizer change no parameter."""
    still = {"lr": 0.0, "weight_decay": 0.0}
    kept = [{name: group[name] for name in still} for group in optimizer.param_groups]
    for group in optimizer.param_groups:
        group.update(still)
    try:
        yield
    finally:
        for group, values in zip(optimizer.param_groups, kept, strict=True):
            group.update(values)
