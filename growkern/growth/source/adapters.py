"""Recognises adapters of PEFT (LoRA and others), which growth and training refuse.

An adapter is a few small matrices beside a model. It cannot be grown by itself: the small model
computes with the sum of its weights and the adapter. Two-stage training trains all weights and
saves whole models. So the adapter has to be merged into the weights first.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from growkern.errors import GrowthError

FILE = "adapter_config.json"


def refuse_adapters(model: Any, role: str) -> None:
    """Refuse a model with adapters.

    Args:
        model: anything.
        role: of the model, for the message: "source".

    Raises:
        GrowthError: it has adapters of PEFT.
    """
    if hasattr(model, "peft_config") or getattr(model, "_hf_peft_config_loaded", False):
        raise GrowthError(
            f"the {role} ({type(model).__name__}) has adapters of PEFT, which belong to the small "
            "weights they were trained beside: use merge_and_unload().requires_grad_()"
        )


def refuse_adapter_directory(directory: Path) -> None:
    """Refuse a directory that holds adapters.

    Raises:
        GrowthError: it does.
    """
    if (directory / FILE).is_file():
        raise GrowthError(
            f"{directory} holds adapters of PEFT, not a whole model: load them beside their model, "
            "call merge_and_unload(), and save its result with save_pretrained"
        )
