"""Shows a dense model as a mixture, from which growth then makes more experts.

The FFN of I units becomes c experts of I / c units each. A router that takes all of them, with
weights 1/c, computes the same as the dense model if their outputs count c times. In whole copies c
is 1. The mixture is never built: `upcycled` gives a source that has its config, names and shapes,
and reads its tensors from the dense model's. All target experts are copies of these c.

The weights of the chosen experts add up to 1 for every router, so its rows are free. Those of the c
parts of one copy are equal: the router then takes all of them or none.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import transformers

from growkern.errors import GrowthError, nearest
from growkern.families.conditions import condition_of
from growkern.families.family import Family
from growkern.families.load import dense_families, load_family, supported_families
from growkern.families.model import ModelSpec
from growkern.growth.options import GrowthOptions
from growkern.growth.source.parts.experts import Assembled, Parts
from growkern.growth.source.source import Source
from growkern.growth.space.experts import is_output

# fields that say what a config is of
NAMES = ("model_type", "architectures", "transformers_version")


def mixture_config(small: ModelSpec, kind: str, dims: dict[str, Any], target: Any = None) -> Any:
    """The config of a dense model as a mixture of one copy of its FFN.

    Args:
        kind: the `model_type` of the mixture.
        dims: the target's sizes, by the mixture's own names. The lists and numbers that decide
            which layers are sparse are taken out of it.
        target: a whole target config instead of `dims`.

    Raises:
        GrowthError: there is no such mixture; or the FFN does not split into experts of the size
            that is asked for.
    """
    family = _sibling(small, kind)
    cls = transformers.CONFIG_MAPPING[kind]
    given, known = small.config.to_dict(), cls().to_dict()
    config = cls(**{name: x for name, x in given.items() if name in known and name not in NAMES})
    for key, size in small.family.config.items():
        # some configs take sizes that they have no default for
        if key in family.config and size.field and family.config[key].field == size.field:
            setattr(config, size.field, small.size(key) - size.plus)
    kinds = {condition_of(text)[2] for texts in family.kinds.values() for text in texts}
    for name in kinds & dims.keys() if target is None else known.keys() - given.keys():
        setattr(config, name, dims.pop(name) if target is None else getattr(target, name))
    for name, value in family.dense.set.items() if family.dense else ():
        setattr(config, name, value)
    config._name_or_path = getattr(small.config, "_name_or_path", "")
    _set_sizes(config, small, family, dims if target is None else vars(target))
    return config


def check_router(view: ModelSpec, options: GrowthOptions) -> None:
    """Refuse rows of 0 where parts of different copies must not mix: all experts would tie."""
    parts = view.size(str(view.family.mixtures[0].size))
    if options.router == "zero" and parts > 1:
        raise GrowthError(
            f"router='zero' does not keep the {parts} parts of an FFN together: leave it out, or "
            "give experts of the FFN's width"
        )


def upcycled(source: Source, config: Any) -> Source:
    """A dense source as the mixture of `mixture_config`.

    Raises:
        GrowthError: the dense model has something that such a mixture lacks.
    """
    family = _sibling(source.spec, config.model_type)
    view = shown_as(source.spec, config, family)
    parts = parts_of(view)
    dtypes = {
        t.name: source.dtypes[parts[t.name].names[0] if t.name in parts else t.name]
        for t in view.own_tensors
    }
    read = Assembled(source.read, parts)
    return replace(source, spec=view, dtypes=dtypes, read=read, keys={}, dense=source, parts=parts)


def as_source_of(small: ModelSpec, opened: Source) -> Source:
    """An opened source as a growth from `small` reads it."""
    return opened if small.dense is None else upcycled(opened, small.config)


def shown_as(small: ModelSpec, config: Any, family: Family) -> ModelSpec:
    """A dense model as a mixture; errors as in `upcycled`."""
    own = small.family.classes[small.class_name]
    same = [n for n, c in family.classes.items() if (c.heads, c.prefix) == (own.heads, own.prefix)]
    if not same:
        raise GrowthError(f"{small.class_name}: a {family.model_type} has no class with its head")
    sparse = ModelSpec.of(config, same[0], family)
    view = replace(sparse, dense=small, untied=small.untied)
    used = {name for part in parts_of(view).values() for name in part.names} | view.shapes.keys()
    for tensor in (t for t in small.own_tensors if t.name not in used):
        when = f"config.{tensor.row.when}: " if tensor.row.when else ""
        raise GrowthError(f"{when}a {view.class_name} has no place for {tensor.name}")
    return view


def dense_model(config: Any, view: ModelSpec) -> ModelSpec:
    """The dense model of this config that becomes a mixture."""
    family, own = load_family(config.model_type), view.family.classes[view.class_name]
    classes = family.classes.items()
    same = [n for n, c in classes if (c.heads, c.prefix) == (own.heads, own.prefix)]
    if not same or family.model_type not in dense_families(view.family.model_type):
        raise GrowthError(f"no {family.model_type} becomes a {view.class_name}")
    return ModelSpec.of(config, same[0], family)


def _sibling(small: ModelSpec, kind: str) -> Family:
    known = small.family.model_type
    allowed = [k for k in supported_families() if known in dense_families(k)]
    if kind not in allowed:
        text = nearest(kind, allowed) if allowed else ": it can only grow in its own family"
        raise GrowthError(f"to={kind!r}: a {known} cannot become one{text}")
    if small.family.table is not None:
        raise GrowthError(f"to={kind!r}: a {known} with a table of your own cannot become one")
    return load_family(kind)


def _set_sizes(config: Any, small: ModelSpec, family: Family, asked: Mapping[str, Any]) -> None:
    """Give the mixture as many experts as its FFN splits into, all of them chosen."""
    asked = {config.attribute_map.get(name, name): value for name, value in asked.items()}
    (space,) = family.mixtures
    fields = [family.config_field(str(key)) for key in (space.size, space.chosen)]
    for field in fields:
        if field not in asked:
            raise GrowthError(f"to={family.model_type!r} needs {field}: give it as well")
    whole, parts = small.size("ffn"), 1
    for key, is_expert in _widths(family):
        field = family.config_field(key)
        if is_expert:
            parts = _parts_of(whole, asked.get(field, whole), field)
        setattr(config, field, whole // parts if is_expert else whole)
    count, chosen = (asked[field] for field in fields)
    if type(chosen) is int is type(count) and (chosen > count or chosen % parts):
        of = (
            ""
            if parts == 1
            else f", in multiples of {parts}: one copy of the FFN has {parts} experts"
        )
        raise GrowthError(f"{fields[1]}={chosen}: give at most {fields[0]}={count}{of}")
    for field in fields:
        setattr(config, field, parts)


def _widths(family: Family) -> set[tuple[str, bool]]:
    """The sizes that are made of the dense FFN's, and whether they are those of an expert."""
    found = set()
    for row in (row for rows in family.parts.values() for row in rows if row.dense):
        spaces = [family.spaces[name] for name in row.uses("")[0]]
        sizes = {str(s.size) for s in spaces if s.kind == "units"}
        found |= {(size, len(row.axes) > 2) for size in sizes}
    return found


def _parts_of(whole: int, asked: Any, field: str) -> int:
    """How many experts of at most this size the FFN splits into evenly."""
    if type(asked) is not int or asked < 1:
        # refused with the other sizes
        return 1
    parts = -(-whole // asked)
    if whole % parts:
        fit = [n for n in range(1, whole + 1) if whole % n == 0]
        near = sorted(fit, key=lambda n: abs(whole // n - asked))[:2]
        raise GrowthError(
            f"{field}={asked}: the FFN of {whole} units does not split evenly into {parts} "
            f"experts; the nearest sizes that fit are "
            f"{' and '.join(str(whole // n) for n in sorted(near, reverse=True))}"
        )
    return parts


def parts_of(view: ModelSpec) -> dict[str, Parts]:
    """The tensors of a mixture that are made of a dense model's FFN."""
    small = view.dense
    if small is None:
        return {}
    prefix = small.family.classes[small.class_name].prefix
    experts = view.size(str(view.family.mixtures[0].size))
    result = {}
    for tensor in (t for t in view.own_tensors if t.row.dense):
        names = tuple(prefix + x.replace("{l}", str(tensor.layer)) for x in tensor.row.dense)
        count = experts if len(tensor.axes) > 2 else 0
        result[tensor.name] = Parts(names, count, int(is_output(tensor)))
    return result
