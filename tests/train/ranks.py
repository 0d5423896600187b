"""The work of one of several processes.

`python -m testbed.forked_ranks N tests.train.ranks FOLDER` starts N of them. Each trains
on the rows that the other processes do not have, evaluates, stops, resumes, and leaves what it
found as FOLDER/<case>.pt. Float64, so that the order of a sum shows nowhere. The places that
dropout set to 0 are in FOLDER/dropped<rank>.pt.
"""

import torch
import torch.distributed as dist

from growkern import InheritanceSchedule, TwoStageConfig, TwoStageTrainer
from growkern.train.loop import trainer as trainer_module
from testbed.tiny import Batches, arguments, build

ROWS, EVAL_ROWS, STEPS = 16, 5, 8
STAGES = TwoStageConfig(layers_per_block=2, stage1_steps=5)
# (family, micro-batches a step, rows with a KL term, optimizer)
CASES = [
    ("bert", 1, "labels", "auto"),
    ("gpt2", 2, "labels", "auto"),
    ("llama", 1, "all", "auto"),
    ("bert", 1, "labels", "muon"),
]


def schedule_of(kl_rows):
    return InheritanceSchedule(alpha=0.8, end_step=6, kl_rows=kl_rows)


def models_of(family):
    student = build(family, layers=3, tied=True).double()
    return student, build(family, layers=2, width=8, seed=9).double()


def trainer_for(folder, case, batch, **options):
    family, accumulation, kl_rows, optimizer = case
    model, teacher = models_of(family)
    args = arguments(
        folder, max_steps=STEPS, per_device_train_batch_size=batch,
        per_device_eval_batch_size=batch, gradient_accumulation_steps=accumulation, use_cpu=True,
        # in a fixed order each process gets its rows whatever it draws
        train_sampling_strategy="random", **options,
    )  # fmt: skip
    return TwoStageTrainer(
        model, args, two_stage=STAGES, inheritance=schedule_of(kl_rows), teacher=teacher,
        train_dataset=Batches(ROWS), eval_dataset=Batches(EVAL_ROWS), optimizer=optimizer,
    )  # fmt: skip


def found_by(trainer):
    return {
        "log": [line for line in trainer.state.log_history if "loss" in line],
        "weights": trainer.model.state_dict(),
        "eval_loss": trainer.evaluate()["eval_loss"],
        "flops": trainer.state.total_flos,
    }


def main(folder):
    # the polynomial of Muon in float64 too
    torch.Tensor.bfloat16 = torch.Tensor.clone
    trainer_module.memory_and_peak = lambda device: (("maxrss", 1e9 * (1 + dist.get_rank())), 0.0)
    for i, case in enumerate(CASES):
        saving = {"save_strategy": "steps", "save_steps": 3, "save_only_model": False}
        trainer = trainer_for(folder / f"run{i}", case, 2, **saving)
        trainer.train()
        found = found_by(trainer)
        again = trainer_for(folder / f"run{i}", case, 2)
        again.train(resume_from_checkpoint=str(folder / f"run{i}" / "checkpoint-3"))
        found["resumed"] = again.model.state_dict()
        if dist.get_rank() == 0:
            torch.save(found, folder / f"{i}.pt")
    torch.save(dropped_in(folder / "dropout"), folder / f"dropped{dist.get_rank()}.pt")


def dropped_in(folder, kind=TwoStageTrainer):
    """What dropout sets to 0 in the first layer, in each step of a run. The rows are all alike."""
    model, found = build("bert", layers=1), []
    model.bert.embeddings.dropout.p = 0.5
    model.bert.embeddings.dropout.register_forward_hook(
        lambda module, given, output: found.append(output == 0) if module.training else None
    )
    args = arguments(folder, max_steps=3, per_device_train_batch_size=2, use_cpu=True)
    kind(model, args, train_dataset=[Batches(1)[0]] * 12).train()
    return found
