"""Prepares a model, its teachers and its arguments for training, before Trainer is made."""

from __future__ import annotations

from itertools import chain
from pathlib import Path
from typing import Any

import torch
from transformers import TrainingArguments

from growkern.errors import warn
from growkern.train.distributed import Shards, is_sharded
from growkern.train.loop.checks import Beginning, choose_teachers
from growkern.train.loop.growing import GrowthInRun
from growkern.train.loop.objective import Objective
from growkern.train.optimizer import OptimizerMaker
from growkern.train.safety import behind_link
from growkern.train.sections import LossOptions

HALF = (torch.bfloat16, torch.float16)


def prepare(run: Beginning) -> tuple[Objective, OptimizerMaker, GrowthInRun, Shards]:
    """Make what a trainer needs before Trainer is made, and compare its model with the teachers.

    The arguments are changed where a run needs it, and the weights may get another dtype.
    """
    model, args, two_stage = run.model, run.args, run.two_stage is not None
    set_arguments(args, in_parts=two_stage or any(step.new_layers_steps for step in run.growth))
    loss = (run.loss or LossOptions()).with_smoothing(args.label_smoothing_factor)
    teachers = choose_teachers(run.inheritance, run.teacher)
    tokenizer = run.options.get("processing_class")
    objective = Objective(model, loss, run.inheritance, teachers, tokenizer, in_stages=two_stage)
    teachers.check_objective(objective.causal)
    teachers.compare(model, tokenizer, run.teacher_tokenizer)
    optimizers = run.optimizers()
    take_model(objective, optimizers, model)
    teachers.place(model, args.device)
    set_precision(model, args, str(run.precision))
    return objective, optimizers, GrowthInRun(run.growth, model), Shards(model, teachers.models)


def take_model(objective: Objective, optimizers: OptimizerMaker, model: Any) -> None:
    """Look at the model that will be trained from now on."""
    objective.take_model(model)
    optimizers.take_model(model)


def set_arguments(args: TrainingArguments, *, in_parts: bool) -> None:
    """Set the arguments that a run needs; in parts: in some steps a part of the model trains."""
    if in_parts:
        # layers outside the sub-model get no gradient; accelerate may wrap one process too
        args.ddp_find_unused_parameters = True
    args.output_dir = str(behind_link(Path(str(args.output_dir))))
    # the filter replaces NaN by an average, in the log alone
    args.logging_nan_inf_filter = False
    if args.data_seed is None:
        # accelerate would take the seed that PyTorch has when training begins, and each process
        # and each resumed run may have another one
        args.data_seed = args.seed


def set_precision(model: Any, args: TrainingArguments, precision: str) -> None:
    """Give a model the weights that its training needs, and set the autocast of the arguments.

    Weights in half precision become float32 here, in place. Other weights stay as they are.

    The cause: bfloat16 has 8 significant bits, so a step below 1/512 of a weight is lost. The
    weights of norms are about 1 and would never change.

    Args:
        args: of the trainer, which get autocast.
        precision: of `choose_precision`.
    """
    if precision == "bf16":
        args.bf16, args.mixed_precision = True, "bf16"
    if precision == "pure-bf16":
        warn(
            "pure-bf16: weights and optimizer state are bfloat16, so steps below 1/512 of a weight "
            'are lost and norms hardly train; precision = "bf16" keeps float32 weights'
        )
        strict = getattr(model, "_keep_in_fp32_modules_strict", None) or ()
        kept = {n: b for n, b in model.named_buffers() if any(word in n for word in strict)}
        model.to(torch.bfloat16)
        for name, buffer in kept.items():
            # near 5, bfloat16 would not tell the biases of a router apart
            model.get_buffer(name).data = buffer.data
    elif is_sharded(model):
        if any(p.dtype in HALF for p in model.parameters()):
            # FSDP2 follows `to`; an assigned `data` would not reach its shards
            model.to(torch.float32)
    else:
        for tensor in chain(model.parameters(), model.buffers()):
            if tensor.dtype in HALF:
                tensor.data = tensor.data.float()
