"""Grows the moments of Adam and Muon, and finds factors for their learning rates.

With these learning-rate factors, growing before or after a step gives the same model.

Moments are means of gradients and of their squares, so they grow as gradients do. With
U = E_out W P_in and (1) of `growkern.growth.plan.axes`, each entry of U and of its gradient is

    U = u W[...],   dU = g dW[...]                                                         (2)

u and g are products of one vector per axis. u is 1/C on read axes and 1 on written axes, C the
number of copies; g is the reverse. Moments grow as m_U = g m_W and v_U = g^2 v_W.

The weight gamma and bias beta of a norm follow (3). p is the share of the norm's readers, and a and
kappa belong to the space that the norm reads, see (3) of `growkern.growth.space.spaces`:

    d gamma_t = p a / kappa d gamma,   d beta_t = p d beta                                 (3)

Plain AdamW moves every copy as far as its source, which is C times too far for divided weights.
With learning rates lr u and eps eps g per entry, and weight decay still lr times weight_decay, a
step and growth commute.

Some models multiply by 1 + w (Gemma). Growth scales the sum by s: 1 + w_t = s (1 + w). When the
source's w decays to 0, the target's must decay

    from w_t to s - 1                                                                      (4)

Muon's step is the polar factor of the momentum: one singular value, about 1, in every direction.
Growth by c copies lengthens singular vectors by sqrt(c), so Muon divides by sqrt(c) per axis, where
the weights want u. Its learning rate then needs, with n the size of the source's axis,

    product over both axes of norm(u) / sqrt(n)                                            (5)

which is sqrt(c_out / c_in) in even growth. Rules that adjust the rate to the matrix's shape are
divided out.

A source that was grown itself takes its steps with factors of its own, so those of the target are

    u_t = u u_s[...],   g_t = g g_s[...],   1 + z_t = s (1 + z_s[...])                     (6)

with z the values of (4), and so on for every growth before. The moments of the target come from
those of its source, so they need (2) alone.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from growkern.errors import GrowthError, warn
from growkern.growth.optimizer.checks import MOMENTS, check_values
from growkern.growth.plan import (
    AxisMap,
    GrowthPlan,
    PlanOfModel,
    Task,
    axis_maps,
    check_plan,
    kind_of,
    old_entries,
)
from growkern.growth.record import plan_of_source, unknown_growth
from growkern.ops.adamw import Factors
from growkern.ops.expand import Work

# how Muon adjusts its learning rate to a matrix of A x B. "none" is for a Muon without such a rule
MUON_RULES: dict[str, Callable[[int, int], float]] = {
    "none": lambda a, b: 1.0,
    "original": lambda a, b: math.sqrt(max(1.0, a / b)),
    "match_rms_adamw": lambda a, b: 0.2 * math.sqrt(max(a, b)),
}
# (name of a source tensor, per axis the entries that are needed) -> the tensor
ReadEntries = Callable[[str, Sequence[Tensor]], Tensor]


@dataclass(frozen=True)
class EntryFactors(Factors):
    """Factors of every entry of one grown parameter: u and g of (2), and the centre of (4).

    Attributes:
        muon: of a matrix, or of the stacked ones of experts, the factor of Muon's learning rate by
            the name of `adjust_lr_fn`: (5) over the growth of that rule. PyTorch's default, None,
            is "original". "none": (5).
    """

    muon: Mapping[str, float] = dataclasses.field(default_factory=dict)


def growth_lr_multipliers(plan: PlanOfModel) -> dict[str, EntryFactors]:
    """The factors of learning rate and eps with which AdamW commutes with growth.

    Source and target then take the same steps in function space, where `moment_findings` says
    "exact". Entries without a source get the mean factor of the others, and negative shares get
    their magnitude. `growkern.GrowthAdamW` and `growkern.GrowthMuon` apply the factors.

    If the source was grown itself, the factors count from the model that was grown first. They
    belong to the parameters, whatever optimizer trained the source.

    Args:
        plan: from `growkern.plan`, or a grown model's `growth_plan`.

    Returns:
        Factors by parameter name.

    Raises:
        GrowthError: `plan` is no plan.
    """
    check_plan(plan)
    try:
        before = plan_of_source(plan)
    except GrowthError:
        # `moment_findings` and `warn_of_unknown_growth` say so
        before = None
    earlier = {} if before is None else growth_lr_multipliers(before)
    return {task.name: entry_factors(plan, task, earlier) for task in plan.tasks}


def warn_of_unknown_growth(plan: GrowthPlan) -> None:
    """Warn if the factors lack those of a growth before this one."""
    if unknown := unknown_growth(plan):
        # at this line, so that two optimizers of one model say it once
        warn(f"{unknown}; if it stays unknown, train with AdamW")


def entry_factors(
    plan: GrowthPlan, task: Task, earlier: Mapping[str, EntryFactors]
) -> EntryFactors:
    """The factors of one parameter, from those of the source's parameters, see (6)."""
    axes = list(zip(task.tensor.axes, task.shape, strict=True))
    kind = kind_of(plan, task)
    if (maps := kind.rates()) is None:
        usual = _spread([torch.ones(size, dtype=torch.float64) for size in task.shape])
        none = tuple(x == 0 for x in usual)
        return EntryFactors(usual, usual, none, muon=dict.fromkeys(MUON_RULES, 1.0))
    # with AKI, entries of the next layer are counted behind those of the layer
    sources = [name for name in (task.source, task.upper) if name is not None]
    before = [earlier[name] for name in sources if name in earlier]
    lr = [m.scale for m in maps]
    centre: tuple[Tensor, ...] = ()
    if (scale := kind.pull()) is not None:
        pulls = [
            1 + (factors.centre[0] if factors.centre else torch.zeros_like(factors.lr[0]))
            for factors in before
        ]
        centre = (scale * _gathered(maps[0], pulls) - 1,)
    lr = [
        x * _gathered(m, [factors.lr[dim] for factors in before])
        for dim, (x, m) in enumerate(zip(lr, maps, strict=True))
    ]
    eps = [
        m.scale * _gathered(m, [factors.eps[dim] for factors in before])
        for dim, m in enumerate(kind.gradients())
    ]
    is_old = is_first_copy(plan, task) and not kind.is_new
    return EntryFactors(
        _spread([*map(_filled, lr)]),
        _spread([*map(_filled, eps)]),
        _spread([old_entries(plan, task, *axis) & is_old for axis in axes]),
        centre,
        _muon_factors(plan, task, before[0].muon if before else {}),
    )


def _gathered(axis: AxisMap, earlier: Sequence[Tensor]) -> Tensor | float:
    """The factors that the sources of an axis' entries had before; their mean for new entries."""
    if not earlier:
        return 1.0
    known = torch.cat([x.flatten() for x in earlier])
    is_copy = torch.arange(len(axis.index)) < len(axis.index) - axis.extra
    of_source = known[torch.where(is_copy, axis.index, 0)]
    return torch.where(is_copy, of_source, known[: axis.source].mean())


def _muon_factors(plan: GrowthPlan, task: Task, earlier: Mapping[str, float]) -> dict[str, float]:
    """`EntryFactors.muon`; empty unless the tensor is a matrix, or has one for each expert."""
    if not has_matrices(plan, task):
        return {}
    maps = axis_maps(plan, task)
    (a, b), (rows, cols) = task.shape[-2:], [m.source for m in maps[-2:]]
    copied = [m.scale[: len(m.scale) - m.extra] for m in maps[-2:]]
    if len(maps) == 2 and (idle := kind_of(plan, task).idle) is not None:
        # a row without a gradient has no part in the singular vectors
        copied[0] = copied[0][~idle]
    scale = math.prod(float(u.norm()) for u in copied) / math.sqrt(rows * cols)
    # all experts have whole copies
    scale *= math.prod(float(m.scale[0]) for m in maps[:-2])
    return {
        name: scale * rule(rows, cols) / rule(a, b) * earlier.get(name, 1.0)
        for name, rule in MUON_RULES.items()
    }


def has_matrices(plan: GrowthPlan, task: Task) -> bool:
    """True for a matrix, and for the stacked matrices of experts."""
    return len(task.shape) == 2 or (len(task.shape) == 3 and plan.small.is_of_experts(task.tensor))


def _filled(scale: Tensor) -> Tensor:
    """Magnitudes, with zeros replaced by the mean of the others: a rate of 0 would not learn."""
    size = scale.abs()
    return torch.where(size == 0, size[size > 0].mean(), size)


def _spread(vectors: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """One vector per axis, shaped to broadcast."""
    axes = range(len(vectors))
    return tuple(
        x.reshape([-1 if axis == own else 1 for axis in axes]) for own, x in enumerate(vectors)
    )


def is_first_copy(plan: GrowthPlan, task: Task) -> bool:
    """True if the tensor's layer is the first target layer made from its source layer."""
    layers = plan.layer_maps.get(task.tensor.stack, ())
    layer = task.tensor.layer
    return layer is None or layers.index(layers[layer]) == layer


# ------------------------------------------------------------------ moments


def starts_at_zero(plan: GrowthPlan, task: Task, moments: str) -> bool:
    """True if moments and step count start at 0, as in experts whose outputs are zero."""
    if moments == "old_slices" and not is_first_copy(plan, task):
        return True
    kind, upcycling = kind_of(plan, task), plan.upcycling
    if moments == "grow" and not kind.has_known_gradient:
        return True
    is_beside = upcycling is not None and upcycling.adds_nothing(task.tensor.row)
    return is_beside or moments == "reset" or kind.is_new


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
    """Build one moment of a target parameter that does not start at zero.

    Args:
        read: returns the source's moment by parameter name. Entries that are not in its second
            argument may be undefined.
        key: which moment, one of `MOMENTS`.
        moments: "grow" or "old_slices", see `growkern.grow_optimizer`.
        part: one slice per axis; default: all of it. A part has the same bits as that place of the
            whole moment.
        out: tensor to fill, of the part's shape and any dtype. Default: a new tensor in the
            dtype of the source's moment.
    """
    part = part or (slice(None),) * len(task.shape)
    where = task.ranges(part)
    if (matrix := task.matrix) is not task:
        place = task.part_of_matrix(part)
        flat = None if out is None else out.view([s.stop - s.start for s in place])
        as_matrix = partial(_as_matrix, plan, matrix, read)
        built = grow_moment(plan, matrix, as_matrix, key=key, moments=moments, part=place, out=flat)
        return built.view([*map(len, where)])
    kind = kind_of(plan, task)
    axes = kind.gradients(MOMENTS[key])
    if moments == "old_slices":
        named = zip(task.tensor.axes, task.shape, strict=True)
        old = [old_entries(plan, task, axis, size) for axis, size in named]
        axes = [dataclasses.replace(m, scale=x.double()) for m, x in zip(axes, old, strict=True)]
    needed = [m.index[s] % m.source for m, s in zip(axes, part, strict=True)]
    mixes = any(bool((m.index >= m.source).any()) for m in axes)
    # read before the return below: gathering a DTensor needs a call from every rank
    weight = read(task.source, needed)
    upper = read(task.upper, needed) if task.upper is not None and mixes else None
    if out is None:
        out = torch.empty([*map(len, where)], dtype=weight.dtype)
    if not out.numel():
        return out
    if task.tensor.is_copied:
        out.copy_(weight[part])
    else:
        found: dict[str | None, Any] = {task.source: weight, task.upper: upper}
        read_found = lambda name, *entries: found[name][entries]  # noqa: E731
        kind.gather(axes, read_found, part, out, Work())
    check_values(task.source if upper is None else f"{task.source} or {task.upper}", key, out)
    return out


def _as_matrix(
    plan: GrowthPlan, matrix: Task, read: ReadEntries, name: str, _needed: Sequence[Tensor]
) -> Tensor:
    whole = read(name, [torch.arange(n) for n in plan.small.shapes[name]])
    return whole.reshape([plan.small.axis_size(axis) for axis in matrix.tensor.axes])
