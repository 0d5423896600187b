"""Optimizer state for every parameter from the start, not from a parameter's first gradient."""

import torch
from torch.optim import Adam, Optimizer

_COUNTED_FROM_ZERO = (Adam, torch.optim.AdamW)


@torch.no_grad()
def create_optimizer_state(optimizer: Optimizer) -> None:
    """Give each parameter without state the state of zero steps; parameters do not change.

    A stage-1 checkpoint otherwise lacks the parameters that no sub-model has reached yet, and a
    sharded load fills the gap with step = 1. Adam and AdamW only: for other optimizers a state of
    zeros is not always the state before the first step.
    """
    if not isinstance(optimizer, _COUNTED_FROM_ZERO):
        return
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    gradients = [p.grad for p in parameters]
    for p in parameters:
        p.grad = None
    for p in parameters:
        if p.requires_grad and not optimizer.state.get(p):
            _step_alone(optimizer, p)
    for p, gradient in zip(parameters, gradients, strict=True):
        p.grad = gradient


def _step_alone(optimizer: Optimizer, p: torch.nn.Parameter) -> None:
    """Let the optimizer make its own state for one parameter, on a stand-in for its values."""
    values = p.data
    p.data = torch.zeros_like(values)
    p.grad = torch.zeros_like(values)
    # the class's step: a scheduler counts the calls of the instance's
    type(optimizer).step(optimizer)
    p.data, p.grad = values, None
    for value in optimizer.state[p].values():
        if isinstance(value, torch.Tensor):
            value.zero_()
