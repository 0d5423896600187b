"""What growth does to gradients, and so to what an optimizer remembers of them.

With U = E_out W P_in and (1) of `growkern.growth.plan.axes`, entry by entry

    U = u W[...],   dU = g dW[...]                                                         (2)

u and g are products of one vector per axis: 1/C on read axes and 1 on written ones for u, the
other way round for g. Moments grow as m_U = g m_W, v_U = g^2 v_W. A norm's gain gets, with p the
share of its readers, a and kappa of the space it reads (`spaces`, (3)),

    d gamma_t = p a / kappa d gamma,   d beta_t = p d beta                                 (3)

AdamW then moves every copy by as much as its source, divided weights C times too far. With
lr u and eps g per entry, and a decay of lr as before, step and growth commute. Where a model
multiplies by 1 + w (Gemma), growth scales that: 1 + w_t = s (1 + w). The decay of w to 0 is that

    of w_t to s - 1                                                                        (4)
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from growkern.errors import GrowthError
from growkern.growth.plan.axes import AxisMap, axis_map, gradient_map, old_entries
from growkern.growth.plan.blueprint import Task
from growkern.growth.plan.exactness import Finding
from growkern.growth.plan.growth_plan import GrowthPlan
from growkern.ops.expand.op import expand

# state of Adam and AdamW -> the power of the gradient it is a mean of
MOMENTS = {"exp_avg": 1, "exp_avg_sq": 2, "max_exp_avg_sq": 2}
# a source tensor by name, of which the listed entries of every axis are wanted
ReadEntries = Callable[[str, Sequence[Tensor]], Tensor]


@dataclass(frozen=True)
class EntryFactors:
    """What a step of AdamW needs to know of the entries of one grown parameter.

    Each is a tuple of one vector per axis, shaped to broadcast: the product over the axes is the
    factor of every entry.

    Attributes:
        lr: u of (2), float64, positive.
        eps: g of (2), float64, positive.
        old: bool; an entry was the source's if it is true on all axes.
        centre: what weight decay pulls towards, for all axes at once, in a tuple of one; () where
            that is 0. See (4).
    """

    lr: tuple[Tensor, ...]
    eps: tuple[Tensor, ...]
    old: tuple[Tensor, ...]
    centre: tuple[Tensor, ...] = ()


def growth_lr_multipliers(plan: GrowthPlan) -> dict[str, EntryFactors]:
    """Per parameter, the factors of learning rate and eps that make AdamW commute with growth.

    Source and target then take the same steps in function space, as far as gradients follow (2)
    (see `moment_findings`), and weight decay does as (4) says. Entries that hold nothing of the
    source's, or a share of negative sign, learn like their neighbours. `growkern.GrowthAdamW`
    applies the factors.

    Args:
        plan: from `growkern.plan`, or a grown model's `growth_plan`.
    """
    return {task.name: _entry_factors(plan, task) for task in plan.tasks}


def _entry_factors(plan: GrowthPlan, task: Task) -> EntryFactors:
    axes = list(zip(task.tensor.axes, task.shape, strict=True))
    lr = [axis_map(plan, task, axis, size).scale for axis, size in axes]
    centre: tuple[Tensor, ...] = ()
    if task.tensor.norm and not task.tensor.is_bias:
        entering = plan.layout.space(task.tensor.norm[0], task.source_layer)
        lr[0] = lr[0] * torch.where(entering.write == 0, 0.0, entering.kappa / entering.write)
        if plan.layout.family.norm.plus_one and not is_new(plan, task):
            # where nothing enters, a weight is a neighbour's, as in `growkern.growth.tensors.norms`
            centre = (torch.where(lr[0] == 0, entering.kappa, lr[0]) - 1,)
    eps = [m.scale for m in _gradient_maps(plan, task)]
    keeps = is_first(plan, task) and not is_new(plan, task)
    old = [old_entries(plan, task, *axis) & keeps for axis in axes]
    return EntryFactors(
        tuple(_broadcast(_filled(x), dim, len(axes)) for dim, x in enumerate(lr)),
        tuple(_broadcast(_filled(x), dim, len(axes)) for dim, x in enumerate(eps)),
        tuple(_broadcast(x, dim, len(axes)) for dim, x in enumerate(old)),
        centre,
    )


def _filled(scale: Tensor) -> Tensor:
    """Magnitudes, and their mean where there is none: a rate of 0 would never learn."""
    size = scale.abs()
    return torch.where(size == 0, size[size > 0].mean(), size)


def _broadcast(vector: Tensor, dim: int, ndim: int) -> Tensor:
    shape = [1] * ndim
    shape[dim] = -1
    return vector.reshape(shape)


def is_new(plan: GrowthPlan, task: Task) -> bool:
    """True for a tensor in which nothing learned has a place yet: inserted blocks, made tensors."""
    if task.is_made or task.identity in ("zero", "unit"):
        return True
    return (task.tensor.stack, task.tensor.layer) in plan.inserted and task.identity != "affine"


def is_first(plan: GrowthPlan, task: Task) -> bool:
    """True for the first of all layers that are made from the same source layer."""
    layers = plan.layer_maps.get(task.tensor.stack, ())
    layer = task.tensor.layer
    return layer is None or layers.index(layers[layer]) == layer


# ------------------------------------------------------------------ moments


def starts_at_zero(plan: GrowthPlan, task: Task, moments: str) -> bool:
    """True for a parameter whose moments and step count are those of step 0."""
    if moments == "old_slices" and not is_first(plan, task):
        return True
    return moments == "reset" or is_new(plan, task)


def grow_moment(
    plan: GrowthPlan,
    task: Task,
    read: ReadEntries,
    *,
    key: str,
    moments: str = "grow",
    part: tuple[slice, ...] | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """One moment of a target parameter that does not start at zero, in the moment's own dtype.

    Args:
        read: gives the source's moment by the parameter's name; entries of an axis that are not
            listed may be undefined.
        key: which moment, one of `MOMENTS`.
        moments: "grow" or "old_slices", see `growkern.grow_optimizer`.
        part: one slice per axis; default all of it. A part has the bits of the same place in the
            whole.
        out: where to put it, in a dtype of its own.

    Raises:
        GrowthError: it holds NaN, Inf or a negative mean of squares.
    """
    power = MOMENTS[key]
    part = part or (slice(None),) * len(task.shape)
    axes = _gradient_maps(plan, task)
    if moments == "old_slices":
        named = zip(task.tensor.axes, task.shape, strict=True)
        old = [old_entries(plan, task, axis, size) for axis, size in named]
        axes = [dataclasses.replace(m, scale=x.double()) for m, x in zip(axes, old, strict=True)]
    blocks = [
        dataclasses.replace(m, scale=m.scale**power).block(range(*s.indices(n)))
        for m, s, n in zip(axes, part, task.shape, strict=True)
    ]
    rows, cols = (*blocks, {})[:2]
    needed = [m.index[s] % m.source for m, s in zip(axes, part, strict=True)]
    mixes = any(bool((m.index >= m.source).any()) for m in axes)
    # on every rank, whatever it holds: reading may take all of them
    weight = read(task.source, needed)
    upper = read(task.upper, needed) if task.upper is not None and mixes else None
    if out is not None and not out.numel():
        return out
    built = expand(
        weight,
        rows=rows["index"],
        cols=cols.get("index"),
        row_scale=rows["scale"],
        col_scale=cols.get("scale"),
        upper=upper,
        out=out,
    )
    check_values(task.source if upper is None else f"{task.source} or {task.upper}", key, built)
    return built


def check_values(name: str, key: str, values: Tensor) -> None:
    """GrowthError for what no step of Adam leaves: NaN, Inf, a negative mean of squares.

    Args:
        name: the source's parameter.
        key: which moment.
        values: it, or a part of it, as saved or grown.
    """
    if not values.numel():
        return
    low, high = (x.item() for x in values.aminmax())
    if not (math.isfinite(low) and math.isfinite(high)):
        wrong = "NaN or Inf"
    elif MOMENTS[key] == 2 and low < 0:
        wrong = "a negative mean of squares"
    else:
        return
    raise GrowthError(
        f"{name}: {key} holds {wrong}; take an optimizer saved before that, or begin anew with "
        'moments="reset" (--moments reset)'
    )


def _gradient_maps(plan: GrowthPlan, task: Task) -> list[AxisMap]:
    """g of (2), axis by axis; (3) for norms."""
    axes = [
        gradient_map(plan, task, axis, size)
        for axis, size in zip(task.tensor.axes, task.shape, strict=True)
    ]
    if task.tensor.norm and not task.tensor.is_bias:
        entering = plan.layout.space(task.tensor.norm[0], task.source_layer)
        scale = torch.where(entering.is_extra, 0.0, axes[0].scale * entering.write / entering.kappa)
        axes = [dataclasses.replace(axes[0], scale=scale)]
    return axes


# ----------------------------------------------------------------- findings


def moment_findings(plan: GrowthPlan) -> tuple[Finding, ...]:
    """Which grown moments are those of the grown model's own gradients, which are a good start.

    "exact": (2) and (3) hold. "approximate": they are a start value that folds back to the
    source's gradient. "changed": the target computes another function, or starts at zero.
    """
    return tuple(finding for part in (_everywhere, _in_places) for finding in part(plan))


def _everywhere(plan: GrowthPlan) -> list[Finding]:
    layout, options = plan.layout, plan.options
    if options.is_baseline:
        return [Finding("changed", "moments", "the weights are not the source's")]
    reasons = []
    if not all(finding.level == "exact" for finding in plan.findings):
        reasons.append("the target does not compute the source's function exactly")
    if options.symmetry == "noise":
        reasons.append("symmetry='noise': copies that differ have gradients that differ")
    if options.symmetry == "split":
        reasons.append("symmetry='split': the readers of a space take different shares")
    if layout.is_extended:
        reasons.append("uneven LayerNorm width: gradients pass through the extra coordinates")
    if reasons:
        return [Finding("approximate", "moments", "; ".join(reasons))]
    return [Finding("exact", "moments", "every copy's gradient is a share of its source's")]


def _in_places(plan: GrowthPlan) -> list[Finding]:
    family, models, found = plan.small.family, (plan.small, plan.large), []
    if "kv_heads" in family.config:
        old, new = (m.size("q_heads") // m.size("kv_heads") for m in models)
        if old != new:
            why = f"{new} query heads share a key head that {old} shared"
            found.append(Finding("approximate", "keys and values", why))
    if any(len({m.head_dim(heads) for m in models}) > 1 for heads in family.query_heads):
        found.append(Finding("approximate", "keys", "new entries are zero, but meet queries"))
    if any(is_new(plan, task) for task in plan.tasks):
        found.append(Finding("changed", "new blocks", "their moments and step counts start at 0"))
    return found
