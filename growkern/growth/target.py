"""The target's config: which sizes change, which follow, and which cannot be."""

from __future__ import annotations

import copy
from typing import Any

from growkern.errors import GrowthError, nearest
from growkern.families.spec import Family

# beyond any model; a longer number is a slip of the finger
LARGEST_SIZE = 1 << 24
GROWABLE = ("stream", "ffn", "q_heads", "kv_heads", "head_dim", "layers")


def growable_fields(family: Family) -> dict[str, str]:
    """Config field -> size, for the sizes a user may set."""
    return {family.config_field(key): key for key in GROWABLE if key in family.config}


def resolve_target(
    family: Family, source: Any, dims: dict[str, int], target: Any | None = None
) -> Any:
    """The target's Hugging Face config.

    Sizes not given follow a larger hidden size in proportion: the FFN keeps its ratio, the
    number of heads grows with head_dim unchanged, key-value heads keep the group size.

    Args:
        source: the source's config.
        dims: target sizes under the config's own names.
        target: a whole target config instead of `dims`.

    Raises:
        GrowthError: an unknown size, a target smaller than the source, heads that do not fit, or
            a target config that differs in more than growable sizes.
    """
    if target is not None and dims:
        raise GrowthError(f"give target_config or {', '.join(dims)}, not both")
    if target is None:
        sizes = _complete(family, source, _asked(family, dims))
        target = copy.deepcopy(source)
        # the residual width first: the default of a null field may follow from it
        for key in sorted(sizes, key=lambda key: key != "stream"):
            if family.size(target, key) != sizes[key]:
                setattr(target, family.config_field(key), sizes[key])
    else:
        _check_same_kind(family, source, target)
    _check_sizes(family, source, target)
    _validate(family, target)
    return target


def _validate(family: Family, target: Any) -> None:
    """Ask the config class itself, which would refuse to load what `save_pretrained` wrote."""
    try:
        type(target)(**target.to_dict())
    except Exception as error:
        # the library raises several kinds of error here, each with the reason in its last line
        why = str(error).strip().splitlines()[-1].strip()
        sizes = {field: getattr(target, field) for field in growable_fields(family)}
        raise GrowthError(f"{family.model_type} cannot have {sizes}: {why}") from error


def _asked(family: Family, dims: dict[str, Any]) -> dict[str, int]:
    allowed = growable_fields(family)
    asked = {}
    for name, value in dims.items():
        if name not in allowed:
            raise GrowthError(
                f"{family.model_type} has no size {name!r} to grow{nearest(name, allowed)}"
            )
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise GrowthError(f"{name}={value!r}: expected a positive whole number")
        if value > LARGEST_SIZE:
            raise GrowthError(f"{name}={value} is larger than any model; at most {LARGEST_SIZE}")
        asked[allowed[name]] = value
    return asked


def _complete(family: Family, source: Any, asked: dict[str, int]) -> dict[str, int]:
    """Add the sizes that follow from the ones asked for."""
    sizes = dict(asked)
    if "stream" not in asked:
        return sizes
    old, new = family.size(source, "stream"), asked["stream"]

    def follow(key: str) -> int | None:
        value, rest = divmod(family.size(source, key) * new, old)
        return None if rest else value

    sizes.setdefault("ffn", round(family.size(source, "ffn") * new / old))
    if "q_heads" not in asked and (heads := follow("q_heads")) is not None:
        sizes["q_heads"] = heads
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
    may_differ = {*growable_fields(family), "architectures", "_name_or_path"}
    old, new = source.to_dict(), target.to_dict()
    changed = [
        name
        for name in sorted(old.keys() & new.keys())
        if old[name] != new[name]
        and name not in may_differ
        and name != "transformers_version"
        # null and a per-model default mean the same for these
        and not (old[name] is None or new[name] is None)
    ]
    if changed:
        name = changed[0]
        raise GrowthError(
            f"target_config.{name}={new[name]!r} differs from the source's {old[name]!r}; growth "
            f"changes only {', '.join(sorted(growable_fields(family)))}"
        )


def _check_sizes(family: Family, source: Any, target: Any) -> None:
    for field, key in growable_fields(family).items():
        old, new = family.size(source, key), family.size(target, key)
        if new < old:
            raise GrowthError(f"{field}={new} is smaller than the source's {old}; growth widens")
    fields = growable_fields(family)
    if all(family.size(source, key) == family.size(target, key) for key in fields.values()):
        raise GrowthError(f"nothing grows: give a larger {', '.join(fields)}")
    stream, heads = family.size(target, "stream"), family.size(target, "q_heads")
    stream_field, heads_field = family.config_field("stream"), family.config_field("q_heads")
    head_dim = family.head_dim(source)
    if family.forces_head_dim and stream != heads * head_dim:
        allowed = stream // head_dim * head_dim
        raise GrowthError(
            f"{stream_field}={stream} with {heads_field}={heads}: {family.model_type} needs "
            f"{stream_field} = {heads_field} x head_dim and head_dim stays {head_dim}; the nearest "
            f"sizes are {allowed} ({allowed // head_dim} heads) and {allowed + head_dim} "
            f"({allowed // head_dim + 1} heads)"
        )
    if family.head_dim(target) != head_dim:
        raise GrowthError(
            f"{family.config_field('head_dim')}={family.head_dim(target)}: the source's {head_dim} "
            "must stay; add heads instead"
        )
    if "kv_heads" in family.config:
        kv_heads = family.size(target, "kv_heads")
        if heads % kv_heads:
            raise GrowthError(
                f"{heads_field}={heads} is not a multiple of "
                f"{family.config_field('kv_heads')}={kv_heads}"
            )
