"""Reads the family tables (one TOML file each) and checks every key and name in them.

`growkern/families/README.md` explains the sections of a table. An unknown key, value or name is an
error. So is a value of another type. The types of all keys are those of the fields of `Family`, and
of the records in it (`growkern.families.spec`).
"""

from __future__ import annotations

import reprlib
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import MISSING, fields, is_dataclass, replace
from functools import cache
from importlib import resources
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, get_args, get_origin, get_type_hints

from growkern.arguments import PLAIN, path_of
from growkern.errors import GrowthError, TableError, nearest
from growkern.families.family import Family
from growkern.families.spec import CONDITIONS, NOTHING, condition_of, parse_scale
from growkern.files import parse_toml, read_bounded

# bytes of a file
MOST_BYTES = 1_000_000
LISTS = {str: 'texts, such as ["a", "b"]', int: "whole numbers, such as [1, 2]"}
# fields of a family that are no keys of its table
NO_KEYS = ("table", "before")
hints = cache(get_type_hints)


def _value(hint: Any, where: str, value: Any, faults: list[str], name: str = "") -> Any:
    """A value of a table, as a field of this type. What is wrong with it is added to `faults`.

    `name` is that of its entry. Tables become records or mappings, or tuples of records.
    """
    options = get_args(hint) if isinstance(hint, UnionType) else (hint,)
    kinds = [kind for kind in options if kind is not NoneType]
    kind, entry = kinds[0], (*get_args(kinds[0]), None)[0]
    wanted = f"a table, such as {{ {getattr(entry, 'FORM', 'key = value')} }}"
    if kind is Any or type(value) in kinds:
        return value
    if {*kinds} <= PLAIN.keys():
        wanted = " or ".join(PLAIN[kind] for kind in kinds)
    elif is_dataclass(kind):
        return _record(kind, where, value, faults, name)
    elif get_origin(kind) is tuple and entry in LISTS:
        if isinstance(value, list) and all(type(item) is entry for item in value):
            return tuple(value)
        wanted = f"a list of {LISTS[entry]}"
    elif isinstance(value, Mapping):
        if get_origin(kind) is not tuple:
            inner = get_args(kind)[1]
            # a size, or another entry that may be plain, that the extended table alone has
            removable = hasattr(inner, "PLAIN")
            kept = {k: v for k, v in value.items() if not (removable and v == [])}
            return {k: _value(inner, f"{where}.{k}", v, faults, k) for k, v in kept.items()}
        entries = [(k, x) for k, v in value.items() for x in (v if isinstance(v, list) else [v])]
        return tuple(_record(entry, f"{where}.{k}", x, faults, k) for k, x in entries)
    faults.append(f"{where}: {reprlib.repr(value)} must be {wanted}")
    return None


def _record(cls: Any, where: str, entry: Any, faults: list[str], name: str = "") -> Any:
    """An entry of a table as a record of a class; None if something is wrong with it."""
    plain, before = getattr(cls, "PLAIN", {}), len(faults)
    if type(entry) in plain:
        entry = {plain[type(entry)]: entry}
    if not isinstance(entry, Mapping):
        kinds = "".join(f"{PLAIN[kind]} or " for kind in plain)
        form = getattr(cls, "FORM", "FIELD = { key = value }").removeprefix("FIELD = ")
        wanted = f"{kinds}a table, such as {form}"
        faults.append(f"{where}: {reprlib.repr(entry)} must be {wanted}")
        return None
    own = getattr(cls, "KEY", None)
    known = [f for f in fields(cls) if f.name not in (own, *NO_KEYS)]
    types, choices = hints(cls), getattr(cls, "CHOICES", {})
    optional = {f.name for f in known if f.default is None}
    given = {} if own is None else {own: name}
    for key, value in entry.items():
        if key not in (allowed := [f.name for f in known]):
            faults.append(f"{where}: unknown key {key!r}{nearest(key, allowed)}")
        elif not (value == [] and key in optional):
            given[key] = _value(types[key], f"{where}.{key}", value, faults)
            for word in _words(key, given[key]) if key in choices else ():
                if word not in choices[key]:
                    faults.append(f"{where}.{key}: {word!r}{nearest(str(word), choices[key])}")
    for key in (f.name for f in known if f.default is f.default_factory is MISSING):
        if key not in entry:
            values = f", one of {', '.join(choices[key])}" if key in choices else ""
            faults.append(f"{where}: no {key!r}: add it{values}")
    return cls(**given) if len(faults) == before else None


def _words(key: str, value: Any) -> list[str]:
    """The words of a value that has choices: the keys of a table, or a text."""
    if isinstance(value, str):
        return value.split("|") if key == "part" else [value]
    return [*(value or ())]


def _refuse(faults: list[str]) -> None:
    if faults:
        raise TableError(list(dict.fromkeys(faults)))


def parse_family(where: str, table: Mapping[str, Any]) -> Family:
    """Make a `Family` from a parsed TOML table; a TableError names all that is wrong with it."""
    faults: list[str] = []
    family = _record(Family, where, table, faults)
    _refuse(faults)
    # in front of a pre-norm the centred extra coordinates are 0: any weight is exact there
    extra = "free" if family.norm.placement == "pre" else "zero"
    rows = {
        part: tuple(replace(row, extra=row.extra or extra) for row in rows)
        for part, rows in family.tensors.items()
    }
    family = replace(family, tensors=rows)
    faults = _reference_faults(where, family)
    # a row may be empty: a tensor of the extended table that this family never has
    names = {name for part in table["tensors"].values() for name in part}
    faults += [
        f"{where}.depth: {name!r} is no row of [tensors]: name one, or remove it"
        for name in (*family.depth.zero, *family.depth.one)
        if not {name, name.rpartition(".")[0]} & names
    ]
    _refuse(faults)
    return family


def _reference_faults(where: str, family: Family) -> list[str]:
    """Stacks, spaces, sizes and parts that are used but not defined."""
    config, spaces, stacks, faults = family.config, family.spaces, family.stacks, list[str]()

    def check(user: str, known: Mapping[str, Any], *used: str | None) -> None:
        unknown = (name for name in used if name is not None and name not in known)
        faults.extend(f"{where}: {user} uses {name!r}{nearest(name, known)}" for name in unknown)

    for stack, size in stacks.items():
        check(f"stack {stack}", config, size)
    check("spaces.stream", spaces, "stream")
    check("config.stream", config, "stream")
    for name, space in spaces.items():
        check(f"spaces.{name}", spaces, space.of, space.untied, *space.blocks)
        own = (space.heads, space.keys, space.size, space.chosen, *space.groups)
        check(f"spaces.{name}", config, *own)
    check("attention.divisor", config, family.attention.divisor)
    for name, model_class in family.classes.items():
        check(name, family.tensors, *model_class.parts)
        check(name, stacks, *model_class.stacks)
        check(name, spaces, model_class.output)
        check(name, config, model_class.cache)
    for key, entry in config.items():
        check(f"config.{key}", config, None if entry.follows == NOTHING else entry.follows)
    for kind, texts in family.kinds.items():
        check(f"kinds.{kind}", CONDITIONS, *(condition_of(text)[1] for text in texts))
    for kind, keys in family.states.items():
        check("states", family.kinds, kind)
        check(f"states.{kind}", config, *keys)
    kinds = {"first": 0, "last": 0, **family.kinds}
    every = [row for rows in family.tensors.values() for row in rows]
    for space in family.mixtures:
        check(f"spaces.{space.name}", {row.name: row for row in every}, space.asleep)
    scales = [(space.name, space.scale) for space in spaces.values()]
    for name, scale in [*scales, *((row.name, row.scale) for row in every)]:
        check(f"{name}: scale", {**config, **spaces}, scale and parse_scale(scale)[2])
    for row in every:
        check(row.name, stacks, row.stack)
        check(row.name, kinds, None if row.only is None else row.only.removeprefix("not_"))
        for stack in stacks:
            of_axes, sizes = row.uses(stack)
            check(row.name, spaces, *sorted(of_axes))
            check(row.name, config, *sorted(sizes))
    return faults


def _merged(base: Mapping[str, Any], table: Mapping[str, Any]) -> dict[str, Any]:
    """`table` laid over the table that it extends.

    Entries of [config], [spaces], [depth], [older] and of each [tensors.*] are replaced one by one,
    all other sections as a whole. A row that names no axes keeps those of the extended table.
    """
    result = dict(base)
    for key, value in table.items():
        deep = key in ("config", "spaces", "tensors", "depth", "older")
        if not (deep and isinstance(base.get(key), Mapping) and isinstance(value, Mapping)):
            result[key] = value
            continue
        if key == "tensors":
            value = {
                part: _merged_rows(base[key].get(part, {}), rows) for part, rows in value.items()
            }
        result[key] = {**base[key], **value}
    return result


def _merged_rows(base: Mapping[str, Any], rows: Any) -> Any:
    if not isinstance(rows, Mapping):
        return rows
    result = dict(base)
    for name, given in rows.items():
        old = base.get(name, [])
        is_whole = not isinstance(given, Mapping) or given.keys() & {"axes", "norm"} or not old
        before = old if isinstance(old, list) else [old]
        result[name] = given if is_whole else [{**row, **given} for row in before]
    return result


def _extended(where: str, table: dict[str, Any]) -> dict[str, Any]:
    """A table with what it takes from the one that it extends."""
    base = table.pop("extends", None)
    if base is None:
        return table
    if base not in supported_families():
        raise GrowthError(f"{where}.extends: {base!r}{nearest(str(base), supported_families())}")
    return _merged(shipped_table(base), table)


@cache
def shipped_table(model_type: str) -> dict[str, Any]:
    """The content of a family's table, with what it extends; not to be changed."""
    file = resources.files("growkern.families") / f"{model_type}.toml"
    table = parse_toml(file.read_text(encoding="utf-8"))
    return _extended(f"{model_type}.toml", table)


@cache
def load_family(model_type: str) -> Family:
    """The family of a Hugging Face `model_type`."""
    known = supported_families()
    if model_type not in known:
        raise GrowthError(
            f"model_type {model_type!r} has no family table{nearest(model_type, known)}"
        )
    table: Mapping[str, Any] = shipped_table(model_type)
    # where transformers is missing, tables can still be read
    with suppress(PackageNotFoundError):
        # few tables ask for the version, which takes a millisecond
        table = as_installed(table, version("transformers")) if "renamed" in table else table
    return parse_family(f"{model_type}.toml", table)


def as_installed(table: Mapping[str, Any], installed: str) -> Mapping[str, Any]:
    """A table with the names of the classes of this version of transformers: see `renamed`."""

    def number(text: str) -> list[int]:
        return [int(part) for part in text.split(".")[:2]]

    if "renamed" not in table or number(installed) >= number(table["renamed"]):
        return table
    parts: Mapping[str, Mapping[str, Any]] = table["tensors"]
    rows = {name: row for part in parts.values() for name, row in part.items()}
    names = {name: row["files"][0] for name, row in rows.items() if "files" in row}
    plain = {name: {k: x for k, x in rows[name].items() if k != "files"} for name in names}
    tensors = {
        key: {names.get(name, name): plain.get(name, row) for name, row in part.items()}
        for key, part in parts.items()
    }
    depth = {**table["depth"], "zero": [names.get(x, x) for x in table["depth"]["zero"]]}
    return {**table, "tensors": tensors, "depth": depth}


def read_family(path: str | Path | Family) -> Family:
    """A table of one's own, from a TOML file; a `Family` is returned as it is."""
    if isinstance(path, Family):
        return path
    file = path_of("family", path, "the TOML file of a table")
    data = read_bounded(file, MOST_BYTES, "family table")
    try:
        table = parse_toml(data.decode())
    except (ValueError, RecursionError) as error:
        raise GrowthError(f"{file}: no TOML: {error}") from error
    return own_family(str(file), _extended(str(file), table))


def own_family(where: str, table: Mapping[str, Any]) -> Family:
    """A family whose table is not part of the package: records keep its content."""
    return replace(parse_family(where, table), table=table)


@cache
def supported_families() -> tuple[str, ...]:
    """The model types that have a table, sorted."""
    files = resources.files("growkern.families").iterdir()
    return tuple(sorted(f.name[: -len(".toml")] for f in files if f.name.endswith(".toml")))


def dense_families(model_type: str) -> tuple[str, ...]:
    """The families of dense models that can become such a mixture."""
    dense = load_family(model_type).dense if model_type in supported_families() else None
    return dense.of if dense else ()


def refuse_other_mixture(known: str, to: str) -> None:
    """Refuse a family `to` that a dense model of the family `known` cannot become."""
    allowed = [kind for kind in supported_families() if known in dense_families(kind)]
    if to not in allowed:
        text = nearest(to, allowed) if allowed else ": it can only grow in its own family"
        raise GrowthError(f"to={to!r}: a {known} cannot become one{text}")
