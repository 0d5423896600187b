"""Which layers run and train at an optimizer step, and which wait for a later one."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Any, NamedTuple

from torch import nn

from growkern.train.config import TwoStageConfig
from growkern.train.schedule.growth import GrowthStep
from growkern.train.schedule.models import Size
from growkern.train.sub_model import Embeddings, sub_model


class Part(NamedTuple):
    """The part of a model that runs and trains in a step.

    Attributes:
        depth: layers that run, from the bottom.
        trained: how many of these train, from the top.
        embeddings: as in `growkern.train.sub_model`.
    """

    depth: int
    trained: int
    embeddings: Embeddings = "frozen"


def for_cost(part: Part | None) -> dict[str, Any]:
    """The arguments of `ModelCost.train` for a part; None: for the whole model."""
    if part is None:
        return {}
    # whether the lowest trained layer passes no gradient on
    frozen = part.depth > part.trained or part.embeddings == "frozen"
    return {"depth": part.depth, "trained_layers": part.trained, "frozen_input": frozen}


def part_of_stage(stage: TwoStageConfig, depth: int) -> Part:
    """The part that trains in a step of stage 1.

    Args:
        stage: the two stages.
        depth: layers that run, from `TwoStageConfig.depth`.
    """
    return Part(depth, stage.layers_per_block, stage.embeddings)


def new_part(step: int, growth: GrowthStep, size: Size) -> Part | None:
    """The part that trains after a growth while `new_layers_steps` last; None later.

    Args:
        step: counted from 0.
        growth: the last one.
        size: to which the model grew.
    """
    if step >= growth.at_step + growth.new_layers_steps:
        return None
    old, new = layers_of(size)
    return Part(new, new - old)


def layers_of(size: Size) -> tuple[int, int]:
    """The layers of a model before and after the growth to a size, in its deepest stack."""
    plan = size.plan
    if plan is None:
        raise ValueError("the first size of a run has no growth")
    keys = plan.small.family.stacks.values()
    return max(map(plan.small.size, keys)), max(map(plan.large.size, keys))


def only(
    part: Part | None, stacks: Sequence[nn.ModuleList]
) -> contextlib.AbstractContextManager[None]:
    """While active, only a part of a model runs and trains; None: all of it."""
    if part is None:
        return contextlib.nullcontext()
    return sub_model(stacks, part.depth, part.trained, part.embeddings)
