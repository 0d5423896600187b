"""Reads the arguments of `growkern.evaluate` from a TOML file.

    [evaluate]   model, text or dataset, tokenizer, seed, batch_size, sequence_length, ...

The keys are the arguments of the function. Paths are relative to the folder of the file.
"""

from __future__ import annotations

import glob
import inspect
import typing
from dataclasses import MISSING, field, fields, make_dataclass
from pathlib import Path
from typing import Any

from growkern.arguments import as_list
from growkern.errors import GrowthError, nearest
from growkern.growth.source import is_hub_name
from growkern.train.dataset.options import DataSection
from growkern.train.evaluation.evaluate import FOR_TRAINING, evaluate
from growkern.train.toml import read_toml, to_dataclass

PATHS = ("model", "dataset", "tokenizer", "cache")


# what a file may give for arguments whose default does not tell their type
KINDS: dict[str, Any] = {
    "model": str,
    "text": str | tuple[str, ...],
    "tokenizer": str | None,
}
TABLE = "evaluate"
# arguments that are not keys; `data` stands for the options of the data
NOT_KEYS = ("progress", "data")
EMPTY = inspect.Parameter.empty


def section() -> type[Any]:
    """A dataclass of the arguments of an evaluation that a file may give."""
    keys = [
        (key, KINDS.get(key, type(x.default)), x.default)
        for key, x in inspect.signature(evaluate).parameters.items()
        if key not in NOT_KEYS
    ]
    kinds, options = typing.get_type_hints(DataSection), fields(DataSection)
    keys += [(x.name, kinds[x.name], x.default) for x in options if x.name not in FOR_TRAINING]
    return make_dataclass(
        TABLE,
        [(k, kind, field(default=MISSING if x is EMPTY else x)) for k, kind, x in keys],
        frozen=True,
    )


def read_arguments(path: str | Path) -> dict[str, Any]:
    """The arguments of an evaluation from a file; its paths then do not depend on their folder."""
    path = Path(path)
    tables = read_toml(path)
    for key, table in tables.items():
        if key != TABLE or not isinstance(table, dict):
            raise GrowthError(f"{path} has no table {key!r}{nearest(key, [TABLE])}")
    if TABLE not in tables:
        raise GrowthError(f"{path} has no table [{TABLE}]: add it, with the key model")
    given = to_dataclass(section(), tables[TABLE], str(path), TABLE)
    arguments = {key: getattr(given, key) for key in tables[TABLE]}
    base = path.parent
    places = {key: base / x for key, x in arguments.items() if key in PATHS and x is not None}
    # a name that is no directory is one on the Hub
    if not places["model"].exists() and is_hub_name(arguments["model"], base):
        del places["model"]
    if "dataset" in places and not (arguments["dataset"] and places["dataset"].is_dir()):
        del places["dataset"]
    arguments |= {key: str(place) for key, place in places.items()}
    if "text" in arguments:
        arguments["text"] = [_text_of(base, name) for name in as_list(arguments["text"])]
    return arguments


def _text_of(base: Path, name: str) -> str:
    """A file, a folder or a pattern of texts. Brackets in the name of `base` are no pattern."""
    place = base / name
    return str(place if place.exists() else Path(glob.escape(str(base))) / name)
