"""Checks of the kinds of arguments. Each error names the argument, its value and what to give."""

from __future__ import annotations

import operator
import os
import reprlib
from collections.abc import Mapping
from numbers import Real
from pathlib import Path
from typing import Any

from growkern.errors import GrowthError


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
    """Refuse an argument of another kind.

    Args:
        kind: its class, or several of which it may be one.
    """
    if not isinstance(value, kind):
        raise GrowthError(f"{name} is a {type(value).__name__}: give {wanted}")


def check_steps(steps: int, given: Mapping[str, float | None], unit: str = "steps") -> None:
    """Refuse step numbers that a training run does not reach.

    Args:
        steps: optimizer steps of the run.
        given: step numbers and counts of steps by their names, for the message.
        unit: name of `steps`, for the message.
    """
    for name, value in given.items():
        if value is not None and value > steps:
            raise GrowthError(f"{name} is {value}: it must not be more than the {steps} {unit}")


def as_list(one_or_many: Any) -> list[Any]:
    """The values of a list or tuple; a single value becomes a list of one."""
    return list(one_or_many) if isinstance(one_or_many, list | tuple) else [one_or_many]
