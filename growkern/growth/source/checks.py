"""Checks of a source before and during growth: its config, names, shapes, ties and values.

transformers builds models from a config without checking most of its values. A label count of a
billion then takes minutes. An attention implementation may name code on a hub. A field called like
a method replaces the method. So the raw JSON is checked before transformers sees it.
"""

from __future__ import annotations

import reprlib
from collections.abc import Callable, Iterator, Mapping, Set
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from growkern.errors import GrowthError, nearest
from growkern.families.family import Family, inner
from growkern.families.model import ModelSpec

# of models of today; transformers is asked for others, as its table takes 2 s to import
USUAL_ACTIVATIONS = ("gelu", "gelu_new", "gelu_pytorch_tanh", "relu", "silu")

# the end of a message about weights that another config describes
OTHER_CHECKPOINT = "check that config.json and the weights are of one checkpoint"


def _is_finite(tensor: Tensor) -> bool:
    # a tensor on the meta device has no values; aminmax propagates NaN, and reads 16-bit types 30
    # times as fast as isfinite
    return (
        tensor.is_meta
        or not tensor.numel()
        or bool(torch.isfinite(torch.stack(tensor.aminmax())).all())
    )


def refuse_nonfinite(name: str, tensor: Tensor) -> None:
    """Refuse NaN and Inf in a tensor, or in this part of it."""
    if _is_finite(tensor):
        return
    bad = int((~torch.isfinite(tensor)).sum())
    raise GrowthError(
        f"{name}: {bad} of {tensor.numel()} values are NaN or Inf: fix the checkpoint, or "
        "grow it as it is with allow_nonfinite=True (--allow-nonfinite)"
    )


def refuse_overflow(name: str, tensor: Tensor) -> None:
    """Refuse grown weights that are beyond the largest number of their dtype, or NaN.

    They overflow if they are converted to a narrower dtype, or if a copy gets more than the whole
    weight, as with `routing` above 1.
    """
    if _is_finite(tensor):
        return
    if bool(torch.isnan(tensor).any()):
        refuse_nonfinite(name, tensor)
    dtype = str(tensor.dtype).removeprefix("torch.")
    raise GrowthError(
        f"{name}: weights are beyond {torch.finfo(tensor.dtype).max:g}, the largest number of "
        f"{dtype}: choose another dtype, or copies that are no larger than the weight (routing=1)"
    )


def check_number_of_tensors(model: ModelSpec, count: int, where: str) -> None:
    """Refuse a checkpoint with far more tensors than its model: names are compared one by one."""
    # old files name buffers in every layer, and tensors of other heads
    most = 4 * len(model.shapes) + 1000
    if count > most:
        raise GrowthError(
            f"{where}: {count} tensors, but {model.class_name} has {len(model.shapes)}; is "
            "config.json that of another model?"
        )


def check_names_and_shapes(
    model: ModelSpec, shapes: Mapping[str, tuple[int, ...]], where: str
) -> None:
    """Refuse missing tensors but tied ones, unknown ones, and shapes that contradict the config."""
    expected = model.shapes
    missing = [name for name in expected if name not in shapes and name not in model.ties]
    if missing:
        stored = model.stored_names.get(missing[0])
        named = missing[0] if stored is None else f"{missing[0]}, {stored} in files,"
        more = f" (and {len(missing) - 1} more)" if len(missing) > 1 else ""
        raise GrowthError(
            f"{where}: tensor {named} is missing{more}: {OTHER_CHECKPOINT}, and that "
            '"architectures" names the class that was saved'
        )
    for name, shape in shapes.items():
        if name not in expected:
            raise GrowthError(
                f"{where}: no rule for tensor {name} {list(shape)}, which the class of the config "
                "does not have: load the model with transformers and save it again to leave it out"
            )
        if shape != expected[name]:
            raise GrowthError(
                f"{where}: {name} has shape {list(shape)}, but its config says "
                f"{list(expected[name])}: {OTHER_CHECKPOINT}"
            )


def check_ties(model: ModelSpec, names: Set[str], read: Callable[[str], Tensor]) -> ModelSpec:
    """Refuse tensors with different values that the config calls tied.

    Returns the model, with heads of its own where its table lets values decide.
    """
    differ = {}
    for name, owner in model.ties.items():
        if {name, owner} <= names:
            values, others = read(name), read(owner)
            if values.data_ptr() != others.data_ptr() and not torch.equal(values, others):
                differ[name] = owner
    model = model.with_own_heads(differ)
    for name in differ.keys() - model.untied:
        raise GrowthError(
            f"{name} and {differ[name]} differ, which config.tie_word_embeddings=True "
            "makes one: set it to False where both are wanted"
        )
    return model


def check_values(file: Path, model: ModelSpec) -> None:
    """Refuse sizes that no model has, and activations that transformers does not know."""
    check_sizes(str(file), model)
    activation = model.family.activation
    name = activation and getattr(model.text, activation)
    if activation is None or name in USUAL_ACTIVATIONS:
        return
    from transformers.activations import ACT2FN

    if name not in ACT2FN:
        raise GrowthError(f"{file}: {activation}={name!r}{nearest(str(name), ACT2FN)}")


def check_sizes(where: str, model: ModelSpec) -> None:
    """Refuse sizes that no model has. One without layers may grow new ones."""
    family = model.family
    for key in family.config:
        size, most = model.size(key), family.largest(key)
        # a null field may mean a model without these units
        is_optional = key in family.stacks.values() or family.config[key].default == "0"
        if not (0 if is_optional else 1) <= size <= most:
            field = family.config_field(key)
            raise GrowthError(f"{where}: {field}={size} must lie in 1 .. {most}")


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


def check_config_values(
    file: Path, data: dict[str, Any], config_class: type, family: Family | None
) -> None:
    """Check all values of a config; `family` is None where growkern has no table for it."""
    check_names(file, data, config_class)
    faults = (
        *(_of_code(data), _of_tables(data)),
        _of_sizes(family, data, getattr(config_class, "attribute_map", {})),
        *(_of_value(name, value) for name, value in _entries(data)),
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

    All values in `data` belong to the field `inherited`, if it is given.
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


def _of_tables(data: dict[str, Any]) -> Iterator[str]:
    names = data.get("architectures")
    is_list = isinstance(names, list) and len(names) <= MOST_CLASSES
    if names is not None and not (
        is_list and all(isinstance(name, str) and len(name) <= MOST_CLASS_NAME for name in names)
    ):
        yield f"architectures={reprlib.repr(names)}: expected a list of class names"
    # with more entries transformers takes more than a second
    limits = {"id2label": MOST_LABELS, "label2id": MOST_LABELS, "pruned_heads": MOST_PRUNED}
    for name, most in limits.items():
        table = data.get(name)
        if table is not None and not isinstance(table, dict):
            yield f"{name}={reprlib.repr(table)}: expected a table"
        elif table and len(table) > most:
            yield f"{name} has {len(table)} entries: at most {most}"
    # embeddings cannot be built with a padding token beyond the vocabulary
    size, padding = data.get("vocab_size"), data.get("pad_token_id")
    if isinstance(size, int) and isinstance(padding, int) and padding >= size:
        yield f"pad_token_id={padding} lies beyond vocab_size={size}"


def _of_sizes(
    family: Family | None, data: dict[str, Any], aliases: Mapping[str, str]
) -> Iterator[str]:
    """Sizes beyond any model: transformers makes a list entry for every layer.

    `aliases` has other names of fields -> the fields.
    """
    fields = {size.field: key for key, size in family.config.items()} if family else {}
    for name, value in (inner(data, family.under) if family else {}).items():
        key = fields.get(aliases.get(name, name))
        if family and key and type(value) is int and value > family.largest(key):
            yield f"{name}={reprlib.repr(value)} must lie in 1 .. {family.largest(key)}"


def _of_value(name: str, value: Any) -> Iterator[str]:
    if name in DTYPES and value is not None:
        # transformers takes any name of the package for a dtype
        known = isinstance(value, str) and getattr(torch, value.removeprefix("torch."), None)
        if not isinstance(known, torch.dtype):
            yield f"{name}={reprlib.repr(value)} is no dtype of PyTorch"
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
