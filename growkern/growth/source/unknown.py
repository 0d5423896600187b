"""What is known of a model without a table: what stands in its way, and the nearest family.

Tensors tell most, by their names: those of its class with the flags of its config, or of its files.
Where there are none, and between families with equally many of them, the config's keys and values
decide.
"""

from __future__ import annotations

import contextlib
import dataclasses
import re
import shlex
from collections.abc import Callable, Iterable, Mapping
from functools import cache
from pathlib import Path
from typing import Any, NoReturn, TypeAlias

from growkern.errors import GrowthError, counted
from growkern.families import known_type, load_family, supported_families
from growkern.package import DOCS, WIDEN

# what a model has, by the names of tensors and keys that its nearest family lacks
OBSTACLES = (
    ("state-space layers (Mamba)", r"(mixer|mamba)\.A_log|^(mamba|ssm|time_step)_"),
    ("state-space layers of the first version (Mamba 1)", r"(mixer|mamba)\.x_proj"),
    ("layers of gated delta attention", r"(gate|attn)\.A_log|^linear_(attn|num)_"),
    ("an indexer that chooses the tokens to attend to", r"indexer\.|^(index|sparse_att\w+)_"),
    ("keys and values compressed over several tokens", r"compressor\.|^compress_"),
    ("several residual streams (hyper-connections)", r"_hc\.|^hc_"),
    ("experts chosen by a token's number", "tid2eid|^num_hash_layers"),
    ("a gate on every attention head", r"self_attn\.g_proj|^use_head_wise_attn_gate"),
    ("blocks of their own sizes", "^block_configs"),
    ("short convolutions", r"conv\.in_proj|^conv_L_cache"),
    ("inputs of its own for each layer", "per_layer_(input|emb|model|proj)"),
    ("latent attention", "kv_a_|^kv_lora_rank"),
    ("experts", r"experts\.|^(num|n)_.*experts|^moe_"),
    ("cross-attention", r"cross_attn|encoder_attn|^cross_attention"),
    ("convolutions over images or sound", r"patch_embed|(^|\.)conv\d?\.|^(patch|image)_size"),
)
# of a model's layers; more of them add no names and no kinds of layers
FEW_LAYERS = 8
# keys of every config, and of code on the Hub
GENERAL = ("auto_map", "torch_dtype", "_name_or_path", "quantization_config", "use_cache")
TEXT_ALONE = "growkern.grow grows the text alone, of a loaded model: model.get_decoder()"
# the keys of what sees images or hears sound
SENSES = {"patch_size", "image_size", "num_mel_bins"}
Tensors: TypeAlias = Mapping[str, tuple[int, ...]]
NUMBER = r"\.\d+\."
# keys of the config of the text, where a config has several
TEXT = ("text_config", "llm_config", "language_config", "thinker_config")


def refuse_unknown(model_type: str, data: Mapping[str, Any], place: str = "") -> NoReturn:
    """Refuse the JSON of a config without a table; the error says what is known of such a model.

    `place` is the directory with that config; "": the model is in memory.
    """
    what, nearest = _described(model_type, data, place, {})
    raise GrowthError(
        f"model_type {model_type!r} has no family table; {what}; {_way(model_type, place, nearest)}"
    )


def what_leads_on(config: Any, tensors: Tensors) -> str:
    """What is in the way of a draft for a config, and what may help; `tensors` are its model's."""
    what, nearest = _described(config.model_type, config.to_dict(), "", tensors)
    by_hand = (
        "extend its table by hand, and check yours with growkern family draft SRC --table "
        f"my.toml: {DOCS}/add_model.md"
    )
    own = by_hand if _is_known(config.model_type) else WIDEN
    return f"{what}; {own if nearest else TEXT_ALONE}"


def _described(
    model_type: str, config: Mapping[str, Any], place: str, tensors: Tensors
) -> tuple[str, str]:
    """Clauses about a model, what is in its way and its nearest family; and that family.

    The family is "" where a table covers the text alone.

    `tensors`, name -> shape, are those of the model itself: the first that is in the way is named.
    """
    text = _text(config)
    kind = known_type(text)
    if kind in supported_families() and text is not config:
        parts = (k for k in sorted(config) if k.endswith("_config") and k not in (*TEXT, *GENERAL))
        others = " and ".join(parts) or "parts"
        first = _first(tensors, lambda name: name not in _names_in_table(str(kind)))
        return f"it has {others}{first} beside its text; nearest: {kind} (its text_config)", ""
    of_class = tensors or _names_in_class(model_type, config) or _names_in_class(str(kind), text)
    names = _short(of_class or _names_in_files(place))
    keys = _fields_of(model_type) | dict(text)
    # a class for text is nearer to one of the same kind
    ending = str(config.get("architectures")).rpartition("For")[2].strip("']")
    keys = {k: v for k, v in keys.items() if k not in _base()}
    unknown, likest, share = _compared(names, keys, ending)
    own = _names_in_table(likest) | _fields_of(likest).keys()
    obstacles = [
        f"{what}{_first(tensors, re.compile(part).search)}"
        for what, part in OBSTACLES
        if _has(part, unknown) and not _has(part, own)
    ]
    if not obstacles and unknown:
        others = f" and {counted(len(unknown) - 1, 'other')}" if len(unknown) > 1 else ""
        first = _first(tensors, lambda name: name == unknown[0])
        obstacles = [f"{unknown[0]}{first}{others}, which {likest} lacks"]
    obstacles = obstacles or [f"a class of its own, which may compute something else than {likest}"]
    return "; ".join([*(f"it has {w}" for w in obstacles), f"nearest: {likest} {share}"]), likest


def _first(tensors: Tensors, fits: Callable[[str], Any]) -> str:
    """The first tensor whose short name fits, and its shape, in brackets; "" if there is none."""
    found = ((name, shape) for name, shape in tensors.items() if any(map(fits, _short([name]))))
    named = (f" ({re.sub(NUMBER, '.{l}.', name)} {list(shape)})" for name, shape in found)
    return next(named, "")


def _has(part: str, names: Iterable[str]) -> bool:
    return any(re.search(part, name) for name in names)


def _way(model_type: str, place: str, nearest: str) -> str:
    """The command that may help."""
    import transformers

    if not nearest:
        return TEXT_ALONE
    if _is_known(model_type):
        own = "growkern.draft_family(model.config)"
        command = f"growkern family draft {shlex.quote(place)}" if place else own
        return f"{command} tries to write a table and checks it: {DOCS}/add_model.md"
    return (
        f"transformers {transformers.__version__} has no such class: if it computes as {nearest} "
        "does, put that model_type into config.json and run growkern plan "
        f"{shlex.quote(place or 'SRC')}; {WIDEN}"
    )


def _is_known(model_type: str) -> bool:
    """True for a model of transformers itself: a class of the user's may be registered there."""
    import transformers

    kinds = transformers.CONFIG_MAPPING
    return model_type in kinds and kinds[model_type].__module__.startswith("transformers.")


def _text(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """The part of a config's JSON that is of its text."""
    parts = (_text(config[key]) for key in TEXT if isinstance(config.get(key), Mapping))
    return next(parts, config)


def _compared(names: set[str], keys: Mapping[str, Any], ending: str) -> tuple[list[str], str, str]:
    """What the nearest family lacks, that family, and how much of the model it has."""
    families = [*supported_families()]
    if not SENSES.intersection(keys):
        # it reads text: towers are no help
        families = [kind for kind in families if "vocab" in load_family(kind).config]
    known = {kind: _names_in_table(kind) for kind in families}
    most = max(len(names & own) for own in known.values())
    # of families with equally many of its names, one with few others and a config that is alike
    tied = [kind for kind, own in known.items() if len(names & own) == most]
    same = [k for k in tied if any(name.endswith(ending) for name in load_family(k).classes)]
    likest = max(same or tied, key=lambda kind: most / len(known[kind]) + _alike(keys, kind))
    if most:
        share = f"({most / len(names):.0%} of its tensor names)"
        return sorted(names - known[likest]), likest, share
    own = {*_fields_of(likest), *(old.field for old in load_family(likest).older)}
    lacks = {key for key in keys if key not in own and "_token_i" not in key}
    used = [key for key in sorted(lacks) if keys[key] not in (None, False, 0, "", [])]
    return used, likest, f"({1 - len(lacks) / max(len(keys), 1):.0%} of its config's keys)"


def _alike(keys: Mapping[str, Any], kind: str) -> float:
    """How many keys of a config a family has, and how many with this value, of all of both."""
    own = _fields_of(kind)
    both = keys.keys() & own.keys()
    agreed = len(both) + sum(keys[key] == own[key] for key in both)
    return agreed / max(len(keys.keys() | own.keys()), 1)


@cache
def _base() -> frozenset[str]:
    import transformers

    fields = dataclasses.fields(transformers.PreTrainedConfig)
    return frozenset([*(field.name for field in fields), *GENERAL, "model_type"])


@cache
def _fields_of(model_type: str) -> dict[str, Any]:
    """Field -> default of a config that transformers knows, or of the one of its text."""
    import transformers

    if model_type not in transformers.CONFIG_MAPPING:
        return {}
    cls = transformers.CONFIG_MAPPING[model_type]
    text = next((cls.sub_configs[key] for key in TEXT if key in cls.sub_configs), cls)
    # of some it may be of any kind
    own = dataclasses.fields(cls if text is transformers.AutoConfig else text)
    return {field.name: field.default for field in own if field.name not in _base()}


def _names_in_files(place: str) -> Iterable[str]:
    """The names of the tensors in a directory, if it has safetensors that can be read."""
    from growkern.growth.source.files import read_headers

    with contextlib.suppress(GrowthError, OSError):
        return read_headers(Path(place)) if place else ()
    return ()


def _names_in_class(model_type: str, data: Mapping[str, Any]) -> Iterable[str]:
    """The names of the tensors of such a model, with the flags of its config.

    Sizes are those of its class, and layers are few. Empty if transformers has no such model.
    """
    import torch
    import transformers

    few = {"num_hidden_layers": FEW_LAYERS}
    for flags in (_flags(data, on=True) | few, _flags(data, on=False) | few, few, {}):
        # errors of any type: the model is refused in any case
        with contextlib.suppress(Exception):
            # the sizes of a file that is refused could take any time
            config = transformers.CONFIG_MAPPING[model_type](**flags)
            with torch.device("meta"):
                return transformers.AutoModel.from_config(config).state_dict()
    return ()


def _flags(data: Mapping[str, Any], *, on: bool) -> dict[str, Any]:
    """What a config says besides sizes: what the model has none of and, with `on`, what it has."""
    flags = {k: v for k, v in data.items() if v in (False, on) and type(v) in (bool, int)}
    parts = {k: v for k, v in data.items() if k.endswith("_config") and isinstance(v, Mapping)}
    kinds = {k: {"model_type": v["model_type"]} for k, v in parts.items() if "model_type" in v}
    return flags | {k: _flags(part, on=on) | kinds.get(k, {}) for k, part in parts.items()}


@cache
def _names_in_table(model_type: str) -> frozenset[str]:
    """The names of a family's tensors in any of its classes, and in files."""
    family, names = load_family(model_type), set[str]()
    parts = {part for own in family.classes.values() for part in (*own.body, *own.heads)}
    for row in (row for part in parts for row in family.tensors[part]):
        is_norm = row.norm and not row.alone
        names |= {f"{row.name}.weight", f"{row.name}.bias"} if is_norm else {row.name}
        names |= {*row.files}
    return frozenset(_short(names))


def _short(names: Iterable[str]) -> set[str]:
    """Names behind the number of a layer: what is before it differs between classes."""
    parts = (re.split(r"\.(?:\d+|\{l\})\.", name, maxsplit=1) for name in names)
    plain = ([re.sub(r"\.(\d+|\{\w\})(?=\.)", "", part) for part in both] for both in parts)
    return {".".join(both[-1].split(".")[-1 - len(both) :]) for both in plain}
