"""Reads a language model of transformers from a directory, for training and for teachers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import transformers
from safetensors import SafetensorError
from transformers import AutoConfig
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_MASKED_LM_MAPPING_NAMES,
)

from growkern.errors import GrowthError


def load_language_model(directory: Path) -> Any:
    """The model of a checkpoint directory, in the class that its config names.

    raises: GrowthError when the directory, the class or the weights are unfit.
    """
    check_directory(directory)
    names = AutoConfig.from_pretrained(directory).architectures or ["(none)"]
    cls = getattr(transformers, names[0], None)
    if cls is None:
        raise GrowthError(f"{directory}: config.json names the architecture {names[0]}: unknown")
    try:
        return cls.from_pretrained(directory)
    except (OSError, SafetensorError, RuntimeError) as error:
        raise GrowthError(f"{directory}: the weights cannot be loaded: {error}") from error


def check_directory(directory: Path) -> None:
    if not (directory / "config.json").is_file():
        raise GrowthError(f"{directory} is no checkpoint directory: it has no config.json")


def check_fits(directory: Path, tokenizer: Any, length: int) -> None:
    """Refuse blocks longer, or ids larger, than a model has embeddings for."""
    config = AutoConfig.from_pretrained(directory)
    positions = getattr(config, "max_position_embeddings", None)
    if positions is not None and length > positions:
        raise GrowthError(
            f"the sequence length (data.sequence_length, --sequence-length) is {length}, "
            f"{directory} has {positions} positions: give {positions} or less"
        )
    if len(tokenizer) > config.vocab_size:
        raise GrowthError(
            f"the tokenizer has {len(tokenizer)} ids, {directory} a vocabulary of "
            f"{config.vocab_size}"
        )


def is_causal(model: Any) -> bool:
    """Whether a position predicts the next token; refuses what is no language model."""
    names = {cls.__name__ for cls in type(model).__mro__}
    causal = bool(names & set(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values()))
    masked = bool(names & set(MODEL_FOR_MASKED_LM_MAPPING_NAMES.values()))
    if model.config.is_encoder_decoder or not (causal or masked):
        raise GrowthError(
            f"{type(model).__name__} is neither a masked nor a causal language model: "
            "use a ...ForMaskedLM or ...ForCausalLM model"
        )
    return causal
