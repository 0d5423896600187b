"""Builds the weights and biases of the target's norms.

They follow (3) of `growkern.growth.space.spaces`: gamma_t = kappa c / a gamma, beta_t = c beta.
Extra coordinates and the norms around inserted blocks have rules of their own.
`growth.optimizer.moments` mirrors all of these; keep both in step.
"""

from __future__ import annotations

import torch
from torch import Tensor

from growkern.growth.plan.blueprint import Blueprint, Task, affine_gain, unit_gain
from growkern.growth.plan.tensors.extras import sum_dtype
from growkern.growth.source import Read
from growkern.growth.space import Space, partial_sums, take_shares
from growkern.ops.expand.op import expand


def build_norm(plan: Blueprint, task: Task, read: Read, backend: str | None) -> Tensor:
    """Weight or bias of one norm of the target, (target's size,) in the plan's dtype."""
    assert task.tensor.norm is not None
    entering, leaving = task.tensor.norm
    offset = plan.layout.family.norm.offset(task.tensor.is_bias)
    if task.identity == "zero":
        # where nothing enters, any weight adds 0, and lets the matrix below learn
        extra = plan.layout.space(entering, task.source_layer).is_extra
        free = 0.0 if task.tensor.is_bias or plan.layout.family.norm.centres else 1.0
        return torch.where(extra, free - offset, -offset).to(plan.dtype)
    if task.identity == "unit":
        gain = 0.0 if task.tensor.is_bias else unit_gain(plan, task)
        return torch.full(task.shape, gain, dtype=plan.dtype)
    value = read(task.source)
    # some models multiply by 1 + weight: scale the sum in float64, as rounding it loses digits
    value = value.to(sum_dtype(plan, value)) if offset == 0 else value.double() + offset
    gain = affine_gain(plan, task)
    index, scale, value = _gather(plan, task, value)
    exact = offset != 0 or gain != 1
    dtype = torch.float64 if exact else plan.dtype
    from_next, upper = from_next_layer(plan, task), None
    if task.upper is not None and bool(from_next.any()):
        # AKI takes whole heads from the next layer's norm
        upper, index = read(task.upper).to(value.dtype) + offset, index + len(value) * from_next
    sums = None
    if not exact and plan.options.shares_add_up and plan.layout.is_dual(leaving):
        # the output enters a tied head
        sums = partial_sums(index, scale, ~plan.layout.space(entering).is_extra)
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


def _gather(plan: Blueprint, task: Task, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Index and scale over the target, (n,) each, and the vector that they gather from."""
    layout = plan.layout
    assert task.tensor.norm is not None
    entering, leaving = (layout.space(name, task.source_layer) for name in task.tensor.norm)
    index, scale = entering.read_index, leaving.write
    if not task.tensor.is_bias:
        # a coordinate that is always 0 may have any weight: a copy's weight trains like a copy
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
    """Weight or bias of a norm at the extra coordinates.

    Returns:
        An element to append to the source vector, (1,).
        The scale of every target coordinate, (n,) float64; only extra ones are set.
        Which target coordinates gather the appended element, (n,) bool.
    """
    layout, is_bias, extra = plan.layout, task.tensor.is_bias, entering.is_extra
    scale = torch.zeros(entering.target, dtype=torch.float64)
    is_appended = torch.zeros(entering.target, dtype=torch.bool)
    appended = torch.ones(1, dtype=torch.float64)
    if task.tensor.row.extra == "free" or not layout.family.norm.centres:
        # the centred input is 0 here, so any weight is exact; take the copies' mean, since a
        # weight of 0 would block the gradient
        copies = (entering.kappa * leaving.write / entering.write)[~extra]
        scale[extra] = 0.0 if is_bias else copies.mean()
        return appended, scale, is_appended
    carries = layout.is_carried and task.tensor.row.extra == "carry"
    if is_bias and (carries or not layout.is_carried):
        appended = value.double().mean()[None]
        scale[extra], is_appended[extra] = leaving.write[extra], True
    elif carries:
        signs = entering.extra_signs
        # the signs of a single extra coordinate do not sum to 0, which shifts the mean
        centred = signs - signs.sum() / entering.target
        scale[extra] = entering.kappa / (plan.options.carry * centred)
        is_appended[extra] = True
    return appended, scale, is_appended


def from_next_layer(plan: Blueprint, task: Task) -> Tensor:
    """Which target entries of a norm AKI takes from the next layer, (n,) bool."""
    assert task.tensor.norm is not None
    if task.upper is None or plan.options.aki != "unit":
        return torch.zeros(task.shape, dtype=torch.bool)
    return plan.layout.next_layer_units(task.tensor.norm[1])
