"""A run in parts, between which the model grows; and what a checkpoint and a log line hold."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from transformers.trainer_callback import ExportableState

from growkern.errors import GrowthError
from growkern.growth.history import GROWN_KEY
from growkern.train.distributed.shard import prime
from growkern.train.loop.growing import Former
from growkern.train.loop.meter import memory_and_peak
from growkern.train.loop.setup import HALF, take_model
from growkern.train.model import setting
from growkern.train.optimizer import bare
from growkern.train.safety.checkpoints import step_of
from growkern.train.safety.saving import evaluates_start, misses_evaluation
from growkern.train.safety.signals import SignalWatch


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
                return result
            run = Path(trainer.args.output_dir)
            checkpoint = growths.checkpoint(run, trainer.state.global_step, trainer.saver)


def _train_part(trainer: Any, checkpoint: Path | None, train: Callable[[Any], Any]) -> Any:
    stops, saver = trainer.stops, trainer.saver
    stops.number, saver.saved_at = 0, time.monotonic()
    trainer.steps.start()
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
        if trainer.growths.steps:
            logs["parameters"] = sum(p.numel() for p in trainer.model.parameters())
        if trainer.steps.skipped:
            logs["skipped_steps"] = trainer.steps.skipped
    # a mean since the last start alone, and NaN after a step that was skipped
    logs.pop("train_loss", None)


def note_evaluation(trainer: Any) -> None:
    """Note whether the model has to be evaluated before its next step."""
    args, state, grows = trainer.args, trainer.state, trainer.growths.source is not None
    is_new = grows or (not state.global_step and hasattr(trainer.model.config, GROWN_KEY))
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
