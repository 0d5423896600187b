"""A `transformers.Trainer` with a teacher and the fused loss, to copy into a trainer of your own.

`python examples/hf_trainer.py` grows a tiny model and trains it beside the model it grew from.
`growkern.TwoStageTrainer` can do more: sub-models, several teachers, FLOPs and logs.
"""

import tempfile
from typing import Any

import torch
import transformers
from torch import Tensor

import growkern


class InheritingTrainer(transformers.Trainer):
    """A Trainer with a frozen teacher.

    Args:
        teacher: its part of the loss follows `schedule`.
        schedule: share of the teacher in each step.
        args, options: of `transformers.Trainer`.
    """

    def __init__(
        self, *args: Any, teacher: Any, schedule: growkern.InheritanceSchedule, **options: Any
    ) -> None:
        super().__init__(*args, **options)
        self.teacher = teacher.to(self.args.device)
        self.schedule = schedule
        # Trainer then leaves the division by the labels of the accumulated batch to us
        self.model_accepts_loss_kwargs = True

    def _get_num_items_in_batch(self, batch_samples: list[dict], device: Any) -> Tensor:
        items = growkern.count_labels(batch_samples, self.model).to(device)
        return self.accelerator.reduce(items)

    def compute_loss(
        self,
        model: Any,
        inputs: dict[str, Tensor],
        return_outputs: bool = False,
        num_items_in_batch: Tensor | int | None = None,
    ) -> Any:
        loss = growkern.inherited_loss(
            model,
            self.teacher,
            inputs,
            alpha=self.schedule.alpha_at(self.state.global_step) if model.training else 0.0,
            num_items=num_items_in_batch,
        )
        if num_items_in_batch is not None:
            # gradients are averaged over processes, but the items are the sum over processes
            loss = loss * self.accelerator.num_processes
        return (loss, {}) if return_outputs else loss


def loss_of(model: Any, tokens: torch.Tensor) -> float:
    """The loss of a batch without a teacher."""
    with torch.no_grad():
        batch = {"input_ids": tokens, "labels": tokens}
        return growkern.inherited_loss(model.eval(), None, batch).item()


def main() -> None:
    torch.manual_seed(0)
    config = transformers.GPT2Config(
        vocab_size=64,
        n_positions=32,
        n_embd=32,
        n_layer=2,
        n_head=2,
        bos_token_id=0,
        eos_token_id=0,
    )
    small = transformers.GPT2LMHeadModel(config)
    large = growkern.grow(small, n_embd=64, n_head=4)
    # text that counts upwards from a random number
    tokens = (torch.randint(64, (640, 1)) + torch.arange(16)) % 64
    before = loss_of(large, tokens[:64])
    with tempfile.TemporaryDirectory() as folder:
        args = transformers.TrainingArguments(
            folder,
            max_steps=40,
            per_device_train_batch_size=16,
            learning_rate=1e-2,
            logging_steps=10,
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
        )
        trainer = InheritingTrainer(
            large,
            args,
            train_dataset=[{"input_ids": x, "labels": x} for x in tokens],
            teacher=small,
            schedule=growkern.InheritanceSchedule(alpha=0.5, end_step=10),
        )
        trainer.train()
    after = loss_of(large.cpu(), tokens[:64])
    print(f"loss {before:.2f} -> {after:.2f} in {trainer.state.global_step} steps")


if __name__ == "__main__":
    main()
