"""Loads language models from checkpoint directories and checks that they fit the data."""

from __future__ import annotations

import stat
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoTokenizer
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
    MODEL_FOR_MASKED_LM_MAPPING_NAMES,
)
from transformers.tokenization_utils_base import TOKENIZER_CONFIG_FILE

from growkern.errors import GrowthError
from growkern.families.load import load_family, supported_families
from growkern.files import read_json
from growkern.growth.source import (
    beside_weights,
    load_model,
    read_config,
    refuse_adapter_directory,
    refuse_links_out,
)
from growkern.train.rules import check

# classes that predict masked tokens, and something else
PRETRAINING = ("BertForPreTraining",)
# classes that predict the next token, also of texts without images
CAUSAL = {
    *MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values(),
    *MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES.values(),
}
# the largest, of 260,000 tokens, have 35 MB; a tokenizer config with all of them has 8 MB
MOST_TOKENIZER_BYTES, MOST_BYTES = 200_000_000, 32_000_000


@dataclass(frozen=True)
class ModelSection:
    """The model to train.

    Args:
        path: checkpoint directory, or a model on the Hub, ORGANISATION/NAME; None with [growth].
        revision: branch, tag or commit of a model on the Hub in `path`.
        tokenizer: directory of the tokenizer; None takes the one of the checkpoint.
    """

    path: str | None = None
    revision: str | None = None
    tokenizer: str | None = None


def load_language_model(directory: Path, dtype: torch.dtype | None = None) -> Any:
    """Load the model of a checkpoint directory in the class that its config names."""
    check_directory(directory)
    return load_model(directory, dtype)


def load_tokenizer(directory: Path, config: Any = None) -> Any:
    """Load the tokenizer of a directory. Code beside it is never run."""
    directory = Path(directory)
    if not directory.is_dir():
        raise GrowthError(
            f"{directory} is not a directory: give one that exists, or download a model from the "
            "Hub first: hf download ORGANISATION/NAME --local-dir DIRECTORY"
        )
    # transformers would make an empty tokenizer, to which every word is unknown
    lacks = GrowthError(
        f"{directory} has no tokenizer files: copy those of the model's tokenizer into it, or name "
        "another directory of a tokenizer"
    )
    if not has_tokenizer(directory):
        raise lacks
    _check_tokenizer_files(directory)
    if config is None and (directory / "config.json").exists():
        config = read_config(directory, any_family=True)
    # without it transformers would read the config itself
    tokenizer = _read_tokenizer(directory, **({} if config is None else {"config": config}))
    if len(tokenizer) <= len(set(tokenizer.all_special_ids)):
        raise lacks
    return tokenizer


def _check_tokenizer_files(directory: Path) -> None:
    """Refuse files that transformers must not open, before it opens any."""
    for file in beside_weights(directory):
        refuse_links_out(file, directory)
        status = file.stat()
        if not stat.S_ISREG(status.st_mode):
            raise GrowthError(f"{file}: not a regular file")
        if status.st_size > MOST_TOKENIZER_BYTES:
            raise GrowthError(
                f"{file}: {status.st_size} bytes, more than any tokenizer has "
                f"({MOST_TOKENIZER_BYTES})"
            )
    file = directory / TOKENIZER_CONFIG_FILE
    if file.exists() and not isinstance(read_json(file, MOST_BYTES, "tokenizer config"), dict):
        raise GrowthError(f"{file}: not a JSON object")


def _read_tokenizer(directory: Path, **how: Any) -> Any:
    """The tokenizer of transformers."""
    try:
        tokenizer = AutoTokenizer.from_pretrained(
            directory, trust_remote_code=False, local_files_only=True, **how
        )
        # both fail for some damaged files
        len(tokenizer), tokenizer.all_special_ids
    except BaseException as error:
        # damaged files raise errors of all kinds; panics of Rust code are no `Exception`
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise
        why = " ".join(str(error).split()) or type(error).__name__
        raise GrowthError(f"{directory}: the tokenizer cannot be loaded: {why[:300]}") from error
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
    """Check that a directory holds a checkpoint."""
    refuse_adapter_directory(directory)
    if not directory.is_dir():
        raise GrowthError(
            f"{directory} is not a checkpoint directory: give the directory of a model, or its "
            "name on the Hub, ORGANISATION/NAME"
        )
    if not (directory / "config.json").is_file():
        raise GrowthError(f"{directory} is not a checkpoint directory: it has no config.json")


def check_fits(directory: Path, tokenizer: Any, length: int, config: Any = None) -> None:
    """Check that a model has embeddings for all positions of a block and all tokens."""
    config = config or read_config(directory, any_family=True)
    positions, config = positions_of(config), config.get_text_config()
    sizes = {"ids": len(tokenizer), "vocabulary": config.vocab_size}
    check("checkpoint", directory=directory, length=length, positions=positions, **sizes)


def positions_of(config: Any) -> int | None:
    """The longest input of a model in tokens, as far as its config tells."""
    if config.model_type in supported_families():
        size = load_family(config.model_type).config.get("positions")
        if size is not None:
            # a RoBERTa numbers its positions from 2
            return size.of(config) - size.reserved
    return getattr(config.get_text_config(), "max_position_embeddings", None)


def is_causal(model: Any) -> bool:
    """Whether a model predicts the next token (True) or masked tokens (False)."""
    names = {cls.__name__ for cls in type(model).__mro__}
    causal = bool(names & CAUSAL)
    masked = bool(names & {*MODEL_FOR_MASKED_LM_MAPPING_NAMES.values(), *PRETRAINING})
    if model.config.is_encoder_decoder or not (causal or masked):
        raise GrowthError(
            f"{type(model).__name__} is neither a masked nor a causal language model: "
            "use a ...ForMaskedLM or ...ForCausalLM model"
        )
    return causal


def separator_of(tokenizer: Any) -> list[int]:
    """The token that follows each text, if the tokenizer has one."""
    separator = tokenizer.eos_token_id
    if separator is None:
        separator = tokenizer.sep_token_id
    return [] if separator is None else [separator]


def head_of(tokenizer: Any) -> list[int]:
    """The token that each row begins with, if the tokenizer has one."""
    return [] if tokenizer.cls_token_id is None else [tokenizer.cls_token_id]
