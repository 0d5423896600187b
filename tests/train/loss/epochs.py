"""Epochs that do not divide by the batch, on one process or several.

`python -m testbed.forked_ranks 2 tests.train.loss.epochs FOLDER` leaves the results in FOLDER.
"""

import torch
import torch.distributed as dist
from torch.utils.data import IterableDataset
from transformers import DataCollatorWithFlattening

from growkern import InheritanceSchedule, TwoStageTrainer
from testbed.tiny import Batches, arguments, build

# rows of the data, micro-batches a step, rows with a KL term, the kind of data
CASES = {
    "one example short": (15, 1, "labels", "indexed"),
    "a process without examples": (13, 1, "all", "indexed"),
    "accumulated": (13, 2, "labels", "indexed"),
    "packed": (15, 1, "all", "packed"),
    "packed, a process without examples": (13, 1, "labels", "packed"),
    "sent": (15, 1, "labels", "sent"),
    "a stream": (15, 1, "labels", "stream"),
    "a stream, a process without examples": (13, 1, "all", "stream"),
    "a stream, accumulated": (9, 2, "labels", "stream"),
    "a stream with a length, accumulated": (9, 2, "labels", "stream with a length"),
}


class Lists(Batches):
    """Examples as lists, which is what the collator of packed sequences takes."""

    def __getitem__(self, i):
        return {key: value.tolist() for key, value in super().__getitem__(i).items()}


class Stream(IterableDataset):
    """The same examples without an index."""

    def __init__(self, rows):
        self.data = Batches(rows)

    def __iter__(self):
        return (self.data[i] for i in range(len(self.data)))


class SizedStream(Stream):
    def __len__(self):
        return len(self.data)


DATA = {"packed": Lists, "stream": Stream, "stream with a length": SizedStream}


def trained(case, folder, batch_size):
    rows, accumulation, kl_rows, kind = CASES[case]
    trainer = TwoStageTrainer(
        build("gpt2", layers=2).double(),
        arguments(
            folder, max_steps=8, per_device_train_batch_size=batch_size, use_cpu=True,
            gradient_accumulation_steps=accumulation, train_sampling_strategy="random",
            accelerator_config={"dispatch_batches": True} if kind == "sent" else None,
        ),
        inheritance=InheritanceSchedule(alpha=0.8, end_step=6, kl_rows=kl_rows),
        teacher=build("gpt2", layers=1, width=8, seed=9).double(),
        train_dataset=DATA.get(kind, Batches)(rows),
        data_collator=DataCollatorWithFlattening() if kind == "packed" else None,
    )  # fmt: skip
    trainer.train()
    log = [line for line in trainer.state.log_history if "loss" in line]
    return {"log": log, "weights": trainer.model.state_dict()}


def main(folder):
    found = {case: trained(case, folder / "run", 2) for case in CASES}
    if dist.get_rank() == 0:
        torch.save(found, folder / "found.pt")
