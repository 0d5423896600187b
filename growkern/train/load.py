"""Loads language models from checkpoint directories and checks that they fit the data."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors import SafetensorError
from transformers import AutoConfig, AutoTokenizer
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_MASKED_LM_MAPPING_NAMES,
)

from growkern.errors import GrowthError


def load_language_model(directory: Path, dtype: torch.dtype | None = None) -> Any:
    """Load the model of a checkpoint directory in the class that its config names.

    Args:
        directory: of the checkpoint.
        dtype: of the weights; None takes the one of the checkpoint.

    Raises:
        GrowthError: there is no checkpoint, its class is unknown to transformers, or its weights
            cannot be read.
    """
    check_directory(directory)
    names = AutoConfig.from_pretrained(directory).architectures or ["(none)"]
    cls = getattr(transformers, names[0], None)
    if cls is None:
        raise GrowthError(f"{directory}: config.json names an unknown class: {names[0]}")
    try:
        return cls.from_pretrained(directory, dtype=dtype or "auto")
    except (OSError, SafetensorError, RuntimeError) as error:
        raise GrowthError(f"{directory}: the weights cannot be loaded: {error}") from error


def stored_dtype(directory: Path) -> torch.dtype:
    """The dtype of a checkpoint's weights as its config names it; float32 if it names none."""
    return AutoConfig.from_pretrained(directory).dtype or torch.float32


def load_tokenizer(directory: Path) -> Any:
    """Load the tokenizer of a directory.

    Raises:
        GrowthError: the directory has no tokenizer files. transformers would make an empty
            tokenizer, to which every word is unknown.
    """
    lacks = GrowthError(
        f"{directory} has no tokenizer files: copy those of the model's tokenizer into it, or name "
        "another directory of a tokenizer"
    )
    if not has_tokenizer(directory):
        raise lacks
    try:
        tokenizer = AutoTokenizer.from_pretrained(directory)
    except (OSError, ValueError) as error:
        raise GrowthError(f"{directory}: the tokenizer cannot be loaded: {error}") from error
    if len(tokenizer) <= len(set(tokenizer.all_special_ids)):
        raise lacks
    return tokenizer


def has_tokenizer(directory: Path) -> bool:
    """Whether a directory has files of a tokenizer, under any of their usual names."""
    return any(any(Path(directory).glob(pattern)) for pattern in TOKENIZER_FILES)


# config.json alone is not enough
TOKENIZER_FILES = (
    *("tokenizer*", "vocab.*", "vocab-*", "merges.txt", "spiece.model", "*.bpe.model", "*.spm"),
    *("sentencepiece*.model", "tekken.json", "*.tiktoken"),
)


def check_directory(directory: Path) -> None:
    """Check that a directory holds a checkpoint.

    Raises:
        GrowthError: it has no config.json.
    """
    if not (directory / "config.json").is_file():
        raise GrowthError(f"{directory} is not a checkpoint directory: it has no config.json")


def check_fits(directory: Path, tokenizer: Any, length: int) -> None:
    """Check that a model has embeddings for all positions of a block and all tokens.

    Args:
        directory: checkpoint of the model.
        tokenizer: makes the ids that the model will read.
        length: tokens per block.

    Raises:
        GrowthError: the blocks are too long or the tokenizer is too large.
    """
    config = AutoConfig.from_pretrained(directory)
    positions = getattr(config, "max_position_embeddings", None)
    if positions is not None and length > positions:
        raise GrowthError(
            f"the sequence length (data.sequence_length, --sequence-length) is {length}, but "
            f"{directory} has {positions} positions: give {positions} or less"
        )
    if len(tokenizer) > config.vocab_size:
        raise GrowthError(
            f"the tokenizer has {len(tokenizer)} ids, but {directory} has a vocabulary of "
            f"{config.vocab_size}"
        )


def is_causal(model: Any) -> bool:
    """Whether a model predicts the next token (True) or masked tokens (False).

    Raises:
        GrowthError: the model is neither a causal nor a masked language model.
    """
    names = {cls.__name__ for cls in type(model).__mro__}
    causal = bool(names & set(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values()))
    masked = bool(names & set(MODEL_FOR_MASKED_LM_MAPPING_NAMES.values()))
    if model.config.is_encoder_decoder or not (causal or masked):
        raise GrowthError(
            f"{type(model).__name__} is neither a masked nor a causal language model: "
            "use a ...ForMaskedLM or ...ForCausalLM model"
        )
    return causal
