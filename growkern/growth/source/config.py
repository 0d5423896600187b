"""Reads the config.json of a checkpoint: refuses damaged and hostile ones before any work.

transformers builds models from a config without checking most of its values. A label count of a
billion then takes minutes. An attention implementation may name code on a hub. A field called like
a method replaces the method. So the raw JSON is checked before transformers sees it.

A config that growth writes is read back. It has keys for older software too. Where transformers
reads one of them before the new key, a model loads without a word and computes something else.
"""

from __future__ import annotations

import contextlib
import json
import re
import reprlib
from collections.abc import Collection, Iterator, Mapping
from itertools import chain
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers.utils import GENERATION_CONFIG_NAME

from growkern.errors import GrowthError, nearest
from growkern.families import (
    Family,
    ModelSpec,
    inner,
    known_class,
    known_type,
    load_family,
    supported_families,
)
from growkern.files import parse_json, read_bounded, read_json
from growkern.growth.source.files import refuse_links_out
from growkern.growth.source.refused import config_directory
from growkern.growth.source.unknown import refuse_unknown
from growkern.package import WIDEN

# they say where a config lies, who wrote it, and the class, which a plan has beside its config
NOT_COMPARED = ("_name_or_path", "transformers_version", "architectures")
# the largest configs of the Hub, with 21,000 named labels, have 2 MB
MOST_BYTES = 4_000_000
# a chat model has 1 kB, one with suppressed tokens 100 kB
MOST_GENERATION_BYTES = 1_000_000

# of models of today; transformers is asked for others, as its table takes 2 s to import
USUAL_ACTIVATIONS = ("gelu", "gelu_new", "gelu_pytorch_tanh", "relu", "silu")

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
# the range of a step of Mamba, of which some configs write 1e308 for no limit
MAY_BE_INFINITE = ("time_step_limit", "mamba_dt_limit")
# of transformers' config classes: they say how fields are read and where files are
OF_THE_CLASS = {
    *("attribute_map", "sub_configs", "sub_configs_defaults", "base_config_key", "extra_files"),
    *("keys_to_ignore_at_inference", "has_no_defaults_at_init", "_auto_class"),
    *("transformers_weights", "configuration_files", "fusion_config", "distributed_config"),
}


def read_config(directory: Path, *, any_family: bool = False, family: Family | None = None) -> Any:
    """The Hugging Face config of a checkpoint directory. Runs no code and asks no hub.

    A checkpoint of `torch.distributed.checkpoint` may have its config in the directory above. A
    config is refused if it is damaged, too large, links to somewhere else, names code of a hub, or
    has values that make no model.
    """
    return read_config_file(directory, any_family=any_family, family=family)[0]


def read_config_file(
    directory: Path, *, any_family: bool = False, family: Family | None = None
) -> tuple[Any, dict[str, Any]]:
    """`read_config`, and the JSON object of the file: transformers drops some of its keys."""
    file = config_directory(directory) / "config.json"
    refuse_links_out(file, file.parent)
    data = read_json(file, MOST_BYTES, "config")
    check_config(file, data, any_family=any_family, family=family)
    return load_config(file.parent, data), data


def load_config(directory: Path, data: dict[str, Any] | None = None) -> Any:
    """The config of a directory, as transformers loads it, without a check of its values.

    `data` is the JSON object of the file, where it was read: most files are then opened once less.
    """
    try:
        if data is None or known_type(data) != data.get("model_type"):
            read = transformers.PreTrainedConfig.get_config_dict
            data, _ = read(directory, local_files_only=True)
        if known_type(data) != data.get("model_type"):
            return config_from(data)
        config = transformers.AutoConfig.from_pretrained(
            directory, trust_remote_code=False, local_files_only=True
        )
        if config.architectures:
            config.architectures = [*map(known_class, config.architectures)]
        return config
    except Exception as error:
        raise GrowthError(f"{directory / 'config.json'}: {_last_line(error)}") from error


def check_config(
    file: Path, data: Any, *, any_family: bool = False, family: Family | None = None
) -> None:
    """Refuse the raw JSON of a config that makes no model.

    With `any_family`, models without a table are fine. `family` is a table of one's own.
    """
    kind = data.get("model_type") if isinstance(data, dict) else None
    if isinstance(kind, str):
        kind = known_type(data)
    if not isinstance(kind, str):
        raise GrowthError(
            f'{file}: no "model_type", the name of its architecture: copy the config.json of the '
            "model there"
        )
    if family is not None and family.model_type != kind:
        raise GrowthError(
            f'{file}: "model_type" is {kind[:100]!r}, and the table is one of '
            f"{family.model_type!r}: give the table of this model"
        )
    if family is None and kind in supported_families():
        family = load_family(kind)
    elif family is None and not any_family:
        refuse_unknown(kind, data, str(file.parent))
    if kind not in transformers.CONFIG_MAPPING:
        raise GrowthError(
            f"{file}: transformers {transformers.__version__} has no model_type {kind[:100]!r}; "
            f"code of a checkpoint is never run; {WIDEN}"
        )
    config_class = transformers.CONFIG_MAPPING[kind]
    check_names(file, data, config_class)
    faults = (
        *(_of_code(data), _of_tables(data)),
        _of_sizes(family, data, getattr(config_class, "attribute_map", {})),
        *(_of_value(name, value) for name, value in _entries(data)),
    )
    for fault in chain.from_iterable(faults):
        raise GrowthError(f"{file}: {fault}")


def check_sizes_and_activation(file: Path, model: ModelSpec) -> None:
    """Refuse sizes that no model has, and activations that transformers does not know."""
    model.check_sizes(str(file))
    activation = model.family.activation
    name = activation and getattr(model.text, activation)
    if activation is None or name in USUAL_ACTIVATIONS:
        return
    from transformers.activations import ACT2FN

    if name not in ACT2FN:
        raise GrowthError(f"{file}: {activation}={name!r}{nearest(str(name), ACT2FN)}")


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
        if isinstance(value, dict) and ("model_type" in value or name.endswith("_config")):
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
            for entry in value:
                yield from _of_code(entry if isinstance(entry, dict) else {"": entry}, name)
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
    if name in MAY_BE_INFINITE and value > 0:
        return
    if not -(1 << 62) < value < 1 << 62:
        # the comparison is also false for NaN
        yield f"{name}={reprlib.repr(value)} is NaN, infinite or beyond 2**62"
    elif name in POSITIVE and value <= 0 and not (name in MAY_BE_ZERO and value == 0):
        yield f"{name}={value} must be positive"
    elif not 0 <= value <= 1 and (name in SHARES or "dropout" in name or name.endswith("pdrop")):
        yield f"{name}={value} must lie in 0 .. 1"
    elif value > limits.get(name, value):
        yield f"{name}={value}: at most {limits[name]}"


def checked_config(file: Path, data: Any, tensors: int, family: Family | None = None) -> Any:
    """The Hugging Face config of a model's JSON data; one that makes no model is refused."""
    check_layers(file, data, tensors)
    check_config(file, data, family=family)
    return config_from(data)


def config_from(data: dict[str, Any]) -> Any:
    """The Hugging Face config of JSON data that `check_config` accepted."""
    try:
        kind = known_type(data)
        data = _with_floats({**data, "model_type": kind})
        if names := data.get("architectures"):
            data["architectures"] = [*map(known_class, names)]
        return transformers.CONFIG_MAPPING[kind].from_dict(data)
    except Exception as error:
        raise GrowthError(_last_line(error)) from error


def _with_floats(data: Any) -> Any:
    """JSON data with the numbers that transformers writes as tables, as JSON has no infinity."""
    if isinstance(data, dict):
        tagged = data.get("__float__") if len(data) == 1 else None
        values = {key: _with_floats(value) for key, value in data.items()}
        return values if tagged is None else float(tagged)
    return [*map(_with_floats, data)] if isinstance(data, list) else data


def _last_line(error: Exception) -> str:
    """transformers raises several types of exceptions for a bad config, some of many lines."""
    lines = str(error).strip().splitlines() or [type(error).__name__]
    # the class of an error within the error
    return re.sub(r"^\w+Error: ", "", lines[-1].strip())[:300]


def read_generation(directory: Path, data: dict[str, Any] | None = None) -> Any | None:
    """How a checkpoint generates: the `GenerationConfig` that its model would have when loaded.

    It comes from generation_config.json, or from config.json, where older models keep it. None if
    transformers can read neither. A file that is too large, links to somewhere else, or replaces
    methods of transformers is refused. `directory` is that of `config_directory`, and `data` the
    JSON object of its config.json, if that was read already.
    """
    file, read = directory / GENERATION_CONFIG_NAME, transformers.GenerationConfig.from_pretrained
    is_there = file.is_symlink() or file.exists()
    if is_there:
        refuse_links_out(file, directory)
        written = read_bounded(file, MOST_GENERATION_BYTES, "generation config")
        values = None
        with contextlib.suppress(ValueError):
            values = parse_json(written)
        if not isinstance(values, dict):
            return None
        check_names(file, values, transformers.GenerationConfig)
    try:
        if is_there:
            return read(directory, local_files_only=True)
        if data is not None:
            return transformers.GenerationConfig.from_model_config(dict(data))
        return read(directory, config_file_name="config.json", _from_model_config=True)
    except Exception:
        # a damaged file raises several types of errors; the weights can be grown without it
        return None


def refuse_misread(
    place: str | Path, family: Family, planned: Any, read: Any, source: Any = None
) -> None:
    """Refuse a config that was read otherwise than planned; the message names the first field.

    Fields that only the config that was read has may be keys of other software. What its class
    does not keep of the `source`, a config too, may differ.
    """
    # what these say follows from other fields, whatever they said before
    kind = type(family.text(planned))
    free = {key.field for key in family.older if key.is_pattern or not hasattr(kind, key.field)}
    found = dict(_differences(_plain(planned), _plain(read), free))
    if found and source is not None:
        # T5 reads every head as tied, and loads one of its own all the same
        for field, _ in _differences(_plain(source), _plain(type(source)(**source.to_dict()))):
            found.pop(field, None)
    for field, values in found.items():
        was, became = (reprlib.repr(value) for value in values)
        raise GrowthError(
            f"{place}: transformers {transformers.__version__} reads {field}={became} where the "
            f"plan has {was}: the grown model would compute something else"
        )


def is_same(planned: Any, config: Any) -> bool:
    """True if a config has all values of another one."""
    return not any(True for _ in _differences(_plain(planned), _plain(config)))


def _plain(config: Any) -> dict[str, Any]:
    """A config as JSON data: lists for tuples, and texts for keys that are numbers."""
    data: dict[str, Any] = json.loads(json.dumps(config.to_dict(), default=str))
    return data


def _differences(
    planned: Mapping[str, Any], read: Mapping[str, Any], free: Collection[str] = (), name: str = ""
) -> Iterator[tuple[str, tuple[Any, Any]]]:
    """The fields whose values differ, and both values; None where there is no such field."""
    # a config within a config may have keys of other software; other tables must be the same
    is_config = not name or "model_type" in planned
    for key in planned if is_config else sorted({*planned, *read}):
        old, new = planned.get(key), read.get(key)
        # the older name of `rope_type` beside it; models give their parts a dtype
        is_filled = (key == "type" and "rope_type" in read) or (key == "dtype" and old is None)
        if is_filled or key in NOT_COMPARED or (is_config and key in free):
            continue
        if isinstance(old, dict) and isinstance(new, dict):
            yield from _differences(old, new, free, f"{name}{key}.")
        # as texts, because NaN is not equal to itself
        elif json.dumps(old) != json.dumps(new):
            yield f"{name}{key}", (old, new)
