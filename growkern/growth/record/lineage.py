"""How a grown checkpoint was made: written beside it, read to check, to repeat or to undo it.

`lineage.json` holds both configs, the options and seeds, every map and share (`maps`), and where
each tensor comes from (`tensors`): `growkern.fold` and `growkern.replay` need nothing else of what
the growth knew. Vectors are texts (`growkern.growth.record.map_text`).
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any

import safetensors
import torch
import transformers

from growkern.errors import GrowthError
from growkern.growth.disk.companions import CHECKSUMS_FILE, LINEAGE_FILE
from growkern.growth.disk.shards import ShardLayout
from growkern.growth.options import GrowthOptions
from growkern.growth.plan.growth_plan import GrowthPlan, plan_growth
from growkern.growth.record.origins import Origin, origin_of, space_from_dict, space_key, spaces_of
from growkern.growth.source.files import METADATA_FILE, STORED_DTYPES, read_header_bytes
from growkern.growth.source.source import Source
from growkern.growth.space.layout import Layer
from growkern.growth.space.spaces import Space
from growkern.package import version

DTYPES = {str(d).removeprefix("torch."): d for d in STORED_DTYPES.values() if d.is_floating_point}
# a config says by what it was saved, and as what it was loaded; that makes no other model
NOT_THE_MODEL = ("transformers_version", "architectures", "dtype")
# the plan's opinions, which a later version may word differently
OPINIONS = ("exact", "findings")


@dataclass(frozen=True)
class Settings:
    """What decides the bytes of a grown checkpoint besides its plan."""

    backend: str | None = None
    max_shard_size: int = 5 * 10**9
    allow_nonfinite: bool = False


def versions() -> dict[str, str]:
    """Of what makes the bytes."""
    modules = (torch, transformers, safetensors)
    return {"growkern": version(), **{m.__name__: m.__version__ for m in modules}}


def source_files(source: Source) -> dict[str, dict[str, Any]]:
    """What tells apart two states of a source's files without reading their weights."""
    found = {}
    for name in sorted({header.file for header in source.headers.values()}):
        file = Path(name)
        is_metadata = file.name == METADATA_FILE
        header = file.read_bytes() if is_metadata else read_header_bytes(file)
        found[file.name] = {
            "size": file.stat().st_size,
            "modified": file.stat().st_mtime_ns,
            "header": hashlib.sha256(header).hexdigest(),
        }
    return found


def identity(plan: GrowthPlan, layout: ShardLayout, settings: Settings) -> dict[str, Any]:
    """All that decides a growth's bytes: two runs that agree in it make the same files."""
    heads = {name: hashlib.sha256(head).hexdigest() for name, head in layout.heads.items()}
    return {
        **plan.to_dict(),
        "target config": config_dict(plan.large.config),
        "source": source_files(plan.source),
        "backend": settings.backend or "",
        "max_shard_size": settings.max_shard_size,
        "files": {n: {"size": layout.sizes[n], "header": head} for n, head in heads.items()},
    }


def config_dict(config: Any) -> dict[str, Any]:
    """A whole config as JSON has it, but for the place it was read from."""
    found = json.loads(config.to_json_string(use_diff=False))
    found.pop("_name_or_path", None)
    return dict(found)


# ------------------------------------------------------------------ writing


def record_of(plan: GrowthPlan) -> dict[str, Any]:
    """What the lineage of a growth says of its plan, as JSON has it."""
    record = {
        **plan.to_dict(),
        "source_config": config_dict(plan.small.config),
        "target_config": config_dict(plan.large.config),
        "source_dtype": str(plan.source.dtype).removeprefix("torch."),
        "maps": spaces_of(plan),
        "tensors": {task.name: origin_of(plan, task).to_dict() for task in plan.tasks},
    }
    return dict(json.loads(json.dumps(record)))


def write_lineage(
    plan: GrowthPlan, settings: Settings, files: Mapping[str, Any], directory: Path
) -> None:
    """Record how `directory` was made out of these source files; the same wherever both lie."""
    source = plan.source.directory
    lineage = {
        **record_of(plan),
        "settings": vars(settings),
        "versions": versions(),
        "source": source.resolve().name if source else "",
        "source_files": _without_times(files),
        "checksums": CHECKSUMS_FILE,
    }
    text = json.dumps(lineage, indent=1, ensure_ascii=False) + "\n"
    (directory / LINEAGE_FILE).write_text(text, encoding="utf-8")


def _without_times(files: Mapping[str, Any]) -> dict[str, Any]:
    return {name: {k: v for k, v in f.items() if k != "modified"} for name, f in files.items()}


# ------------------------------------------------------------------ reading


@dataclass(frozen=True)
class Lineage:
    """A lineage file.

    Attributes:
        file: where it was read from.
        data: all of it.
        origins: per target tensor.
        options, settings: of the growth.
        dtype, source_dtype: of the target's and of the source's weights.
        source_config, target_config: configs of transformers.
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

    @cached_property
    def _spaces(self) -> Any:
        return lru_cache(maxsize=64)(lambda key: space_from_dict(self.data["maps"][key]))

    def space(self, name: str, layer: Layer) -> Space:
        """A space as it was for the tensors of this source layer."""
        own = space_key(name, layer)
        try:
            return self._spaces(own if own in self.data["maps"] else name)
        except MALFORMED as error:
            raise GrowthError(f"{self.file}: no map of {own}: {error!r}") from error


MALFORMED = (ValueError, KeyError, TypeError, AttributeError, IndexError, RecursionError)


def read_lineage(path: Path) -> Lineage:
    """Read a lineage file, or that of a grown checkpoint's directory.

    Raises:
        GrowthError: there is none, or one that is damaged.
    """
    file = path / LINEAGE_FILE if path.is_dir() else path
    if not file.is_file():
        raise GrowthError(f"{path}: no {LINEAGE_FILE}; only grown checkpoints have one")
    try:
        data = json.loads(file.read_text(encoding="utf-8"))
        return Lineage(
            file,
            data,
            {name: Origin.from_dict(entry) for name, entry in data["tensors"].items()},
            GrowthOptions(**data["options"]),
            Settings(**data["settings"]),
            DTYPES[data["dtype"]],
            DTYPES[data["source_dtype"]],
            _read_config(data["source_config"]),
            _read_config(data["target_config"]),
        )
    except GrowthError as error:
        raise GrowthError(f"{file}: {error}") from error
    except MALFORMED as error:
        raise GrowthError(f"{file}: not a growth record: {error!r}") from error


def _read_config(data: Mapping[str, Any]) -> Any:
    try:
        return transformers.CONFIG_MAPPING[data["model_type"]].from_dict(dict(data))
    except Exception as error:
        # the library raises several kinds of error for a bad value
        why = str(error).strip().splitlines()[-1].strip()
        raise GrowthError(f"not a growth record: {why}") from error


def plan_from_lineage(source: Source, lineage: Lineage) -> GrowthPlan:
    """The plan that a lineage speaks of, made anew for this source.

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


# ---------------------------------------------------------------- comparing


def version_notes(lineage: Lineage) -> list[str]:
    """One line per package that was another version when the checkpoint was grown."""
    then = lineage.data.get("versions", {})
    return [
        f"{lineage.file}: grown with {name} {then.get(name, '(not said)')}, this is {version}"
        for name, version in versions().items()
        if then.get(name) != version
    ]


def contradictions(lineage: Lineage, plan: GrowthPlan) -> list[str]:
    """What the lineage says otherwise than the plan made anew and the source's files; no values."""
    data, now = lineage.data, record_of(plan)
    if plan.source.directory is not None:
        now["source_files"] = _without_times(source_files(plan.source))
    else:
        # a model in memory may have been loaded in another dtype
        del now["source_dtype"]
    left_out = {"growkern"}
    if data.get("versions", {}).get("growkern") != version():
        left_out.update(OPINIONS)
    found = []
    for key in now.keys() - left_out:
        is_config = key.endswith("_config")
        where = next(_differences(data.get(key), now[key], is_config), None)
        if where is not None:
            found.append(f"{lineage.file}: {key}{where}")
    return sorted(found)


def _differences(then: Any, now: Any, is_config: bool) -> Iterator[str]:
    """Where two JSON values differ, as `.name.name`."""
    if not isinstance(then, dict) or not isinstance(now, dict):
        if then != now:
            yield ""
        return
    for name in {**now, **then}:
        if is_config and (name in NOT_THE_MODEL or name not in then or name not in now):
            continue
        if name not in then or name not in now:
            yield f".{name}"
        for rest in _differences(then.get(name), now.get(name), is_config):
            yield f".{name}{rest}"
