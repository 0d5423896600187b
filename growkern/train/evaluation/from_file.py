"""Reads the arguments of `growkern.evaluate` and `growkern.finetune` from a TOML file.

A file may have both tables. Their keys are the arguments of the functions:

    [evaluate]   model, text or dataset, tokenizer, seed, batch_size, sequence_length, ...
    [finetune]   model, text, tokenizer, seeds, seed, epochs, batch_size, learning_rate, ...

Paths are relative to the folder of the file.
"""

from __future__ import annotations

import glob
import typing
from dataclasses import dataclass, fields, make_dataclass
from pathlib import Path
from typing import Any

from growkern.errors import GrowthError, nearest
from growkern.growth.source.hub import ID
from growkern.train.dataset.options import DataSection
from growkern.train.evaluation.evaluate import FOR_TRAINING
from growkern.train.toml import read_toml, to_dataclass

PATHS = ("tokenizer", "cache")


@dataclass(frozen=True)
class _Evaluate:
    """The arguments of `growkern.evaluate` that are not options of the data."""

    model: str
    text: str | tuple[str, ...] = ()
    tokenizer: str | None = None
    seed: int = 0
    batch_size: int = 16
    confidence: float = 0.95


@dataclass(frozen=True)
class _Finetune:
    """The arguments of `growkern.finetune`."""

    model: str
    text: tuple[str, ...]
    tokenizer: str | None = None
    seeds: int = 3
    seed: int = 0
    epochs: float = 3.0
    batch_size: int = 16
    learning_rate: float = 5e-5
    sequence_length: int = 128
    passages: int = 500
    confidence: float = 0.95


def _of_data() -> list[tuple[str, Any, Any]]:
    """The options of the data of an evaluation: name, type and default."""
    kinds = typing.get_type_hints(DataSection)
    found = [field for field in fields(DataSection) if field.name not in FOR_TRAINING]
    return [(field.name, kinds[field.name], field.default) for field in found]


SECTIONS: dict[str, type[Any]] = {
    "evaluate": make_dataclass("Evaluate", _of_data(), bases=(_Evaluate,), frozen=True),
    "finetune": _Finetune,
}


def read_arguments(path: str | Path, name: str) -> dict[str, Any]:
    """The arguments of an evaluation, from a file.

    Returns:
        The keyword arguments that the file gives, with paths that do not depend on its folder.
    """
    path = Path(path)
    tables = read_toml(path)
    for key, table in tables.items():
        if key not in SECTIONS or not isinstance(table, dict):
            raise GrowthError(f"{path} has no table {key!r}{nearest(key, SECTIONS)}")
    if name not in tables:
        raise GrowthError(f"{path} has no table [{name}]: add it, with the key model")
    section = to_dataclass(SECTIONS[name], tables[name], str(path), name)
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
