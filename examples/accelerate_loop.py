"""The same loop under accelerate: one process or many, any mixed precision it offers."""

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
    """The loss of every step; `steps` are this process's lists of micro-batches."""
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
                # gradients are averaged over processes, and `items` counts those of all of them
                accelerator.backward(loss * accelerator.num_processes)
            total += accelerator.reduce(loss.detach()).item()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(total)
    return losses
