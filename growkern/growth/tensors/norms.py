"""Norms of the target: gamma_t = kappa c / a gamma, beta_t = c beta, and what extra ones leave."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from growkern.growth.plan.blueprint import Blueprint, Task
from growkern.growth.space.shares import partial_sums, take_shares
from growkern.growth.space.spaces import Space
from growkern.ops.expand.op import expand


def build_norm(
    plan: Blueprint, task: Task, read: Callable[[str], Tensor], backend: str | None
) -> Tensor:
    """Weight or bias of one norm of the target, (n,), in the plan's dtype."""
    offset = stored_offset(plan, task)
    if task.identity == "zero":
        return torch.full(task.shape, -offset, dtype=plan.dtype)
    if task.identity == "unit":
        return _unit_norm(plan, task)
    value = read(task.source)
    # 1 + weight is what is scaled; it must not be rounded before the 1 is gone again
    value = value + offset if offset == 0 else value.double() + offset
    gain = affine_gain(plan, task)
    index, scale, value = _gather(plan, task, value, read)
    exact = offset != 0 or gain != 1
    dtype = torch.float64 if exact else plan.dtype
    upper, index = _upper(plan, task, value, read, index)
    sums = None if exact else _sums(plan, task, index, scale)
    built = expand(
        value,
        rows=index,
        row_scale=scale if sums is None else None,
        upper=upper,
        out_dtype=dtype,
        backend=backend,
    )
    if sums is not None:
        take_shares(built, 0, *sums)
    return (built * gain - offset).to(plan.dtype) if exact else built


def _sums(
    plan: Blueprint, task: Task, index: Tensor, scale: Tensor
) -> tuple[Tensor, Tensor] | None:
    """What `take_shares` takes, where a tied head reads what the norm puts out."""
    assert task.tensor.norm is not None
    entering, leaving = task.tensor.norm
    if plan.options.symmetry != "split" or not plan.layout.is_dual(leaving):
        return None
    return partial_sums(index, scale, ~plan.layout.space(entering).is_extra)


def stored_offset(plan: Blueprint, task: Task) -> float:
    """What the model adds to the stored weight before it multiplies."""
    return 1.0 if plan.layout.family.norm.plus_one and not task.tensor.is_bias else 0.0


def _gather(
    plan: Blueprint, task: Task, value: Tensor, read: Callable[[str], Tensor]
) -> tuple[Tensor, Tensor, Tensor]:
    """Index and scale over the target, (n,), and what they gather from."""
    layout = plan.layout
    assert task.tensor.norm is not None
    entering, leaving = (layout.space(name, task.source_layer) for name in task.tensor.norm)
    index, scale = entering.read_index, leaving.write
    if not task.tensor.is_bias:
        # where nothing enters, any weight is exact: that of a neighbour learns like it
        inverse = torch.where(entering.write == 0, 1.0, 1 / entering.write)
        scale = entering.kappa * torch.where(entering.write == 0, 1.0, leaving.write) * inverse
    extra = entering.is_extra
    if not bool(extra.any()):
        return index, scale, value
    appended, extra_scale, is_appended = _extra(plan, task, value, entering, leaving)
    index = torch.where(extra & is_appended, len(value), index)
    scale = torch.where(extra, extra_scale, scale)
    return index, scale, torch.cat([value, appended.to(value.dtype)])


def _extra(
    plan: Blueprint, task: Task, value: Tensor, entering: Space, leaving: Space
) -> tuple[Tensor, Tensor, Tensor]:
    """What extra coordinates leave a norm as.

    Returns:
        An element to append to the source, (1,); per target coordinate its scale, (n,), and
        whether it is that element rather than its own source, (n,) bool.
    """
    layout, is_bias, extra = plan.layout, task.tensor.is_bias, entering.is_extra
    scale = torch.zeros(entering.target, dtype=torch.float64)
    is_appended = torch.zeros(entering.target, dtype=torch.bool)
    appended = torch.ones(1, dtype=torch.float64)
    if task.tensor.row.extra == "free":
        # the centred input is 0 there, so the weight is free; a zero would never learn
        copies = (entering.kappa * leaving.write / entering.write)[~extra]
        scale[extra] = 0.0 if is_bias else copies.mean()
        return appended, scale, is_appended
    carries = layout.is_carried and task.tensor.row.extra == "carry"
    if is_bias and (carries or not layout.is_carried):
        appended = value.double().mean()[None]
        scale[extra], is_appended[extra] = leaving.write[extra], True
    elif carries:
        signs = entering.extra_signs
        # a single extra coordinate shifts the mean it is measured from
        centred = signs - signs.sum() / entering.target
        scale[extra] = entering.kappa / (plan.options.carry * centred)
        is_appended[extra] = True
    return appended, scale, is_appended


def _upper(
    plan: Blueprint, task: Task, value: Tensor, read: Callable[[str], Tensor], index: Tensor
) -> tuple[Tensor | None, Tensor]:
    """The next layer's norm, where whole heads of it move with AKI, and the index that says so."""
    fresh = from_next_layer(plan, task)
    if task.upper is None or not bool(fresh.any()):
        return None, index
    upper = read(task.upper).to(value.dtype) + stored_offset(plan, task)
    return upper, index + len(value) * fresh


def from_next_layer(plan: Blueprint, task: Task) -> Tensor:
    """Target entries of a norm that AKI takes from the next layer's, (n,) bool."""
    assert task.tensor.norm is not None
    if task.upper is None or plan.options.aki != "unit":
        return torch.zeros(task.shape, dtype=torch.bool)
    return plan.layout.fresh(task.tensor.norm[1])


def affine_gain(plan: Blueprint, task: Task) -> float:
    """What makes up, in the last norm of inserted blocks, for the size at which they run."""
    if task.identity != "affine" or task.tensor.is_bias:
        return 1.0
    return _unit_gain(plan) / plan.options.identity_gain


def _unit_gain(plan: Blueprint) -> float:
    """sqrt(K^2 + eps): gives an input of size K back as it was, but for eps."""
    return math.sqrt(plan.options.identity_gain**2 + plan.small.norm_epsilon)


def _unit_norm(plan: Blueprint, task: Task) -> Tensor:
    if task.tensor.is_bias:
        return torch.zeros(task.shape, dtype=plan.dtype)
    # the first of a chain normalises, the ones after it must repeat their input
    is_first = (task.tensor.stack, task.tensor.layer) not in plan.inserted
    gain = plan.options.identity_gain if is_first else _unit_gain(plan)
    return torch.full(task.shape, gain, dtype=plan.dtype)
