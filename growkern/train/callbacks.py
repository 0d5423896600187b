"""Where the training loop is, told to those parts of `TwoStageTrainer` that go by it."""

from typing import Any

import torch
from torch.optim import Adam, Optimizer
from transformers import TrainerCallback


class Cues(TrainerCallback):
    """Tells the trainer's parts where the loop is."""

    def __init__(self, trainer: Any) -> None:
        self.trainer = trainer

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        optimizer = kwargs["optimizer"]
        create_optimizer_state(getattr(optimizer, "optimizer", optimizer))

    def on_epoch_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        collator = self.trainer.data_collator
        if hasattr(collator, "set_epoch"):
            collator.set_epoch(int(state.epoch or 0))

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.trainer.meter.start_step()
        collator, schedule = self.trainer.data_collator, self.trainer.inheritance
        if schedule is not None and hasattr(collator, "leave_out"):
            collator.leave_out(schedule.rate_at(state.global_step) == 0)

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.trainer.meter.end_step()


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
