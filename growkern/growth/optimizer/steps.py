"""The steps of `GrowthAdamW`: which of them PyTorch's own fused kernel can take, and their factors.

With (2) of `optimizer.moments`, a step of AdamW with rate u and eps factor g of every entry is

    p <- p - lr u ratio m / (sqrt(v) + eps g) - lr ratio weight_decay (p - centre)           (1)

with bias-corrected m and v. Growth in even numbers gives all entries of a parameter the same u and
g. (1) is then plain AdamW with lr u ratio, eps g and weight_decay / u, so the fused kernel of
PyTorch does it, for all such parameters at once. Other parameters take `growkern.ops.adamw`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from growkern.errors import GrowthError
from growkern.growth.optimizer.checks import check_planned_shape
from growkern.growth.optimizer.moments import EntryFactors
from growkern.growth.sharded.placement import local_part
from growkern.ops.adamw.factors import Factors, Part, Rule

FUSED_DEVICES = ("cpu", "cuda")


def loss_of(closure: Callable[[], Any] | None) -> Any:
    """The loss that the closure of a step computes, with gradients; None without a closure."""
    if closure is None:
        return None
    with torch.enable_grad():
        return closure()


class Uniform(NamedTuple):
    """u and g of (1), where all entries of a part share them."""

    lr: float = 1.0
    eps: float = 1.0


def rule_of(group: dict[str, Any], step: float) -> Rule:
    """The settings of a parameter group in its step of this number."""
    lr, eps, weight_decay = (float(group[key]) for key in ("lr", "eps", "weight_decay"))
    beta1, beta2 = (float(beta) for beta in group["betas"])
    return Rule(lr, beta1, beta2, eps, weight_decay, bool(group["maximize"]), step)


def uniform_of(factors: EntryFactors) -> Uniform | None:
    """The factors that all entries share, or None if they differ."""
    if factors.centre:
        return None
    shared = []
    for vectors in (factors.lr, factors.eps):
        ends = [[x.item() for x in vector.aminmax()] for vector in vectors if vector.numel()]
        if any(low != high for low, high in ends):
            return None
        shared.append(math.prod(low for low, _ in ends))
    return Uniform(*shared)


def is_old_of(factors: EntryFactors) -> bool | None:
    """Whether the source had the entries; None if it had only some of them."""
    if all(bool(x.all()) for x in factors.old):
        return True
    return None if all(bool(x.any()) for x in factors.old) else False


def factors_for_step(factors: EntryFactors, *, scaled: bool) -> Factors:
    """The factors as a step takes them; `scaled=False`: those of plain AdamW."""
    if scaled:
        return Factors(factors.lr, factors.eps, factors.old, factors.centre)
    lr, eps = (tuple(map(torch.ones_like, x)) for x in (factors.lr, factors.eps))
    return Factors(lr, eps, factors.old)


def can_be_fused(part: Part) -> bool:
    """Whether PyTorch's fused kernel takes these tensors: it reads them as flat memory."""
    value = part.value
    return value.device.type in FUSED_DEVICES and all(
        x.is_contiguous() and x.dtype == value.dtype for x in part.tensors()
    )


def step_fused(parts: Sequence[Part], factors: Uniform, ratio: float, rule: Rule) -> None:
    """(1) for parts whose entries share their factors, all on one device and of one dtype."""
    values, gradients, means, squares, _ = (list(x) for x in zip(*parts, strict=True))
    largest = [part.largest for part in parts if part.largest is not None]
    count = torch.full((), rule.step, dtype=torch.float32, device=values[0].device)
    torch._fused_adamw_(
        values, gradients, means, squares, largest, [count] * len(parts),
        lr=rule.lr * factors.lr * ratio, beta1=rule.beta1, beta2=rule.beta2,
        weight_decay=rule.weight_decay / factors.lr, eps=rule.eps * factors.eps,
        amsgrad=bool(largest), maximize=rule.maximize,
    )  # fmt: skip


def factors_of(factors: Mapping[str, EntryFactors], name: str, p: Tensor) -> EntryFactors:
    """The factors of this process's part of a parameter, on its device.

    They are float64 for parameters in float64, and float32 for all others: bfloat16 cannot
    represent a third.

    Args:
        name: the parameter's name; wrappers of `torch.compile` and DistributedDataParallel may add
            to it.
    """
    name = name.replace("_orig_mod.", "").removeprefix("module.")
    if name not in factors:
        raise GrowthError(
            f"the plan has no parameter {name}: pass the parameters of the grown model"
        )
    found = factors[name]
    shape = tuple(max(n) for n in zip(*(v.shape for v in found.lr), strict=True))
    check_planned_shape(name, p.shape, shape)
    part = local_part(name, p)
    device = p.to_local().device if isinstance(p, DTensor) else p.device
    dtype = torch.float64 if p.dtype == torch.float64 else torch.float32

    def here(vectors: tuple[Tensor, ...], dtype: torch.dtype) -> tuple[Tensor, ...]:
        cut = (v.swapaxes(0, d)[part[d]].swapaxes(0, d) for d, v in enumerate(vectors))
        return tuple(v.to(device, dtype) for v in cut)

    return EntryFactors(
        here(found.lr, dtype),
        here(found.eps, dtype),
        here(found.old, torch.bool),
        here(found.centre, dtype),
        found.muon,
    )
