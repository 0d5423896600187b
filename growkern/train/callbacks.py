"""The callback of `TwoStageTrainer`: it prepares the optimizer and follows the training loop."""

import contextlib
import math
from collections.abc import Iterator
from typing import Any, Protocol

import torch
from accelerate.optimizer import AcceleratedOptimizer
from torch.optim import Adam, AdamW, Optimizer
from transformers import TrainerCallback

from growkern.train.cached_teacher.teacher import CachedCollator
from growkern.train.data import EpochCollator
from growkern.train.inheritance import InheritanceSchedule
from growkern.train.meter import Meter


class FollowedTrainer(Protocol):
    """The parts of a trainer that `LoopCallback` uses."""

    data_collator: Any
    inheritance: InheritanceSchedule | None
    meter: Meter

    def end_pass(self) -> None:
        """Note that the data was read to its end."""


class LoopCallback(TrainerCallback):
    """Forwards the events of the training loop to the trainer's collator and meter.

    Args:
        trainer: its parts are looked up at every event, so they may be replaced in between.
    """

    def __init__(self, trainer: FollowedTrainer) -> None:
        self.trainer = trainer

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Give every parameter its optimizer state."""
        # a checkpoint brings the intervals it was saved with
        state.compute_steps(args, state.max_steps)
        optimizer = kwargs["optimizer"]
        if isinstance(optimizer, AcceleratedOptimizer):
            optimizer = optimizer.optimizer
        create_optimizer_state(optimizer)

    def on_epoch_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Tell the collator which epoch begins."""
        collator = self.trainer.data_collator
        if isinstance(collator, EpochCollator):
            collator.set_epoch(int(state.epoch or 0))

    def on_epoch_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Count the epoch as a whole one: Trainer has no length for some data sets."""
        if state.global_step < state.max_steps and not control.should_training_stop:
            state.epoch = float(math.ceil(state.epoch or 0))
            self.trainer.end_pass()

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Start the clock; stop reading the cached teacher once its rate is 0."""
        self.trainer.meter.start_step()
        collator, schedule = self.trainer.data_collator, self.trainer.inheritance
        if schedule is not None and isinstance(collator, CachedCollator):
            collator.leave_out(schedule.rate_at(state.global_step) == 0)

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Stop the clock."""
        self.trainer.meter.end_step()


# --------------------------------------------------------- optimizer state


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
