"""Reads `lineage.json`, and makes plans of it: with the source, or of the record alone.

The optimizer of a grown model needs the maps of the growth, but neither the source nor its weights.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from growkern.arguments import check_kind, path_of
from growkern.errors import GrowthError, reason
from growkern.families.family import Family
from growkern.families.fields import value_of
from growkern.families.model import ModelSpec
from growkern.files import check_format, read_json
from growkern.growth import history
from growkern.growth.history import LINEAGE_FILE, MOST_LINEAGE_BYTES, NEEDED, History
from growkern.growth.options import GrowthOptions
from growkern.growth.plan import GrowthPlan, plan_growth
from growkern.growth.record.lineage import (
    DENSE,
    DTYPES,
    FORMAT,
    RECORD,
    GrowthSettings,
    spaces_of,
)
from growkern.growth.source import (
    Source,
    check_config,
    check_layers,
    config_directory,
    config_from,
    read_config,
)
from growkern.growth.space import dense_model, upcycled, with_start

TABLES = ("options", "settings", "sizes", "maps", "tensors", "versions")
MALFORMED = (ValueError, KeyError, TypeError, AttributeError, IndexError, RecursionError)


@dataclass(frozen=True)
class Lineage:
    """A lineage file.

    If a dense model became a mixture, `source_config` shows it as a mixture of one copy.
    """

    file: Path
    data: Mapping[str, Any]
    options: GrowthOptions
    settings: GrowthSettings
    sizes: Mapping[str, tuple[int, int]]  # config field -> (source, target)
    dtype: torch.dtype  # of the target's weights
    source_dtype: torch.dtype
    source_config: Any
    target_config: Any
    earlier: History  # the growths that made the source
    family: Family | None = None  # the table of one's own that the growth used
    dense_config: Any = None

    def shown(self, spec: ModelSpec) -> ModelSpec:
        """The source's `spec`, with the dense model that it shows."""
        if self.dense_config is None:
            return spec
        family = with_start(spec.family, self.options)
        return replace(spec, family=family, dense_model=dense_model(self.dense_config, spec))


def read_lineage(path: Path) -> Lineage:
    """Read a lineage file, or that of a grown checkpoint's directory."""
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
    check_format(file, data, FORMAT, NEEDED)
    try:
        if missing := [name for name in NEEDED if name not in data]:
            raise ValueError(f"it has no {missing[0]!r}")
        for name in TABLES:
            if not isinstance(data.get(name, {}), dict):
                raise ValueError(f"{name} is a {type(data[name]).__name__}")
        family = history.family_from(file, data)
        configs = ("source_config", "target_config", *({DENSE} & data.keys()))
        for name in configs:
            check_layers(file, data[name], len(data["tensors"]))
        return Lineage(
            file,
            data,
            GrowthOptions(**data["options"]),
            GrowthSettings(**data["settings"]),
            {name: (old, new) for name, (old, new) in data["sizes"].items()},
            DTYPES[data["dtype"]],
            DTYPES[data["source_dtype"]],
            _read_config(file, data["source_config"], family),
            _read_config(file, data["target_config"], family),
            History(records=history.history_from(file, data).records[1:]),
            family,
            _read_config(file, data[DENSE], None) if DENSE in data else None,
        )
    except GrowthError as error:
        why = str(error).removeprefix(f"{file}: ")
        raise _no_record(file, why) from error
    except MALFORMED as error:
        raise _no_record(file, reason(error)[:200]) from error


def has_record(directory: Path | None) -> bool:
    """True if a directory has a lineage file."""
    return directory is not None and (directory / LINEAGE_FILE).is_file()


def read_lineage_of(grown: Path, lineage: str | Path | None = None) -> Lineage:
    """Read the record of a grown checkpoint, which may have been trained since.

    `lineage` is the lineage file, or a directory with it; None: that of `grown`.
    """
    if lineage is not None:
        return read_lineage(path_of("lineage", lineage, RECORD))
    if not has_record(grown):
        raise GrowthError(
            f"{grown}: no {LINEAGE_FILE}: give a grown checkpoint; if this one was trained since, "
            f"add --lineage with the {LINEAGE_FILE} of the growth (in Python lineage=...)"
        )
    return read_lineage(grown)


def own_family_of(lineage: str | Path | None) -> Family | None:
    """The table of one's own in a record, if a record is given and has one."""
    return None if lineage is None else read_lineage(path_of("lineage", lineage, RECORD)).family


def _no_record(file: Path, why: str) -> GrowthError:
    return GrowthError(f"{file}: not a growth record: {why}: give {RECORD}")


def _read_config(file: Path, data: Any, family: Family | None) -> Any:
    check_config(file, data, family=family)
    return config_from(data)


def plan_from_lineage(source: Source, lineage: Lineage) -> GrowthPlan:
    """Make the plan of a lineage again, for this source."""
    dense = lineage.dense_config
    for name, (size, _) in lineage.sizes.items():
        own = size if dense is None else getattr(dense, name, None)
        other = value_of(source.spec.text, name, None)
        # a field may have the size once for each layer
        if other not in (own, None) and not (isinstance(other, list) and {*other} == {own}):
            raise GrowthError(
                f"{lineage.file}: made from a model with {name}={own}, this source has {other}"
            )
    if dense is not None:
        source = upcycled(source, lineage.source_config, lineage.options)
    return plan_growth(source, lineage.options, {}, lineage.target_config, lineage.dtype)


# --------------------------------------------------------- without the source


def growth_plan_of(model: Any) -> GrowthPlan | None:
    """The plan by which a model was grown, or None if it was not grown.

    Args:
        model: from `growkern.grow` or `growkern.grow_into`; or loaded by `from_pretrained` from a
            directory that growkern wrote; or the path of such a directory.

    Raises:
        GrowthError: it is neither; the record of its growth is missing or damaged; or there is no
            such directory.
    """
    plan = getattr(model, "growth_plan", None)
    if plan is not None:
        return plan
    wanted = "a model, or the path of its directory"
    check_kind("model", model, (str, Path, nn.Module), wanted)
    is_path = isinstance(model, str | Path)
    directory = config_directory(Path(model)) if is_path else history.directory_of(model)
    if directory is not None and has_record(directory):
        return recorded_plan(read_lineage(directory))
    # a model without a directory, such as a pair of grown ones, never had a record of its own
    if directory is not None:
        config = read_config(directory) if is_path else model.config
        if lost := history.history_in(directory, config).lost:
            raise GrowthError(lost)
    return None


def plan_of_source(plan: GrowthPlan) -> GrowthPlan | None:
    """The plan by which the source of a growth was grown itself; None if it was not."""
    known = plan.source.history
    earlier = known.plan
    if known.records:
        record = known.records[0]
        if isinstance(record, str):
            raise GrowthError(record)
        file = (plan.source.directory or Path()) / LINEAGE_FILE
        before = History(records=known.records[1:])
        earlier = recorded_plan(replace(lineage_of(file, record), earlier=before))
    if earlier is None:
        return None
    if earlier.large.shapes != plan.small.shapes:
        raise GrowthError(f"the {plan.small.class_name} is not as its growth made it")
    # the steps of random weights follow no source
    return None if earlier.options.is_baseline else earlier


def unknown_growth(plan: GrowthPlan) -> str:
    """What the optimizer lacks, if a growth before this one is not known; "" if all are."""
    earlier: GrowthPlan | None = plan
    try:
        while earlier is not None:
            earlier = plan_of_source(earlier)
    except GrowthError as error:
        return history.forgotten(str(error))
    return ""


def misfit(plan: GrowthPlan, model: Any) -> str | None:
    """The first parameter that is not as growth made it: layers or tokens may have been added."""
    shapes, named = plan.large.shapes, model.named_parameters()
    return next((name for name, p in named if tuple(p.shape) != shapes.get(name)), None)


def recorded_plan(lineage: Lineage) -> GrowthPlan:
    """The plan of a lineage, made without the source. Its findings cannot be asked for."""
    name = lineage.data.get("model_class")
    small = ModelSpec.of(lineage.source_config, str(name), lineage.family)
    small = lineage.shown(small).with_own_heads(lineage.data["tensors"])
    dtypes = {name: lineage.source_dtype for name in small.shapes if name not in small.ties}

    def read(name: str) -> Tensor:
        raise GrowthError(f"{lineage.file} has no weights: {name} is in the source")

    source = Source(small, dtypes, read, history=lineage.earlier)
    plan = plan_growth(
        source, lineage.options, {}, lineage.target_config, lineage.dtype, judged=False
    )
    if spaces_of(plan) != lineage.data.get("maps"):
        raise GrowthError(
            f"{lineage.file}: this version of growkern draws other maps than the one that grew the "
            "model"
        )
    return plan
