"""Reads and checks family tables; `growkern.families.spec` says what they mean.

An unknown key or name anywhere is an error: a table is never half understood.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from functools import cache
from importlib import resources
from typing import Any

from growkern.errors import GrowthError, nearest
from growkern.families.spec import Family, ModelClass, Refusal, Row, SpaceSpec

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

_KEYS = {
    "table": "model_type activation ignored norm config refuse spaces classes depth tensors",
    "norm": "kind placement eps",
    "space": "kind of untied heads size activated",
    "class": "prefix body heads",
    "depth": "zero inner_norm outer_norm refuse",
    "tensor": "axes norm extra into tied when",
    "refuse": "value why",
}


_VALUES = {
    "norm.kind": ("layernorm", "rmsnorm"),
    "norm.placement": ("pre", "post"),
    "space.kind": ("stream", "normed", "heads", "units", "tied_output"),
    "tensor.extra": ("zero", "carry"),
}


def _check_value(key: str, where: str, value: Any) -> None:
    if value not in _VALUES[key]:
        raise GrowthError(f"{where}: {value!r}{nearest(str(value), _VALUES[key])}")


def _check_keys(kind: str, where: str, table: Mapping[str, Any]) -> None:
    allowed = _KEYS[kind].split()
    for key in table:
        if key not in allowed:
            raise GrowthError(f"{where}: unknown key {key!r}{nearest(key, allowed)}")


def _refusals(where: str, table: Mapping[str, Any]) -> tuple[Refusal, ...]:
    for name, entry in table.items():
        _check_keys("refuse", f"{where}.{name}", entry)
    return tuple(Refusal(name, **entry) for name, entry in table.items())


def _row(where: str, name: str, entry: Mapping[str, Any]) -> Row:
    _check_keys("tensor", f"{where}.{name}", entry)
    values: dict[str, Any] = dict(entry)
    _check_value("tensor.extra", f"{where}.{name}.extra", values.get("extra", "zero"))
    if "axes" in values:
        values["axes"] = tuple(values["axes"])
    if "norm" in values:
        source, _, target = values["norm"].partition(">")
        values["norm"] = (source, target)
    return Row(name=name, **values)


def parse_family(where: str, table: Mapping[str, Any]) -> Family:
    """A `Family` from a parsed TOML table.

    Raises:
        GrowthError: an unknown key, or a space, size or part that is used but not defined.
    """
    _check_keys("table", where, table)
    _check_keys("norm", f"{where}.norm", table["norm"])
    for key in ("kind", "placement"):
        _check_value(f"norm.{key}", f"{where}.norm.{key}", table["norm"][key])
    depth = table.get("depth", {})
    _check_keys("depth", f"{where}.depth", depth)
    for name, entry in table["spaces"].items():
        _check_keys("space", f"{where}.spaces.{name}", entry)
        _check_value("space.kind", f"{where}.spaces.{name}.kind", entry["kind"])
    for name, entry in table["classes"].items():
        _check_keys("class", f"{where}.classes.{name}", entry)
    family = Family(
        model_type=table["model_type"],
        activation=table.get("activation"),
        ignored=tuple(table.get("ignored", ())),
        norm_kind=table["norm"]["kind"],
        norm_placement=table["norm"]["placement"],
        norm_eps=table["norm"]["eps"],
        config=table["config"],
        refuse=_refusals(f"{where}.refuse", table.get("refuse", {})),
        spaces={name: SpaceSpec(name=name, **entry) for name, entry in table["spaces"].items()},
        classes={
            name: ModelClass(
                entry.get("prefix", ""), tuple(entry["body"]), tuple(entry.get("heads", ()))
            )
            for name, entry in table["classes"].items()
        },
        zero_in_identity=tuple(depth.get("zero", ())),
        inner_norm=depth.get("inner_norm"),
        outer_norm=depth.get("outer_norm"),
        refuse_depth=_refusals(f"{where}.depth.refuse", depth.get("refuse", {})),
        parts={
            part: tuple(
                _row(f"{where}.tensors.{part}", name, entry) for name, entry in rows.items()
            )
            for part, rows in table["tensors"].items()
        },
    )
    _check_references(where, family)
    return family


def _check_references(where: str, family: Family) -> None:
    for model_class in family.classes.values():
        for part in (*model_class.body, *model_class.heads):
            if part not in family.parts:
                raise GrowthError(f"{where}: part {part!r} has no [tensors.{part}]")
    for rows in family.parts.values():
        for row in rows:
            names = [axis.partition(":") for axis in row.axes]
            used = [s for _, colon, spaces in names if colon for s in spaces.split("|")]
            used += row.norm or ()
            sizes = [name for name, colon, _ in names if not colon]
            for name, known in [(s, family.spaces) for s in used] + [
                (s, family.config) for s in sizes
            ]:
                if name not in known:
                    raise GrowthError(f"{where}: {row.name} uses {name!r}{nearest(name, known)}")


@cache
def load_family(model_type: str) -> Family:
    """The table of one family, by its Hugging Face `model_type`.

    Raises:
        GrowthError: no table for this model type; the message lists the supported ones.
    """
    known = supported_families()
    if model_type not in known:
        raise GrowthError(
            f"model_type {model_type!r} has no family table; supported: {', '.join(known)}"
        )
    file = resources.files("growkern.families") / f"{model_type}.toml"
    return parse_family(f"{model_type}.toml", tomllib.loads(file.read_text(encoding="utf-8")))


@cache
def supported_families() -> tuple[str, ...]:
    """Model types that have a table."""
    files = resources.files("growkern.families").iterdir()
    return tuple(sorted(f.name[: -len(".toml")] for f in files if f.name.endswith(".toml")))
