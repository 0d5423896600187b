"""A step of AdamW in which every entry has a learning rate and an eps of its own, in one pass.

With gradient g, moments m and v, bias corrections c1 = 1 - beta1^step and c2 = 1 - beta2^step, and
the factors u, e, s and the centre z of an entry:

    m <- beta1 m + (1 - beta1) g
    v <- beta2 v + (1 - beta2) g^2                                                         (1)
    w <- w - lr s (u m / c1 / (sqrt(v / c2) + eps e) + weight_decay (w - z))               (2)

u and e are products of one vector per axis. s is 1 for entries that are old on every axis, and
`ratio` for the others. With amsgrad, (2) takes the largest v so far. All weights are read and
written once: 28 bytes per entry in float32, as in PyTorch's fused AdamW. bfloat16 is computed in
float32, and rounded once when it is written.

Reading order: this file, `factors.py`, then one backend: `on_cpu.py` with
`csrc/cpu/adamw_body.cpp`, or `on_triton.py`.
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from growkern.ops.adamw.factors import Factors, StatePart, UpdateRule
from growkern.ops.adamw.on_cpu import adamw_step_on_cpu
from growkern.ops.adamw.on_triton import adamw_step_on_triton
from growkern.ops.backend import COMMON, choose_backend

# numbers that the reference updates at a time: 512 KiB in float32. A GPU takes more at a time,
# because each block needs about ten launches
ELEMENTS_ON_CPU, ELEMENTS_ON_GPU = 1 << 17, 1 << 24


def adamw_step(
    part: StatePart, factors: Factors, ratio: float, rule: UpdateRule, *, backend: str | None = None
) -> None:
    """(1) and (2), in place. The gradient is only read.

    Args:
        part: the tensors, of one shape.
        factors: u, e, s and z.
        ratio: s of the entries that are not old.
        rule: the numbers of the step.
        backend: "reference", "cpu" or "triton"; None takes the best that does these tensors. The
            kernels do float32 and bfloat16 (the CPU float64 too), contiguous, with one or two axes.
    """
    if not part.value.numel():
        return
    name = choose_backend(backend, part.value.device, _supported(part))
    KERNELS[name](part, factors, ratio, rule)


def _supported(part: StatePart) -> tuple[str, ...]:
    """The backends that do these tensors."""
    dtype = part.value.dtype
    if part.value.ndim <= 2 and all(x.is_contiguous() and x.dtype == dtype for x in part.tensors()):
        if dtype in (torch.float32, torch.bfloat16):
            return COMMON
        if dtype == torch.float64:
            return ("reference", "cpu")
    return ("reference",)


def step_in_blocks(part: StatePart, factors: Factors, ratio: float, rule: UpdateRule) -> None:
    """The reference, a block of rows at a time: temporary tensors stay small and in the caches."""
    size = ELEMENTS_ON_CPU if part.value.device.type == "cpu" else ELEMENTS_ON_GPU
    rows = len(part.value)
    each = max(1, size * rows // part.value.numel())
    for start in range(0, rows, each):
        here = slice(start, min(rows, start + each))
        _step_block(part.rows(here), factors.rows(here, rows), ratio, rule)


def _step_block(part: StatePart, factors: Factors, ratio: float, rule: UpdateRule) -> None:
    if part.value.dtype not in (torch.float32, torch.float64):
        wide = StatePart(*(x.float() for x in part.tensors()))
        _step_block(wide, factors, ratio, rule)
        for x, y in zip(part.tensors(), wide.tensors(), strict=True):
            if x is not part.gradient:
                x.copy_(y)
        return
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


KERNELS = {"reference": step_in_blocks, "cpu": adamw_step_on_cpu, "triton": adamw_step_on_triton}
