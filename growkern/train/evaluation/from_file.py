"""Reads the arguments of `growkern.evaluate` and `growkern.finetune` from a TOML file.

A file may have both tables. Their keys are the arguments of the functions:

    [evaluate]   model, text or dataset, tokenizer, seed, batch_size, sequence_length, ...
    [finetune]   model, text, tokenizer, seeds, seed, epochs, batch_size, learning_rate, ...

Paths are relative to the folder of the file.
"""

from __future__ import annotations

import glob
import inspect
import typing
from dataclasses import field, fields, make_dataclass
from pathlib import Path
from typing import Any

import growkern
from growkern.errors import GrowthError, nearest
from growkern.growth.source.hub import ID
from growkern.train.dataset.options import DataSection
from growkern.train.evaluation.evaluate import FOR_TRAINING
from growkern.train.toml import read_toml, to_dataclass

PATHS = ("tokenizer", "cache")


# what a file may give for arguments whose default does not tell their type
KINDS: dict[str, dict[str, Any]] = {
    "evaluate": {"model": str, "text": str | tuple[str, ...], "tokenizer": str | None},
    "finetune": {"model": str, "text": tuple[str, ...], "tokenizer": str | None},
}
# arguments that are not keys; `data` stands for the options of the data
NOT_KEYS = ("progress", "data")


def section_of(name: str) -> type[Any]:
    """A dataclass of the arguments of an evaluation that a file may give."""
    given = inspect.signature(getattr(growkern, name)).parameters.items()
    found = [
        (key, KINDS[name].get(key, type(one.default)), one.default)
        for key, one in given
        if key not in NOT_KEYS
    ]
    if name == "evaluate":
        kinds, options = typing.get_type_hints(DataSection), fields(DataSection)
        found += [(x.name, kinds[x.name], x.default) for x in options if x.name not in FOR_TRAINING]
    keys = [
        (key, kind) if default is inspect.Parameter.empty else (key, kind, field(default=default))
        for key, kind, default in found
    ]
    return make_dataclass(name, keys, frozen=True)


def read_arguments(path: str | Path, name: str) -> dict[str, Any]:
    """The arguments of an evaluation from a file; its paths then do not depend on their folder."""
    path = Path(path)
    tables = read_toml(path)
    for key, table in tables.items():
        if key not in KINDS or not isinstance(table, dict):
            raise GrowthError(f"{path} has no table {key!r}{nearest(key, KINDS)}")
    if name not in tables:
        raise GrowthError(f"{path} has no table [{name}]: add it, with the key model")
    section = to_dataclass(section_of(name), tables[name], str(path), name)
    found = {key: getattr(section, key) for key in tables[name]}
    base = path.parent
    for key in PATHS:
        if found.get(key) is not None:
            found[key] = str(base / found[key])
    # a name that is no directory is one on the Hub
    if (base / found["model"]).exists() or not ID.fullmatch(found["model"]):
        found["model"] = str(base / found["model"])
    if found.get("dataset") and (base / found["dataset"]).is_dir():
        found["dataset"] = str(base / found["dataset"])
    if "text" in found:
        text = [found["text"]] if isinstance(found["text"], str) else found["text"]
        found["text"] = [_text_of(base, one) for one in text]
    return found


def _text_of(base: Path, name: str) -> str:
    """A file, a folder or a pattern of texts. Brackets in the name of `base` are no pattern."""
    place = base / name
    return str(place if place.exists() else Path(glob.escape(str(base))) / name)
