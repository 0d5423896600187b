"""A training loop in plain PyTorch with gradient accumulation and a teacher that fades out."""

from collections.abc import Sequence
from typing import Any

import torch

from examples.inherited_loss import count_labels, inherited_loss
from growkern.train.head import check_head
from growkern.train.inheritance import InheritanceSchedule


def train(
    model: Any, teacher: Any, steps: Sequence[list[dict]], schedule: InheritanceSchedule, lr: float
) -> list[float]:
    """Train with AdamW and a teacher that fades out.

    Args:
        model: the student.
        teacher: its part of the loss follows `schedule`.
        steps: one list of micro-batches {input_ids, labels, ...} per step.
        schedule: share of the teacher in each step.
        lr: learning rate.

    Returns:
        The loss of every step.
    """
    for one in (model, teacher):
        check_head(one)
    teacher.eval().requires_grad_(False)
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr, weight_decay=0.0)
    losses = []
    model.train()
    for step, micro_batches in enumerate(steps):
        items = count_labels(micro_batches, model)
        total = 0.0
        for batch in micro_batches:
            loss = inherited_loss(
                model, teacher, batch, alpha=schedule.rate_at(step), num_items=items
            )
            loss.backward()
            total += loss.item()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(total)
    return losses
