"""The messages of a run: a header before the first step, and an end after the last one."""

from __future__ import annotations

import os
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.text import Text

from growkern.errors import clean
from growkern.growth.plan.growth_plan import GrowthPlan
from growkern.train.growth.step import GrowthStep
from growkern.units import human

PRECISIONS = {
    "fp32": "float32",
    "bf16": "bfloat16 autocast over float32 weights",
    "fp16": "float16 autocast over float32 weights",
    "pure-bf16": "bfloat16 weights and optimizer state",
}


def resume_command(file: Path) -> str:
    """The command that starts a run again.

    Args:
        file: the run file.
    """
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


def describe_device(device: torch.device, processes: int) -> str:
    """The device of a process and the number of processes."""
    name = str(device)
    if device.type == "cuda":
        name = f"{device.type} ({torch.cuda.get_device_name(device)})"
    return f"{name}, {processes} process{'es' if processes > 1 else ''}"


def describe_optimizer(choice: str, plan: GrowthPlan | None) -> str:
    """The optimizer, and why.

    Args:
        choice: `training.optimizer` of the run.
        plan: of the growth whose factors the optimizer uses; None: it uses none.
    """
    prefix = "" if plan is None else "Growth"
    name = f"{prefix}AdamW"
    if choice == "muon":
        name = f"{prefix}Muon for the matrices of the blocks, {name} for all else"
    if plan is None:
        return name
    changes = plan.size_changes().items()
    sizes = ", ".join(f"{key} {old} -> {new}" for key, (old, new) in changes if old != new)
    return f"{name}, because the model was grown ({sizes})"


def describe_growth(growth: Sequence[GrowthStep]) -> str:
    """When a model grows inside a run, and to which sizes.

    Args:
        growth: inside the run.
    """
    return "; ".join(
        f"at step {one.at_step} to " + ", ".join(f"{name} {x}" for name, x in one.sizes.items())
        for one in growth
    )


def describe_saving(directory: Path, save_every: int, save_minutes: float, keep: int) -> str:
    """Where checkpoints go, how often, and how many are kept.

    Args:
        directory: of the run.
        save_every: steps between checkpoints; 0 does not count steps.
        save_minutes: minutes between checkpoints; 0 does not look at the clock.
        keep: number of checkpoints that are kept.
    """
    when = [f"every {save_every} steps"] if save_every else []
    when += [f"every {save_minutes:g} minutes"] if save_minutes else []
    often = " and ".join((*when, "at the end"))
    return f"{directory}, {often}; the last {keep} checkpoints are kept"


def describe_model(model: Any, path: Path) -> str:
    """The class of a model, its checkpoint, and its number of parameters."""
    count = sum(p.numel() for p in model.parameters())
    name = type(model).__name__.removeprefix("FSDP")
    return f"{name} from {path}, {human(count)} parameters"
