"""The baselines of bert2BERT, Table 1: random weights, and DirectCopy into their leading block."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from growkern.growth import maps
from growkern.growth.plan import GrowthPlan
from growkern.growth.tasks import Task

# of models whose config gives none
INITIALIZER_RANGE = 0.02


def build_baseline(plan: GrowthPlan, task: Task, read: Callable[[str], Tensor]) -> Tensor:
    """Random as at the start of training; DirectCopy keeps the source in the leading block."""
    tensor, config, dtype = task.tensor, plan.target_config, plan.dtype
    if tensor.norm or tensor.is_bias:
        unit = 0.0 if plan.layout.family.norm.plus_one else 1.0
        fill = unit if tensor.norm and not tensor.is_bias else 0.0
        built = torch.full(task.shape, fill, dtype=dtype)
    else:
        rng = maps.generator(plan.options.seed, "init", tensor.name)
        deviation = getattr(config, "initializer_range", None) or INITIALIZER_RANGE
        built = (torch.randn(task.shape, generator=rng) * deviation).to(dtype)
    if plan.options.method == "direct_copy" and not task.is_made:
        old = read(task.source)
        at = [_old_positions(plan, axis) for axis in tensor.axes]
        built[at[0] if len(at) == 1 else torch.meshgrid(*at, indexing="ij")] = old.to(dtype)
    return built


def _old_positions(plan: GrowthPlan, axis: str) -> Tensor:
    """Where the source's entries of an axis stand in the target, block by block."""
    _, _, names = axis.partition(":")
    family = plan.layout.family
    if not names:
        return torch.arange(family.axis_size(plan.source.config, axis))
    blocks, first = [], 0
    for name in names.split("|"):
        blocks.append(first + torch.arange(family.space_size(plan.source.config, name)))
        first += family.space_size(plan.target_config, name)
    return torch.cat(blocks)
