"""A training loop with a teacher under accelerate: for many processes and mixed precision.

`python examples/accelerate_loop.py` trains a tiny grown model in one process, and
`accelerate launch examples/accelerate_loop.py` in several.
"""

import contextlib
from collections.abc import Sequence
from typing import Any

import torch
import transformers
from accelerate import Accelerator

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
        steps: one list of micro-batches {input_ids, labels, ...} per step, of this process.
        schedule: share of the teacher in each step.
        lr: learning rate.

    Returns:
        The loss of every step.
    """
    accelerator = Accelerator()
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr, weight_decay=0.0)
    model, optimizer = accelerator.prepare(model, optimizer)
    teacher.to(accelerator.device)
    losses = []
    model.train()
    for step, micro_batches in enumerate(steps):
        items = growkern.count_labels(micro_batches, model).to(accelerator.device)
        items = accelerator.reduce(items)
        total = 0.0
        for number, batch in enumerate(micro_batches):
            # counted on the CPU: rows without a label then cost nothing on a GPU
            rows = int(growkern.count_labels([batch], model))
            batch = {name: x.to(accelerator.device) for name, x in batch.items()}
            last = number + 1 == len(micro_batches)
            with contextlib.nullcontext() if last else accelerator.no_sync(model):
                with accelerator.autocast():
                    loss = growkern.inherited_loss(
                        model,
                        teacher,
                        batch,
                        alpha=schedule.alpha_at(step),
                        num_items=items,
                        max_rows=max(rows, 1),
                    )
                # gradients are averaged over processes, but `items` is the sum over processes
                accelerator.backward(loss * accelerator.num_processes)
            total += accelerator.reduce(loss.detach()).item()
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
    # text that counts upwards from a random number, another in each process
    torch.manual_seed(Accelerator().process_index)
    starts = torch.randint(64, (40, 2, 8, 1))
    tokens = (starts + torch.arange(16)) % 64
    steps = [[{"input_ids": x, "labels": x} for x in micro_batches] for micro_batches in tokens]
    schedule = growkern.InheritanceSchedule(alpha=0.5, end_step=10)
    before = loss_of(large, tokens[0, 0])
    train(large, small, steps, schedule, lr=1e-2)
    after = loss_of(large.cpu(), tokens[0, 0])
    Accelerator().print(f"loss {before:.2f} -> {after:.2f} in {len(steps)} steps")


if __name__ == "__main__":
    main()
