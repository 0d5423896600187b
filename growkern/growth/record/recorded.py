"""The plan of a grown model that was loaded from disk, from its lineage alone.

The optimizer of a grown model needs the maps of the growth, but neither the source nor its weights.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from torch import Tensor

from growkern.errors import GrowthError
from growkern.families.model import ModelSpec
from growkern.growth.history import LINEAGE_FILE, History, directory_of
from growkern.growth.plan.growth_plan import GrowthPlan, plan_growth
from growkern.growth.record.lineage import Lineage, has_record, lineage_of, read_lineage
from growkern.growth.record.origins import spaces_of
from growkern.growth.source.source import Source


def growth_plan_of(model: Any) -> GrowthPlan | None:
    """The plan by which a model was grown, or None if it was not grown.

    Args:
        model: from `growkern.grow` or `growkern.grow_into`, or loaded by `from_pretrained` from a
            directory that growkern wrote.

    Raises:
        GrowthError: the directory's lineage is damaged, or this version draws other maps.
    """
    plan = getattr(model, "growth_plan", None)
    if plan is not None:
        return plan
    directory = directory_of(model)
    if directory is None or not has_record(directory):
        return None
    return recorded_plan(read_lineage(directory))


def plan_of_source(plan: GrowthPlan) -> GrowthPlan | None:
    """The plan by which the source of a growth was grown itself; None if it was not.

    Raises:
        GrowthError: it was, or may have been, and how is not known. The message says why.
    """
    history = plan.source.history
    earlier = history.plan
    if history.records:
        record = history.records[0]
        if isinstance(record, str):
            raise GrowthError(record)
        file = (plan.source.directory or Path()) / LINEAGE_FILE
        before = History(records=history.records[1:])
        earlier = recorded_plan(replace(lineage_of(file, record), earlier=before))
    if earlier is None:
        return None
    if earlier.large.shapes != plan.small.shapes:
        raise GrowthError(f"the {plan.small.class_name} is not as its growth made it")
    # the steps of random weights follow no source
    return None if earlier.options.is_baseline else earlier


def misfit(plan: GrowthPlan, model: Any) -> str | None:
    """The first parameter that is not as growth made it: layers or tokens may have been added."""
    shapes, named = plan.large.shapes, model.named_parameters()
    return next((name for name, p in named if tuple(p.shape) != shapes.get(name)), None)


def recorded_plan(lineage: Lineage) -> GrowthPlan:
    """The plan of a lineage, made without the source. Its findings cannot be asked for.

    Raises:
        GrowthError: this version of growkern draws other maps than the one that grew the model.
    """
    name = lineage.data.get("model_class")
    small = ModelSpec.of(lineage.source_config, str(name)).with_own_heads(lineage.origins)
    dtypes = {name: lineage.source_dtype for name in small.shapes if name not in small.ties}

    def read(name: str) -> Tensor:
        raise GrowthError(f"{lineage.file} has no weights: {name} is in the source")

    source = Source(small, dtypes, read, history=lineage.earlier)
    plan = plan_growth(
        source, lineage.options, {}, lineage.target_config, lineage.dtype, judged=False
    )
    if spaces_of(plan) != lineage.data["maps"]:
        raise GrowthError(
            f"{lineage.file}: this version of growkern draws other maps than the one that grew the "
            "model"
        )
    return plan
