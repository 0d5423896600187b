"""Checks the tensors of a grown model for `growkern.verify`: by replay and by folding back."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from growkern.growth.plan.blueprint import Task
from growkern.growth.plan.finding import WEIGHT_ROUNDINGS
from growkern.growth.plan.growth_plan import GrowthPlan
from growkern.growth.plan.tensors.tensor import build_tensor
from growkern.growth.record.fold import fold_tensor
from growkern.growth.record.origins import origin_of
from growkern.growth.source.source import Source


@dataclass(frozen=True)
class TensorGroup:
    """All tensors of one kind (the same row of the family table).

    Attributes:
        kind: the row, a name with the layer left open.
        replay_error: largest difference to the rebuilt tensors, relative to their largest element.
        fold_error: largest relative difference of a folded weight to the source's (`WEIGHT_ERROR`
            of `plan.finding`); None if folding does not apply (norms, AKI, random weights).
        ok: True if rounding explains all errors.
    """

    kind: str
    count: int
    replay_error: float
    fold_error: float | None
    worst: str
    ok: bool


def check_tensors(plan: GrowthPlan, grown: Source) -> tuple[TensorGroup, ...]:
    """Compare every tensor of a grown model with the plan's, and with the source by folding."""
    by_kind: dict[str, list[Task]] = {}
    for task in plan.tasks:
        by_kind.setdefault(task.tensor.template, []).append(task)
    return tuple(_check_group(plan, grown, kind, tasks) for kind, tasks in by_kind.items())


def _check_group(plan: GrowthPlan, grown: Source, kind: str, tasks: list[Task]) -> TensorGroup:
    replay, fold, ok, worst = 0.0, None, True, (-1.0, tasks[0].name)
    for task in tasks:
        actual = grown.read(task.name).cpu()
        expected = build_tensor(plan, task, backend="reference")
        error, within = _replay_error(actual, expected)
        replay = max(replay, error)
        fold_error = _fold_error(plan, task, actual)
        if fold_error is not None:
            fold = max(fold or 0.0, fold_error)
            allowed = WEIGHT_ROUNDINGS if actual.dtype.itemsize == 2 else 16
            within &= fold_error <= allowed * torch.finfo(actual.dtype).eps
            error = max(error, fold_error)
        ok &= within
        # rank tensors that fail above those with larger errors that rounding explains
        worst = max(worst, (error + (0 if within else 1e9), task.name))
    return TensorGroup(kind, len(tasks), replay, fold, worst[1], ok)


def _replay_error(actual: Tensor, expected: Tensor) -> tuple[float, bool]:
    """The largest difference, relative to the largest element, and whether rounding explains it."""
    eps = torch.finfo(actual.dtype).eps
    actual64, expected64 = actual.double(), expected.double()
    difference = (actual64 - expected64).abs()
    # allow 4 units in the last place, as products round twice, but only 1 for 16-bit types. In
    # bfloat16 that is up to 1 %, so the mean error is limited too: rounding moves few elements
    is_narrow = actual.dtype.itemsize == 2
    tiny = torch.finfo(actual.dtype).tiny
    allowed = (1 if is_narrow else 4) * eps * expected64.abs().clamp(min=tiny)
    is_shifted = is_narrow and _relative(actual64, expected64) > eps / 4
    scale = expected64.abs().max().clamp(min=torch.finfo(torch.float64).tiny)
    both_nonfinite = ~torch.isfinite(actual64) & ~torch.isfinite(expected64)
    wrong = (~(difference <= allowed) & ~both_nonfinite).any()
    return (difference.nan_to_num(0.0).max() / scale).item(), not (bool(wrong) or is_shifted)


def _relative(actual: Tensor, truth: Tensor) -> float:
    """Frobenius norm of the difference, relative to that of `truth`."""
    norm = truth.norm()
    return ((actual - truth).norm() / norm).item() if norm > 0 else actual.norm().item()


def _fold_error(plan: GrowthPlan, task: Task, grown: Tensor) -> float | None:
    """`WEIGHT_ERROR` of a grown weight; None if not all of it comes from one source tensor."""
    origin = origin_of(plan, task)
    if origin.holds != "copies" or task.upper is not None or task.tensor.norm:
        return None
    space_of = partial(plan.layout.space, layer=task.source_layer)
    folded = fold_tensor(origin, space_of, grown)
    truth = plan.source.read(task.source).cpu().double()
    # a copy below the smallest normal number is rounded as coarsely as that number
    tiny = torch.full_like(grown, torch.finfo(grown.dtype).tiny)
    least = torch.maximum(truth.abs(), fold_tensor(origin, space_of, tiny).abs())
    # in units of the largest, as squares of the smallest numbers are 0
    unit = least.max()
    return (((folded - truth) / unit).norm() / (least / unit).norm()).item()
