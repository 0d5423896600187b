"""Runs of Hugging Face trainers on random tokens, with the time of every step."""

import tempfile
import time
from collections.abc import Callable
from typing import Any

import torch
import transformers
from torch import Tensor


class RandomRows(torch.utils.data.Dataset):
    """The rows of one batch, again and again.

    Args:
        ids, labels: (B, S) int64.
        count: number of rows.
    """

    def __init__(self, ids: Tensor, labels: Tensor, count: int) -> None:
        self.ids, self.labels, self.count = ids.cpu(), labels.cpu(), count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, i: int) -> dict[str, Tensor]:
        at = i % len(self.ids)
        return {"input_ids": self.ids[at], "labels": self.labels[at]}


class Clock(transformers.TrainerCallback):
    """Notes when each step ended, after the device has finished its work."""

    def __init__(self) -> None:
        self.ends: list[float] = []

    def on_step_end(self, *_: Any, **__: Any) -> None:
        self.ends.append(now())

    @property
    def seconds(self) -> list[float]:
        """The time of each step but the first."""
        return [b - a for a, b in zip(self.ends, self.ends[1:], strict=False)]


def now() -> float:
    """The time in seconds, after the device has finished its work."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter()


def trained(
    make: Callable[..., Any], model: Any, ids: Tensor, labels: Tensor, steps: int, **options: Any
) -> tuple[Any, Clock]:
    """Train a model for some steps.

    Args:
        make: makes a trainer of model, arguments, train_dataset and callbacks.
        model: is trained in place.
        ids, labels: (B, S) int64, the batch of every step.
        steps: optimizer steps.
        options: further training arguments.

    Returns:
        The trainer, and the clock of its steps.
    """
    clock = Clock()
    with tempfile.TemporaryDirectory() as directory:
        args = transformers.TrainingArguments(
            directory,
            max_steps=steps,
            per_device_train_batch_size=len(labels),
            learning_rate=1e-5,
            max_grad_norm=0.0,
            logging_first_step=True,
            logging_steps=10**6,
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
            train_sampling_strategy="sequential",
            **options,
        )
        data = RandomRows(ids, labels, steps * len(labels))
        trainer = make(model, args, train_dataset=data, callbacks=[clock])
        trainer.remove_callback(transformers.PrinterCallback)
        trainer.train()
    return trainer, clock
