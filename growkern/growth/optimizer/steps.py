"""The steps of `GrowthAdamW`: PyTorch's fused kernel where it can, else PyTorch in blocks.

With (2) of `optimizer.moments`, a step of AdamW with rate u and eps factor g of every entry is

    p <- p - lr u ratio m / (sqrt(v) + eps g) - lr ratio weight_decay (p - centre)           (1)

with bias-corrected m and v. Growth in even numbers gives all entries of a parameter the same u and
g. (1) is then plain AdamW with lr u ratio, eps g and weight_decay / u, so the fused kernel of
PyTorch does it, for all such parameters at once. Other parameters are done a few rows at a time,
which bounds the temporary tensors and keeps them in the caches.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from growkern.growth.optimizer.moments import EntryFactors

# numbers of a parameter that are updated at a time: 512 KiB in float32. A GPU takes more at a time,
# because each block needs about ten launches
ELEMENTS_ON_CPU, ELEMENTS_ON_GPU = 1 << 17, 1 << 24
FUSED_DEVICES = ("cpu", "cuda")


class Part(NamedTuple):
    """This process's part of a parameter, its gradient and its moments, all of one shape.

    `largest` is the maximum of amsgrad, or None.
    """

    value: Tensor
    gradient: Tensor
    mean: Tensor
    square: Tensor
    largest: Tensor | None = None

    def tensors(self) -> list[Tensor]:
        return [x for x in self if x is not None]

    def rows(self, here: slice) -> Part:
        """Some rows of all tensors."""
        return Part(*(x[here] for x in self.tensors()))


class Uniform(NamedTuple):
    """u and g of (1), where all entries of a part share them."""

    lr: float = 1.0
    eps: float = 1.0


class Rule(NamedTuple):
    """The settings of one step of AdamW, and its number (from 1)."""

    lr: float
    beta1: float
    beta2: float
    eps: float
    weight_decay: float
    maximize: bool
    step: float


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


def unscaled(factors: EntryFactors) -> EntryFactors:
    """The factors of plain AdamW, with the same new entries."""
    lr, eps = (tuple(map(torch.ones_like, x)) for x in (factors.lr, factors.eps))
    return EntryFactors(lr, eps, factors.old)


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


def step_in_blocks(part: Part, factors: EntryFactors, ratio: float, rule: Rule) -> None:
    """(1) for any part, a block of rows at a time; only new entries have the `ratio`."""
    on_cpu = part.value.device.type == "cpu"
    size = ELEMENTS_ON_CPU if on_cpu else ELEMENTS_ON_GPU
    rows = len(part.value)
    each = max(1, size * rows // max(1, part.value.numel()))
    for start in range(0, rows, each):
        here = slice(start, min(rows, start + each))
        _step_block(part.rows(here), _rows_of(factors, here, rows), ratio, rule)


def _rows_of(factors: EntryFactors, here: slice, rows: int) -> EntryFactors:
    def cut(vectors: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        return tuple(x[here] if len(x) == rows else x for x in vectors)

    return EntryFactors(*(cut(x) for x in (factors.lr, factors.eps, factors.old, factors.centre)))


def _step_block(part: Part, factors: EntryFactors, ratio: float, rule: Rule) -> None:
    gradient = -part.gradient if rule.maximize else part.gradient
    part.mean.lerp_(gradient, 1 - rule.beta1)
    square = part.square.mul_(rule.beta2).addcmul_(gradient, gradient, value=1 - rule.beta2)
    if part.largest is not None:
        square = torch.maximum(part.largest, square, out=part.largest)
    root = (square / (1 - rule.beta2**rule.step)).sqrt_()
    update = part.mean / (1 - rule.beta1**rule.step)
    eps: Tensor | float = rule.eps
    for lr_factor, eps_factor in zip(factors.lr, factors.eps, strict=True):
        update *= lr_factor
        eps = eps * eps_factor
    root += eps
    decayed = part.value - factors.centre[0] if factors.centre else part.value
    update = update.div_(root).add_(decayed, alpha=rule.weight_decay)
    if ratio != 1:
        is_old = functools.reduce(torch.logical_and, factors.old)
        update = torch.where(is_old, update, update * ratio)
    part.value.sub_(update, alpha=rule.lr)
