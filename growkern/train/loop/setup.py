"""Checks the arguments of `TwoStageTrainer`, and makes its collaborators of them.

A collaborator knows nothing of the trainer. It gets what it needs with each call.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

from transformers import TrainingArguments

from growkern.errors import GrowthError
from growkern.train.distributed.shards import Shards
from growkern.train.growth.step import GrowthStep, check_new_layers
from growkern.train.loop.callbacks import LoopCallback, WorkCallback
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
from growkern.train.loop.progress import use_own_displays
from growkern.train.loop.two_stage import TwoStageConfig
from growkern.train.loss.batches import Batches, LabelledSteps
from growkern.train.loss.domains import SourceCollator, TeachersOfSources
from growkern.train.loss.inheritance import InheritanceSchedule, Teachers
from growkern.train.loss.losses import LossOptions
from growkern.train.loss.side import check_side, side_loss_of
from growkern.train.loss.streams import are_sent
from growkern.train.loss.vocabulary import check_vocabularies
from growkern.train.objectives.language_modeling import evaluation_collator
from growkern.train.optimizer.choose import OptimizerMaker
from growkern.train.optimizer.options import OptimizerChoice, OptimizerOptions
from growkern.train.safety.precision import set_arguments, set_precision
from growkern.train.safety.saving import Saver
from growkern.train.safety.steps import StepOptions, StepWatch
from growkern.train.safety.stops import Stops
from growkern.train.topk_teacher.teacher import TopKTeacher


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


class Early(NamedTuple):
    """The collaborators that are made before Trainer is."""

    objective: Objective
    optimizers: OptimizerMaker
    growths: GrowthInRun
    shards: Shards
    precision: str


class Late(NamedTuple):
    """The collaborators that need the accelerator of Trainer."""

    batches: Batches
    labelled: LabelledSteps
    meter: Meter
    stops: Stops
    saver: Saver
    steps: StepWatch


def prepare(
    settings: Settings, model: Any, args: TrainingArguments, options: dict[str, Any]
) -> Early:
    """Check everything that can be checked before Trainer is made.

    Args:
        model: in training. Its weights may get another dtype.
        args: of the trainer; changed where a run needs it.
        options: the other keyword arguments of `transformers.Trainer`.

    Raises:
        GrowthError: models, teachers or arguments that cannot be trained this way.
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
    return Early(objective, optimizers, growths, Shards(model, teachers.models), precision)


def take_model(
    objective: Objective,
    optimizers: OptimizerMaker,
    two_stage: TwoStageConfig | None,
    model: Any,
) -> None:
    """Look at the model that will be trained from now on.

    Args:
        model: of another size than before, if there was one.

    Raises:
        GrowthError: it cannot be trained this way.
    """
    objective.take_model(model)
    check_block_size(two_stage, objective.layers)
    optimizers.take_model(model)


def complete(trainer: Any, settings: Settings, early: Early) -> Late:
    """Make the other collaborators, and check what Trainer knows by now.

    Args:
        trainer: with its accelerator, its data and its arguments. Its two stages are counted in
            steps from now on, and it gets its callbacks.

    Raises:
        GrowthError: the data or the length of the run does not fit the settings.
    """
    accelerator, args, objective = trainer.accelerator, trainer.args, early.objective
    check_accelerator(accelerator)
    early.growths.plan(trainer.model, objective.check_size)
    kind = {"causal": objective.causal, "decoder": objective.decoder}
    stops = Stops(accelerator)
    saver = Saver(args, accelerator, stops)
    late = Late(
        batches=Batches(accelerator, objective.loss.row_weights, **kind),
        labelled=LabelledSteps(),
        meter=Meter(partial(add_up, accelerator)),
        stops=stops,
        saver=saver,
        steps=StepWatch(settings.steps, accelerator, stops, saver),
    )
    # the data loader of the run counts its rows
    trainer.batches = late.batches
    trainer.two_stage = stages = stages_in_steps(settings.two_stage, trainer)
    check_step_numbers(trainer, stages, settings.inheritance, early.optimizers.own.rewarm_steps)
    check_new_layers(settings.growth, (stages and stages.stage1_steps) or 0)
    own, check = trainer.data_collator, late.batches.check_labels
    if isinstance(objective.teachers, TeachersOfSources):
        if are_sent(trainer.train_dataset, accelerator):
            raise GrowthError(
                "the first process sends its batches to the others, which cannot carry the sources "
                "of teachers: set dispatch_batches=False in accelerator_config"
            )
        own = SourceCollator(own, objective.teachers.names)
    without = trainer._get_collator_with_removed_columns
    check(trainer.train_dataset, without(own), trainer._train_batch_size, "training")
    data = trainer.eval_dataset
    for one in data.values() if isinstance(data, dict) else [data]:
        collator = without(evaluation_collator(own, one))
        check(one, collator, args.eval_batch_size, "evaluation")
    trainer.data_collator = objective.teachers.collator(own, trainer.train_dataset)
    trainer.add_callback(
        LoopCallback(late.batches, late.meter, early.growths, objective.inheritance)
    )
    trainer.add_callback(WorkCallback(late.batches, early.growths, late.steps, saver))
    use_own_displays(trainer)
    return late
