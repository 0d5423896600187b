"""Checks the raw JSON of a config before transformers sees it.

transformers builds models from a config without checking most of its values. A label count of a
billion then takes minutes. An attention implementation may name code on a hub. A field called like
a method replaces the method.
"""

from __future__ import annotations

import reprlib
from collections.abc import Iterator, Mapping
from itertools import chain
from pathlib import Path
from typing import Any

import torch

from growkern.errors import GrowthError
from growkern.families.family import Family, inner

# classes that a head may tell apart; ImageNet-21k has 21,841
MOST_LABELS = 1 << 15
# attention heads, or layers, to be removed
MOST_PRUNED = 1 << 12
# transformers makes a list entry for every layer, and a module for it
MOST_LAYERS = 1 << 14
# the longest contexts have 10 million tokens
MOST_POSITIONS = 1 << 30
MOST_CLASSES, MOST_CLASS_NAME = 16, 200
# fields that must be positive, also inside nested dictionaries
POSITIVE = {
    *("rope_theta", "rope_local_base_freq", "factor", "rms_norm_eps", "layer_norm_eps"),
    *("layer_norm_epsilon", "layernorm_epsilon", "norm_eps", "initializer_range"),
    *("max_position_embeddings", "n_positions", "sliding_window", "local_attention"),
    *("query_pre_attn_scalar", "num_labels", "vocab_size", "hidden_size", "num_attention_heads"),
}
POSITIONS = ("max_position_embeddings", "n_positions", "n_ctx")
LAYERS = (
    *("num_hidden_layers", "n_layer", "n_layers", "num_layers", "num_decoder_layers", "depth"),
    *("encoder_layers", "decoder_layers"),
)
IMPLEMENTATIONS = (
    *("attn_implementation", "_attn_implementation", "_attn_implementation_internal"),
    *("experts_implementation", "_experts_implementation", "_experts_implementation_internal"),
)
# the share of a head that rotary positions turn
SHARES = ("partial_rotary_factor", "rotary_pct")
DTYPES = ("dtype", "torch_dtype")
# Qwen2-MoE writes 0 for no window
MAY_BE_ZERO = ("sliding_window",)
# of transformers' config classes: they say how fields are read and where files are
OF_THE_CLASS = {
    *("attribute_map", "sub_configs", "sub_configs_defaults", "base_config_key", "extra_files"),
    *("keys_to_ignore_at_inference", "has_no_defaults_at_init", "_auto_class"),
    *("transformers_weights", "configuration_files", "fusion_config", "distributed_config"),
}


def check_values(
    file: Path, data: dict[str, Any], config_class: type, family: Family | None
) -> None:
    """Check all values of a config.

    Args:
        family: of the model; None where growkern has no table for it.
    """
    check_names(file, data, config_class)
    faults = (
        *(_of_code(data), _of_architectures(data), _of_counts(data)),
        _of_sizes(family, data, getattr(config_class, "attribute_map", {})),
        *(of(name, value) for name, value in _entries(data) for of in (_of_dtype, _of_number)),
        _of_tokens(data),
    )
    for fault in chain.from_iterable(faults):
        raise GrowthError(f"{file}: {fault}")


def check_layers(place: Path, config: Mapping[str, Any], tensors: int) -> None:
    """Refuse more layers than a model has tensors: building them could take minutes."""
    for name in LAYERS:
        layers = config.get(name)
        if isinstance(layers, int) and layers > tensors:
            raise GrowthError(
                f"{place}: its config says {name}={layers}, but the files have {tensors} tensors"
            )


def check_names(file: Path, data: dict[str, Any], config_class: type) -> None:
    """Refuse fields with the name of a method: transformers would set them in its place."""
    for name, value in data.items():
        is_method = callable(getattr(config_class, name, None))
        if is_method or name.startswith("__") or name in OF_THE_CLASS:
            raise GrowthError(f"{file}: {reprlib.repr(name)} is no field of a config: remove it")
        is_config = isinstance(value, dict) and ("model_type" in value or name.endswith("_config"))
        if is_config:
            check_names(file, value, config_class)


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


# what is wrong with a config, as the end of a message


def _of_code(data: Any, inherited: str | None = None) -> Iterator[str]:
    """Implementations that lie on a hub: transformers would download and run them.

    Args:
        inherited: the field that all values in `data` belong to.
    """
    for key, value in data.items():
        name = key if key in IMPLEMENTATIONS else inherited
        if isinstance(value, dict):
            yield from _of_code(value, name)
        elif isinstance(value, list):
            for inner in value:
                yield from _of_code(inner if isinstance(inner, dict) else {"": inner}, name)
        elif name and value is not None and not (isinstance(value, str) and value.isidentifier()):
            yield f"{name}={reprlib.repr(value)} refers to code outside transformers: remove it"


def _of_architectures(data: dict[str, Any]) -> Iterator[str]:
    names = data.get("architectures")
    is_list = isinstance(names, list) and len(names) <= MOST_CLASSES
    if names is not None and not (
        is_list and all(isinstance(name, str) and len(name) <= MOST_CLASS_NAME for name in names)
    ):
        yield f"architectures={reprlib.repr(names)}: expected a list of class names"


def _of_counts(data: dict[str, Any]) -> Iterator[str]:
    """Tables with more entries than transformers handles in a second."""
    limits = {"id2label": MOST_LABELS, "label2id": MOST_LABELS, "pruned_heads": MOST_PRUNED}
    for name, most in limits.items():
        table = data.get(name)
        if table is not None and not isinstance(table, dict):
            yield f"{name}={reprlib.repr(table)}: expected a table"
        elif table and len(table) > most:
            yield f"{name} has {len(table)} entries: at most {most}"


def _of_sizes(
    family: Family | None, data: dict[str, Any], aliases: Mapping[str, str]
) -> Iterator[str]:
    """Sizes beyond any model: transformers makes a list entry for every layer.

    Args:
        aliases: other name of a field -> the field.
    """
    fields = {size.field: key for key, size in family.config.items()} if family else {}
    for name, value in (inner(data, family.under) if family else {}).items():
        key = fields.get(aliases.get(name, name))
        if family and key and type(value) is int and value > family.largest(key):
            yield f"{name}={reprlib.repr(value)} must lie in 1 .. {family.largest(key)}"


def _of_dtype(name: str, value: Any) -> Iterator[str]:
    """A dtype that PyTorch does not have: transformers takes any name of the package."""
    if name in DTYPES and value is not None:
        known = isinstance(value, str) and getattr(torch, value.removeprefix("torch."), None)
        if not isinstance(known, torch.dtype):
            yield f"{name}={reprlib.repr(value)} is no dtype of PyTorch"


def _of_number(name: str, value: Any) -> Iterator[str]:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return
    limits = {"num_labels": MOST_LABELS}
    limits |= dict.fromkeys(LAYERS, MOST_LAYERS) | dict.fromkeys(POSITIONS, MOST_POSITIONS)
    if not -(1 << 62) < value < 1 << 62:
        # the comparison is also false for NaN
        yield f"{name}={reprlib.repr(value)} is NaN, infinite or beyond 2**62"
    elif name in POSITIVE and value <= 0 and not (name in MAY_BE_ZERO and value == 0):
        yield f"{name}={value} must be positive"
    elif not 0 <= value <= 1 and (name in SHARES or "dropout" in name or name.endswith("pdrop")):
        yield f"{name}={value} must lie in 0 .. 1"
    elif value > limits.get(name, value):
        yield f"{name}={value}: at most {limits[name]}"


def _of_tokens(data: dict[str, Any]) -> Iterator[str]:
    """A padding token beyond the vocabulary: embeddings cannot be built with it."""
    size, padding = data.get("vocab_size"), data.get("pad_token_id")
    if isinstance(size, int) and isinstance(padding, int) and padding >= size:
        yield f"pad_token_id={padding} lies beyond vocab_size={size}"
