"""Reads the family tables (one TOML file each) and checks every key and name in them.

`growkern.families.spec` explains the sections of a table. An unknown key, value or name is an
error. So is a value of another type.
"""

from __future__ import annotations

import reprlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import MISSING, fields, replace
from functools import cache
from importlib import resources
from pathlib import Path
from types import UnionType
from typing import Any, TypeVar, get_args, get_origin, get_type_hints

from growkern.arguments import path_of
from growkern.errors import GrowthError, TableError, nearest
from growkern.families.family import NORM_KINDS, Dense, Family, Norm
from growkern.families.fields import CONDITIONS, FORMS, OlderKey, condition_of
from growkern.families.spec import NOTHING, Attention, ModelClass, Refusal, Row, Size, SpaceSpec
from growkern.files import parse_toml, read_bounded

T = TypeVar("T")

# what a class has no fields for, or under other names
_TABLE_KEYS = (
    "extends under model_type activation softcap ignored per_layer norm attention config stacks "
    "refuse spaces classes depth tensors older ties_by_value runtimes kinds states dense"
)
# the field of an entry that is no key of it: its name, or what a plain number becomes
_NO_KEY = {"config": "number", "space": "name", "tensor": "name", "refuse": "field"}
_NO_KEY |= {"older": "field"}
_ROOTS = ("sqrt(stream)", "rounded(sqrt(stream))")
_VALUES = {
    "norm.kind": tuple(NORM_KINDS),
    "older.form": FORMS,
    "norm.placement": ("pre", "post", "sandwich", "output"),
    "attention.positions": ("rotary", "learned", "relative"),
    "attention.scale": ("head_dim", "constant"),
    "attention.pairs": ("halves", "adjacent"),
    "space.kind": ("stream", "normed", "heads", "head", "units", "experts", "fixed", "tied_output"),
    "space.part": ("value", "query", "key", "before_norm"),
    "space.scale": _ROOTS,
    "tensor.keep": ("float32",),
    "tensor.extra": ("free", "zero", "carry"),
    "tensor.scale": (*_ROOTS, *(f"1/{root}" for root in _ROOTS)),
}


_TEXTS = tuple[str, ...]
# kind of an entry -> the class that it becomes. Its fields are the keys, and have their types
_CLASSES: dict[str, Any] = {
    "table": Family,
    "config": Size,
    "norm": Norm,
    "attention": Attention,
    "space": SpaceSpec,
    "class": ModelClass,
    "tensor": Row,
    "refuse": Refusal,
    "older": OlderKey,
    "dense": Dense,
}
_REQUIRED = ("model_type", "norm", "attention", "config", "spaces", "classes", "tensors")
# the keys of a table that are attributes of a family as they are
_PLAIN = (
    *("model_type", "under", "activation", "softcap", "ignored", "per_layer", "stacks"),
    "ties_by_value",
)
# sections whose entries are all of one kind
_SECTIONS = {"spaces": "space", "classes": "class", "refuse": "refuse", "older": "older"}
# bytes of a file
MOST_BYTES = 1_000_000


@cache
def _keys(kind: str) -> dict[str, Any]:
    """The keys of an entry -> their types, where these are known."""
    if kind == "depth":
        known = {"zero": _TEXTS, "inner_norms": _TEXTS, "refuse": Mapping, "in_place": str}
        return {**known, "outer_norm": Any}
    if kind == "runtimes":
        return dict.fromkeys(("head_dim", "layers", "scale"), Any)
    types = get_type_hints(_CLASSES[kind])
    if kind == "table":
        return {key: types.get(key, Any) for key in _TABLE_KEYS.split()}
    return {key: of for key, of in types.items() if key != _NO_KEY.get(kind)}


def _misfit(value: Any, hint: Any) -> str:
    """What a value should be, if it is something else; "" if it fits."""
    if hint is Any:
        return ""
    kinds = [k for k in (get_args(hint) if isinstance(hint, UnionType) else (hint,)) if k]
    lists = {str: 'texts, such as ["a", "b"]', int: "whole numbers, such as [1, 2]"}
    for entry in {get_args(kind)[0] for kind in kinds if get_origin(kind) is tuple} & {*lists}:
        fits = isinstance(value, list) and all(type(one) is entry for one in value)
        return "" if fits else f"a list of {lists[entry]}"
    plain = {str: "a text", bool: "true or false", int: "a whole number", float: "a number"}
    if not set(kinds) <= {*plain, type(None)}:
        return "" if isinstance(value, Mapping) else "a table, such as { key = value }"
    return "" if type(value) in kinds else " or ".join(plain[k] for k in kinds if k in plain)


def _faults(kind: str, where: str, entry: Any) -> Iterator[str]:
    """Unknown keys, values of another type or outside of a list, and keys that are missing."""
    if not isinstance(entry, Mapping):
        yield f"{where}: {reprlib.repr(entry)} must be a table, such as {{ key = value }}"
        return
    allowed = _keys(kind)
    for key, value in entry.items():
        values = _VALUES.get(f"{kind}.{key}")
        if key not in allowed:
            yield f"{where}: unknown key {key!r}{nearest(key, allowed)}"
        elif wanted := _misfit(value, allowed[key]):
            yield f"{where}.{key}: {reprlib.repr(value)} must be {wanted}"
        elif values is not None:
            for one in value.split("|") if key == "part" else [value]:
                if one not in values:
                    yield f"{where}.{key}: {one!r}{nearest(str(one), values)}"
    needed: tuple[str, ...] = _REQUIRED
    if kind != "table":
        made = fields(_CLASSES[kind]) if kind in _CLASSES else ()
        needed = tuple(f.name for f in made if f.default is f.default_factory is MISSING)
    for key in (key for key in needed if key in allowed and key not in entry):
        values = _VALUES.get(f"{kind}.{key}")
        yield f"{where}: no {key!r}: add it" + (f", one of {', '.join(values)}" if values else "")


def table_faults(where: str, table: Mapping[str, Any]) -> Iterator[str]:
    """What is wrong with the keys and values of a table, one line each."""
    yield from _faults("table", where, table)

    def section(name: str, of: Any = table) -> Mapping[str, Any]:
        # what is no table was named above
        return found if isinstance(found := of.get(name, {}), Mapping) else {}

    for name in ("norm", "attention", "depth", "runtimes", "dense"):
        if name in table and isinstance(table[name], Mapping):
            yield from _faults(name, f"{where}.{name}", table[name])
    for name, kind in _SECTIONS.items():
        for key, entry in section(name).items():
            yield from _faults(kind, f"{where}.{name}.{key}", entry)
    for name in ("depth", "dense"):
        for key, entry in section("refuse", section(name)).items():
            yield from _faults("refuse", f"{where}.{name}.refuse.{key}", entry)
    for key, entry in section("config").items():
        if isinstance(entry, Mapping):
            yield from _faults("config", f"{where}.config.{key}", entry)
        elif type(entry) not in (int, str) and entry != []:
            found = reprlib.repr(entry)
            yield f"{where}.config.{key}: {found} must be a number or the name of a config field"
    parts, rows = section("tensors"), set[str]()
    for part in parts:
        for name, entry in section(part, parts).items():
            rows.add(name)
            for one in entry if isinstance(entry, list) else [entry]:
                yield from _faults("tensor", f"{where}.tensors.{part}.{name}", one)
    zero = section("depth").get("zero", ())
    for name in zero if isinstance(zero, list) else ():
        if name not in rows and str(name).rpartition(".")[0] not in rows:
            yield f"{where}.depth.zero: {name!r} is no row of [tensors]: name one, or remove it"


def _refuse(faults: Iterable[str]) -> None:
    if found := list(dict.fromkeys(faults)):
        raise TableError(found)


def _checked(table: Mapping[str, Any]) -> dict[str, Any]:
    """A checked entry as keyword arguments, with tuples for lists."""
    return {k: tuple(v) if isinstance(v, list) else v for k, v in table.items()}


def _named(made: Callable[..., T], table: Mapping[str, Any] | None) -> tuple[T, ...]:
    return tuple(made(name, **_checked(entry)) for name, entry in (table or {}).items())


def _dense(table: Mapping[str, Any] | None) -> Dense | None:
    if not table:
        return None
    return Dense(**{**_checked(table), "refuse": _named(Refusal, table.get("refuse"))})


def _size(entry: Any) -> Size:
    if isinstance(entry, int):
        return Size(number=entry)
    if isinstance(entry, str):
        return Size(field=entry)
    return Size(**_checked(entry))


def _rows(table: Mapping[str, Any], placement: str) -> Iterator[Row]:
    # in front of a pre-norm the centred extra coordinates are 0: any weight is exact there
    extra = "free" if placement == "pre" else "zero"
    for name, entry in table.items():
        for values in entry if isinstance(entry, list) else [entry]:
            yield Row(name=name, **{"extra": extra, **_checked(values)})


def parse_family(where: str, table: Mapping[str, Any]) -> Family:
    """Make a `Family` from a parsed TOML table; a TableError names all that is wrong with it."""
    _refuse(table_faults(where, table))
    norm = Norm(**_checked(table["norm"]))
    depth = _checked(table.get("depth", {}))
    family = Family(
        **{key: value for key, value in _checked(table).items() if key in _PLAIN},
        norm=norm,
        attention=Attention(**_checked(table["attention"])),
        config={k: _size(v) for k, v in table["config"].items() if v != []},
        refuse=_named(Refusal, table.get("refuse")),
        spaces={space.name: space for space in _named(SpaceSpec, table["spaces"])},
        classes={name: ModelClass(**_checked(entry)) for name, entry in table["classes"].items()},
        zero_in_identity=depth.get("zero", ()),
        inner_norms=depth.get("inner_norms", ()),
        outer_norm=depth.get("outer_norm") or None,
        refuse_depth=_named(Refusal, depth.get("refuse")),
        in_place=depth.get("in_place"),
        parts={part: tuple(_rows(rows, norm.placement)) for part, rows in table["tensors"].items()},
        runtimes=_checked(table.get("runtimes", {})),
        dense=_dense(table.get("dense")),
        kinds=_checked(table.get("kinds", {})),
        states=_checked(table.get("states", {})),
        older=_named(OlderKey, table.get("older")),
    )
    _refuse(_reference_faults(where, family))
    return family


def _reference_faults(where: str, family: Family) -> list[str]:
    """Stacks, spaces, sizes and parts that are used but not defined."""
    config, spaces, stacks, faults = family.config, family.spaces, family.stacks, list[str]()

    def check(user: str, known: Mapping[str, Any], *used: str | None) -> None:
        unknown = (one for one in used if one is not None and one not in known)
        faults.extend(f"{where}: {user} uses {one!r}{nearest(one, known)}" for one in unknown)

    for stack, size in stacks.items():
        check(f"stack {stack}", config, size)
    check("spaces.stream", spaces, "stream")
    check("config.stream", config, "stream")
    for name, space in spaces.items():
        check(f"spaces.{name}", spaces, space.of, space.untied, *space.blocks)
        check(f"spaces.{name}", config, space.heads, space.size, space.chosen, *space.groups)
    check("attention.divisor", config, family.attention.divisor)
    for name, model_class in family.classes.items():
        check(name, family.parts, *model_class.parts)
        check(name, stacks, *model_class.stacks)
        check(name, spaces, model_class.output)
        check(name, config, *model_class.repeats.values(), model_class.cache)
    for key, entry in config.items():
        check(f"config.{key}", config, None if entry.follows == NOTHING else entry.follows)
    for kind, texts in family.kinds.items():
        check(f"kinds.{kind}", CONDITIONS, *(condition_of(text)[1] for text in texts))
    for kind, keys in family.states.items():
        check("states", family.kinds, kind)
        check(f"states.{kind}", config, *keys)
    kinds = {"first": 0, "last": 0, **family.kinds}
    every = [row for rows in family.parts.values() for row in rows]
    for space in family.mixtures:
        check(f"spaces.{space.name}", {row.name: row for row in every}, space.asleep)
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
        result[name] = given if is_whole else [{**one, **given} for one in before]
    return result


def _extended(where: str, table: dict[str, Any]) -> dict[str, Any]:
    """A table with what it takes from the one that it extends."""
    base = table.pop("extends", None)
    if base is None:
        return table
    if base not in supported_families():
        raise GrowthError(f"{where}.extends: {base!r}{nearest(str(base), supported_families())}")
    return _merged(_table(base), table)


@cache
def _table(model_type: str) -> dict[str, Any]:
    file = resources.files("growkern.families") / f"{model_type}.toml"
    table = parse_toml(file.read_text(encoding="utf-8"))
    return _extended(f"{model_type}.toml", table)


@cache
def load_family(model_type: str) -> Family:
    """The family of a Hugging Face `model_type`."""
    known = supported_families()
    if model_type not in known:
        raise GrowthError(
            f"model_type {model_type!r} has no family table; supported: {', '.join(known)}"
        )
    return parse_family(f"{model_type}.toml", _table(model_type))


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


def dense_families(model_type: str) -> tuple[str, ...]:
    """The families of dense models that can become such a mixture."""
    dense = load_family(model_type).dense if model_type in supported_families() else None
    return dense.of if dense else ()


@cache
def supported_families() -> tuple[str, ...]:
    """The model types that have a table, sorted."""
    files = resources.files("growkern.families").iterdir()
    return tuple(sorted(f.name[: -len(".toml")] for f in files if f.name.endswith(".toml")))
