"""A training loop in plain PyTorch, with gradient accumulation and a teacher that fades out.

`python examples/pytorch_loop.py` grows a tiny model and trains it beside the model it grew from.
"""

from collections.abc import Sequence
from typing import Any

import torch
import transformers

import growkern


def train(
    model: Any,
    teacher: Any,
    steps: Sequence[list[dict]],
    schedule: growkern.InheritanceSchedule,
    lr: float,
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
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr, weight_decay=0.0)
    losses = []
    model.train()
    for step, micro_batches in enumerate(steps):
        items = growkern.count_labels(micro_batches, model)
        total = 0.0
        for batch in micro_batches:
            loss = growkern.inherited_loss(
                model, teacher, batch, alpha=schedule.alpha_at(step), num_items=items
            )
            loss.backward()
            total += loss.item()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(total)
    return losses


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
    starts = torch.randint(64, (40, 2, 8, 1))
    tokens = (starts + torch.arange(16)) % 64
    steps = [[{"input_ids": x, "labels": x} for x in micro_batches] for micro_batches in tokens]
    schedule = growkern.InheritanceSchedule(alpha=0.5, end_step=10)
    before = loss_of(large, tokens[0, 0])
    train(large, small, steps, schedule, lr=1e-2)
    after = loss_of(large, tokens[0, 0])
    print(f"loss {before:.2f} -> {after:.2f} in {len(steps)} steps")


if __name__ == "__main__":
    main()
