"""Where the training loop is, told to those parts of `TwoStageTrainer` that go by it."""

from typing import Any

from transformers import TrainerCallback

from growkern.train.optimizer_state import create_optimizer_state


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
