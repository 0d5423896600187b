"""Turns TOML tables into dataclasses and back, and checks them against the types of the fields."""

import dataclasses
import json
import sys
import types
import typing
from pathlib import Path
from typing import Any, Literal, TypeVar, Union

from growkern.errors import GrowthError, nearest

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

T = TypeVar("T")


def read_toml(path: Path) -> dict[str, Any]:
    """Parse a TOML file.

    Raises:
        GrowthError: the file cannot be read or is not TOML.
    """
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise GrowthError(f"cannot read {path}: {error}") from error


def to_dataclass(cls: type[T], table: dict[str, Any], file: str, key: str = "") -> T:
    """Make a dataclass from a table. Fields that are dataclasses are made from the inner tables.

    Args:
        cls: the dataclass.
        table: the parsed table.
        file: name of the file, for error messages.
        key: dotted key of the table in the file, for error messages.

    Returns:
        An instance of `cls`.

    Raises:
        GrowthError: unknown or missing keys, wrong types, or values that the class refuses.
    """
    place = f"{file}: [{key}]" if key else file
    kinds = typing.get_type_hints(cls)
    for name in table:
        if name not in kinds:
            raise GrowthError(f"{place} has no key {name!r}{nearest(name, kinds)}")
    fields = {field.name: field for field in dataclasses.fields(cls)}  # type: ignore[arg-type]
    missing = [n for n, f in fields.items() if n not in table and f.default is dataclasses.MISSING]
    if missing:
        raise GrowthError(f"{place} lacks {', '.join(map(repr, missing))}")
    values = {
        name: _convert(value, kinds[name], file, f"{key}.{name}" if key else name)
        for name, value in table.items()
    }
    try:
        return cls(**values)
    except GrowthError as error:
        raise GrowthError(f"{place}: {error}") from error


def _convert(value: Any, kind: Any, file: str, key: str) -> Any:
    """Convert a TOML value to the type of its field."""
    origin, options = typing.get_origin(kind), typing.get_args(kind)
    if origin in (types.UnionType, Union):
        # TOML has no null: the value of an optional key always has the other type
        (kind,) = (option for option in options if option is not types.NoneType)
        return _convert(value, kind, file, key)
    if dataclasses.is_dataclass(kind) and isinstance(kind, type) and isinstance(value, dict):
        return to_dataclass(kind, value, file, key)
    if origin is Literal and isinstance(value, str):
        if value not in options:
            raise GrowthError(f"{file}: {key} is {value!r}{nearest(value, options)}")
        return value
    if origin is tuple and isinstance(value, list):
        return tuple(
            _convert(item, options[0], file, f"{key}[{i}]") for i, item in enumerate(value)
        )
    if kind is float and type(value) is int:
        return float(value)
    if isinstance(kind, type) and type(value) is kind:
        return value
    raise GrowthError(
        f"{file}: {key} is {value!r} ({type(value).__name__}): it must be {_describe(kind)}"
    )


def _describe(kind: Any) -> str:
    if typing.get_origin(kind) is tuple:
        return f"a list of {typing.get_args(kind)[0].__name__}"
    if typing.get_origin(kind) is Literal:
        return " or ".join(map(repr, typing.get_args(kind)))
    return "a table" if dataclasses.is_dataclass(kind) else str(kind.__name__)


def to_toml(value: Any) -> str:
    """Write a dataclass of dataclasses as a TOML document. Fields that are None are left out."""
    lines = []
    for section in dataclasses.fields(value):
        table = getattr(value, section.name)
        if table is None:
            continue
        lines.append(f"[{section.name}]")
        for field in dataclasses.fields(table):
            item = getattr(table, field.name)
            if item is not None:
                # JSON strings, numbers, booleans and lists of them are valid TOML, except for DEL
                text = json.dumps(item, ensure_ascii=False).replace("\x7f", "\\u007f")
                lines.append(f"{field.name} = {text}")
        lines.append("")
    return "\n".join(lines)
