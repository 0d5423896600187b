"""Makes the target's config: the sizes asked for, those that follow from them, and all checks.

`sized_target` sets the sizes, or `given_target` takes those of a config. `finish_target` then sets
everything that follows from them.
"""

from __future__ import annotations

import contextlib
import copy
import math
import re
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from transformers import CONFIG_MAPPING

from growkern.errors import GrowthError, UnfitError
from growkern.families import FOLLOWING, Family, ModelSpec, follow_layers, growable_fields
from growkern.growth.history import GROWN_KEY
from growkern.growth.options import PAD_VOCAB, asked_size, refuse_heads, refuse_smaller
from growkern.growth.source import refuse_misread
from growkern.growth.space import (
    check_copies,
    copies_of,
    eps_factor,
    followers,
    pair_step,
    rotary_entries,
)

# types of rotary positions whose frequencies depend on head_dim only through theta ** (-2 i / R)
PLAIN_ROTARY = ("default", "linear", "llama3")
# what configs say besides sizes, those of parts too
NOT_SIZES = ("architectures", "_name_or_path", "dtype", "use_cache", "transformers_version")
# what layers have instead of fields of the config
BY_LAYER = "per_layer_config"


def followed_fields(family: Family) -> tuple[str, ...]:
    """Config fields that users do not set: they follow from the sizes and the source's config."""
    averaged = (str(space.averaged) for space in family.mixtures if space.averaged)
    conditional = family.conditional(*FOLLOWING)
    others = (*averaged, str(family.norm.eps), "rope_parameters")
    return (*family.per_layer, *conditional, *others)


def unread_in(small: ModelSpec) -> list[str]:
    """The config fields that count layers which are left out, as transformers lacks them."""
    if small.second:
        return []
    return [name for name in small.family.unread if getattr(small.text, name, None)]


def given_target(small: ModelSpec, dims: dict[str, int], target_config: Any) -> ModelSpec:
    """The target of a whole config that differs in sizes alone; `finish_target` must follow."""
    if dims:
        raise GrowthError(f"give target_config or {', '.join(dims)}, not both")
    _check_same_kind(small, target_config)
    large = small.with_config(target_config)
    _check_sizes(small, large, dict.fromkeys(small.family.growable, 0))
    return large


def sized_target(small: ModelSpec, asked: dict[str, int], sizes: dict[str, int]) -> ModelSpec:
    """The target with all these sizes, of which the user asked for some; then `finish_target`."""
    large = small.with_config(_with_sizes(small, sizes))
    _check_sizes(small, large, asked)
    return large


def finish_target(
    small: ModelSpec, large: ModelSpec, layer_map: tuple[int, ...], dtype: torch.dtype
) -> ModelSpec:
    """The target with its final config, a new one, which its config class has checked.

    `layer_map` has the source layer of every target layer of the stack of `per_layer` lists.
    """
    family, config = small.family, copy.deepcopy(large.config)
    for model in (small, large):
        model.check_turning()
    text = family.text(config)
    by_layer = dict.fromkeys((*family.per_layer, *_foreign_lists(small)), "is")
    by_layer |= family.conditional(*FOLLOWING)
    has_layers = small.size(next(iter(family.stacks.values()))) > 0
    follow_layers(text, small.text, by_layer, layer_map if has_layers else None)
    if own := small.text.to_dict().get(BY_LAYER):
        values = {int(layer): value for layer, value in own.items()}
        text.per_layer_config = {i: values[x] for i, x in enumerate(layer_map) if x in values}
    for space in small.mixtures:
        value = getattr(small.text, str(space.averaged), None)
        # every copy of an expert adds as much to that loss as the expert did; a dense FFN adds none
        if value and not small.of_one_ffn:
            setattr(text, str(space.averaged), value / copies_of(space, small, large))
    factor = eps_factor(small, large)
    if isinstance(family.norm.eps, str):
        setattr(text, family.norm.eps, getattr(small.text, family.norm.eps) * factor)
    if hasattr(small.text, "rope_parameters"):
        text.rope_parameters = _rotary_parameters(small, large)
    elif family.attention.positions == "rotary" and pair_step(small.turning, large.turning) is None:
        raise UnfitError(
            f"head_dim={large.head_dim()} has no rotary pairs of the same speeds: give a multiple "
            f"of {small.head_dim()}"
        )
    large.repeat(config)
    _follow_older(family, small.text, text)
    for key, size in family.config.items():
        if isinstance(vars(text).get(str(size.field)), list):
            # one number is right for any number of layers
            setattr(text, str(size.field), large.size(key) - size.plus)
    for name in unread_in(small):
        # other software would look for weights that are left out
        setattr(text, name, 0)
    # of every part, as transformers builds them
    for part in (config, text, *(getattr(config, name) for name in config.sub_configs)):
        if part is not None:
            part.dtype = dtype
    # the source's path names another model
    config._name_or_path = ""
    setattr(config, GROWN_KEY, True)
    if large.short_cache:
        config.use_cache = False
    finished = small.with_config(config)
    # grouped products, the default, take no float64, and read rows of whole 16 bytes
    odd = any(dtype == torch.float64 or x * dtype.itemsize % 16 for x in expert_sides(finished))
    if odd and config._experts_implementation in (None, "grouped_mm"):
        config._experts_implementation = "eager"
    _validate(small, finished)
    return finished


def _foreign_lists(small: ModelSpec) -> list[str]:
    """The fields that the config's class does not know, and that have an entry for every layer.

    Other software reads such lists, as MLX does `is_moe_layer`.
    """
    count = small.size(next(iter(small.family.stacks.values())))
    known = {*type(small.text).__dataclass_fields__, *(x.field for x in small.family.older)}
    return [
        name
        for name, value in vars(small.text).items()
        if isinstance(value, list) and len(value) == count and name not in known
    ]


def _follow_older(family: Family, source: Any, text: Any) -> None:
    """Set the older keys that a target's config has as attributes, where they followed before."""
    for older in family.older:
        if older.field not in vars(text):
            continue
        now = getattr(text, older.field)
        if older.is_pattern:
            value = older.value(vars(text), now)
            # without a value, software reads `per_layer` lists or fails, where it would be wrong
            delattr(text, older.field) if value is None else setattr(text, older.field, value)
        elif older.form in ("value", "runs") and now == older.value(vars(source), now):
            setattr(text, older.field, older.value(vars(text), now))


def expert_sides(model: ModelSpec) -> set[int]:
    """The sides of the matrices of experts."""
    experts = [t.name for t in model.tensors if len(t.axes) == 3 and model.is_of_experts(t)]
    return {side for name in experts for side in model.shapes[name][1:]}


def follow_heads(
    small: ModelSpec, large: ModelSpec, dtype: torch.dtype, *, always: bool
) -> ModelSpec:
    """The target whose scores are divided by the root of head_dim, where the source's are.

    Gemma has the square of that number in a field of its own. Runtimes such as llama.cpp do not
    read it: they take head_dim. Growing it scales the queries by the root of the growth. Unless
    `always`, it stays where that would round weights in 16 bits, which are copied otherwise.
    """
    field = small.family.attention.field
    if field is None:
        return large
    old, new = small.head_dim(), large.head_dim()
    if old == new or getattr(small.text, field) != old:
        return large
    # queries below a norm take the scale from its weight, which changes anyway
    has_norm = any(space.part == "before_norm" for space in small.family.spaces.values())
    is_copied = dtype.itemsize == 2 and not has_norm and not math.log(new / old, 4).is_integer()
    if is_copied and not always:
        return large
    config = copy.deepcopy(large.config)
    setattr(small.family.text(config), field, new)
    return small.with_config(config)


def check_given(small: ModelSpec, given: Any, large: ModelSpec) -> None:
    """Refuse a config from the user that contradicts the finished target's.

    Fields that follow from the sizes may have the source's values; those are updated silently.
    """
    for name in followed_fields(small.family):
        models = (small.with_config(given), large, small)
        value, needed, old = (getattr(model.text, name, None) for model in models)
        if value not in (needed, old):
            raise GrowthError(
                f"target_config.{name}={value}, but the source's function needs {needed}: set it "
                "so, or give sizes instead of a config"
            )


def _rotary_parameters(small: ModelSpec, large: ModelSpec) -> Any:
    """Keep the frequency of every rotary pair: theta_t ** (1 / R_t) = theta ** (1 / R)."""
    parameters = copy.deepcopy(small.text.rope_parameters)
    heads = small.family.query_heads[0]
    old, new = small.head_dim(heads), large.head_dim(heads)
    if old == new:
        return parameters
    # a target config given by the user may hold other rotary parameters than the source
    turning = small.turning_of(old), small.turning_of(new)
    pairs, new_pairs = map(rotary_entries, turning)
    if new - new_pairs < old - pairs:
        raise UnfitError(
            f"head_dim={new} has no room for {new_pairs} entries that turn in pairs and "
            f"{old - pairs} that do not: give a head_dim of {new + 1}"
        )
    # one set of parameters, or one per kind of layer
    for rope in [parameters] if "rope_type" in parameters else parameters.values():
        if rope["rope_type"] not in PLAIN_ROTARY:
            raise GrowthError(
                f"rope_parameters {rope['rope_type']!r}: head_dim cannot go from {old} to {new}: "
                "add heads instead"
            )
        step = pair_step(*turning)
        if step is None:
            rope["rope_theta"] **= turning[1] / turning[0]
        default = small.family.attention.sections
        if default is not None:
            # pair i has become pair `step` * i. More pairs have keys of 0: they may turn with any
            sections = [(step or 1) * n for n in rope.get("mrope_section", default)]
            sections[-1] += new_pairs // 2 - sum(sections)
            rope["mrope_section"] = sections
    return parameters


def _validate(small: ModelSpec, large: ModelSpec) -> None:
    """Let the config class check the target's values, as it will when the result is loaded."""
    family, config = large.family, large.config
    try:
        read = type(config)(**config.to_dict())
    except Exception as error:
        # transformers raises several types of errors, each with the reason in its last line
        why = str(error).strip().splitlines()[-1].strip().removeprefix("ValueError: ").rstrip(".")
        fields = growable_fields(family).items()
        told = [f"{x}={large.size(key)}" for x, key in fields if large.size(key) != small.size(key)]
        raise UnfitError(f"{family.model_type} cannot have {', '.join(told)}: {why}") from error
    refuse_misread(family.model_type, family, config, read, small.config)


@contextlib.contextmanager
def in_given_names(text: Any, to: str, dims: Mapping[str, Any]) -> Iterator[None]:
    """Let errors call sizes as the user does: a field of a config may have several names.

    Args:
        text: the config of the source's text model.
        to: the `model_type` of the mixture that the model becomes, or "".
    """
    kinds = [text, *([CONFIG_MAPPING[to]] if to in CONFIG_MAPPING else [])]
    own = {name: field for kind in kinds for name, field in kind.attribute_map.items()}
    given = {own[name]: name for name in dims if name in own}
    try:
        yield
    except GrowthError as error:
        words = re.compile(rf"\b({'|'.join(map(re.escape, given)) or '(?!)'})\b")
        message = words.sub(lambda found: given[found[0]], str(error))
        if message == str(error):
            raise
        raise GrowthError(message) from error


def asked_sizes(small: ModelSpec, dims: dict[str, Any]) -> dict[str, int]:
    """The sizes that the user gave by the config's own names, `dims`, by the table's names."""
    stacks = small.family.stacks.values()
    fields = growable_fields(small.family).items()
    # units that the model has none of, such as experts
    allowed = {field: key for field, key in fields if key in stacks or small.size(key)}
    asked: dict[str, int] = {}
    for given, value in dims.items():
        # other names of a field, such as num_experts
        name = small.text.attribute_map.get(given, given)
        size, key = asked_size(small.family, allowed, name, value), allowed.get(name, name)
        if asked.setdefault(key, size) != size:
            raise GrowthError(f"{name} is given twice, as {asked[key]} and {size}: give it once")
    multiple = asked.pop(PAD_VOCAB, 1)
    if multiple > 1:
        rows = asked.get("vocab", small.size("vocab"))
        asked["vocab"] = rows + -rows % multiple
    return asked


def completed(small: ModelSpec, asked: dict[str, int]) -> dict[str, int]:
    """The given sizes and those that follow from them, by the table's names.

    The FFN keeps its ratio. The number of heads grows and head_dim stays. Key-value heads keep
    their group size.
    """
    family, sizes = small.family, dict(asked)
    if not family.forces_head_dim:
        # a config without head_dim would derive it from the new sizes
        sizes.setdefault("head_dim", small.head_dim())
    if "stream" in asked:
        _follow_stream(small, asked, sizes)
    follows = {key: size.follows for key, size in family.config.items()}
    follows |= {key: m.size for m in family.mixtures for key in followers(m, small, asked)}
    for key, other in follows.items():
        if other in sizes:
            sizes.setdefault(key, small.size(key) * sizes[other] // small.size(other))
    return sizes


def _follow_stream(small: ModelSpec, asked: dict[str, int], sizes: dict[str, int]) -> None:
    """Add the sizes that grow in proportion to the stream."""
    family = small.family
    old, new = small.size("stream"), asked["stream"]
    for key in family.unit_sizes:
        if family.config[key].follows is None:
            sizes.setdefault(key, round(small.size(key) * new / old))
    for key in family.query_heads:
        heads, rest = divmod(small.size(key) * new, old)
        if key in asked or rest or family.config[key].fixed:
            continue
        sizes[key] = heads
        if "kv_heads" in family.growable and "kv_heads" not in asked:
            group = small.size("q_heads") // small.size("kv_heads")
            if heads % group == 0:
                sizes["kv_heads"] = heads // group


def _with_sizes(small: ModelSpec, sizes: dict[str, int]) -> Any:
    """A copy of the source's config with these sizes."""
    known, config = small.family.config, copy.deepcopy(small.config)
    # null fields last: their defaults follow from the others
    for key in sorted(sizes, key=lambda key: known[key].default is not None):
        if small.with_config(config).size(key) != sizes[key]:
            known[key].put(small.family.text(config), sizes[key])
    return config


def _check_same_kind(small: ModelSpec, target: Any) -> None:
    """Refuse a target config that differs from the source's in more than growable sizes."""
    family, source = small.family, small.config
    if target.model_type != family.model_type:
        raise GrowthError(
            f"target_config is a {target.model_type}, but the source's config is a "
            f"{family.model_type}"
        )
    tied, target_tied = (getattr(c, "tie_word_embeddings", False) for c in (source, target))
    if tied and not target_tied:
        raise GrowthError(
            "target_config.tie_word_embeddings=False unties the head of a tied source: "
            "set it to True"
        )
    # the whole family: sizes of stacks that this class lacks may differ, too
    may_differ = {*growable_fields(family.whole), *followed_fields(family)}
    may_differ |= {*family.unread, *(key.field for key in family.older)}
    # the flags of sizes that say less than their fields
    may_differ |= {name for size in family.config.values() for name in size.narrowed[:1]}
    repeats = family.classes[small.class_name].repeats
    may_differ |= {str(family.under), *(x.removeprefix(f"{family.under}.") for x in repeats)}
    old, new = (_flat(config.to_dict(), family.under) for config in (source, target))
    # both divide scores by the root of their head_dim
    models, scale = (small, small.with_config(target)), str(family.attention.field)
    has_head_dim = scale in old and all(getattr(m.text, scale) == m.head_dim() for m in models)
    changed = [
        name
        for name in sorted(old.keys() & new.keys())
        if old[name] != new[name]
        and name not in may_differ
        and name.rpartition(".")[2] not in NOT_SIZES
        and not (name == scale and has_head_dim)
        # the meaning of a token changes no logits
        and not (name.endswith("_token_id") and None in (old[name], new[name]))
    ]
    if changed:
        name = changed[0]
        raise GrowthError(
            f"target_config.{name}={new[name]!r} differs from the source's {old[name]!r}; growth "
            f"changes only {', '.join(sorted(growable_fields(family)))}"
        )


def _flat(config: dict[str, Any], under: str | None) -> dict[str, Any]:
    """A config whose configs for parts are entries of their own: those of the text by their names.

    The others keep the name of the part, as in "vision_config.depth".
    """
    result = dict(config)
    for part, fields in config.items():
        if isinstance(fields, dict) and "model_type" in fields:
            del result[part]
            name = "" if part == under else f"{part}."
            result = {f"{name}{field}": value for field, value in fields.items()} | result
    if own := result.get(BY_LAYER):
        # whatever the numbers of the layers
        result[BY_LAYER] = sorted({str(value) for value in own.values()})
    return result


def _check_sizes(small: ModelSpec, large: ModelSpec, asked: dict[str, int]) -> None:
    """Refuse sizes that shrink, that no model has, that do not fit together, or that all stay."""
    family = small.family
    fields = growable_fields(family)
    for field, key in fields.items():
        old, new = small.size(key), large.size(key)
        refuse_smaller(field, old, new)
        if new and not old and key not in family.stacks.values():
            raise GrowthError(f"{field}={new}: the source has none that could be copied")
        if new > family.largest(key):
            most = family.largest(key)
            raise GrowthError(f"{field}={new} is larger than in any model; at most {most}")
    # a mixture of one expert is new too
    if not small.of_one_ffn and all(small.size(key) == large.size(key) for key in fields.values()):
        raise GrowthError(f"nothing grows: give a larger {', '.join(fields)}")
    check_copies(small, large)
    for heads in family.query_heads if family.forces_head_dim else ():
        _check_head_dim(small, large, heads, asked)
    large.check_groups()
    large.check_transposed()


def _check_head_dim(small: ModelSpec, large: ModelSpec, heads: str, asked: dict[str, int]) -> None:
    """Where head_dim is stream / heads, it may grow only if the user gave the heads."""
    family = small.family
    old, new = small.head_dim(heads), large.head_dim(heads)
    stream, count = large.size("stream"), large.size(heads)
    divides = stream == count * new
    is_fixed = family.config[heads].fixed
    if divides and (old == new or (new > old and (is_fixed or heads in asked))):
        return
    stream_field, heads_field = family.config_field("stream"), family.config_field(heads)
    if is_fixed:
        raise UnfitError(
            f"{stream_field}={stream} is not a multiple of {heads_field}={count}, which never grows"
        )
    if heads in asked:
        # of heads that were not given head_dim stays
        before, all_heads = (small.size("stream"), small.size(heads)), family.query_heads
        others = (large.size(x) if x in asked else small.head_dim(x) for x in all_heads)
        refuse_heads(family, heads, before, (stream, count, *others))
    wider = f"; or give {heads_field}={count} for a head_dim of {new}"
    raise UnfitError(
        f"{stream_field}={stream} with {heads_field}={count}: {family.model_type} needs "
        f"{stream_field} = {heads_field} x head_dim and head_dim stays {old}"
        f"{wider if divides and new > old else ''}"
    )
