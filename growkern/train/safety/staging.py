"""Lets all processes write to one staging folder, whose contents then appear at once."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from accelerate import Accelerator
from accelerate.utils import gather_object
from safetensors import SafetensorError

from growkern.train.safety.checkpoints import STAGING, close_staging, open_staging

# in the messages of Rust code, such as the tokenizer's, which raises plain exceptions
RUST_ERROR = re.compile(r"(.*) \(os error \d+\)$")
# in the messages of the C++ code that torch.save writes with, for every disk error
TORCH_SAVE = ("PytorchStreamWriter", "inline_container.cc", "iostream error")


def write_together(
    accelerator: Accelerator,
    run: Path,
    write: Callable[[Path], None],
    appear: Callable[[Path], None],
) -> str | None:
    """Write to a staging folder, then let its contents appear. All processes take part.

    Args:
        accelerator: of the processes.
        run: directory of the run.
        write: writes to the staging folder; called by all processes.
        appear: moves the contents to their place; called by the first process.

    Returns:
        None, or why a process could not write, the same for all. Nothing is left then.
    """
    staging, first = run / STAGING, accelerator.is_main_process
    steps: list[Callable[[], Any]] = [
        lambda: open_staging(run) if first else None,
        lambda: write(staging),
        lambda: appear(staging) if first else None,
    ]
    failure = None
    for step in steps:
        failure = failure or _try_together(accelerator, step)
    if first:
        close_staging(run)
    return failure


def _try_together(accelerator: Accelerator, step: Callable[[], Any]) -> str | None:
    """Do something on every process; the first failure to write of any of them, or None."""
    failure = None
    try:
        step()
    except Exception as error:
        failure = _write_failure(error)
        if failure is None:
            raise
    if accelerator.num_processes == 1:
        return failure
    return next((one for one in gather_object([failure]) if one is not None), None)


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
