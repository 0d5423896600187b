"""Prepares `TwoStageTrainer` and its collaborators, and runs it in parts between which it grows.

A collaborator knows nothing of the trainer. It gets what it needs with each call.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from transformers import TrainingArguments
from transformers.trainer_callback import ExportableState

from growkern.errors import GrowthError, warn
from growkern.growth.history import GROWN_KEY
from growkern.train.distributed import Shards, is_sharded, prime
from growkern.train.loop.callbacks import LoopCallback, warn_of_imbalance
from growkern.train.loop.checks import (
    Beginning,
    check_accelerator,
    check_step_numbers,
    choose_teachers,
    length_of_run,
    stages_in_steps,
)
from growkern.train.loop.display import use_own_displays, warn_of_divergence
from growkern.train.loop.growing import Former, GrowthInRun
from growkern.train.loop.meter import Meter, memory_and_peak
from growkern.train.loop.objective import Objective, add_up
from growkern.train.loss import Batches, LabelledSteps, are_sent
from growkern.train.model import setting
from growkern.train.objectives import evaluation_collator
from growkern.train.optimizer import OptimizerMaker, bare
from growkern.train.safety import (
    Saver,
    SignalWatch,
    StepWatch,
    Stops,
    behind_link,
    evaluates_start,
    misses_evaluation,
    step_of,
)
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


def make_collaborators(
    trainer: Any, run: Beginning
) -> tuple[LabelledSteps, Meter, Stops, Saver, StepWatch]:
    """Make the other collaborators, and check what Trainer knows by now.

    Args:
        trainer: with its accelerator and its data. Its two stages are counted in steps from now
            on, and it gets its batches and its callbacks.
    """
    accelerator, args, objective = trainer.accelerator, trainer.args, trainer.objective
    check_accelerator(accelerator)
    set_labels(trainer, objective)
    trainer.growths.plan(trainer.model, objective.check_size, run.planned)
    kind = {"causal": objective.causal, "decoder": objective.decoder}
    stops = Stops(accelerator)
    saver = Saver(args, accelerator, stops)
    steps = StepWatch(run.on_nonfinite, run.save_minutes, accelerator, stops, saver)
    meter = Meter(partial(add_up, accelerator))
    # the data loader of the run counts its rows
    trainer.batches = Batches(accelerator, objective.loss.columns, **kind)
    trainer.two_stage = stages_in_steps(run.two_stage, run.growth, partial(length_of_run, trainer))
    check_step_numbers(trainer)
    sent, check_labels = are_sent(trainer.train_dataset, accelerator), trainer.batches.check_labels
    own = objective.teachers.collator(trainer.data_collator, sent=sent)
    without = trainer._get_collator_with_removed_columns
    check_labels(trainer.train_dataset, without(own), trainer._train_batch_size, "training")
    data = trainer.eval_dataset
    for dataset in data.values() if isinstance(data, dict) else [data]:
        check_labels(dataset, without(evaluation_collator(own)), args.eval_batch_size, "evaluation")
    trainer.data_collator = objective.teachers.trained(own, trainer.train_dataset)
    trainer.add_callback(
        LoopCallback(trainer.batches, meter, trainer.growths, steps, saver, objective.inheritance)
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


def train_in_parts(trainer: Any, checkpoint: Path | None, train: Callable[[Any], Any]) -> Any:
    """Train through all growths: `train` trains until the model grows or the run ends."""
    trainer.fit_to(checkpoint)
    message, growths = f"stopped; to resume: {trainer.saver.hint}", trainer.growths
    # An exception of a signal may skip the end of a `torch.no_grad`. A signal during a growth would
    # be lost in a finaliser.
    has_grad = torch.set_grad_enabled(torch.is_grad_enabled())
    with has_grad, SignalWatch(message, enabled=bool(growths.steps)):
        while True:
            if checkpoint is not None and growths.is_due(step_of(checkpoint)):
                replace_model(trainer, partial(growths.grow, checkpoint))
            growths.ends_here = False
            try:
                watch = SignalWatch(message, enabled=trainer.args.save_strategy != "no")
                with watch as trainer.stops.signals:
                    result = _train_part(trainer, checkpoint, train)
            finally:
                growths.source = None
            if not growths.ends_here:
                warn_of_divergence(trainer.state.log_history, growths.since)
                return result
            run = Path(trainer.args.output_dir)
            checkpoint = growths.checkpoint(run, trainer.state.global_step, trainer.saver)


def _train_part(trainer: Any, checkpoint: Path | None, train: Callable[[Any], Any]) -> Any:
    stops, saver = trainer.stops, trainer.saver
    stops.number, saver.saved_at = 0, time.monotonic()
    trainer.steps.start()
    warn_of_imbalance(trainer.model, trainer.callback_handler.callbacks)
    try:
        result = train(None if checkpoint is None else str(checkpoint))
    except BaseException:
        # the error that ends the run counts; the checkpoint is complete or gone
        with contextlib.suppress(GrowthError):
            saver.wait(trainer.state.global_step)
        raise
    step = trainer.state.global_step
    saver.wait(step)
    stops.number = stops.of_any()
    if stops.number:
        stops.end_run(step, Path(trainer.args.output_dir), saver.hint)
    return result


def replace_model(trainer: Any, make: Callable[[Former], Any]) -> None:
    """Train a model of another size, which is made when the one before is gone from memory."""
    old = forget_model(trainer)
    model = make(old)
    if old.generation is not None:
        model.generation_config = old.generation
    if trainer.shards.sharded:
        prime(model)
    elif trainer.place_model_on_device:
        trainer._move_model_to_device(model, trainer.args.device)
    trainer.model = trainer.model_wrapped = model
    take_model(trainer.objective, trainer.optimizers, model)


def forget_model(trainer: Any) -> Former:
    """Free the model in memory and its optimizer, before there is another one."""
    model = trainer.model
    trainer.optimizer = trainer.lr_scheduler = None
    trainer.accelerator.free_memory()
    for name in ("model", "optimizer", "lr_scheduler"):
        setattr(trainer.callback_handler, name, None)
    trainer.model = trainer.model_wrapped = None
    return Former.of(model)


def write_checkpoint(trainer: Any, directory: Path) -> None:
    """Write everything but the state of the trainer, which is completed here."""
    shards, name, is_first = trainer.shards, str(directory), trainer.args.should_save
    store_flops(trainer)
    with setting(shards, "in_checkpoint", True):
        trainer.save_model(name, _internal_call=True)
    if not trainer.args.save_only_model:
        if shards.sharded:
            parts = bare(trainer.optimizer), trainer.lr_scheduler
            shards.save_optimizer(trainer.model, *parts, directory, is_first=is_first)
        else:
            trainer._save_optimizer_and_scheduler(name)
        trainer._save_scaler(name)
        trainer._save_rng_state(name)
        if trainer.batches.stream is not None:
            trainer.batches.stream.save(directory)
    # the state of callbacks that have one, as Trainer does
    kept = trainer.state.stateful_callbacks
    for callback in (*trainer.callback_handler.callbacks, trainer.control):
        if isinstance(callback, ExportableState):
            kind, own = type(callback).__name__, callback.state()
            if isinstance(kept[kind], list):
                kept[kind].append(own)
            else:
                kept[kind] = own


def store_flops(trainer: Any) -> None:
    """Put the FLOPs since the last call into the state of a trainer, without those of padding."""
    trainer.current_flos += trainer.objective.flops.drain()
    trainer.store_flos()


def complete_line(trainer: Any, logs: dict[str, float]) -> None:
    """Put the FLOPs so far and the numbers of the collaborators into a log line."""
    store_flops(trainer)
    logs["flops"] = trainer.state.total_flos
    if "loss" in logs:
        args = trainer.args
        memory, peak = memory_and_peak(args.device)
        is_half = args.bf16 or args.fp16 or trainer.model.dtype in HALF
        logs.update(trainer.meter.drain(logs["flops"], peak if is_half else 0.0) | memory)
        logs.update(trainer.growths.event(trainer.state.log_history))
        # of steps without a label the meter knows nothing, and Trainer counts them
        logs["loss"] = trainer.labelled.corrected(logs["loss"], trainer.accelerator)
        logs["parameters"] = sum(p.numel() for p in trainer.model.parameters())
        if trainer.steps.skipped:
            logs["skipped_steps"] = trainer.steps.skipped
    # a mean since the last start alone, and NaN after a step that was skipped
    logs.pop("train_loss", None)


def note_evaluation(trainer: Any) -> None:
    """Note whether the model has to be evaluated before its next step."""
    args, state, grows = trainer.args, trainer.state, trainer.growths.source is not None
    is_first = trainer.evaluates_first or hasattr(trainer.model.config, GROWN_KEY)
    is_new = grows or (not state.global_step and is_first)
    trainer.evaluates_start = is_new and evaluates_start(args, state)
    # numbers of a model that has grown since would be another's
    trainer.misses_evaluation = not grows and misses_evaluation(args, state, trainer.eval_dataset)


def make_up_evaluation(trainer: Any) -> None:
    """Evaluate a model that was just grown, or a checkpoint if a signal has prevented that."""
    starts, trainer.evaluates_start = trainer.evaluates_start, False
    if starts:
        # the schedule does not go by it, and no checkpoint holds this model
        trainer._evaluate(None, None, skip_scheduler=True)
    misses, trainer.misses_evaluation = trainer.misses_evaluation, False
    if misses and (metrics := trainer._evaluate(None, None)):
        trainer._determine_best_metric(metrics, None)
