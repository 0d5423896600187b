"""Turns TOML tables into dataclasses, and checks them against the types of the fields."""

import dataclasses
import reprlib
import types
import typing
from pathlib import Path
from typing import Any, Literal, TypeVar, Union

from growkern.arguments import PLAIN
from growkern.errors import GrowthError, nearest
from growkern.files import parse_toml, read_bounded

T = TypeVar("T")

# a run file has about 2,000 bytes; long lists of text files may be given as patterns
MOST_BYTES = 256_000
# TOML has integers of 64 bits
INTEGERS = range(-(1 << 63), 1 << 63)


def read_toml(path: Path) -> dict[str, Any]:
    """Parse a TOML file."""
    if path.is_dir():
        raise GrowthError(f"{path} is a directory: give a file of settings (TOML)")
    try:
        return parse_toml(read_bounded(path, MOST_BYTES, "run file").decode())
    except (ValueError, RecursionError) as error:
        why = str(error).removeprefix(f"{path}: ")
        raise GrowthError(f"cannot read {path} as TOML: {why}") from error


def to_dataclass(cls: type[T], table: dict[str, Any], file: str, key: str = "") -> T:
    """Make a dataclass from a table. Fields that are dataclasses are made from the inner tables.

    Error messages name the file and the dotted key of the table in it.
    """
    place = f"{file}: [{key}]" if key else file
    fields = {field.name: field for field in dataclasses.fields(cls)}  # type: ignore[arg-type]
    hints = typing.get_type_hints(cls)
    kinds = {name: hints[name] for name in fields}
    for name in table:
        if name not in kinds:
            raise GrowthError(f"{place} has no key {reprlib.repr(name)}{nearest(name, kinds)}")
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


def _convert(value: Any, kind: Any, file: str, key: str, described: str = "") -> Any:
    """Convert a TOML value to the type of its field, `described` in an error message."""
    origin, options = typing.get_origin(kind), typing.get_args(kind)
    if origin in (types.UnionType, Union):
        # TOML has no null: the value of an optional key always has another type
        kinds = [option for option in options if option is not types.NoneType]
        is_list = isinstance(value, list)
        fitting = [option for option in kinds if (typing.get_origin(option) is tuple) == is_list]
        described = " or ".join(map(_describe, kinds))
        return _convert(value, (fitting or kinds)[0], file, key, described)
    if kind is Any:
        return value
    if dataclasses.is_dataclass(kind) and isinstance(kind, type) and isinstance(value, dict):
        return to_dataclass(kind, value, file, key)
    if origin is Literal and isinstance(value, str):
        if value not in options:
            raise GrowthError(f"{file}: {key} is {reprlib.repr(value)}{nearest(value, options)}")
        return value
    if origin is tuple and isinstance(value, list):
        return tuple(
            _convert(item, options[0], file, f"{key}[{i}]") for i, item in enumerate(value)
        )
    if type(value) is int and value not in INTEGERS:
        raise GrowthError(f"{file}: {key} is {reprlib.repr(value)}: an integer has 64 bits")
    if origin is dict and isinstance(value, dict):
        return {
            name: _convert(item, options[1], file, f"{key}.{name}") for name, item in value.items()
        }
    if kind is float and type(value) is int:
        return float(value)
    if isinstance(kind, type) and type(value) is kind:
        return value
    given = f"{reprlib.repr(value)} ({type(value).__name__})"
    raise GrowthError(f"{file}: {key} is {given}: it must be {described or _describe(kind)}")


def _describe(kind: Any) -> str:
    if typing.get_origin(kind) is tuple:
        return f"a list, each {_describe(typing.get_args(kind)[0])}"
    if typing.get_origin(kind) is dict:
        return "a table"
    if typing.get_origin(kind) is Literal:
        return " or ".join(map(repr, typing.get_args(kind)))
    return "a table" if dataclasses.is_dataclass(kind) else PLAIN[kind]
