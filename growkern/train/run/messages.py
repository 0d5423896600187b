"""The messages of a run: a header before the first step, and an end after the last one.

A run that shall print neither silences other libraries too: see `without_bars`.
"""

from __future__ import annotations

import contextlib
import json
import os
import shlex
from collections.abc import Iterator, Mapping
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.text import Text
from transformers.utils import logging

from growkern.errors import clean, human
from growkern.growth.plan import GrowthPlan
from growkern.train.dataset.load import describe_data
from growkern.train.dataset.options import DataSection
from growkern.train.loop.callbacks import last_losses
from growkern.train.loop.trainer import TwoStageTrainer
from growkern.train.objectives.names import span_counts
from growkern.train.run.file import TrainingSection
from growkern.train.run.resolve import ResolvedRun

PRECISIONS = {
    "fp32": "float32",
    "bf16": "bfloat16 autocast over float32 weights",
    "fp16": "float16 autocast over float32 weights",
    "pure-bf16": "bfloat16 weights and optimizer state",
}


def resume_command(file: Path) -> str:
    """The command that starts a run again."""
    command = f"growkern train {shlex.quote(str(file))}"
    processes = int(os.environ.get("WORLD_SIZE", "1"))
    if processes == 1:
        return command
    local = os.environ.get("LOCAL_WORLD_SIZE", str(processes))
    launcher = f"torchrun --nproc_per_node={local}"
    if int(local) < processes:
        launcher += " ... (as before, on every node)"
    return f"{launcher} -m {command}"


def print_lines(lines: Mapping[str, str]) -> None:
    """Print names and values, one pair per line, on a terminal and in a file alike."""
    console = Console()
    width = max(map(len, lines)) + 2
    for name, value in lines.items():
        # one line each, so that paths can be copied and lines can be searched
        text = Text.assemble((f"{name:<{width}}", "bold"), clean(value, kept=""))
        console.print(text, soft_wrap=True)


@contextlib.contextmanager
def without_bars() -> Iterator[None]:
    """While active, transformers, the Hub's client and datasets show no progress bars."""

    def hidden(bar: Any, args: Any, options: dict[str, Any]) -> Any:
        return bar(*args, **{**options, "disable": True})

    with contextlib.ExitStack() as stack:
        # its switch would turn that of the Hub's client with it, and never back
        stack.callback(logging.set_tqdm_hook, logging.set_tqdm_hook(hidden))
        for name in ("huggingface_hub.utils", "datasets"):
            library = import_module(name) if find_spec(name) else None
            if library is not None and not library.are_progress_bars_disabled():
                library.disable_progress_bars()
                stack.callback(library.enable_progress_bars)
        yield


def _describe_device(device: torch.device, processes: int) -> str:
    """The device of a process and the number of processes."""
    name = str(device)
    if device.type == "cuda":
        name = f"{device.type} ({torch.cuda.get_device_name(device)})"
    return f"{name}, {processes} process{'es' if processes > 1 else ''}"


def _describe_optimizer(choice: str, plan: GrowthPlan | None) -> str:
    """The optimizer, and why: it may use the factors of a growth."""
    prefix = "" if plan is None else "Growth"
    name = f"{prefix}AdamW"
    if choice == "muon":
        name = f"{prefix}Muon for the matrices of the blocks, {name} for all else"
    if plan is None:
        return name
    changes = plan.size_changes().items()
    sizes = ", ".join(f"{key} {old} -> {new}" for key, (old, new) in changes if old != new)
    return f"{name}, because the model was grown ({sizes})"


def _describe_saving(directory: Path, training: TrainingSection) -> str:
    """Where checkpoints go, how often, and how many are kept."""
    when = [f"every {training.save_every} steps"] if training.save_every else []
    when += [f"every {training.save_minutes:g} minutes"] if training.save_minutes else []
    often, kept = " and ".join((*when, "at the end")), training.keep_checkpoints
    last = "the last checkpoint is kept" if kept == 1 else f"the last {kept} checkpoints are kept"
    return f"{directory}, {often}; {last}"


def _describe_model(model: Any, path: Path) -> str:
    """The class of a model, its checkpoint, and its number of parameters."""
    count = sum(p.numel() for p in model.parameters())
    name = type(model).__name__.removeprefix("FSDP")
    return f"{name} from {path}, {human(count)} parameters"


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
    flops = trainer.flops_per_step(sequences, data.sequence_length, *_labelled_share(data))
    dtype = str(run.model.dtype).removeprefix("torch.")
    lines = {
        "model": _describe_model(trainer.model, run.model.directory),
        "data": describe_data(trainer.train_dataset, trainer.eval_dataset),
        "objective": data.objective,
        "precision": f"{PRECISIONS[run.precision]}; the checkpoint is {dtype}",
        "optimizer": _describe_optimizer(training.optimizer, trainer.optimizers.plan),
        "device": _describe_device(run.arguments.device, run.arguments.world_size),
        "steps": f"{training.steps}, of {sequences} x {data.sequence_length} tokens",
        "FLOPs": ", ".join(f"{human(n)} in {name}" for name, n in flops.items()),
        "saves": _describe_saving(run.output, training),
        "to resume": command,
    }
    if settings.later_growths:
        lines["growth"] = "; ".join(
            f"at step {step.at_step} to "
            + ", ".join(f"{name} {x}" for name, x in step.sizes.items())
            for step in settings.later_growths
        )
    if settings.trainer:
        given = (f"{name} = {json.dumps(value)}" for name, value in settings.trainer.items())
        lines["trainer"] = ", ".join(given)
    if checkpoint is not None:
        lines["resumes"] = f"from {checkpoint}"
    return lines


def end(output: Path, trainer: TwoStageTrainer) -> dict[str, str]:
    """Where the model is, and what to do next."""
    step = trainer.state.global_step
    lines = {
        "finished": f"{step} steps, {last_losses(trainer.state.log_history, step)}",
        "model": f"{output} ({str(trainer.model.dtype).removeprefix('torch.')})",
        "next": f"growkern plot {shlex.quote(str(output))}",
    }
    if trainer.steps.skipped:
        lines["skipped"] = f"{trainer.steps.skipped} steps that were not finite"
    return lines
