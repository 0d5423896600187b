"""The callbacks of `TwoStageTrainer`: they follow the training loop."""

import math
from collections.abc import Sequence
from typing import Any

from accelerate.optimizer import AcceleratedOptimizer
from transformers import TrainerCallback
from transformers.trainer_callback import ExportableState

from growkern.train.distributed.optimizer_state import create_optimizer_state
from growkern.train.loop.growing import GrowthInRun
from growkern.train.loop.meter import Meter
from growkern.train.loss.batches import Batches
from growkern.train.loss.inheritance import InheritanceSchedule
from growkern.train.objectives.language_modeling import EpochCollator
from growkern.train.safety.saving import Saver
from growkern.train.safety.steps import StepWatch
from growkern.train.topk_teacher.teacher import TopKCollator


class LoopCallback(TrainerCallback):
    """Forwards the events of the training loop to the collator, the batches and the meter.

    Args:
        schedule: of the teacher; None without one.
    """

    def __init__(
        self,
        batches: Batches,
        meter: Meter,
        growths: GrowthInRun,
        schedule: InheritanceSchedule | None = None,
    ) -> None:
        self.batches, self.meter, self.growths = batches, meter, growths
        self.schedule = schedule

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Give every parameter its optimizer state, and the schedule its growths."""
        self.growths.rewarm(kwargs["lr_scheduler"], args.lr_scheduler_type)
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


class WorkCallback(TrainerCallback):
    """Chooses what Trainer does after a step: log, save, stop.

    Args:
        steps: knows what all processes have reported.
    """

    def __init__(
        self, batches: Batches, growths: GrowthInRun, steps: StepWatch, saver: Saver
    ) -> None:
        self.batches, self.growths, self.steps, self.saver = batches, growths, steps, saver

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Save before a stop and before a growth, and when the clock says so."""
        if self.steps.take_report():
            # all processes report an error at the same step, and none waits for another
            self.saver.wait(state.global_step)
        self.growths.end_part(control, state.global_step)
        self.steps.choose_work(control, state, args)
        self._set_epoch(state)

    def on_epoch_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Count the passes through a stream by its steps."""
        self._set_epoch(state)

    def _set_epoch(self, state: Any) -> None:
        if self.batches.stream is not None:
            # the share of the steps that were made
            state.epoch = state.global_step / state.max_steps


def keep_states(state: Any, callbacks: Sequence[Any]) -> None:
    """Put the state of callbacks that have one into that of the trainer, as Trainer does."""
    kept = state.stateful_callbacks
    for callback in callbacks:
        if isinstance(callback, ExportableState):
            name, mine = type(callback).__name__, callback.state()
            if isinstance(kept[name], list):
                kept[name].append(mine)
            else:
                kept[name] = mine
