"""Checks of the kinds of arguments. Each error names the argument, its value and what to give."""

from __future__ import annotations

import hashlib
import math
import operator
import os
import reprlib
import types
import typing
from collections.abc import Callable, Mapping
from numbers import Real
from pathlib import Path
from typing import Any, NamedTuple

from growkern.errors import GrowthError, a_kind, nearest

# PyTorch takes 63 bits, NumPy 32
MOST_SEED, MOST_NUMPY_SEED = (1 << 63) - 1, (1 << 32) - 1


class Limit(NamedTuple):
    """The values that a number may have."""

    inside: Callable[[float], bool]
    must: str  # the same in words


# written so that NaN fails. math.isinf cannot be traced by torch.compile
POSITIVE = Limit(lambda x: 0 < x < math.inf, "be positive and finite")
NOT_NEGATIVE = Limit(lambda x: 0 <= x < math.inf, "be 0 or more, and finite")
SHARE = Limit(lambda x: 0 <= x <= 1, "lie in [0, 1]")


# types that a field may have, in words
PLAIN = {bool: "true or false", int: "a whole number", float: "a number", str: "a text"}


def between(least: int, most: int) -> Limit:
    """The limit of a whole number."""
    return Limit(lambda x: least <= x <= most, f"lie in {least} .. {most}")


def choices(kind: Any) -> tuple[Any, ...]:
    """The values that a type names, if it is a Literal or one of several types."""
    if typing.get_origin(kind) is typing.Literal:
        return typing.get_args(kind)
    return tuple(value for option in typing.get_args(kind) for value in choices(option))


def check_fields(record: Any, section: str = "") -> None:
    """Check the fields of a dataclass: plain values by their types, and numbers by its `LIMITS`.

    `section` is that of a run file, for the message.
    """
    kinds = typing.get_type_hints(type(record))
    for name, value in vars(record).items():
        full = f"{section}.{name}" if section else name
        if value is None and type(None) in typing.get_args(kinds[name]):
            continue
        is_union = typing.get_origin(kinds[name]) in (types.UnionType, typing.Union)
        options = typing.get_args(kinds[name]) if is_union else (kinds[name],)
        plain = [kind for kind in options if kind is not type(None)]
        if all(kind in PLAIN for kind in plain) and not any(_is_of(value, x) for x in plain):
            must = " or ".join(PLAIN[kind] for kind in plain)
            raise GrowthError(f"{full} is {reprlib.repr(value)}: it must be {must}")
        limit = record.LIMITS.get(name)
        if limit is not None and not limit.inside(value):
            raise GrowthError(f"{full} is {value}: it must {limit.must}")
        known = choices(kinds[name])
        # a sequence in place of a word was checked by who read it
        is_list = isinstance(value, tuple) and any(typing.get_origin(x) is tuple for x in options)
        if known and not is_list and value not in known:
            others = [field for field in kinds if value in choices(kinds[field])]
            hint = f": it is a value of {others[0]}" if others else nearest(str(value), known)
            raise GrowthError(f"{full} is {reprlib.repr(value)}{hint}")


def _is_of(value: Any, kind: type) -> bool:
    if kind in (int, float) and not isinstance(value, bool):
        return hasattr(value, "__index__") if kind is int else isinstance(value, Real)
    return isinstance(value, kind) and (kind is bool or not isinstance(value, bool))


def whole_number(name: str, value: Any, wanted: str = "a whole number") -> int:
    """An argument as an int. Integers of NumPy and of other libraries count as whole numbers."""
    try:
        if isinstance(value, bool):
            raise TypeError
        return operator.index(value)
    except TypeError:
        raise GrowthError(f"{name}={reprlib.repr(value)}: expected {wanted}") from None


def real_number(name: str, value: Any) -> float:
    """An argument as a float."""
    try:
        if isinstance(value, bool) or not isinstance(value, Real):
            raise TypeError
        return float(value)
    except (TypeError, OverflowError):
        raise GrowthError(f"{name}={reprlib.repr(value)}: expected a number") from None


def path_of(name: str, value: Any, wanted: str = "the path of a directory") -> Path:
    """An argument as a path."""
    check_kind(name, value, (str, os.PathLike), wanted)
    return Path(value)


def check_kind(name: str, value: Any, kind: type | tuple[type, ...], wanted: str) -> None:
    """Refuse an argument that is of no such class."""
    if not isinstance(value, kind):
        raise GrowthError(f"{name} is {a_kind(value)}: give {wanted}")


def check_steps(steps: int, given: Mapping[str, float | None], unit: str = "steps") -> None:
    """Refuse step numbers and counts of steps, by their names, beyond the end of a training run."""
    for name, value in given.items():
        if value is not None and value > steps:
            raise GrowthError(f"{name} is {value}: it must not be more than the {steps} {unit}")


def as_list(one_or_many: Any) -> list[Any]:
    """The values of a list or tuple; a single value becomes a list of one."""
    return list(one_or_many) if isinstance(one_or_many, list | tuple) else [one_or_many]


def check_seed(seed: int) -> int:
    """The seed as an int, if a generator of random numbers takes it."""
    seed = whole_number("seed", seed)
    if not 0 <= seed <= MOST_SEED:
        raise GrowthError(f"seed is {seed}: it must lie in 0 .. {MOST_SEED}")
    return seed


def seed_of_process(seed: int, rank: int) -> int:
    """A seed for one of several processes: of each seed and rank another one."""
    digest = hashlib.sha256(f"{seed} {rank}".encode()).digest()
    return int.from_bytes(digest[:8], "little") & MOST_SEED
