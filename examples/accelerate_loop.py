"""A training loop with a teacher under accelerate: for many processes and mixed precision."""

import contextlib
from collections.abc import Sequence
from typing import Any

import torch
from accelerate import Accelerator

from examples.inherited_loss import count_labels, inherited_loss
from growkern.train.inheritance import InheritanceSchedule


def train(
    model: Any, teacher: Any, steps: Sequence[list[dict]], schedule: InheritanceSchedule, lr: float
) -> list[float]:
    """Train with AdamW and a teacher that fades out.

    Args:
        model: the student.
        teacher: its part of the loss follows `schedule`.
        steps: one list of micro-batches {input_ids, labels, ...} per step, of this process.
        schedule: share of the teacher in each step.
        lr: learning rate.

    Returns:
        The loss of every step.
    """
    accelerator = Accelerator()
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr, weight_decay=0.0)
    wrapped, optimizer = accelerator.prepare(model, optimizer)
    teacher.to(accelerator.device).eval().requires_grad_(False)
    losses = []
    wrapped.train()
    for step, micro_batches in enumerate(steps):
        items = accelerator.reduce(count_labels(micro_batches, model).to(accelerator.device))
        total = 0.0
        for number, batch in enumerate(micro_batches):
            batch = {name: x.to(accelerator.device) for name, x in batch.items()}
            last = number + 1 == len(micro_batches)
            with contextlib.nullcontext() if last else accelerator.no_sync(wrapped):
                with accelerator.autocast():
                    loss = inherited_loss(
                        model,
                        teacher,
                        batch,
                        alpha=schedule.rate_at(step),
                        num_items=items,
                        wrapped=wrapped,
                    )
                # gradients are averaged over processes, but `items` is the sum over processes
                accelerator.backward(loss * accelerator.num_processes)
            total += accelerator.reduce(loss.detach()).item()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(total)
    return losses
