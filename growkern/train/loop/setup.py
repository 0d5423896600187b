"""Checks the arguments of `TwoStageTrainer`, sets the precision, and makes its collaborators.

A collaborator knows nothing of the trainer. It gets what it needs with each call.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from transformers import TrainingArguments

from growkern.errors import GrowthError, GrowthWarning, nearest
from growkern.train.distributed.shard import is_sharded
from growkern.train.distributed.shards import Shards
from growkern.train.growth import GrowthStep
from growkern.train.loop.callbacks import LoopCallback, use_own_displays
from growkern.train.loop.checks import (
    check_accelerator,
    check_arguments,
    check_block_size,
    check_kinds,
    check_step_numbers,
    check_trained_model,
    choose_teachers,
    stages_in_steps,
)
from growkern.train.loop.growing import GrowthInRun
from growkern.train.loop.meter import Meter
from growkern.train.loop.objective import Objective, add_up
from growkern.train.loss.batches import Batches, LabelledSteps
from growkern.train.loss.inheritance import (
    SourceCollator,
    Teachers,
    TeachersOfSources,
)
from growkern.train.loss.options import InheritanceSchedule, LossOptions
from growkern.train.loss.passes import are_sent
from growkern.train.loss.side import check_side, side_loss_of
from growkern.train.loss.vocabulary import check_vocabularies
from growkern.train.model.sub_model import TwoStageConfig
from growkern.train.objectives.language_modeling import evaluation_collator
from growkern.train.optimizer import OptimizerChoice, OptimizerMaker, OptimizerOptions
from growkern.train.rules import check
from growkern.train.safety.checkpoints import behind_link
from growkern.train.safety.saving import Saver, Stops
from growkern.train.safety.steps import StepOptions, StepWatch
from growkern.train.topk_teacher.teacher import TopKTeacher

PRECISIONS = ("fp32", "bf16", "pure-bf16")
# set by `accelerate launch`; accelerate follows it where the arguments say nothing
SWITCH = "ACCELERATE_MIXED_PRECISION"
HALF = (torch.bfloat16, torch.float16)


@dataclass(frozen=True)
class Settings:
    """The arguments of the trainer that Trainer does not have, see there."""

    two_stage: TwoStageConfig | None
    inheritance: InheritanceSchedule | None
    teacher: Any
    teacher_tokenizer: Any
    loss: LossOptions | None
    optimizer: OptimizerChoice
    optimizer_options: OptimizerOptions | None
    growth: Sequence[GrowthStep]
    precision: str | None
    steps: StepOptions


def prepare(
    settings: Settings, model: Any, args: TrainingArguments, options: dict[str, Any]
) -> tuple[Objective, OptimizerMaker, GrowthInRun, Shards, str]:
    """Check everything that can be checked before Trainer is made, and make what it needs.

    Args:
        model: in training. Its weights may get another dtype.
        args: of the trainer; changed where a run needs it.
    """
    check_kinds(model, **vars(settings))
    check_arguments(args, options)
    check_trained_model(model)
    two_stage, growth = settings.two_stage is not None, settings.growth
    set_arguments(args, in_parts=two_stage or any(one.new_layers_steps for one in growth))
    loss = (settings.loss or LossOptions()).with_smoothing(args.label_smoothing_factor)
    teachers = choose_teachers(settings.inheritance, settings.teacher)
    check_side(
        side_loss_of(model),
        two_stage=two_stage,
        teacher=settings.inheritance is not None,
        cached=isinstance(teachers, TopKTeacher),
        grows=bool(growth),
    )
    own = settings.optimizer_options or OptimizerOptions()
    optimizers = OptimizerMaker(settings.optimizer, own, args, options, grows=bool(growth))
    tokenizer = options.get("processing_class")
    objective = Objective(
        model, loss, settings.inheritance, teachers, tokenizer, in_stages=two_stage
    )
    take_model(objective, optimizers, settings.two_stage, model)
    if isinstance(teachers, Teachers):
        found = check_vocabularies(model, teachers.models, tokenizer, settings.teacher_tokenizer)
        teachers.known = found
    teachers.freeze(model, args.device)
    growths = GrowthInRun(growth, model, args, options)
    precision = set_precision(model, args, settings.precision)
    return objective, optimizers, growths, Shards(model, teachers.models), precision


def take_model(
    objective: Objective,
    optimizers: OptimizerMaker,
    two_stage: TwoStageConfig | None,
    model: Any,
) -> None:
    """Look at the model that will be trained from now on."""
    objective.take_model(model)
    check_block_size(two_stage, objective.layers)
    optimizers.take_model(model)


def complete(
    trainer: Any, settings: Settings
) -> tuple[LabelledSteps, Meter, Stops, Saver, StepWatch]:
    """Make the other collaborators, and check what Trainer knows by now.

    Args:
        trainer: with its accelerator and its data. Its two stages are counted in steps from now
            on, and it gets its batches and its callbacks.
    """
    accelerator, args, objective = trainer.accelerator, trainer.args, trainer.objective
    check_accelerator(accelerator)
    trainer.growths.plan(trainer.model, objective.check_size)
    kind = {"causal": objective.causal, "decoder": objective.decoder}
    stops = Stops(accelerator)
    saver = Saver(args, accelerator, stops)
    steps = StepWatch(settings.steps, accelerator, stops, saver)
    meter = Meter(partial(add_up, accelerator))
    # the data loader of the run counts its rows
    trainer.batches = Batches(accelerator, objective.loss.columns, **kind)
    trainer.two_stage = stages = stages_in_steps(settings.two_stage, trainer)
    check_step_numbers(trainer, stages, settings.inheritance, trainer.optimizers.own.rewarm_steps)
    for one in settings.growth:
        check("growth in stage 1", growth=one, stage1_steps=(stages and stages.stage1_steps) or 0)
    own, check_labels = trainer.data_collator, trainer.batches.check_labels
    if isinstance(objective.teachers, TeachersOfSources):
        if are_sent(trainer.train_dataset, accelerator):
            raise GrowthError(
                "the first process sends its batches to the others, which cannot carry the sources "
                "of teachers: set dispatch_batches=False in accelerator_config"
            )
        own = SourceCollator(own, objective.teachers.names)
    without = trainer._get_collator_with_removed_columns
    check_labels(trainer.train_dataset, without(own), trainer._train_batch_size, "training")
    data = trainer.eval_dataset
    for one in data.values() if isinstance(data, dict) else [data]:
        collator = without(evaluation_collator(own, one))
        check_labels(one, collator, args.eval_batch_size, "evaluation")
    trainer.data_collator = objective.teachers.collator(own, trainer.train_dataset)
    schedule = objective.inheritance
    trainer.add_callback(
        LoopCallback(trainer.batches, meter, trainer.growths, steps, saver, schedule)
    )
    use_own_displays(trainer)
    return LabelledSteps(), meter, stops, saver, steps


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


def set_precision(model: Any, args: TrainingArguments, precision: str | None) -> str:
    """Give a model the weights that its training needs, and set the autocast of the arguments.

    Weights in half precision become float32 here, in place. Other weights stay as they are.

    The cause: bfloat16 has 8 significant bits, so a step below 1/512 of a weight is lost. The
    weights of norms are about 1 and would never change.

    Args:
        args: of the trainer; changed if `precision` asks for autocast.
        precision: "fp32"; "bf16", which is autocast over float32 weights; "pure-bf16", where
            weights and optimizer state are bfloat16 too; None follows `args.bf16` and
            `args.fp16`, then the environment variable that `accelerate launch` sets.

    Returns:
        The precision that was chosen: one of the above, or "fp16".
    """
    of_args = "bf16" if args.bf16 else "fp16" if args.fp16 else None
    where = f"the training arguments set {of_args}=True: give one of the two"
    of_launcher = os.environ.get(SWITCH, "no")
    if of_args is None and of_launcher in ("bf16", "fp16"):
        of_args = of_launcher
        instead = f', or give precision = "{of_args}"' if of_args in PRECISIONS else ""
        where = f"the environment variable {SWITCH} is {of_args!r}: unset it{instead}"
    if precision is not None and precision not in PRECISIONS:
        raise GrowthError(f"precision is {precision!r}{nearest(precision, PRECISIONS)}")
    if precision is not None and of_args not in (None, precision):
        default = ", also where a run file says nothing" if precision == "fp32" else ""
        raise GrowthError(f"precision is {precision!r}{default}, but {where}")
    chosen = precision or of_args or "fp32"
    if chosen == "bf16":
        args.bf16, args.mixed_precision = True, "bf16"
    if chosen == "pure-bf16":
        warnings.warn(
            "pure-bf16: weights and optimizer state are bfloat16, so steps below 1/512 of a weight "
            'are lost and norms hardly train; precision = "bf16" keeps float32 weights',
            GrowthWarning,
            stacklevel=4,
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
    return chosen
