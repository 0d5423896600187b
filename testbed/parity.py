"""The same training on one process and on several: cases, and the numbers that they leave.

`python -m testbed.forked_ranks N testbed.parity DIR` runs cases on N ranks.
DIR/cases.json names them. The first rank leaves DIR/<number>.pt; a case that has one is not run
again. One process trains the whole model. Several shard it or have copies, and share out the same
batches.
"""

import contextlib
import functools
import json
from collections import Counter
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.fsdp._fully_shard import _fsdp_param_group as groups
from torch.distributed.tensor import DTensor

import growkern
from growkern import InheritanceSchedule, TwoStageConfig, TwoStageTrainer
from growkern.train.distributed.shard import make_mesh, shard
from growkern.train.model import layer_stacks
from growkern.train.sections import DistributedOptions
from testbed.tiny import MEASURED, Batches, arguments, build

BATCH, ROWS, EVAL_ROWS = 8, 24, 10


@dataclass(frozen=True)
class Case:
    """One training run.

    Attributes:
        family: of the model.
        dtype: of weights and arithmetic, "float64" or "float32"; "bf16" computes in bfloat16 on
            float32 weights.
        accumulation: micro-batches in a step.
        checkpointing: whether activations are computed again.
        teacher: "none", "whole" or "sharded".
        by_hand: whether `fully_shard` is called as a user would.
        sharded: whether several ranks shard the model; else each has a copy.
        replicas: of the model, with at least two ranks for each.
        layers: of the model; a block of stage 1 is half of them.
        steps: optimizer steps; the first half of them is stage 1.
        optim: optimizer, in the names of transformers, or "muon".
    """

    family: str
    dtype: str = "float64"
    accumulation: int = 1
    checkpointing: bool = False
    teacher: str = "none"
    by_hand: bool = False
    sharded: bool = True
    replicas: int = 1
    layers: int = 4
    steps: int = 6
    optim: str = "adamw_torch"

    @property
    def stages(self):
        return TwoStageConfig(self.layers // 2, stage1_steps=self.steps // 2, seed=3)

    @property
    def schedule(self):
        return InheritanceSchedule(alpha=0.8, end_step=self.steps - 1)

    @property
    def name(self):
        words = [self.family, self.dtype]
        words += [self.optim] * (self.optim != "adamw_torch")
        words += ["accumulation"] * (self.accumulation > 1)
        words += ["checkpointing"] * self.checkpointing
        words += [f"{self.teacher} teacher"] * (self.teacher != "none")
        words += ["by hand"] * self.by_hand + ["replicas"] * (self.replicas > 1)
        words += ["copies"] * (not self.sharded)
        return ", ".join(words)


def options_of(case):
    narrow = "bf16" if case.dtype == "bf16" else "fp32"
    return DistributedOptions(
        sharding="fsdp",
        replicas=case.replicas,
        param_dtype=narrow,
        activation_checkpointing=case.checkpointing,
    )


def shard_by_hand(model, dtype):
    """What a user writes who knows nothing of growkern."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    how = {"mesh": mesh}
    if dtype == "bf16":
        how["mp_policy"] = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
    for stack in layer_stacks(model):
        for block in stack:
            fully_shard(block, **how)
    return fully_shard(model, **how)


def prepared(model, case):
    """The model of a rank; that of a single process stays whole."""
    model = model.double() if case.dtype == "float64" else model
    model.config.use_cache = False
    if case.checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    if not is_group() or not case.sharded:
        return model
    if case.by_hand:
        return shard_by_hand(model, case.dtype)
    return shard(model, options_of(case), make_mesh("cpu", case.replicas))


def is_group():
    return dist.is_initialized() and dist.get_world_size() > 1


def model_of(family, layers, width=16, seed=0):
    if family == "mixtral":
        source = build(family, layers=layers, width=width // 2, tied=True, seed=seed)
        return growkern.grow(source, hidden_size=width, num_local_experts=6)
    return build(family, layers=layers, width=width, tied=True, seed=seed)


def teacher_of(case):
    if case.teacher == "none":
        return None
    teacher = model_of(case.family, 2, 8, 9).eval().requires_grad_(False)
    if case.teacher == "sharded":
        return prepared(teacher, Case(case.family, case.dtype, by_hand=case.by_hand))
    return teacher.double() if case.dtype == "float64" else teacher


def trainer_for(folder, case, **options):
    ranks = dist.get_world_size() if is_group() else 1
    model = prepared(model_of(case.family, case.layers), case)
    beside = {}
    if case.teacher != "none":
        beside = {"inheritance": case.schedule, "teacher": teacher_of(case)}
    is_muon = case.optim == "muon"
    settings = {
        "max_steps": case.steps, "per_device_train_batch_size": BATCH // ranks,
        "per_device_eval_batch_size": BATCH // ranks, "use_cpu": True, "max_grad_norm": 0.5,
        "gradient_accumulation_steps": case.accumulation,
        # the changes of the weights are compared with bfloat16, and decay would be most of them
        "weight_decay": 0.0 if case.dtype == "bf16" else 0.1,
        # with 1e-8, a gradient that is all rounding moves its weight by a whole step
        "adam_epsilon": 1e-4, **({} if is_muon else {"optim": case.optim}),
        # in a fixed order each rank gets its rows whatever it draws; the errors of bfloat16 were
        # measured in one
        "train_sampling_strategy": "sequential" if case.dtype == "bf16" else "random",
    }  # fmt: skip
    if case.dtype == "bf16" and ranks == 1:
        settings["bf16"] = True
    return TwoStageTrainer(
        model, arguments(folder, **settings | options), two_stage=case.stages, **beside,
        train_dataset=Batches(ROWS), eval_dataset=Batches(EVAL_ROWS),
        optimizer="muon" if is_muon else "auto",
    )  # fmt: skip


def whole(tensor):
    tensor = tensor.detach()
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).clone()


def weights_of(model):
    return {name: whole(p) for name, p in model.named_parameters()}


def timeless(line):
    return {name: value for name, value in line.items() if name not in MEASURED}


def found_in(folder, case):
    """Train as a case says, with the polynomial of Muon in float64 too."""
    kept = torch.Tensor.bfloat16
    if case.optim == "muon":
        torch.Tensor.bfloat16 = torch.Tensor.clone
    try:
        return found_by(trainer_for(folder, case))
    finally:
        torch.Tensor.bfloat16 = kept


def found_by(trainer):
    """Train, and collect every number that is to be the same on any number of ranks."""
    before = weights_of(trainer.model)
    with counting(trainer.model) as counts:
        trainer.train()
    log = [timeless(line) for line in trainer.state.log_history if "loss" in line]
    evaluation = trainer.evaluate()["eval_loss"]
    return result_of(trainer.model, before, counts, log, evaluation, trainer.state.total_flos)


def result_of(model, before, counts, log, evaluation, flops):
    after = weights_of(model)
    return {
        "log": log,
        "eval_loss": evaluation,
        "flops": flops,
        "weights": after,
        "moved": torch.cat([(after[name] - before[name]).flatten() for name in after]),
        "still": [name for name, weight in before.items() if torch.equal(weight, after[name])],
        "sharded": sum(isinstance(p, DTensor) for p in model.parameters()),
        "counts": dict(counts),
    }


@contextlib.contextmanager
def counting(model):
    """Count the gathers and the reductions of every group of a model, by the group's first name."""
    counts, modules = Counter(), set(model.modules())
    kept = groups.foreach_all_gather, groups.foreach_reduce

    def counted(kind, call, params, *args, **options):
        counts[kind, params[0]._param_fqn] += params[0]._module_info.module in modules
        return call(params, *args, **options)

    groups.foreach_all_gather = functools.partial(counted, "gather", kept[0])
    groups.foreach_reduce = functools.partial(counted, "reduce", kept[1])
    try:
        yield counts
    finally:
        groups.foreach_all_gather, groups.foreach_reduce = kept


def differences(found, expected):
    """The largest differences between two runs, of losses, other logged numbers, and weights.

    The "loss" of a log line has a place of its own: Trainer adds it up in float32.
    """
    logged = {"losses": 0.0, "Trainer's loss": 0.0, "logged numbers": 0.0}
    for ours, theirs in zip(found["log"], expected["log"], strict=True):
        assert ours.keys() == theirs.keys()
        for name, value in theirs.items():
            kind = "losses" if name in ("label_loss", "kl") else "logged numbers"
            kind = "Trainer's loss" if name == "loss" else kind
            apart = abs(ours[name] - value) / max(1.0, abs(value))
            logged[kind] = max(logged[kind], apart)
    apart = abs(found["eval_loss"] - expected["eval_loss"])
    logged["losses"] = max(logged["losses"], apart)
    assert found["flops"] == expected["flops"]
    assert found["weights"].keys() == expected["weights"].keys()
    weights = max(
        ((weight - expected["weights"][name]).abs().max() / (1 + weight.abs().max())).item()
        for name, weight in found["weights"].items()
    )
    return {**logged, "weights": weights}


def moved_apart(found, expected):
    """The difference between the changes of all weights together, relative to the change."""
    return float((found["moved"] - expected["moved"]).norm() / expected["moved"].norm())


def main(folder):
    cases = [Case(**fields) for fields in json.loads((folder / "cases.json").read_text())]
    # looked at once, before any rank can have finished a case
    missing = [number for number in range(len(cases)) if not (folder / f"{number}.pt").exists()]
    dist.barrier()
    for number in missing:
        found = found_in(folder / f"run{number}", cases[number])
        if dist.get_rank() == 0:
            torch.save(found, folder / "part")
            (folder / "part").replace(folder / f"{number}.pt")
