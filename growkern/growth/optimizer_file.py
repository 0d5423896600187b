"""Optimizer files of `transformers.Trainer`: read as tensors alone, written whole or not at all."""

from __future__ import annotations

import os
import pickle
import zipfile
from pathlib import Path
from typing import Any

import torch

from growkern.errors import GrowthError

OPTIMIZER_FILE = "optimizer.pt"


def read_optimizer(file: Path) -> dict[str, Any]:
    """The state dict in a file of `torch.save`, its tensors mapped from there.

    Raises:
        GrowthError: no file, or one that holds more than tensors and plain values.
    """
    try:
        # files of before 2020 are not archives, and cannot be mapped
        mapped = zipfile.is_zipfile(file)
        state = torch.load(file, map_location="cpu", weights_only=True, mmap=mapped)
    except FileNotFoundError:
        raise GrowthError(f"{file}: no such file") from None
    except pickle.UnpicklingError as error:
        # PyTorch's own advice here is to unpickle it all the same
        raise GrowthError(
            f"{file}: not a file of optimizer state: damaged, or more than tensors and plain "
            "values; nothing else is unpickled"
        ) from error
    except (OSError, RuntimeError, EOFError, ValueError) as error:
        why = str(error).strip().partition("\n")[0]
        raise GrowthError(f"{file}: not a file of optimizer state: {why}") from error
    if not isinstance(state, dict):
        raise GrowthError(f"{file}: holds a {type(state).__name__}, not an optimizer's state")
    return state


def write_optimizer(state: dict[str, Any], file: Path) -> None:
    """Save a state dict; the file appears by a rename.

    Raises:
        GrowthError: the disk is full or cannot be written.
    """
    staging = file.with_name(f".{file.name}.growing")
    try:
        torch.save(state, staging)
        os.replace(staging, file)
    except (OSError, RuntimeError) as error:
        staging.unlink(missing_ok=True)
        raise GrowthError(f"{file}: {error}") from error
