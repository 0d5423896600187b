"""Writes and reads `lineage.json`, the record of how a grown checkpoint was made.

`growkern.verify`, `growkern.replay` and `growkern.fold` work from this file. It holds both configs,
the options and seeds, all maps and shares (key `maps`), and the origin of each tensor (key
`tensors`). Long vectors are stored as text (`growkern.growth.record.map_text`). The keys are a file
format: keep old files readable.
"""

from __future__ import annotations

import hashlib
import json
import reprlib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any, TypeVar, get_args, get_type_hints

import safetensors
import torch
import transformers

from growkern.arguments import path_of
from growkern.bounded import read_json
from growkern.errors import GrowthError
from growkern.growth.disk.shards import ShardLayout
from growkern.growth.history import (
    EARLIER,
    LINEAGE_FILE,
    MOST_LINEAGE_BYTES,
    History,
    history_from,
)
from growkern.growth.options import GrowthOptions
from growkern.growth.plan.growth_plan import GrowthPlan, plan_growth
from growkern.growth.record.origins import Origin, origin_of, space_from_dict, space_key, spaces_of
from growkern.growth.source.config import check_config, config_from
from growkern.growth.source.config_values import LAYERS
from growkern.growth.source.hub import hub_model, name_of
from growkern.growth.source.source import Source
from growkern.growth.space.layout import Layer
from growkern.growth.space.spaces import Space
from growkern.ops.expand.call import DTYPES as GROWN_DTYPES
from growkern.package import version

DTYPES = {str(dtype).removeprefix("torch."): dtype for dtype in GROWN_DTYPES}
T = TypeVar("T")

# the key of a record whose weights were trained or changed after the growth
TRAINED = "trained_since"
# where there is a record, for messages
RECORD = f"a grown checkpoint, or its {LINEAGE_FILE}"


@dataclass(frozen=True)
class Settings:
    """Settings besides the plan that decide the bytes of a grown checkpoint.

    Attributes:
        backend: backend of the expansion kernel; None: chosen automatically.
        max_shard_size: bytes.
        allow_nonfinite: NaN and Inf in the source are grown, not refused.
    """

    backend: str | None = None
    max_shard_size: int = 5 * 10**9
    allow_nonfinite: bool = False

    def __post_init__(self) -> None:
        if self.max_shard_size < 1:
            raise GrowthError(f"max_shard_size={self.max_shard_size} must be positive")


def versions() -> dict[str, str]:
    """Versions of the packages that a growth's bytes depend on."""
    modules = (torch, transformers, safetensors)
    return {"growkern": version(), **{m.__name__: m.__version__ for m in modules}}


def source_files(source: Source) -> dict[str, dict[str, Any]]:
    """Size, time and header checksum of the source's files, to notice changes.

    Weights are not read. A model in memory has no files.
    """
    found: dict[str, dict[str, Any]] = {}
    if source.format is None:
        return found
    for name in sorted({header.file for header in source.headers.values()}):
        file = Path(name)
        header = source.format.read_header(file)
        found[file.name] = {
            "size": file.stat().st_size,
            "modified": file.stat().st_mtime_ns,
            "header": hashlib.sha256(header).hexdigest(),
        }
    return found


def identity(plan: GrowthPlan, layout: ShardLayout, settings: Settings) -> dict[str, Any]:
    """Everything that decides a growth's bytes. Runs with equal identities write equal files.

    The resume journal stores it, so that only the same growth resumes.
    """
    heads = {name: hashlib.sha256(head).hexdigest() for name, head in layout.heads.items()}
    return {
        # findings decide no byte, and a bound that is measured differs between kinds of CPUs
        **plan.summary(),
        "target config": config_dict(plan.large.config),
        "source": source_files(plan.source),
        "input": plan.source.stamps.identity() if plan.source.stamps else {},
        "backend": settings.backend or "",
        "max_shard_size": settings.max_shard_size,
        "files": {n: {"size": layout.sizes[n], "header": head} for n, head in heads.items()},
    }


def config_dict(config: Any) -> dict[str, Any]:
    """A whole config as JSON data, without the path that it was read from."""
    found = json.loads(config.to_json_string(use_diff=False))
    found.pop("_name_or_path", None)
    return dict(found)


# ------------------------------------------------------------------ writing


def record_of(plan: GrowthPlan) -> dict[str, Any]:
    """The part of `lineage.json` that follows from the plan, as JSON data."""
    record = {
        # findings may need weights, which a plan of a record does not have
        **(plan.to_dict() if "findings" in vars(plan) else plan.summary()),
        "source_config": config_dict(plan.small.config),
        "target_config": config_dict(plan.large.config),
        "source_dtype": str(plan.source.dtype).removeprefix("torch."),
        "maps": spaces_of(plan),
        "tensors": {task.name: origin_of(plan, task).to_dict() for task in plan.tasks},
    }
    return dict(json.loads(json.dumps(record)))


def lineage_text(
    plan: GrowthPlan, settings: Settings, files: Mapping[str, Any], *, trained: bool = False
) -> str:
    """`lineage.json` of a grown checkpoint. It does not depend on where directories are.

    Args:
        files: of `source_files`, before the growth.
        trained: whether the weights were trained or changed since the growth.
    """
    source, on_hub = plan.source.directory, hub_model(plan.source.directory)
    lineage = {
        **record_of(plan),
        "settings": vars(settings),
        "versions": versions(),
        "source": name_of(source) if source else "",
        **({"source_commit": on_hub.commit} if on_hub else {}),
        "source_files": without_times(files),
        EARLIER: records_in(plan.source.history),
        **({TRAINED: True} if trained else {}),
    }
    return json.dumps(lineage, indent=1, ensure_ascii=False) + "\n"


def records_in(history: History) -> list[Any]:
    """The records of the growths in a history, the latest first; None for one that is lost."""
    if history.plan is None:
        return [one if isinstance(one, dict) else None for one in history.records]
    text = lineage_text(history.plan, Settings(), {}, trained=True)
    return [*history_from(json.loads(text)).records]


def keep_lineage(history: History, directory: Path) -> None:
    """Write the record of the growths of a model that may have been trained since, if it is known.

    A record that is in the directory stays.
    """
    last, *earlier = records_in(history) or [None]
    if isinstance(last, dict) and not (directory / LINEAGE_FILE).exists():
        data = {**last, TRAINED: True, EARLIER: earlier}
        write_lineage(json.dumps(data, indent=1, ensure_ascii=False) + "\n", directory)


def write_lineage(text: str, directory: Path) -> None:
    """Write the text of `lineage_text` into a grown checkpoint."""
    (directory / LINEAGE_FILE).write_text(text, encoding="utf-8")


def without_times(files: Mapping[str, Any]) -> dict[str, Any]:
    """`source_files` as it is stored: copying a source changes the times of its files."""
    return {name: {k: v for k, v in f.items() if k != "modified"} for name, f in files.items()}


# ------------------------------------------------------------------ reading


@dataclass(frozen=True)
class Lineage:
    """A lineage file.

    Attributes:
        file: path of the file.
        data: its whole content.
        origins: where each target tensor comes from, by name.
        options, settings: of the growth.
        dtype, source_dtype: dtype of the target's weights and of the source's.
        source_config, target_config: Hugging Face configs.
        earlier: the growths that made the source.
    """

    file: Path
    data: Mapping[str, Any]
    origins: Mapping[str, Origin]
    options: GrowthOptions
    settings: Settings
    dtype: torch.dtype
    source_dtype: torch.dtype
    source_config: Any
    target_config: Any
    earlier: History

    @cached_property
    def _spaces(self) -> Any:
        return lru_cache(maxsize=64)(lambda key: space_from_dict(self.data["maps"][key]))

    def space(self, name: str, layer: Layer) -> Space:
        """The space that was used for tensors of this source layer.

        Raises:
            GrowthError: the record has no such map, or a damaged one.
        """
        own = space_key(name, layer)
        try:
            return self._spaces(own if own in self.data["maps"] else name)
        except MALFORMED as error:
            raise GrowthError(f"{self.file}: no map of {own}: {error!r}") from error


TABLES = ("options", "settings", "sizes", "maps", "tensors", "versions")
NEEDED = ("options", "settings", "tensors", "dtype", "source_dtype")
MALFORMED = (ValueError, KeyError, TypeError, AttributeError, IndexError, RecursionError)


def read_lineage(path: Path) -> Lineage:
    """Read a lineage file.

    Args:
        path: the file, or the directory of a grown checkpoint.

    Raises:
        GrowthError: the file is missing or damaged.
    """
    file = path / LINEAGE_FILE if path.is_dir() else path
    if not file.is_file():
        raise GrowthError(f"{path}: no {LINEAGE_FILE}: give {RECORD}")
    try:
        data = read_json(file, MOST_LINEAGE_BYTES, "lineage")
    except GrowthError as error:
        raise _no_record(file, str(error).removeprefix(f"{file}: ")) from error
    return lineage_of(file, data)


def lineage_of(file: Path, data: dict[str, Any]) -> Lineage:
    """A lineage from the content of its file."""
    try:
        if missing := [name for name in NEEDED if name not in data]:
            raise ValueError(f"it has no {missing[0]!r}")
        for name in TABLES:
            if not isinstance(data.get(name, {}), dict):
                raise ValueError(f"{name} is a {type(data[name]).__name__}")
        # records that are older than this option are of copies
        data["options"] = {"stream": "copies", **data["options"]}
        for name in ("source_config", "target_config"):
            _check_layers(data[name], len(data["tensors"]))
        return Lineage(
            file,
            data,
            {name: Origin.from_dict(entry) for name, entry in data["tensors"].items()},
            _typed(GrowthOptions, data["options"]),
            _typed(Settings, data["settings"]),
            DTYPES[data["dtype"]],
            DTYPES[data["source_dtype"]],
            _read_config(file, data["source_config"]),
            _read_config(file, data["target_config"]),
            History(records=history_from(data).records[1:]),
        )
    except GrowthError as error:
        why = str(error).removeprefix(f"{file}: ")
        raise _no_record(file, why) from error
    except MALFORMED as error:
        raise _no_record(file, _brief(error)) from error


def has_record(directory: Path | None) -> bool:
    """True if a directory has a lineage file."""
    return directory is not None and (directory / LINEAGE_FILE).is_file()


def read_lineage_of(grown: Path, lineage: str | Path | None = None) -> Lineage:
    """Read the record of a grown checkpoint, which may have been trained since.

    Args:
        lineage: the lineage file, or a directory with it; None: that of `grown`.

    Raises:
        GrowthError: the file is missing or damaged.
    """
    if lineage is not None:
        return read_lineage(path_of("lineage", lineage, RECORD))
    if not has_record(grown):
        raise GrowthError(
            f"{grown}: no {LINEAGE_FILE}: give a grown checkpoint; if this one was trained since, "
            f"add --lineage with the {LINEAGE_FILE} of the growth (in Python lineage=...)"
        )
    return read_lineage(grown)


def _no_record(file: Path, why: str) -> GrowthError:
    return GrowthError(f"{file}: not a growth record: {why}: give {RECORD}")


def _typed(cls: type[T], table: Mapping[str, Any]) -> T:
    """A dataclass of plain values, each of the type of its field.

    Raises:
        ValueError: a value has another type, or is an integer of more than 64 bits.
        KeyError: no such field.
    """
    kinds = get_type_hints(cls)
    for name, value in table.items():
        # of a Literal its choices, whose type counts here
        allowed = [
            kind if isinstance(kind, type) else type(kind)
            for kind in get_args(kinds[name]) or (kinds[name],)
        ]
        is_number = float in allowed and type(value) is int
        is_large = type(value) is int and value.bit_length() > 63
        if is_large or not (type(value) in allowed or is_number):
            raise ValueError(f"{name} is {reprlib.repr(value)}")
    return cls(**table)


def _brief(error: Exception) -> str:
    """The type and the text of an error that a damaged file caused; its values may be huge."""
    text = str(error)
    return f"{type(error).__name__}: {text if len(text) < 200 else text[:200] + '...'}"


def _check_layers(config: Any, tensors: int) -> None:
    """Refuse more layers than tensors were grown: building such a model could take minutes.

    Raises:
        ValueError: a config has them.
    """
    for field in LAYERS:
        layers = config.get(field)
        if isinstance(layers, int) and layers > tensors:
            raise ValueError(f"its config says {field}={layers}, but it has {tensors} tensors")


def _read_config(file: Path, data: Any) -> Any:
    check_config(file, data)
    return config_from(data)


def plan_from_lineage(source: Source, lineage: Lineage) -> GrowthPlan:
    """Make the plan of a lineage again, for this source.

    Raises:
        GrowthError: the lineage does not fit the source.
    """
    for name, (size, _) in _sizes(lineage).items():
        found = getattr(source.config, name, None)
        if found not in (size, None):
            raise GrowthError(
                f"{lineage.file}: made from a model with {name}={size}, this source has {found}"
            )
    return plan_growth(source, lineage.options, {}, lineage.target_config, lineage.dtype)


def _sizes(lineage: Lineage) -> dict[str, tuple[int, int]]:
    try:
        return {name: (old, new) for name, (old, new) in lineage.data["sizes"].items()}
    except MALFORMED as error:
        raise GrowthError(f"{lineage.file}: not a growth record: {error!r}") from error
