"""A `transformers.Trainer` with a teacher and the fused loss, to copy into a trainer of your own.

`growkern.TwoStageTrainer` can do more: sub-models, several teachers, FLOPs and logs.
"""

from typing import Any

from torch import Tensor
from transformers import Trainer

from examples.inherited_loss import inherited_loss
from growkern.train.inheritance import InheritanceSchedule
from growkern.train.load import is_causal


class InheritingTrainer(Trainer):
    """A Trainer with a frozen teacher.

    Args:
        teacher: its part of the loss follows `schedule`.
        schedule: share of the teacher in each step.
        args, options: of `transformers.Trainer`.
    """

    def __init__(self, *args: Any, teacher: Any, schedule: InheritanceSchedule, **options: Any):
        super().__init__(*args, **options)
        self.teacher = teacher.to(self.args.device).eval().requires_grad_(False)
        self.schedule = schedule
        # Trainer then counts the labels of the accumulated batch and leaves the division to us
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
