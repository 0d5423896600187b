"""Reads the family tables (one TOML file each) and checks every key and name in them.

`growkern.families.spec` explains the sections of a table. An unknown key, value or name is an
error.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import cache
from importlib import resources
from typing import Any

from growkern.errors import GrowthError, nearest
from growkern.families.family import Family
from growkern.families.norm import NORM_KINDS, Norm
from growkern.families.older import FORMS, OlderKey
from growkern.families.spec import Attention, ModelClass, Refusal, Row, Size, SpaceSpec
from growkern.package import parse_toml

_KEYS = {
    "table": "extends model_type activation softcap ignored per_layer norm attention config stacks "
    "refuse spaces classes depth tensors older "
    "ties_by_value runtimes",
    "runtimes": "head_dim layers scale",
    "config": "field default plus reserved",
    "norm": "kind placement eps plus_one bias",
    "attention": "positions scale when partial field pairs whole_pairs turning clip",
    "space": "kind of untied heads width part weighted size activated scale scale_when",
    "class": "prefix body heads output stacks repeats cache",
    "depth": "zero inner_norms outer_norm refuse",
    "tensor": "axes norm extra into tied when only stack scale scale_when fallback stored",
    "refuse": "value differs why",
    "older": "of form when",
}

_ROOTS = ("sqrt(stream)", "rounded(sqrt(stream))")
_VALUES = {
    "norm.kind": tuple(NORM_KINDS),
    "older.form": FORMS,
    "norm.placement": ("pre", "post", "sandwich", "output"),
    "attention.positions": ("rotary", "learned", "relative"),
    "attention.scale": ("head_dim", "constant"),
    "attention.pairs": ("halves", "adjacent"),
    "space.kind": ("stream", "normed", "heads", "head", "units", "fixed", "tied_output"),
    "space.part": ("value", "query", "key", "before_norm"),
    "space.scale": _ROOTS,
    "tensor.extra": ("free", "zero", "carry"),
    "tensor.only": ("first", "not_first", "last", "not_last"),
    "tensor.scale": (*_ROOTS, *(f"1/{root}" for root in _ROOTS)),
}


def _check(kind: str, where: str, table: Mapping[str, Any]) -> None:
    """Refuse unknown keys, and unknown values of keys that have a list of allowed values."""
    allowed = _KEYS[kind].split()
    for key, value in table.items():
        if key not in allowed:
            raise GrowthError(f"{where}: unknown key {key!r}{nearest(key, allowed)}")
        values = _VALUES.get(f"{kind}.{key}")
        if values is None:
            continue
        for one in value.split("|") if key == "part" else [value]:
            if one not in values:
                raise GrowthError(f"{where}.{key}: {one!r}{nearest(str(one), values)}")


def _checked(kind: str, where: str, table: Mapping[str, Any]) -> dict[str, Any]:
    """The checked entry as keyword arguments, with tuples for lists."""
    _check(kind, where, table)
    return {k: tuple(v) if isinstance(v, list) else v for k, v in table.items()}


def _refusals(where: str, table: Mapping[str, Any]) -> tuple[Refusal, ...]:
    return tuple(
        Refusal(name, **_checked("refuse", f"{where}.{name}", entry))
        for name, entry in table.items()
    )


def _size(where: str, entry: Any) -> Size:
    if isinstance(entry, int):
        return Size(number=entry)
    if isinstance(entry, str):
        return Size(field=entry)
    return Size(**_checked("config", where, entry))


def _rows(where: str, table: Mapping[str, Any], placement: str) -> Iterator[Row]:
    # in front of a pre-norm the centred extra coordinates are 0: any weight is exact there
    extra = "free" if placement == "pre" else "zero"
    for name, entry in table.items():
        for values in entry if isinstance(entry, list) else [entry]:
            given = _checked("tensor", f"{where}.{name}", values)
            yield Row(name=name, **{"extra": extra, **given})


def parse_family(where: str, table: Mapping[str, Any]) -> Family:
    """Make a `Family` from a parsed TOML table.

    Raises:
        GrowthError: an unknown key or value, or a stack, space, size or part that is used but not
            defined.
    """
    _check("table", where, table)
    norm = Norm(**_checked("norm", f"{where}.norm", table["norm"]))
    depth = _checked("depth", f"{where}.depth", table.get("depth", {}))
    family = Family(
        model_type=table["model_type"],
        activation=table.get("activation"),
        softcap=table.get("softcap"),
        ignored=tuple(table.get("ignored", ())),
        per_layer=tuple(table.get("per_layer", ())),
        norm=norm,
        attention=Attention(**_checked("attention", f"{where}.attention", table["attention"])),
        config={k: _size(f"{where}.config.{k}", v) for k, v in table["config"].items() if v != []},
        stacks=table.get("stacks", {"": "layers"}),
        refuse=_refusals(f"{where}.refuse", table.get("refuse", {})),
        spaces={
            name: SpaceSpec(name=name, **_checked("space", f"{where}.spaces.{name}", entry))
            for name, entry in table["spaces"].items()
        },
        classes={
            name: ModelClass(**_checked("class", f"{where}.classes.{name}", entry))
            for name, entry in table["classes"].items()
        },
        zero_in_identity=depth.get("zero", ()),
        inner_norms=depth.get("inner_norms", ()),
        outer_norm=depth.get("outer_norm") or None,
        refuse_depth=_refusals(f"{where}.depth.refuse", depth.get("refuse", {})),
        parts={
            part: tuple(_rows(f"{where}.tensors.{part}", rows, norm.placement))
            for part, rows in table["tensors"].items()
        },
        ties_by_value=table.get("ties_by_value", False),
        runtimes=_checked("runtimes", f"{where}.runtimes", table.get("runtimes", {})),
        older=tuple(
            OlderKey(name, **_checked("older", f"{where}.older.{name}", entry))
            for name, entry in table.get("older", {}).items()
        ),
    )
    _check_references(where, family)
    return family


def _check_references(where: str, family: Family) -> None:
    """Refuse stacks, spaces, sizes and parts that are used but not defined."""

    def known(user: str, name: str, names: Mapping[str, Any]) -> None:
        if name not in names:
            raise GrowthError(f"{where}: {user} uses {name!r}{nearest(name, names)}")

    for stack, size in family.stacks.items():
        known(f"stack {stack}", size, family.config)
    for name, model_class in family.classes.items():
        for part in (*model_class.body, *model_class.heads):
            known(name, part, family.parts)
        for stack in model_class.stacks:
            known(name, stack, family.stacks)
        for size in (*model_class.repeats.values(), *filter(None, [model_class.cache])):
            known(name, size, family.config)
    for row in (row for rows in family.parts.values() for row in rows):
        if row.stack is not None:
            known(row.name, row.stack, family.stacks)
        for stack in family.stacks:
            for used, names in zip(row.uses(stack), (family.spaces, family.config), strict=True):
                for name in sorted(used):
                    known(row.name, name, names)


def _merged(base: Mapping[str, Any], table: Mapping[str, Any]) -> dict[str, Any]:
    """`table` laid over the table that it extends.

    Entries of [config], [spaces], [depth], [older] and of each [tensors.*] are replaced one by one,
    all other sections as a whole.
    """
    result = dict(base)
    for key, value in table.items():
        deep = key in base and key in ("config", "spaces", "tensors", "depth", "older")
        if deep and key == "tensors":
            value = {part: {**base[key].get(part, {}), **rows} for part, rows in value.items()}
        result[key] = {**base[key], **value} if deep else value
    return result


@cache
def _table(model_type: str) -> dict[str, Any]:
    file = resources.files("growkern.families") / f"{model_type}.toml"
    table = parse_toml(file.read_text(encoding="utf-8"))
    base = table.pop("extends", None)
    return table if base is None else _merged(_table(base), table)


@cache
def load_family(model_type: str) -> Family:
    """The family of a Hugging Face `model_type`."""
    known = supported_families()
    if model_type not in known:
        raise GrowthError(
            f"model_type {model_type!r} has no family table; supported: {', '.join(known)}"
        )
    return parse_family(f"{model_type}.toml", _table(model_type))


@cache
def supported_families() -> tuple[str, ...]:
    """The model types that have a table, sorted."""
    files = resources.files("growkern.families").iterdir()
    return tuple(sorted(f.name[: -len(".toml")] for f in files if f.name.endswith(".toml")))
