"""Carries a plan out, tensor by tensor: one gather with two scales each.

Where the target has extra coordinates (uneven LayerNorm widths) the source tensor first gets the
few rows those coordinates copy:

    written axis     the functional f_t = (1/n) 1 + delta e_t w of its rows, one per sign e_t, where
                     w = (gamma - mean(gamma)) / n belongs to the norm the vector enters  (1)
    first FFN matrix the rows 1/n and w, read by the carry units                          (2)
    second FFN matrix the columns that add them to the extra coordinates                  (3)

A carrying norm then multiplies extra coordinate k by 1 / (delta e_k): it leaves as the mean of the
norm's output. All of (1)-(3) are copied and scaled by the same maps as every other row.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from growkern.growth import maps
from growkern.growth.layout import Layout
from growkern.growth.plan import GrowthPlan, Task
from growkern.growth.spaces import Space
from growkern.ops.expand import expand

Read = Callable[[str], Tensor]


@dataclass(frozen=True)
class AxisMap:
    """One axis of a gather: index, scale and noise over the target, None where trivial."""

    index: Tensor | None
    scale: Tensor | None
    noise: Tensor | None = None


def build_tensor(
    plan: GrowthPlan,
    task: Task,
    *,
    read: Read | None = None,
    backend: str | None = None,
) -> Tensor:
    """The value of one target tensor, on the CPU, in the plan's dtype."""
    read = read or plan.source.read
    dtype = plan.dtype
    if task.identity == "zero":
        return torch.zeros(task.shape, dtype=dtype)
    if task.identity == "unit":
        return _unit_norm(plan, task, dtype)
    if plan.options.method in ("direct_copy", "random"):
        built = _random_with_old_block(plan, task, read, dtype)
    elif task.tensor.row.norm:
        built = _build_norm(plan, task, read, dtype, backend)
    else:
        built = _build_weight(plan, task, read, dtype, backend)
    if task.identity == "affine" and not task.tensor.is_bias:
        built = (built.double() * _unit_gain(plan)).to(dtype)
    return built


# ------------------------------------------------------------------ weights


def _build_weight(
    plan: GrowthPlan, task: Task, read: Read, dtype: torch.dtype, backend: str | None
) -> Tensor:
    tensor = task.tensor
    axes = [_axis_map(plan, task, axis) for axis in tensor.axes]
    mixes = any(
        m.index is not None and bool((m.index >= _source_length(plan, task, a)).any())
        for m, a in zip(axes, tensor.axes, strict=True)
    )
    weight = _with_functionals(plan, task, read(task.source), read)
    upper = None
    if task.upper is not None and mixes:
        upper = _with_functionals(plan, task, read(task.upper), read)
    rows, cols = axes[0], axes[1] if len(axes) == 2 else AxisMap(None, None)
    return expand(
        weight,
        rows=rows.index,
        cols=cols.index,
        row_scale=rows.scale,
        col_scale=cols.scale,
        row_noise=rows.noise,
        col_noise=cols.noise,
        upper=upper,
        seed=maps.generator(plan.options.seed, "noise", tensor.name).initial_seed(),
        out_dtype=dtype,
        backend=backend,
    )


def _axis_map(plan: GrowthPlan, task: Task, axis: str) -> AxisMap:
    role, _, names = axis.partition(":")
    if not names:
        return AxisMap(None, None)
    layout, layer = plan.layout, task.source_layer
    indices, scales, noises = [], [], []
    first = 0
    total = _source_length(plan, task, axis)
    for name in names.split("|"):
        space = layout.space(name, layer)
        index = space.write_index if role == "write" else space.read_index
        fresh = _fresh(plan, task, role, name)
        indices.append(index + first + total * fresh)
        scales.append(space.write if role == "write" else space.read)
        noise = None
        if role == "read" and plan.options.symmetry == "noise" and not bool(fresh.any()):
            noise = space.noise(plan.options.noise)
        noises.append(torch.zeros(space.target, dtype=torch.float64) if noise is None else noise)
        first += _block_length(layout, role, name, layer)
    index, scale, noise = torch.cat(indices), torch.cat(scales), torch.cat(noises)
    return AxisMap(
        None if len(index) == total and torch.equal(index, torch.arange(total)) else index,
        None if bool((scale == 1).all()) else scale,
        None if not bool(noise.any()) else noise,
    )


def _fresh(plan: GrowthPlan, task: Task, role: str, name: str) -> Tensor:
    """Target units of this axis that come from the next layer, (target,) int64 of 0 and 1."""
    space = plan.layout.space(name, task.source_layer)
    none = torch.zeros(space.target, dtype=torch.int64)
    if task.upper is None:
        return none
    if plan.options.aki == "eq16":
        if role == "read":
            return none
        new = torch.arange(space.target) >= space.source
        return (new & ~space.is_extra).long()
    is_unit = plan.layout.family.spaces[name].kind in ("heads", "units")
    return plan.layout.fresh(name).long() if is_unit else none


# -------------------------------------------------- extra coordinates, (1)-(3)


def _block_length(layout: Layout, role: str, name: str, layer: int | None) -> int:
    """Length of one block of a source axis once its functionals are appended."""
    space = layout.space(name, layer)
    if space.carry_units:
        return space.source + 2
    is_written_stream = role == "write" and layout.family.spaces[name].kind == "stream"
    return space.source + (len(space.signs) if is_written_stream else 0)


def _source_length(plan: GrowthPlan, task: Task, axis: str) -> int:
    role, _, names = axis.partition(":")
    if not names:
        return plan.layout.family.axis_size(plan.source.config, axis)
    return sum(_block_length(plan.layout, role, n, task.source_layer) for n in names.split("|"))


def _carried_weight(plan: GrowthPlan, task: Task, read: Read) -> Tensor:
    """w of (1) for the norm this tensor's vector enters, (n,) float64; 0 where none carries."""
    layout = plan.layout
    size = layout.stream_sizes[0]
    if task.into is None or not layout.is_carried:
        return torch.zeros(size, dtype=torch.float64)
    gamma = read(f"{task.into}.weight").double()
    return (gamma - gamma.mean()) / size


def _with_functionals(plan: GrowthPlan, task: Task, weight: Tensor, read: Read) -> Tensor:
    """Append what extra coordinates and carry units copy; `weight` itself where there are none."""
    layout = plan.layout
    if not layout.is_extended:
        return weight
    axes = [axis.partition(":")[::2] for axis in task.tensor.axes]
    kinds = [layout.family.spaces[n].kind if n and "|" not in n else "" for _, n in axes]
    delta, size = plan.options.carry, layout.stream_sizes[0]
    w = _carried_weight(plan, task, read)
    mean = torch.full((size,), 1 / size, dtype=torch.float64)
    signs = torch.tensor(layout.space("stream").signs, dtype=torch.float64)
    functionals = mean + delta * signs[:, None] * w
    carries = layout.is_carried and "write:ffn" in task.tensor.axes
    carried = layout.is_carried and "read:ffn" in task.tensor.axes
    extended = weight
    for dim, ((role, _), kind) in enumerate(zip(axes, kinds, strict=True)):
        if role == "write" and kind == "stream":
            rows = torch.tensordot(functionals, weight.double(), dims=([1], [dim]))
            extended = torch.cat([weight, rows.movedim(0, dim).to(weight.dtype)], dim)
    if carries:
        rows = torch.stack([mean, w]) if weight.ndim == 2 else torch.zeros(2, dtype=torch.float64)
        extended = torch.cat([extended, rows.to(weight.dtype)], 0)
    if carried:
        columns = torch.zeros(extended.shape[0], 2, dtype=torch.float64)
        columns[size:, 0], columns[size:, 1] = 1.0, delta * signs
        extended = torch.cat([extended, columns.to(weight.dtype)], 1)
    return extended


# -------------------------------------------------------------------- norms


def _build_norm(
    plan: GrowthPlan, task: Task, read: Read, dtype: torch.dtype, backend: str | None
) -> Tensor:
    """gamma_t = kappa c / a gamma, beta_t = c beta; extra coordinates by the row's `extra`."""
    layout, row = plan.layout, task.tensor.row
    assert row.norm is not None
    entering, leaving = (layout.space(name, task.source_layer) for name in row.norm)
    value = read(task.source)
    scale = leaving.write
    if not task.tensor.is_bias:
        scale = entering.kappa * leaving.write / entering.write
    index = entering.read_index
    extra = entering.is_extra
    if bool(extra.any()):
        appended, extra_scale = _extra_of_norm(plan, task, value, entering, leaving)
        index = torch.where(extra & (extra_scale[1] > 0), len(value), index)
        scale = torch.where(extra, extra_scale[0], scale)
        value = torch.cat([value, appended.to(value.dtype)])
    return expand(value, rows=index, row_scale=scale, out_dtype=dtype, backend=backend)


def _extra_of_norm(
    plan: GrowthPlan, task: Task, value: Tensor, entering: Space, leaving: Space
) -> tuple[Tensor, Tensor]:
    """An element to append, (1,), and per coordinate its scale and whether it is that element."""
    layout, is_bias = plan.layout, task.tensor.is_bias
    scale = torch.zeros(2, entering.target, dtype=torch.float64)
    appended = torch.ones(1, dtype=torch.float64)
    copy_scale = (entering.kappa * leaving.write / entering.write)[~entering.is_extra].mean()
    if layout.family.norm_placement == "pre":
        # the centred input is 0 there, so the weight is free; a zero would never learn
        scale[0, entering.is_extra] = 0.0 if is_bias else copy_scale
        return appended, scale
    carries = layout.is_carried and task.tensor.row.extra == "carry"
    if is_bias and (carries or not layout.is_carried):
        appended = value.double().mean()[None]
        scale[0, entering.is_extra] = leaving.write[entering.is_extra]
        scale[1, entering.is_extra] = 1.0
    elif carries:
        signs = entering.extra_signs
        # a single extra coordinate shifts the mean it is measured from
        centred = signs - signs.sum() / entering.target
        scale[0, entering.is_extra] = entering.kappa / (plan.options.carry * centred)
        scale[1, entering.is_extra] = 1.0
    return appended, scale


def _unit_gain(plan: GrowthPlan) -> float:
    """sqrt(1 + eps): undoes what eps takes from an input of variance 1."""
    return math.sqrt(1 + getattr(plan.source.config, plan.layout.family.norm_eps))


def _unit_norm(plan: GrowthPlan, task: Task, dtype: torch.dtype) -> Tensor:
    if task.tensor.is_bias:
        return torch.zeros(task.shape, dtype=dtype)
    # the first of a chain normalises, the ones after it must repeat their input
    is_first = task.tensor.layer not in plan.inserted
    return torch.full(task.shape, 1.0 if is_first else _unit_gain(plan), dtype=dtype)


# ---------------------------------------------------------------- baselines


def _random_with_old_block(plan: GrowthPlan, task: Task, read: Read, dtype: torch.dtype) -> Tensor:
    """Random as at the start of training; DirectCopy keeps the source in the leading block."""
    tensor, config = task.tensor, plan.target_config
    if tensor.row.norm or tensor.is_bias:
        fill = 1.0 if tensor.row.norm and not tensor.is_bias else 0.0
        built = torch.full(task.shape, fill, dtype=dtype)
    else:
        rng = maps.generator(plan.options.seed, "init", tensor.name)
        built = (torch.randn(task.shape, generator=rng) * config.initializer_range).to(dtype)
    if plan.options.method == "direct_copy":
        old = read(task.source)
        at = [_old_positions(plan, axis) for axis in tensor.axes]
        built[at[0] if len(at) == 1 else torch.meshgrid(*at, indexing="ij")] = old.to(dtype)
    return built


def _old_positions(plan: GrowthPlan, axis: str) -> Tensor:
    """Where the source's entries of an axis stand in the target, block by block."""
    _, _, names = axis.partition(":")
    family = plan.layout.family
    if not names:
        return torch.arange(family.axis_size(plan.target_config, axis))
    blocks, first = [], 0
    for name in names.split("|"):
        blocks.append(first + torch.arange(family.space_size(plan.source.config, name)))
        first += family.space_size(plan.target_config, name)
    return torch.cat(blocks)
