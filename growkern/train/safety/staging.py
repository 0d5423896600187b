"""Lets all processes write to one staging folder, whose contents then appear at once."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch.distributed as dist
from accelerate import Accelerator
from accelerate.utils import gather_object
from safetensors import SafetensorError

from growkern.errors import GrowthError
from growkern.train.safety.checkpoints import STAGING, close_staging, open_staging

# in the messages of Rust code, such as the tokenizer's, which raises plain exceptions
RUST_ERROR = re.compile(r"(.*) \(os error \d+\)$")
# in the messages of the C++ code that torch.save writes with, for every disk error
TORCH_SAVE = ("PytorchStreamWriter", "inline_container.cc", "iostream error")

Step = Callable[[], Any]


@dataclass(frozen=True)
class Processes:
    """The processes that write together.

    Attributes:
        first: whether this is the first of them.
        gather: takes an object of each process, and returns all of them on every process.
    """

    first: bool
    gather: Callable[[Any], list[Any]]

    @classmethod
    def of_accelerator(cls, accelerator: Accelerator) -> Processes:
        """All processes of a training run."""
        several = accelerator.num_processes > 1
        return cls(accelerator.is_main_process, lambda x: gather_object([x]) if several else [x])

    @classmethod
    def of_group(cls, group: dist.ProcessGroup) -> Processes:
        """The processes of a group that can exchange CPU tensors."""

        def gather(x: Any) -> list[Any]:
            found: list[Any] = [None] * dist.get_world_size(group)
            dist.all_gather_object(found, x, group=group)
            return found

        return cls(dist.get_rank(group) == 0, gather)


def begin_together(
    processes: Processes, run: Path, write: Callable[[Path], None]
) -> tuple[Path, str | None]:
    """Open a staging folder and write to it. All processes take part.

    Args:
        processes: that write.
        run: directory of the run.
        write: writes to the staging folder; called by all processes.

    Returns:
        The staging folder; and None, or why a process could not write, the same for all. Nothing is
        left then.
    """
    staging = run / STAGING
    failure = _take_together(
        processes,
        run,
        lambda: open_staging(run) if processes.first else None,
        lambda: write(staging),
    )
    return staging, failure


def finish_together(processes: Processes, run: Path, write: Step, appear: Step) -> str | None:
    """Write the rest to the staging folder, then let its contents appear. All processes take part.

    Args:
        processes: that write.
        run: directory of the run.
        write: writes to the staging folder; called by all processes.
        appear: moves the contents to their place; called by the first process.

    Returns:
        None, or why a process could not write, the same for all. Nothing is left then.
    """
    failure = _take_together(processes, run, write, lambda: appear() if processes.first else None)
    if processes.first:
        close_staging(run)
    return failure


def _take_together(processes: Processes, run: Path, *steps: Step) -> str | None:
    """Take steps on every process, until one fails on any; why, or None."""
    for step in steps:
        failure = _try_together(processes, step)
        if failure is not None:
            if processes.first:
                close_staging(run)
            return failure
    return None


def _try_together(processes: Processes, step: Step) -> str | None:
    """Do something on every process; the first failure to write of any of them, or None.

    Any other error ends this on all processes.
    """
    failure, unexpected = None, None
    try:
        step()
    except Exception as error:
        failure = _write_failure(error)
        if failure is None:
            unexpected = error
    name = None if unexpected is None else f"{type(unexpected).__name__}: {unexpected}"
    found = processes.gather((failure, name))
    if unexpected is not None:
        raise unexpected
    for rank, (_, text) in enumerate(found):
        if text is not None:
            raise GrowthError(f"process {rank} failed: {text}")
    return next((one for one, _ in found if one is not None), None)


def _write_failure(error: Exception) -> str | None:
    """Why a disk took no more bytes, or None if the error is another one."""
    if isinstance(error, OSError):
        return error.strerror or str(error)
    text = " ".join(str(error).split())
    if isinstance(error, SafetensorError):
        return text
    from_rust = RUST_ERROR.match(text)
    if from_rust and type(error) is Exception:
        return from_rust[1]
    of_torch_save = any(part in text for part in TORCH_SAVE)
    return "the disk takes no more bytes" if of_torch_save else None
