"""The plan of a grown model that was loaded from disk, from its lineage alone.

The optimizer of a grown model needs the maps of the growth, but neither the source nor its weights.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from torch import Tensor

from growkern.errors import GrowthError
from growkern.families.model import ModelSpec
from growkern.growth.disk.companions import LINEAGE_FILE
from growkern.growth.plan.growth_plan import GrowthPlan, plan_growth
from growkern.growth.record.lineage import Lineage, read_lineage
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
    directory = getattr(model, "name_or_path", "")
    if not directory or not (Path(directory) / LINEAGE_FILE).is_file():
        return None
    return recorded_plan(read_lineage(Path(directory)))


def recorded_plan(lineage: Lineage) -> GrowthPlan:
    """The plan of a lineage, made without the source. Its findings cannot be asked for.

    Args:
        lineage: of the grown checkpoint.

    Raises:
        GrowthError: this version of growkern draws other maps than the one that grew the model.
    """
    name = lineage.data.get("model_class")
    small = ModelSpec.of(lineage.source_config, str(name)).with_own_heads(lineage.origins)
    dtypes = {name: lineage.source_dtype for name in small.shapes if name not in small.ties}

    def read(name: str) -> Tensor:
        raise GrowthError(f"{lineage.file} has no weights: {name} is in the source")

    source = Source(small, dtypes, read)
    plan = plan_growth(
        source, lineage.options, {}, lineage.target_config, lineage.dtype, judged=False
    )
    if spaces_of(plan) != lineage.data["maps"]:
        raise GrowthError(
            f"{lineage.file}: this version of growkern draws other maps than the one that grew the "
            "model"
        )
    return plan
