"""Checks the arguments of `TwoStageTrainer`, sets the precision, and makes its collaborators.

A collaborator knows nothing of the trainer. It gets what it needs with each call.
"""

from __future__ import annotations

from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from transformers import TrainingArguments

from growkern.errors import warn
from growkern.train.distributed.shard import is_sharded
from growkern.train.distributed.shards import Shards
from growkern.train.growth import check_new_layers
from growkern.train.loop.callbacks import LoopCallback, use_own_displays
from growkern.train.loop.checks import (
    TrainerSettings,
    check_accelerator,
    check_settings,
    check_step_numbers,
    choose_precision,
    choose_teachers,
    length_of_run,
    stages_in_steps,
)
from growkern.train.loop.growing import GrowthInRun
from growkern.train.loop.meter import Meter
from growkern.train.loop.objective import Objective, add_up
from growkern.train.loss import (
    Batches,
    LabelledSteps,
    LossOptions,
    are_sent,
)
from growkern.train.objectives.language_modeling import evaluation_collator
from growkern.train.optimizer import OptimizerMaker
from growkern.train.safety.checkpoints import behind_link
from growkern.train.safety.saving import Saver, Stops
from growkern.train.safety.steps import StepWatch

HALF = (torch.bfloat16, torch.float16)


def prepare(
    settings: TrainerSettings, model: Any, args: TrainingArguments, options: dict[str, Any]
) -> tuple[Objective, OptimizerMaker, GrowthInRun, Shards, str]:
    """Check everything that can be checked before Trainer is made, and make what it needs.

    Args:
        model: in training. Its weights may get another dtype.
        args: of the trainer; changed where a run needs it.
    """
    if not settings.is_resolved:
        check_settings(settings, model, args, options)
    two_stage, growth = settings.two_stage is not None, settings.growth
    set_arguments(args, in_parts=two_stage or any(step.new_layers_steps for step in growth))
    loss = (settings.loss or LossOptions()).with_smoothing(args.label_smoothing_factor)
    teachers = choose_teachers(settings.inheritance, settings.teacher)
    own = settings.optimizer_options
    optimizers = OptimizerMaker(settings.optimizer, own, args, options, grows=bool(growth))
    tokenizer = options.get("processing_class")
    objective = Objective(
        model, loss, settings.inheritance, teachers, tokenizer, in_stages=two_stage
    )
    if not settings.is_resolved:
        teachers.check_objective(objective.causal)
    take_model(objective, optimizers, model)
    if not settings.is_resolved:
        teachers.compare(model, tokenizer, settings.teacher_tokenizer)
    teachers.place(model, args.device)
    wanted = settings.precision
    precision = str(wanted) if settings.is_resolved else choose_precision(args, wanted)
    set_precision(model, args, precision)
    growths = GrowthInRun(growth, model)
    return objective, optimizers, growths, Shards(model, teachers.models), precision


def take_model(objective: Objective, optimizers: OptimizerMaker, model: Any) -> None:
    """Look at the model that will be trained from now on."""
    objective.take_model(model)
    optimizers.take_model(model)


def make_collaborators(
    trainer: Any, settings: TrainerSettings
) -> tuple[LabelledSteps, Meter, Stops, Saver, StepWatch]:
    """Make the other collaborators, and check what Trainer knows by now.

    Args:
        trainer: with its accelerator and its data. Its two stages are counted in steps from now
            on, and it gets its batches and its callbacks.
    """
    accelerator, args, objective = trainer.accelerator, trainer.args, trainer.objective
    check_accelerator(accelerator)
    set_labels(trainer, objective)
    trainer.growths.plan(trainer.model, objective.check_size, settings.planned)
    kind = {"causal": objective.causal, "decoder": objective.decoder}
    stops = Stops(accelerator)
    saver = Saver(args, accelerator, stops)
    steps = StepWatch(settings.steps, accelerator, stops, saver)
    meter = Meter(partial(add_up, accelerator))
    # the data loader of the run counts its rows
    trainer.batches = Batches(accelerator, objective.loss.columns, **kind)
    length = partial(length_of_run, trainer)
    trainer.two_stage = stages = stages_in_steps(settings.two_stage, settings.growth, length)
    if not settings.is_resolved:
        check_new_layers(settings.growth, trainer.growths.sizes[1:])
        rewarm_steps = trainer.optimizers.own.rewarm_steps
        check_step_numbers(trainer, stages, settings.inheritance, rewarm_steps)
    sent, check_labels = are_sent(trainer.train_dataset, accelerator), trainer.batches.check_labels
    own = objective.teachers.collator(trainer.data_collator, sent=sent)
    without = trainer._get_collator_with_removed_columns
    check_labels(trainer.train_dataset, without(own), trainer._train_batch_size, "training")
    data = trainer.eval_dataset
    for dataset in data.values() if isinstance(data, dict) else [data]:
        collator = without(evaluation_collator(own))
        check_labels(dataset, collator, args.eval_batch_size, "evaluation")
    trainer.data_collator = objective.teachers.trained(own, trainer.train_dataset)
    schedule = objective.inheritance
    trainer.add_callback(
        LoopCallback(trainer.batches, meter, trainer.growths, steps, saver, schedule)
    )
    use_own_displays(trainer)
    return LabelledSteps(), meter, stops, saver, steps


def set_labels(trainer: Any, objective: Objective) -> None:
    """Tell Trainer how labels are counted, and which columns it must leave in the data."""
    # Trainer counts the labels of an accumulated batch if the first is true, and counts them
    # shifted if the second is. Its own guess from the class is wrong for BERT and for GPT-2
    trainer.model_accepts_loss_kwargs = True
    trainer._loss_shifts_labels = objective.causal
    columns = (*objective.loss.columns, *objective.teachers.columns)
    trainer.label_names = [*trainer.label_names, *columns]


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
