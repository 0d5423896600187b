"""Reads the config.json of a checkpoint: refuses damaged and hostile ones before any work.

transformers builds models from a config without checking most of its values. A label count of a
billion then takes minutes, and an attention implementation may name code on a hub. So the raw JSON
is checked first. Only then does transformers see it.
"""

from __future__ import annotations

import reprlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import transformers
from transformers.utils import GENERATION_CONFIG_NAME

from growkern.bounded import read_json
from growkern.errors import GrowthError
from growkern.families.family import Family
from growkern.families.load import load_family
from growkern.growth.source.files import METADATA_FILE

# the largest configs of the Hub, with 21,000 named labels, have 2 MB
MOST_BYTES = 8_000_000
# classes that a head may tell apart
MOST_LABELS = 1 << 20
# fields that must be positive, also inside nested dictionaries
POSITIVE = {
    *("rope_theta", "rope_local_base_freq", "factor", "rms_norm_eps", "layer_norm_eps"),
    *("layer_norm_epsilon", "layernorm_epsilon", "norm_eps", "initializer_range"),
    *("max_position_embeddings", "n_positions", "sliding_window", "local_attention"),
    *("query_pre_attn_scalar", "num_labels"),
}
IMPLEMENTATIONS = (
    *("attn_implementation", "_attn_implementation", "_attn_implementation_internal"),
    *("experts_implementation", "_experts_implementation"),
)


def read_config(directory: Path) -> Any:
    """The Hugging Face config of a checkpoint directory. Runs no code and asks no hub.

    A checkpoint of `torch.distributed.checkpoint` may have its config in the directory above.

    Args:
        directory: the checkpoint.

    Raises:
        GrowthError: no such directory, no config.json, or one that is damaged, too large, names
            code of a hub, or has values that make no model.
    """
    file = config_directory(directory) / "config.json"
    data = read_json(file, MOST_BYTES, "config")
    if not isinstance(data, dict) or not isinstance(data.get("model_type"), str):
        raise GrowthError(f'{file}: no "model_type"')
    family = load_family(data["model_type"])
    _check_code(file, data)
    _check_architectures(file, data)
    _check_sizes(file, family, data)
    for name, value in _entries(data):
        _check_number(file, name, value)
    _check_tokens(file, data)
    try:
        return transformers.AutoConfig.from_pretrained(file.parent, trust_remote_code=False)
    except Exception as error:
        # transformers raises several types of exceptions for a bad config
        lines = str(error).strip().splitlines() or [type(error).__name__]
        raise GrowthError(f"{file}: {lines[-1].strip()[:300]}") from error


def config_directory(directory: Path) -> Path:
    """The directory that holds the config and the companions of a checkpoint.

    Raises:
        GrowthError: there is no such directory or no config.
    """
    file = directory / "config.json"
    if not directory.is_dir():
        raise GrowthError(f"{directory}: no such directory")
    if (directory / METADATA_FILE).is_file() and not file.is_file():
        # trainers save sharded weights in a subdirectory of the model's directory
        file = directory.parent / "config.json"
    if not file.is_file():
        raise GrowthError(f"{directory}: no config.json; expected a Hugging Face checkpoint")
    return file.parent


def read_generation(directory: Path) -> Any | None:
    """How a checkpoint generates: the `GenerationConfig` that its model would have when loaded.

    It comes from generation_config.json, or from config.json, where older models keep it.

    Args:
        directory: of `config_directory`.

    Returns:
        None if transformers can read neither.
    """
    read = transformers.GenerationConfig.from_pretrained
    try:
        if (directory / GENERATION_CONFIG_NAME).is_file():
            return read(directory)
        return read(directory, config_file_name="config.json", _from_model_config=True)
    except Exception:
        # a damaged file raises several types of errors; the weights can be grown without it
        return None


def _entries(data: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    """Every number, text and null of a config, with the name of the field that holds it."""
    if isinstance(data, dict):
        for key, value in data.items():
            yield from _entries(value, key)
    elif isinstance(data, list):
        for value in data:
            yield from _entries(value, name)
    else:
        yield name, data


# ------------------------------------------------------------------- values


def _check_code(file: Path, data: dict[str, Any]) -> None:
    """Refuse an implementation that lies on a hub: transformers would download and run it."""
    for name in IMPLEMENTATIONS:
        value = data.get(name)
        values = value.values() if isinstance(value, dict) else [value]
        for one in values:
            if one is not None and not (isinstance(one, str) and one.isidentifier()):
                raise GrowthError(
                    f"{file}: {name}={reprlib.repr(one)} refers to code outside transformers: "
                    "remove it"
                )


def _check_architectures(file: Path, data: dict[str, Any]) -> None:
    names = data.get("architectures")
    if names is not None and not (
        isinstance(names, list) and all(isinstance(name, str) for name in names)
    ):
        raise GrowthError(
            f"{file}: architectures={reprlib.repr(names)}: expected a list of class names"
        )


def _check_sizes(file: Path, family: Family, data: dict[str, Any]) -> None:
    """Refuse sizes beyond any model: transformers makes a list entry for every layer."""
    for key, size in family.config.items():
        value = data.get(str(size.field))
        if type(value) is int and value > family.largest(key):
            most = family.largest(key)
            raise GrowthError(f"{file}: {size.field}={reprlib.repr(value)} must lie in 1 .. {most}")


def _check_number(file: Path, name: str, value: Any) -> None:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return
    if not -(1 << 62) < value < 1 << 62:
        # the comparison is also false for NaN
        raise GrowthError(f"{file}: {name}={reprlib.repr(value)} is NaN, infinite or beyond 2**62")
    if name in POSITIVE and value <= 0:
        raise GrowthError(f"{file}: {name}={value} must be positive")
    if name == "num_labels" and value > MOST_LABELS:
        raise GrowthError(f"{file}: num_labels={value}: at most {MOST_LABELS}")


def _check_tokens(file: Path, data: dict[str, Any]) -> None:
    """Refuse a padding token beyond the vocabulary: embeddings cannot be built with it."""
    size, padding = data.get("vocab_size"), data.get("pad_token_id")
    if isinstance(size, int) and isinstance(padding, int) and padding >= size:
        raise GrowthError(f"{file}: pad_token_id={padding} lies beyond vocab_size={size}")
