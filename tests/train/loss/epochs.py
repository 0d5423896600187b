"""Epochs that do not divide by the batch, on one process or several.

`torchrun --nproc_per_node=2 -m tests.train.loss.epochs FOLDER` leaves the results in FOLDER.
"""

import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from transformers import DataCollatorWithFlattening

from growkern import InheritanceSchedule, TwoStageTrainer
from tests.train.test_trainer import Batches, arguments
from tests.train.tiny import build

# rows of the data, micro-batches a step, rows with a KL term, whether sequences are packed
CASES = {
    "one example short": (15, 1, "labels", False),
    "a process without examples": (13, 1, "all", False),
    "accumulated": (13, 2, "labels", False),
    "packed": (15, 1, "all", True),
    "packed, a process without examples": (13, 1, "labels", True),
}


class Lists(Batches):
    """Examples as lists, which is what the collator of packed sequences takes."""

    def __getitem__(self, i):
        return {key: value.tolist() for key, value in super().__getitem__(i).items()}


def trained(case, folder, batch_size):
    rows, accumulation, kl_rows, packed = CASES[case]
    trainer = TwoStageTrainer(
        build("gpt2", layers=2).double(),
        arguments(
            folder, max_steps=8, per_device_train_batch_size=batch_size, use_cpu=True,
            gradient_accumulation_steps=accumulation,
        ),
        inheritance=InheritanceSchedule(rate=0.8, end_step=6, kl_rows=kl_rows),
        teacher=build("gpt2", layers=1, width=8, seed=9).double(),
        train_dataset=(Lists if packed else Batches)(rows),
        data_collator=DataCollatorWithFlattening() if packed else None,
    )  # fmt: skip
    trainer.train()
    log = [line for line in trainer.state.log_history if "loss" in line]
    return {"log": log, "weights": trainer.model.state_dict()}


if __name__ == "__main__":
    torch.set_num_threads(1)
    out = Path(sys.argv[1])
    found = {case: trained(case, out / "run", 2) for case in CASES}
    if dist.get_rank() == 0:
        torch.save(found, out / "found.pt")
    dist.barrier()
    sys.stdout.flush()
    # gloo's threads now and then abort a process that leaves in the ordinary way
    os._exit(0)
