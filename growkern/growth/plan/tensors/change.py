"""Measures how far a growth that keeps no function moves the outputs: it grows a small model."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from growkern.growth.plan.blueprint import Blueprint
from growkern.growth.plan.bounds import MOST_MEASURED, outputs_on, predicts_tokens
from growkern.growth.plan.tensors.tensor import build_tensor
from growkern.growth.source.loading import (
    LARGEST,
    as_model,
    fits,
    largest_difference,
    random_inputs,
)


@torch.no_grad()
def measured_change(plan: Blueprint) -> float | None:
    """The relative error of outputs on the random texts that `growkern.verify` compares them on.

    Returns:
        None if the source or the target cannot be run: it is too large, spread over processes or
        without weights, or transformers cannot run it on tokens alone.
    """
    if plan.parameters() > MOST_MEASURED or not fits(plan.source, MOST_MEASURED):
        return None
    tasks = {task.name: task for task in plan.tasks}
    grown = replace(
        plan.source,
        spec=plan.large,
        dtypes=plan.dtypes,
        read=lambda name, *_: build_tensor(plan, tasks[name]),
        dense=None,
    )
    dtype = torch.float64 if plan.parameters() <= LARGEST else torch.float32
    tokens = random_inputs(plan.source)
    try:
        old, new = (
            next(iter(outputs_on(as_model(model, dtype), tokens).values()))
            for model in (plan.source, grown)
        )
    except Exception:
        # classes of transformers that need other inputs raise errors of any type
        return None
    return largest_difference(source_coordinates(plan, new, old.shape[-1]), old)


def source_coordinates(plan: Blueprint, grown: Tensor, size: int) -> Tensor:
    """The entries of a grown output that the source has too, scaled as in the source."""
    if grown.shape[-1] == size:
        return grown
    if predicts_tokens(plan.small):
        # logits of a larger vocabulary
        return grown[..., :size]
    name = plan.small.output_space
    return grown[..., :size] / plan.layout.space(name).write[:size]
