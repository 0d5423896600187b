"""Checks that transformers reads a config as it was planned.

A config.json of a grown model has keys for older software too. Where transformers reads one of them
before the new key, a model loads without a word and computes something else.
"""

from __future__ import annotations

import json
import reprlib
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

import transformers

from growkern.errors import GrowthError
from growkern.families.family import Family

# they say where a config lies, who wrote it, and the class, which a plan has beside its config
NOT_COMPARED = ("_name_or_path", "transformers_version", "architectures")


def refuse_misread(
    place: str | Path, family: Family, planned: Any, read: Any, source: Any = None
) -> None:
    """Refuse a config that was read otherwise than planned; the message names the first field.

    Fields that only the config that was read has may be keys of other software. What its class
    does not keep of the `source`, a config too, may differ.
    """
    # what these say follows from other fields, whatever they said before
    kind = type(family.text(planned))
    free = {key.field for key in family.older if key.is_pattern or not hasattr(kind, key.field)}
    found = dict(_differences(_plain(planned), _plain(read), free))
    if found and source is not None:
        # T5 reads every head as tied, and loads one of its own all the same
        again = type(source)(**source.to_dict())
        for field, _ in _differences(_plain(source), _plain(again)):
            found.pop(field, None)
    for field, values in found.items():
        was, became = (reprlib.repr(value) for value in values)
        raise GrowthError(
            f"{place}: transformers {transformers.__version__} reads {field}={became} where the "
            f"plan has {was}: the grown model would compute something else"
        )


def is_same(planned: Any, config: Any) -> bool:
    """True if a config has all values of another one."""
    return not any(True for _ in _differences(_plain(planned), _plain(config)))


def _plain(config: Any) -> dict[str, Any]:
    """A config as JSON data: lists for tuples, and texts for keys that are numbers."""
    data: dict[str, Any] = json.loads(json.dumps(config.to_dict(), default=str))
    return data


def _differences(
    planned: Mapping[str, Any], read: Mapping[str, Any], free: Collection[str] = (), name: str = ""
) -> Iterator[tuple[str, tuple[Any, Any]]]:
    """The fields whose values differ, and both values; None where there is no such field."""
    # a config within a config may have keys of other software; other tables must be the same
    is_config = not name or "model_type" in planned
    for key in planned if is_config else sorted({*planned, *read}):
        old, new = planned.get(key), read.get(key)
        # the older name of `rope_type` beside it; models give their parts a dtype
        is_filled = (key == "type" and "rope_type" in read) or (key == "dtype" and old is None)
        if is_filled or key in NOT_COMPARED or (is_config and key in free):
            continue
        if isinstance(old, dict) and isinstance(new, dict):
            yield from _differences(old, new, free, f"{name}{key}.")
        # as texts, because NaN is not equal to itself
        elif json.dumps(old) != json.dumps(new):
            yield f"{name}{key}", (old, new)
