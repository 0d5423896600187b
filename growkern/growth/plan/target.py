"""The target's config: which sizes change, which follow, and which cannot be."""

from __future__ import annotations

import copy
from typing import Any

from growkern.errors import GrowthError, nearest
from growkern.families.family import Family
from growkern.families.load import load_family
from growkern.growth.space.rotary import pair_step, rotary_entries

# rotary frequencies that depend on head_dim through theta ** (-2 i / R) alone
PLAIN_ROTARY = ("default", "linear", "llama3")
# not a size, but what one is rounded up to
PAD_VOCAB = "pad_vocab_to_multiple_of"


def growable_fields(family: Family) -> dict[str, str]:
    """Config field -> size, for the sizes a user may set."""
    return {family.config_field(key): key for key in family.growable}


def resolve_target(
    family: Family, source: Any, dims: dict[str, int], target: Any | None = None
) -> Any:
    """The target's sizes, in a config of its own; `finish_target` must follow.

    Sizes not given follow a larger hidden size in proportion: the FFN keeps its ratio, the
    number of heads grows with head_dim unchanged, key-value heads keep the group size.

    Args:
        source: the source's config.
        dims: target sizes under the config's own names, and what to pad the vocabulary to.
        target: a whole target config instead of `dims`.

    Raises:
        GrowthError: an unknown size, a target smaller than the source, heads that do not fit, or
            a target config that differs in more than growable sizes.
    """
    if target is not None and dims:
        raise GrowthError(f"give target_config or {', '.join(dims)}, not both")
    asked = _asked(family, source, dims)
    if target is None:
        sizes = _complete(family, source, asked)
        target = copy.deepcopy(source)
        # null fields last: their defaults follow from the others
        for key in sorted(sizes, key=lambda key: family.config[key].default is not None):
            if family.size(target, key) != sizes[key]:
                setattr(target, family.config_field(key), sizes[key] - family.config[key].plus)
    else:
        _check_same_kind(family, source, target)
        target = copy.deepcopy(target)
        asked = dict.fromkeys(family.growable, 0)
    _check_sizes(family, source, target, asked)
    return target


def finish_target(
    family: Family,
    class_name: str,
    source: Any,
    target: Any,
    layer_map: tuple[int, ...],
    dtype: Any,
) -> None:
    """Write what follows from the sizes into the target's config, and have its class check it.

    Args:
        layer_map: source layer of every target layer, of the stack that `per_layer` lists follow.

    Raises:
        GrowthError: sizes the config class refuses, rotary positions head_dim cannot grow with.
    """
    for name in family.per_layer:
        values = getattr(source, name, None)
        if values is not None:
            setattr(target, name, [values[layer] for layer in layer_map])
    for name, key in family.classes[class_name].repeats.items():
        setattr(target, name, family.size(target, key))
    _rescale_rotary(family, source, target)
    target.dtype = dtype
    _validate(family, target)


def followed_fields(family: Family) -> tuple[str, ...]:
    """Config fields that no user sets: they follow from the source's and from the sizes."""
    return (*family.per_layer, "rope_parameters")


def check_given(family: Family, source: Any, given: Any, target: Any) -> None:
    """Refuse a config from the user that the target's, finished, contradicts.

    One with the source's own values of what follows from the sizes is completed in silence.
    """
    for name in followed_fields(family):
        found, needed = getattr(given, name, None), getattr(target, name, None)
        if found not in (needed, getattr(source, name, None)):
            raise GrowthError(
                f"target_config.{name}={found}: the source's function needs {needed}; set it so, "
                "or give sizes instead of a config"
            )


def _rescale_rotary(family: Family, source: Any, target: Any) -> None:
    """Keep the frequency of every rotary pair: theta_t ** (1 / R_t) = theta ** (1 / R)."""
    if family.attention.positions != "rotary":
        return
    parameters = target.rope_parameters = copy.deepcopy(source.rope_parameters)
    old, new = (family.head_dim(c, family.query_heads[0]) for c in (source, target))
    if old == new:
        return
    turning = family.turning(source), family.turning(target)
    pairs, new_pairs = map(rotary_entries, turning)
    if new - new_pairs < old - pairs:
        raise GrowthError(
            f"head_dim={new} has no room for {new_pairs} entries that turn in pairs and "
            f"{old - pairs} that do not; give a head_dim of {new + 1}"
        )
    # one set, or one per kind of layer
    for rope in [parameters] if "rope_type" in parameters else parameters.values():
        if rope["rope_type"] not in PLAIN_ROTARY:
            raise GrowthError(
                f"rope_parameters {rope['rope_type']!r}: head_dim cannot go from {old} to {new}; "
                "add heads instead"
            )
        if pair_step(*turning) is None:
            rope["rope_theta"] **= turning[1] / turning[0]


def _validate(family: Family, target: Any) -> None:
    """Ask the config class itself, which would refuse to load what `save_pretrained` wrote."""
    try:
        type(target)(**target.to_dict())
    except Exception as error:
        # the library raises several kinds of error here, each with the reason in its last line
        why = str(error).strip().splitlines()[-1].strip()
        sizes = {field: getattr(target, field) for field in growable_fields(family)}
        raise GrowthError(f"{family.model_type} cannot have {sizes}: {why}") from error


def _asked(family: Family, source: Any, dims: dict[str, Any]) -> dict[str, int]:
    """The sizes asked for, by the table's names."""
    allowed = growable_fields(family)
    asked = {}
    for name, value in dims.items():
        if name not in allowed and name != PAD_VOCAB:
            raise GrowthError(
                f"this {family.model_type} has no size {name!r} to grow{nearest(name, allowed)}"
            )
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise GrowthError(f"{name}={value!r}: expected a positive whole number")
        asked[allowed.get(name, name)] = value
    multiple = asked.pop(PAD_VOCAB, 1)
    rows = asked.get("vocab", family.size(source, "vocab"))
    if rows % multiple:
        asked["vocab"] = rows + -rows % multiple
    return asked


def _complete(family: Family, source: Any, asked: dict[str, int]) -> dict[str, int]:
    """Add the sizes that follow from the ones asked for."""
    sizes = dict(asked)
    if not family.forces_head_dim:
        # a config may leave it out and would then derive it from the new sizes
        sizes.setdefault("head_dim", family.head_dim(source))
    if "stream" not in asked:
        return sizes
    old, new = family.size(source, "stream"), asked["stream"]
    for key in family.unit_sizes:
        sizes.setdefault(key, round(family.size(source, key) * new / old))
    for key in family.query_heads:
        heads, rest = divmod(family.size(source, key) * new, old)
        if key in asked or rest:
            continue
        sizes[key] = heads
        if "kv_heads" in family.config and "kv_heads" not in asked:
            group = family.size(source, "q_heads") // family.size(source, "kv_heads")
            if heads % group == 0:
                sizes["kv_heads"] = heads // group
    return sizes


def _check_same_kind(family: Family, source: Any, target: Any) -> None:
    if target.model_type != family.model_type:
        raise GrowthError(
            f"target_config is a {target.model_type}, the source a {family.model_type}"
        )
    if bool(source.tie_word_embeddings) and not bool(target.tie_word_embeddings):
        raise GrowthError(
            "target_config.tie_word_embeddings=False unties the head of a tied source; "
            "set it to True"
        )
    # also in the sizes of stacks that this class lacks
    may_differ = {*growable_fields(load_family(family.model_type)), *followed_fields(family)}
    may_differ |= {"architectures", "_name_or_path", "dtype"}
    old, new = source.to_dict(), target.to_dict()
    changed = [
        name
        for name in sorted(old.keys() & new.keys())
        if old[name] != new[name]
        and name not in may_differ
        and name != "transformers_version"
        # which tokens mean what changes no logits
        and not (name.endswith("_token_id") and None in (old[name], new[name]))
    ]
    if changed:
        name = changed[0]
        raise GrowthError(
            f"target_config.{name}={new[name]!r} differs from the source's {old[name]!r}; growth "
            f"changes only {', '.join(sorted(growable_fields(family)))}"
        )


def _check_sizes(family: Family, source: Any, target: Any, asked: dict[str, int]) -> None:
    fields = growable_fields(family)
    for field, key in fields.items():
        old, new = family.size(source, key), family.size(target, key)
        if new < old:
            raise GrowthError(f"{field}={new} is smaller than the source's {old}; growth widens")
        if new > family.largest(key):
            most = family.largest(key)
            raise GrowthError(f"{field}={new} is larger than in any model; at most {most}")
    if all(family.size(source, key) == family.size(target, key) for key in fields.values()):
        raise GrowthError(f"nothing grows: give a larger {', '.join(fields)}")
    for heads in family.query_heads if family.forces_head_dim else ():
        _check_head_dim(family, source, target, heads, asked)
    if "kv_heads" in family.config:
        count, kv_heads = family.size(target, "q_heads"), family.size(target, "kv_heads")
        if count % kv_heads:
            raise GrowthError(
                f"{family.config_field('q_heads')}={count} is not a multiple of "
                f"{family.config_field('kv_heads')}={kv_heads}"
            )


def _check_head_dim(
    family: Family, source: Any, target: Any, heads: str, asked: dict[str, int]
) -> None:
    """Where head_dim is stream / heads, it may grow if the user gave the heads."""
    old, new = family.head_dim(source, heads), family.head_dim(target, heads)
    stream, count = family.size(target, "stream"), family.size(target, heads)
    divides = stream == count * new
    if divides and (old == new or (new > old and heads in asked)):
        return
    stream_field, heads_field = family.config_field("stream"), family.config_field(heads)
    allowed = stream // old * old
    fix = (
        f"the nearest sizes are {allowed} ({allowed // old} heads) and {allowed + old} "
        f"({allowed // old + 1} heads)"
    )
    if divides and new > old:
        fix += f"; or give {heads_field}={count} for a head_dim of {new}"
    raise GrowthError(
        f"{stream_field}={stream} with {heads_field}={count}: {family.model_type} needs "
        f"{stream_field} = {heads_field} x head_dim and head_dim stays {old}; {fix}"
    )
