"""A stock `transformers.Trainer` whose loss is ours: what to copy into a trainer you have.

`growkern.TwoStageTrainer` does this and more: sub-models, several teachers, FLOPs, logs.
"""

from typing import Any

from torch import Tensor
from transformers import Trainer

from examples.inherited_loss import inherited_loss
from growkern.train.inheritance import InheritanceSchedule
from growkern.train.load import is_causal


class InheritingTrainer(Trainer):
    """Trainer with a frozen teacher; everything else is its base class's."""

    def __init__(self, *args: Any, teacher: Any, schedule: InheritanceSchedule, **options: Any):
        super().__init__(*args, **options)
        self.teacher = teacher.to(self.args.device).eval().requires_grad_(False)
        self.schedule = schedule
        # Trainer then counts the labels of the whole accumulated batch, and divides by nothing
        self.model_accepts_loss_kwargs = True
        self._loss_shifts_labels = is_causal(self.model)

    def compute_loss(
        self,
        model: Any,
        inputs: dict[str, Tensor],
        return_outputs: bool = False,
        num_items_in_batch: Tensor | int | None = None,
    ) -> Any:
        loss = inherited_loss(
            self.accelerator.unwrap_model(model),
            self.teacher,
            inputs,
            alpha=self.schedule.rate_at(self.state.global_step) if model.training else 0.0,
            num_items=num_items_in_batch,
            wrapped=model,
        )
        return (loss, {}) if return_outputs else loss
