"""Reads the config.json of a checkpoint: refuses damaged and hostile ones before any work.

The raw JSON is checked first (`checks`). Only then does transformers see it. Every command
reads configs here.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NoReturn

import torch
import transformers
from transformers.utils import GENERATION_CONFIG_NAME

from growkern.errors import GrowthError
from growkern.families.family import Family
from growkern.families.load import load_family, supported_families
from growkern.files import parse_json, read_bounded, read_json
from growkern.growth.source.checks import check_config_values, check_names
from growkern.growth.source.files import METADATA_FILE, refuse_links_out
from growkern.growth.source.refused import refuse_directory
from growkern.package import DOCS

# config fields that count experts
EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
# the share of a model's names that a family must have to be worth naming
LEAST = 0.5
# of a model's layers; more of them add no names
LAYERS = 2

# the largest configs of the Hub, with 21,000 named labels, have 2 MB
MOST_BYTES, MOST_VALUES = 4_000_000, 100_000
# a chat model has 1 kB, one with suppressed tokens 100 kB
MOST_GENERATION_BYTES, MOST_GENERATION_VALUES = 1_000_000, 100_000

# the end of a message about a name that is no directory
ON_THE_HUB = "; a model on the Hub is named ORGANISATION/NAME"


def read_config(directory: Path, *, any_family: bool = False, family: Family | None = None) -> Any:
    """The Hugging Face config of a checkpoint directory. Runs no code and asks no hub.

    A checkpoint of `torch.distributed.checkpoint` may have its config in the directory above. A
    config is refused if it is damaged, too large, links to somewhere else, names code of a hub, or
    has values that make no model.
    """
    return read_config_file(directory, any_family=any_family, family=family)[0]


def read_config_file(
    directory: Path, *, any_family: bool = False, family: Family | None = None
) -> tuple[Any, dict[str, Any]]:
    """`read_config`, and the JSON object of the file: transformers drops some of its keys."""
    file = config_directory(directory) / "config.json"
    refuse_links_out(file, file.parent)
    data = read_json(file, MOST_BYTES, "config", MOST_VALUES)
    check_config(file, data, any_family=any_family, family=family)
    try:
        config = transformers.AutoConfig.from_pretrained(
            file.parent, trust_remote_code=False, local_files_only=True
        )
    except Exception as error:
        raise GrowthError(f"{file}: {_last_line(error)}") from error
    return config, data


def check_config(
    file: Path, data: Any, *, any_family: bool = False, family: Family | None = None
) -> None:
    """Refuse the raw JSON of a config that makes no model.

    With `any_family`, models without a table are fine. `family` is a table of one's own.
    """
    kind = data.get("model_type") if isinstance(data, dict) else None
    if not isinstance(kind, str):
        raise GrowthError(
            f'{file}: no "model_type", the name of its architecture: copy the config.json of the '
            "model there"
        )
    if family is not None and family.model_type != kind:
        raise GrowthError(
            f'{file}: "model_type" is {kind[:100]!r}, and the table is one of '
            f"{family.model_type!r}: give the table of this model"
        )
    if family is None and kind in supported_families():
        family = load_family(kind)
    elif family is None and not any_family:
        refuse_unknown(kind, data)
    if kind not in transformers.CONFIG_MAPPING:
        raise GrowthError(
            f"{file}: transformers {transformers.__version__} has no model_type {kind[:100]!r}; "
            "code of a checkpoint is never run"
        )
    check_config_values(file, data, transformers.CONFIG_MAPPING[kind], family)


def config_from(data: dict[str, Any]) -> Any:
    """The Hugging Face config of JSON data that `check_config` accepted."""
    try:
        return transformers.CONFIG_MAPPING[data["model_type"]].from_dict(dict(data))
    except Exception as error:
        raise GrowthError(_last_line(error)) from error


def _last_line(error: Exception) -> str:
    """transformers raises several types of exceptions for a bad config, some of many lines."""
    lines = str(error).strip().splitlines() or [type(error).__name__]
    # the class of an error within the error
    return re.sub(r"^\w+Error: ", "", lines[-1].strip())[:300]


def config_directory(directory: Path) -> Path:
    """The directory that holds the config and the companions of a checkpoint."""
    file = directory / "config.json"
    if not directory.is_dir():
        refuse_directory(directory)
        named = "" if directory.is_absolute() or len(directory.parts) > 1 else ON_THE_HUB
        raise GrowthError(f"{directory}: no such directory{named}")
    if (directory / METADATA_FILE).is_file() and not file.is_file():
        # trainers save sharded weights in a subdirectory of the model's directory
        file = directory.parent / "config.json"
    if not file.is_file():
        refuse_directory(directory)
        raise GrowthError(f"{directory}: no config.json; expected a Hugging Face checkpoint")
    return file.parent


def read_generation(directory: Path) -> Any | None:
    """How a checkpoint generates: the `GenerationConfig` that its model would have when loaded.

    It comes from generation_config.json, or from config.json, where older models keep it. None if
    transformers can read neither. A file that is too large, links to somewhere else, or replaces
    methods of transformers is refused. `directory` is that of `config_directory`.
    """
    file, read = directory / GENERATION_CONFIG_NAME, transformers.GenerationConfig.from_pretrained
    is_there = file.is_symlink() or file.exists()
    if is_there:
        refuse_links_out(file, directory)
        data = read_bounded(file, MOST_GENERATION_BYTES, "generation config")
        values = None
        with contextlib.suppress(ValueError):
            values = parse_json(data, MOST_GENERATION_VALUES)
        if not isinstance(values, dict):
            return None
        check_names(file, values, transformers.GenerationConfig)
    try:
        if is_there:
            return read(directory, local_files_only=True)
        return read(directory, config_file_name="config.json", _from_model_config=True)
    except Exception:
        # a damaged file raises several types of errors; the weights can be grown without it
        return None


def refuse_unknown(model_type: str, data: Mapping[str, Any]) -> NoReturn:
    """Refuse the JSON of a config without a table; the error says what is known of such a model."""
    known = _what_it_is(model_type, data) or f"supported: {', '.join(supported_families())}"
    raise GrowthError(f"model_type {model_type!r} has no family table; {known}")


def _what_it_is(model_type: str, config: Mapping[str, Any]) -> str:
    """A clause about a model without a table, or nothing."""
    inner = config.get("text_config")
    kind = inner.get("model_type") if isinstance(inner, Mapping) else None
    if kind in supported_families():
        return f"its text_config is a {kind}, which has a table: grow that part by itself"
    # some configs have a config of the text or of the FFN inside
    for part in (config, *(x for x in config.values() if isinstance(x, Mapping))):
        for name in EXPERTS:
            # dense models of such a class say 0 or 1
            if isinstance(count := part.get(name), int) and count > 1:
                return f"it is a mixture of experts ({name}={count})"
    names = _names_of(model_type)
    if not names:
        return ""
    # of families with equally many of its names, the one with the fewest others
    known = {kind: _names_in_table(kind) for kind in supported_families()}
    nearest = max(known, key=lambda kind: (len(names & known[kind]), -len(known[kind])))
    share = len(names & known[nearest]) / len(names)
    if share < LEAST:
        return ""
    return (
        f"nearest: {nearest} ({share:.0%} of its tensor names). A table of your own, by --family "
        f"(in Python family=...), may extend it: {DOCS}/add_model.md"
    )


def _names_of(model_type: str) -> set[str]:
    """The names of the tensors of such a model, of any sizes; none if transformers has no such."""
    try:
        # the values of a file that is refused could take any time
        config = transformers.CONFIG_MAPPING[model_type]()
        config.num_hidden_layers = min(LAYERS, config.num_hidden_layers)
        with torch.device("meta"):
            return _short(transformers.AutoModel.from_config(config).state_dict())
    except Exception:
        # of any type: the model is refused in any case
        return set()


def _names_in_table(model_type: str) -> set[str]:
    """The names of a family's tensors in any of its bodies."""
    family, names = load_family(model_type), set[str]()
    parts = {part for model_class in family.classes.values() for part in model_class.body}
    for row in (row for part in parts for row in family.tensors[part]):
        names |= {f"{row.name}.weight", f"{row.name}.bias"} if row.norm else {row.name}
    return _short(names)


def _short(names: Iterable[str]) -> set[str]:
    """Names behind the number of a layer: what is before it differs between classes."""
    behind = (re.split(r"\.(?:\d+|\{l\})\.", name, maxsplit=1)[-1] for name in names)
    return {".".join(name.split(".")[-3:]) for name in behind}
