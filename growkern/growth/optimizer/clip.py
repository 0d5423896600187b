"""`growkern.growth_clip_norm_`: clips a grown model's gradients by the norm of its source's.

Growth makes several copies of a source entry, and the gradient of each is g times that of the
source, see (2) of `optimizer.moments`. The plain norm counts all copies. It differs from the
source's norm, so clipping by it scales the steps of source and target differently. Here an entry
counts with the weight u / g:

    norm^2 = sum of (u / g) dU^2                                                           (1)

Over the copies of an entry, u g adds up to 1, so (1) is the sum of the source's squares wherever
(2) of `optimizer.moments` holds. With other symmetries only the mean of the copies' gradients
follows from the source's. (1) also counts how they differ, so it is larger. Leaving the
differences out would give the source's norm, but nothing would then clip them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Partial, Replicate
from torch.utils.weak import WeakIdKeyDictionary

from growkern.errors import GrowthError
from growkern.growth.models import local_tensor, unwrapped
from growkern.growth.optimizer.adamw import factors_of
from growkern.growth.optimizer.moments import EntryFactors, growth_lr_multipliers
from growkern.growth.plan import GrowthPlan, PlanOfModel, check_plan

# elements that are squared and weighted at a time: the temporary tensor takes 4 MiB in float32
ELEMENTS_AT_ONCE = 1 << 20


@torch.no_grad()
def growth_clip_norm_(
    model: Any,
    max_norm: float,
    *,
    plan: PlanOfModel | None = None,
    error_if_nonfinite: bool = False,
) -> Tensor:
    """Clip the gradients of a grown model by a norm in which all copies of an entry count as one.

    It replaces `torch.nn.utils.clip_grad_norm_`, to continue training as the source would have.
    With symmetry="none", stream="copies" and even widths the norm is exactly the source's. Together
    with `growkern.GrowthAdamW`, clipped steps then commute with growth, wherever `moment_findings`
    says "exact". Other symmetries give the copies different gradients, and new entries of a padded
    stream have gradients of their own. The norm counts all of these. Right after growth to 2 or 3
    times the width, it was this many times the source's norm in small random GPT-2, Llama and BERT
    models:

        symmetry      stream="copies"                      stream="padded"
        "none"        1; at an uneven LayerNorm 1.07       1.1 to 1.6
        "noise"       1.01 to 1.03                         1.1 to 1.4
        "routing"     1.2 to 1.5 with 2 copies, else 1.8   1.2 to 1.8
        "split"       1.7 to 2.9                           1.4 to 2.6

    Entries without a source, such as those of new layers, count with the mean weight of the others.

    Args:
        model: the grown model. Parameters may be DTensors; then all ranks must call this. Wrappers
            of `torch.compile` and DistributedDataParallel are fine.
        max_norm: gradients with a larger norm are multiplied by max_norm / norm. Infinity: they
            stay as they are.
        plan: the growth of the weights; default: the model's `growth_plan`.
        error_if_nonfinite: raise an error if the norm is NaN or infinite. False: PyTorch's
            behaviour, gradients become NaN or 0. True waits for a GPU.

    Returns:
        That norm before clipping, a 0-d float32 tensor (float64 for float64 gradients).

    Raises:
        GrowthError: there is no plan, a parameter is not in it, a gradient is sparse, or
            `max_norm` is negative or NaN.

    Source: derived from the chain rule.
    """
    if not max_norm >= 0:
        raise GrowthError(f"max_norm={max_norm}: give a number of 0 or more")
    model = unwrapped(model)
    plan = plan or getattr(model, "growth_plan", None)
    if plan is None:
        raise GrowthError(
            "the model has no growth_plan: give plan, from growkern.growth_plan_of(model) before "
            "the loop"
        )
    check_plan(plan)
    weights = _weights_of(model, plan)
    norm = _norm({p: weights[p] for p in model.parameters() if p.grad is not None})
    if error_if_nonfinite and not torch.isfinite(norm):
        raise GrowthError(f"the norm of the gradients is {norm.item()}, so they cannot be clipped")
    if max_norm < float("inf"):
        # as in PyTorch, so that a step of the source is clipped alike
        factor = (max_norm / (norm + 1e-6)).clamp(max=1.0)
        for p in model.parameters():
            if p.grad is not None:
                gradient = local_tensor(p.grad)
                gradient.mul_(factor.to(gradient.device))
    return norm


class _Weights(NamedTuple):
    """u / g of (1) for the entries of this process's part of one parameter."""

    constant: float  # product of the axes on which all entries have the same weight
    vectors: dict[int, Tensor]  # of the other axes by their number, (size,) float64 or float32


# plan -> parameter's name and place -> weights: they are the same in every step, and making them
# reads the whole plan. A weak reference to a parameter would keep `model.to` from replacing it
_known: Any = WeakIdKeyDictionary()


def _weights_of(model: Any, plan: GrowthPlan) -> Mapping[Tensor, _Weights]:
    """The weights of every parameter."""
    known = _known.setdefault(plan, {})
    factors: Mapping[str, EntryFactors] = {}
    result = {}
    for name, p in model.named_parameters():
        key = (name, *_place(p))
        if key not in known:
            factors = factors or growth_lr_multipliers(plan)
            known[key] = _make_weights(factors_of(factors, name, p), local_tensor(p))
        result[p] = known[key]
    return result


def _place(p: Tensor) -> tuple[Any, ...]:
    """What decides the weights of a parameter besides its name: device, dtype and part."""
    if not isinstance(p, DTensor):
        return p.device, p.dtype
    mesh = p.device_mesh
    at = (mesh.shape, tuple(mesh.get_coordinate() or ()), p.placements)
    return local_tensor(p).device, p.dtype, *at


def _make_weights(factors: EntryFactors, part: Tensor) -> _Weights:
    constant, vectors = 1.0, {}
    for dim, (lr, eps) in enumerate(zip(factors.lr, factors.eps, strict=True)):
        weight = (lr.double() / eps.double()).flatten()
        if not weight.numel():
            continue
        first = weight[0].item()
        if bool((weight - first).abs().max() <= 1e-6 * first):
            constant *= first
        else:
            vectors[dim] = weight.to(_sum_dtype(part))
    return _Weights(constant, vectors)


def _sum_dtype(x: Tensor) -> torch.dtype:
    return torch.float64 if x.dtype == torch.float64 else torch.float32


def _norm(weights: Mapping[Tensor, _Weights]) -> Tensor:
    """The square root of (1) over all parameters, on all ranks."""
    local: list[Tensor] = []
    # sums of the same mesh and the same sharded mesh dimensions are added up before they travel
    sharded: dict[tuple[Any, tuple[bool, ...]], list[Tensor]] = {}
    for p, weight in weights.items():
        gradient = p.grad
        assert gradient is not None
        if gradient.layout != torch.strided:
            raise GrowthError("a gradient is sparse: make the embedding with sparse=False")
        if isinstance(p, DTensor) and isinstance(gradient, DTensor):
            gradient = gradient.redistribute(placements=p.placements)
            where = p.device_mesh, tuple(not x.is_replicate() for x in p.placements)
            sharded.setdefault(where, []).append(_weighted_squares(local_tensor(gradient), weight))
        else:
            local.append(_weighted_squares(gradient, weight))
    for (mesh, is_sharded), squares in sharded.items():
        placements = [Partial() if x else Replicate() for x in is_sharded]
        local.append(DTensor.from_local(_sum(squares), mesh, placements).full_tensor())
    return _sum(local).sqrt()


def _sum(squares: list[Tensor]) -> Tensor:
    if not squares:
        return torch.tensor(0.0)
    return torch.stack([x.to(squares[0].device) for x in squares]).sum()


def _weighted_squares(gradient: Tensor, weight: _Weights) -> Tensor:
    """(1) of one part, a 0-d tensor; no temporary tensor is as large as the gradient."""
    dtype = _sum_dtype(gradient)
    if not gradient.numel():
        return torch.zeros((), dtype=dtype, device=gradient.device)
    if len(weight.vectors) < 2:
        others = [d for d in range(gradient.ndim) if d not in weight.vectors]
        norms = torch.linalg.vector_norm(gradient, dim=others, dtype=dtype) if others else gradient
        squares = norms.to(dtype).square()
        for vector in weight.vectors.values():
            squares = squares * vector
        return squares.sum() * weight.constant
    rows = max(1, ELEMENTS_AT_ONCE // gradient[0].numel())
    total = torch.zeros((), dtype=dtype, device=gradient.device)
    first = weight.vectors.get(0)
    for start in range(0, len(gradient), rows):
        block = gradient[start : start + rows].to(dtype).square()
        for dim, vector in weight.vectors.items():
            vector = vector[start : start + rows] if vector is first else vector
            block *= vector.reshape([-1 if d == dim else 1 for d in range(block.ndim)])
        total += block.sum()
    return total * weight.constant
