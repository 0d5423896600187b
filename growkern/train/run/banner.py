"""What a run prints before its first step and after its last one."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import torch
from rich.console import Console
from rich.text import Text

from growkern.errors import clean, counted, human
from growkern.train.dataset import describe_data
from growkern.train.loop import TwoStageTrainer, last_losses
from growkern.train.run.file import Run, TrainingSection
from growkern.train.run.resolve import ResolvedRun
from growkern.train.safety import LOG_FILE, step_of
from growkern.train.sections import TASKS, DataSection, span_counts

PRECISIONS = {
    "fp32": "float32",
    "bf16": "bfloat16 autocast over float32 weights",
    "fp16": "float16 autocast over float32 weights",
    "pure-bf16": "bfloat16 weights and optimizer state",
}


def print_lines(lines: Mapping[str, str]) -> None:
    """Print names and values, one pair per line, on a terminal and in a file alike."""
    console = Console()
    width = max(map(len, lines)) + 2
    for name, value in lines.items():
        # one line each, so that paths can be copied and lines can be searched
        text = Text.assemble((f"{name:<{width}}", "bold"), clean(value, kept=""))
        console.print(text, soft_wrap=True)


def _describe_precision(run: ResolvedRun) -> str:
    """The dtypes of the weights in training and on disk."""
    distributed = run.settings.distributed
    is_bf16 = run.settings.is_sharded and distributed and distributed.param_dtype == "bf16"
    used = "bfloat16 over float32 shards" if is_bf16 else PRECISIONS[str(run.precision)]
    return f"{used}; the checkpoint is {str(run.checkpoint.dtype).removeprefix('torch.')}"


def _describe_device(run: ResolvedRun) -> str:
    """The device of a process, the number of processes, and how they share the model."""
    device, processes = run.args.device, run.args.world_size
    name = str(device)
    if device.type == "cuda":
        name = f"{device.type} ({torch.cuda.get_device_name(device)})"
    way = ", sharded by FSDP2" if run.settings.is_sharded else ""
    return f"{name}, {counted(processes, 'process')}{way}"


def _describe_saving(directory: Path, training: TrainingSection) -> str:
    """Where checkpoints go, how often, and how many are kept."""
    when = [f"every {counted(training.save_every, 'step')}"] if training.save_every else []
    when += [f"every {training.save_minutes:g} minutes"] if training.save_minutes else []
    often, kept = " and ".join((*when, "at the end")), training.keep_checkpoints
    last = "the last checkpoint is kept" if kept == 1 else f"the last {kept} checkpoints are kept"
    return f"{directory}, {often}; {last}"


def _describe_model(trainer: TwoStageTrainer, run: ResolvedRun) -> str:
    """The class of the model, the checkpoint that it is or grows from, and its parameters."""
    count = sum(p.numel() for p in trainer.model.parameters())
    name, growth = type(trainer.model).__name__.removeprefix("FSDP"), run.settings.first_growth
    origin = f"from {run.checkpoint.directory}"
    if growth is not None:
        how = f"grown {origin} by method {growth.method!r}"
        origin = "with random weights" if growth.method == "random" else how
    later = " at first" if run.settings.later_growths else ""
    return f"{name} {origin}, {human(count)} parameters{later}"


def _describe_growths(settings: Run, done: int) -> str:
    """The growths inside a run, of which those before step `done` are made."""
    texts = []
    for step in settings.later_growths:
        sizes = ", ".join(f"{name} {size}" for name, size in step.sizes.items())
        sizes = sizes or counted(len(step.depth), "layer")
        made = " (done)" if step.at_step < done else ""
        how = f"method {step.method!r}, depth {step.depth!r}, moments {step.moments!r}"
        texts.append(f"at step {step.at_step} to {sizes} by {how}{made}")
    return "; ".join(texts)


def _labelled_share(data: DataSection) -> tuple[float, int | None]:
    """The share of tokens with a label, and the tokens per row of a decoder beside an encoder.

    Labels of a decoder are its tokens.
    """
    if data.objective == "span_corruption":
        return 1.0, span_counts(data.row_length, data.share, data.mean_span_length).target
    if data.objective in ("denoising", "pairs"):
        return 1.0, data.sequence_length
    return (1.0 if data.objective == "clm" else data.share), None


def header(
    run: ResolvedRun, trainer: TwoStageTrainer, checkpoint: Path | None, command: str
) -> dict[str, str]:
    """The lines that describe a run before its first step."""
    settings, training, data = run.settings, run.settings.training, run.data
    sequences = training.batch_size * training.accumulation
    sizes = sequences, data.sequence_length, *_labelled_share(data)
    flops = trainer.objective.flops_per_step(trainer.two_stage, *sizes)
    if own := trainer.optimizers.products(trainer.model):
        flops["the optimizer"] = own
    tokens = training.steps * sequences * data.sequence_length
    each = f"{sequences} x {data.sequence_length}"
    # beside the state
    trackers = "".join(f" and {name}" for name in run.args.report_to)
    lines = {
        "model": _describe_model(trainer, run),
        "data": describe_data(trainer.train_dataset, trainer.eval_dataset),
        "objective": f"{data.objective}: predicts {TASKS[data.objective]}",
        "precision": _describe_precision(run),
        "optimizer": trainer.optimizers.described(),
        "device": _describe_device(run),
        "steps": f"{training.steps}, of {each} tokens, {human(tokens)} in all",
        "FLOPs": ", ".join(f"{human(n)} in {name}" for name, n in flops.items()),
        "saves": _describe_saving(run.output, training),
        "logs": f"every {counted(training.log_every, 'step')}; all values go to "
        f"{run.output / LOG_FILE}{trackers}",
        "to stop": "Ctrl-C or SIGTERM: the step ends and is saved",
        "to resume": command,
    }
    if settings.later_growths:
        done = 0 if checkpoint is None else step_of(checkpoint)
        lines["growth"] = _describe_growths(settings, done)
    if settings.trainer:
        given = (f"{name} = {json.dumps(value)}" for name, value in settings.trainer.items())
        lines["trainer"] = ", ".join(given)
    if checkpoint is not None:
        lines["resumes"] = f"from {checkpoint}"
    return lines


def end(output: Path, trainer: TwoStageTrainer, after: str) -> dict[str, str]:
    """Where the model is, and what comes after this run."""
    step = trainer.state.global_step
    lines = {
        "finished": f"{counted(step, 'step')}, {last_losses(trainer.state.log_history, step)}",
        "model": f"{output} ({str(trainer.model.dtype).removeprefix('torch.')})",
        "next": after,
    }
    if trainer.meter.skipped:
        lines["skipped"] = f"{counted(trainer.meter.skipped, 'step')}, not finite"
    return lines
