"""The callback of `TwoStageTrainer`: it prepares the optimizer and follows the training loop."""

import math
from typing import Any, Protocol

from accelerate.optimizer import AcceleratedOptimizer
from transformers import TrainerCallback

from growkern.train.distributed.optimizer_state import create_optimizer_state
from growkern.train.loop.meter import Meter
from growkern.train.loop.progress import use_named_progress
from growkern.train.loop.tensorboard import use_safe_tensorboard
from growkern.train.loss.inheritance import InheritanceSchedule
from growkern.train.objectives.language_modeling import EpochCollator
from growkern.train.topk_teacher.teacher import TopKCollator


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
        # a checkpoint restores the intervals that it was saved with
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
        if schedule is not None and isinstance(collator, TopKCollator):
            collator.leave_out(schedule.rate_at(state.global_step) == 0)

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Stop the clock."""
        self.trainer.meter.end_step()


def use_own_callbacks(trainer: Any) -> None:
    """Let a trainer follow its loop, survive failing TensorBoard logs and name its label loss."""
    trainer.add_callback(LoopCallback(trainer))
    use_safe_tensorboard(trainer)
    use_named_progress(trainer)
