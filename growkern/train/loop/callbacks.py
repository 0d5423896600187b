"""The callback of `TwoStageTrainer`: it prepares the optimizer and follows the training loop."""

import math
from typing import Any

from accelerate.optimizer import AcceleratedOptimizer
from transformers import TrainerCallback

from growkern.train.distributed.optimizer_state import create_optimizer_state
from growkern.train.loop.meter import Meter
from growkern.train.loss.batches import Batches
from growkern.train.loss.inheritance import InheritanceSchedule
from growkern.train.objectives.language_modeling import EpochCollator
from growkern.train.topk_teacher.teacher import TopKCollator


class LoopCallback(TrainerCallback):
    """Forwards the events of the training loop to the collator, the batches and the meter.

    Args:
        batches: of the run.
        meter: of the run.
        schedule: of the teacher; None without one.
    """

    def __init__(
        self, batches: Batches, meter: Meter, schedule: InheritanceSchedule | None = None
    ) -> None:
        self.batches, self.meter, self.schedule = batches, meter, schedule

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
        collator = self.batches.source
        if isinstance(collator, EpochCollator):
            collator.set_epoch(int(state.epoch or 0))

    def on_epoch_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Count the epoch as a whole one: Trainer has no length for some data sets."""
        if state.global_step < state.max_steps and not control.should_training_stop:
            state.epoch = float(math.ceil(state.epoch or 0))
            self.batches.done = 0

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Start the clock; stop reading the cached teacher once its rate is 0."""
        self.meter.start_step()
        collator = self.batches.source
        if self.schedule is not None and isinstance(collator, TopKCollator):
            collator.leave_out(self.schedule.rate_at(state.global_step) == 0)

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Stop the clock."""
        self.meter.end_step()
