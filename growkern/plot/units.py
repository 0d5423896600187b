"""Where the units, heads and layers of a grown model come from, read from its growth record."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from growkern.errors import GrowthError
from growkern.growth.history import LINEAGE_FILE
from growkern.growth.plan.growth_plan import GrowthPlan
from growkern.growth.record.recorded import read_lineage, recorded_plan
from growkern.growth.source.config import read_config
from growkern.growth.source.hub import hub_model
from growkern.growth.space.layout import Layer

NOTHING = -1


@dataclass(frozen=True)
class Units:
    """Where the units or heads of one target layer come from.

    Attributes:
        source: source unit of every target unit, (target,) int64; `NOTHING` for one that copies
            no unit.
        is_next: which of them come from the next source layer (AKI), (target,) bool.
    """

    source: Tensor
    is_next: Tensor


def recorded_growth(
    source: str | Path, grown: str | Path, lineage: str | Path | None = None
) -> GrowthPlan:
    """The growth that made one checkpoint from another. No weights are read.

    Args:
        source, grown: directories of the checkpoints.
        lineage: the lineage file, or its directory; None: that of `grown`.

    Raises:
        GrowthError: there is no growth record, or it is of other models.
    """
    source, grown = Path(source), Path(grown)
    configs = [read_config(source), read_config(grown)]
    if lineage is None and not (grown / LINEAGE_FILE).is_file():
        raise GrowthError(
            f"{grown}: no {LINEAGE_FILE}, which says where each unit comes from: give that of the "
            "growth with --lineage"
        )
    plan = recorded_plan(read_lineage(Path(lineage or grown)))
    changes = plan.size_changes().items()
    for which, directory in enumerate((source, grown)):
        for name, sizes in changes:
            found = getattr(configs[which], name, None)
            if found not in (sizes[which], None):
                raise GrowthError(
                    f"{directory}: {name}={found}, the growth record says {sizes[which]}: give the "
                    "small model first, and then the model grown from it"
                )
    return plan


def name_of(directory: str | Path) -> str:
    """The name of a model: that on the Hub if it has one, else that of its directory."""
    directory = Path(directory)
    on_hub = hub_model(directory)
    return on_hub.id if on_hub else directory.resolve().name


def main_stack(plan: GrowthPlan) -> str:
    """The first stack of layers, the encoder if there are several."""
    return next(iter(plan.layer_maps))


def source_layer(plan: GrowthPlan, stack: str, layer: int) -> Layer:
    """The name of a target layer's source layer, as `Task.source_layer`."""
    number = plan.layer_maps[stack][layer]
    return f"{stack}.{number}" if stack else number


def units_of(plan: GrowthPlan, space: str, stack: str, layer: int) -> Units:
    """Where the units of a space come from. A unit of several entries counts once.

    Args:
        plan: of the growth.
        space: of the family's table.
        stack: of the layer.
        layer: of the target.
    """
    found = plan.layout.space(space, source_layer(plan, stack, layer))
    old, _ = plan.layout.sizes(str(plan.small.family.spaces[space].size or "stream"))
    width = found.source // old
    source = torch.where(found.is_extra, NOTHING, found.read_index // width)[::width]
    if plan.options.is_baseline:
        source = _only_old(source, old)
    return Units(source, _is_next(plan, space, stack, layer)[::width])


def heads_of(plan: GrowthPlan, space: str, stack: str, layer: int) -> Units:
    """Where the heads of a space come from; arguments as in `units_of`."""
    spec = plan.small.family.spaces[space]
    _, key = plan.layout.key(space, source_layer(plan, stack, layer))
    source = plan.layout.head_map(str(spec.heads), key)
    if plan.options.is_baseline:
        source = _only_old(source, plan.layout.sizes(str(spec.heads))[0])
    is_next = _is_next(plan, space, stack, layer).reshape(len(source), -1)[:, 0]
    return Units(source, is_next)


def _is_next(plan: GrowthPlan, space: str, stack: str, layer: int) -> Tensor:
    """`Units.is_next`. The last source layer has no next one."""
    is_last = plan.layer_maps[stack][layer] == max(plan.layer_maps[stack])
    family = plan.small.family.spaces[space]
    is_own = family.kind in ("heads", "units") and family.size != "stream"
    if plan.options.method != "aki" or is_last or not is_own:
        return torch.zeros(plan.layout.space(space, 0).target, dtype=torch.bool)
    return plan.layout.next_layer_units(space)


def _only_old(source: Tensor, count: int) -> Tensor:
    """Without copies: new units have random weights, and the old ones lead."""
    return torch.where(torch.arange(len(source)) < count, source, NOTHING)
