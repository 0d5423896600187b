"""The rows that each of two processes trains on.

`python -m testbed.forked_ranks 2 tests.train.distributed.rows FOLDER` leaves FOLDER/rows.json.
For each case it has a list of token lists for each process: the rows in their order. The run files
of RUNS in FOLDER are trained too. Dropout is on, so that training draws random numbers between
rows.
"""

import json

import torch
import torch.distributed as dist
from torch.utils.data import IterableDataset, SubsetRandomSampler
from transformers import Trainer

from growkern import TwoStageTrainer
from growkern.train.distributed.shard import make_mesh, shard
from growkern.train.run import start as module
from growkern.train.sections import DistributedOptions, GrowthStep
from testbed.tiny import Batches, arguments, build

RUNS = ("run-ddp", "run-fsdp")
# two passes through the data, two rows in each step of each process
ROWS, STEPS, RESUMED_AT = 16, 8, 6
RANDOM = {"train_sampling_strategy": "random"}
SEEDED = {**RANDOM, "data_seed": 5}


class Shuffled(IterableDataset):
    """Rows in an order of PyTorch's generator, another one in each pass."""

    def __init__(self):
        self.data = Batches(ROWS)

    def __iter__(self):
        return (self.data[i] for i in torch.randperm(ROWS))


class Sampling:
    """A trainer with a sampler that has no generator of its own."""

    def _get_train_sampler(self, dataset=None):
        return SubsetRandomSampler(range(ROWS))


class PlainSampling(Sampling, Trainer):
    pass


class OurSampling(Sampling, TwoStageTrainer):
    pass


# plain Trainer, ours, arguments, data
CASES = {
    "random": (Trainer, TwoStageTrainer, RANDOM, Batches),
    "data_seed": (Trainer, TwoStageTrainer, SEEDED, Batches),
    "stream": (Trainer, TwoStageTrainer, RANDOM, Shuffled),
    "sampler": (PlainSampling, OurSampling, RANDOM, Batches),
}
# whose order depends on the seed alone; others are drawn anew after a restart
KEEPING = ("random", "data_seed")


def model_of(sharded):
    model = build("gpt2", layers=2)
    for one in model.modules():
        if isinstance(one, torch.nn.Dropout):
            one.p = 0.1
    return shard(model, DistributedOptions("fsdp"), make_mesh("cpu")) if sharded else model


def watched(trainer):
    """The trainer, and the list to which it will add the rows that this process trains on."""
    rows, compute_loss = [], trainer.compute_loss

    def spy(model, inputs, *args, **options):
        if model.training:
            rows.extend(inputs["input_ids"].tolist())
        return compute_loss(model, inputs, *args, **options)

    trainer.compute_loss = spy
    return trainer, rows


def rows_of(trainer, checkpoint=None):
    """The rows that each process trains on, in their order."""
    trainer, mine = watched(trainer)
    trainer.train(checkpoint)
    return everyones(mine)


def everyones(mine):
    every = [None] * dist.get_world_size()
    dist.all_gather_object(every, mine)
    return every


def trainer_for(kind, folder, options, data, *, sharded=False, **more):
    settings = {"max_steps": STEPS, "use_cpu": True, "seed": 3, **options}
    dataset = data(ROWS) if data is Batches else data()
    return kind(model_of(sharded), arguments(folder, **settings), train_dataset=dataset, **more)


def rows_of_case(folder, name):
    plain, ours, options, data = CASES[name]
    found = {"plain": rows_of(trainer_for(plain, folder / "plain", options, data))}
    saving = options | {"save_strategy": "steps", "save_steps": RESUMED_AT}
    for how in ("ddp", "fsdp"):
        place, sharded = folder / f"{name}-{how}", how == "fsdp"
        found[how] = rows_of(trainer_for(ours, place, saving, data, sharded=sharded))
        if name in KEEPING:
            again = trainer_for(ours, place, options, data, sharded=sharded)
            # a seed of the user's own
            torch.manual_seed(100 + dist.get_rank())
            checkpoint = str(place / f"checkpoint-{RESUMED_AT}")
            found[f"{how}, resumed"] = rows_of(again, checkpoint)
    if name in KEEPING:
        growth = [GrowthStep(at_step=3, sizes={"n_layer": 3}, moments="reset")]
        place = folder / f"{name}-grown"
        found["growing"] = rows_of(trainer_for(ours, place, saving, data, growth=growth))
    return found


def rows_of_run(file):
    """The rows of a run file, and those of plain Trainer on the same data."""
    made, build_trainer = [], module.build_trainer

    def building(*args, **options):
        made.append(watched(build_trainer(*args, **options)))
        return made[0][0]

    module.build_trainer = building
    try:
        module.run(file, progress=False)
    finally:
        module.build_trainer = build_trainer
    ((trainer, mine),) = made
    settings = {"max_steps": trainer.args.max_steps, "use_cpu": True, "seed": trainer.args.seed}
    plain = Trainer(
        model_of(False), arguments(file.parent / "plain", **settings | RANDOM),
        train_dataset=trainer.train_dataset, data_collator=trainer.data_collator,
    )  # fmt: skip
    return {"ours": everyones(mine), "plain": rows_of(plain)}


def main(folder):
    found = {name: rows_of_case(folder, name) for name in CASES}
    found |= {name: rows_of_run(folder / f"{name}.toml") for name in RUNS}
    if dist.get_rank() == 0:
        (folder / "rows.json").write_text(json.dumps(found))
