"""What is only nearly exact in a growth: norms, rotary positions, and the loss with new tokens.

A plan names these parts. It does not forecast how far they move the outputs: layers can shrink an
error inside a model or enlarge it a thousand times. `growkern.verify` gives a copy of the source
the same errors (`add_errors`), and measures how far its outputs move. It reads no grown tensor for
that, so a tensor that is wrong moves the outputs of the grown model alone.

Two kinds of norms err.

A LayerNorm with weight gamma and bias beta, whose input has extra coordinates that carry the mean,
gets coordinates delta e_k t, in units of the input's deviation (`growth.plan.tensors.extras`):

    t = mean(y - beta),   y = beta + gamma z the norm's output in the source                (1)

They shift the mean over N coordinates, and add to the variance of the n old ones. So y becomes

    beta + gamma (z - t S_1) (1 - t^2 S_2 / 2),                                              (2)
    S_1 = delta sum_k e_k / N,   S_2 = delta^2 sum_k e_k^2 / n

The norms around inserted blocks repeat z at the size K (`growth.plan.tensors.norm`). z has the
variance v / (v + eps) for an input of variance v. Each norm behind the first one turns a square s
into (K^2 + eps) s / (s + eps).

Where `growth.plan.target` changes rope_theta, frequencies are rounded to float32 anew.

`growth.plan.tensors.extras` starts a new token's logit at the mean of the old logits, minus
`NEW_TOKEN_MARGIN` where every token has a bias. With n new tokens and V old ones, the loss of any
text then rises by at most

    log(1 + n / V exp(-margin))                                                            (3)

A soft cap c turns a logit z into c tanh(z / c). (3) needs exp(c tanh(z / c)) to be convex. It is
up to z = c artanh(t), t = sqrt(1 + 1 / c^2) - 1 / c.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor

from growkern.families import ModelSpec
from growkern.growth.models import is_dtensor
from growkern.growth.plan.blueprint import Blueprint
from growkern.growth.space import pair_step

# how often a frequency is rounded: its exponent, its power and its inverse. The rounding of the
# exponent counts log(theta) times, which is below 16
FREQUENCY_ROUNDINGS = 16

Disturb = Callable[[Any, tuple[Tensor, ...], Tensor], Tensor]


def has_errors(plan: Blueprint) -> bool:
    """True if norms or rotary positions of the target err."""
    return turns_further(plan) or next(_disturbances(plan), None) is not None


def add_errors(plan: Blueprint, source: Any) -> None:
    """Give a model of the source the errors of the target's norms and rotary positions."""
    if turns_further(plan):
        share = 1 + FREQUENCY_ROUNDINGS * torch.finfo(torch.float32).eps
        for module in source.modules():
            for name, buffer in module._buffers.items():
                if name.endswith("inv_freq"):
                    module._buffers[name] = buffer.double() * share
    for name, disturb in _disturbances(plan):
        source.get_submodule(name).register_forward_hook(disturb)


def carries_exactly(plan: Blueprint) -> bool:
    """True if t of (1) is 0 in every norm that carries the mean."""
    for task in plan.tasks:
        if task.tensor.norm and task.tensor.row.extra == "carry" and not task.tensor.is_bias:
            gamma = plan.source.read(task.source)
            # weights on the meta device have no values, and sharded ones lie elsewhere
            if gamma.is_meta or is_dtensor(gamma) or bool((gamma != gamma[0]).any()):
                return False
    return True


def turns_further(plan: Blueprint) -> bool:
    """True if rotary pairs of the target turn as fast as the source's but for float32 rounding."""
    small, large = plan.small, plan.large
    is_rotary = small.family.attention.positions == "rotary"
    is_same = all(small.head_dim(name) == large.head_dim(name) for name in small.family.query_heads)
    return is_rotary and not is_same and pair_step(*plan.layout.turning) is None


def _disturbances(plan: Blueprint) -> Iterator[tuple[str, Disturb]]:
    """The norms of the source that err, by the names of their modules, and how."""
    space, options = plan.layout.space("stream"), plan.options
    shift = options.carry * space.extra_signs.sum().item() / space.target
    variance = options.carry**2 * space.extra_signs.square().sum().item() / space.source
    weights = [task for task in plan.tasks if task.tensor.norm and not task.tensor.is_bias]
    # with norms in front of blocks the plan says "changed"
    if plan.layout.is_carried and plan.small.family.norm.placement == "post":
        for source in {task.source for task in weights if task.tensor.row.extra == "carry"}:
            yield source.rpartition(".")[0], partial(_carry, shift, variance)
    chained = [task for task in weights if task.identity in ("unit", "affine")]
    for task in chained:
        # the norm in front of the inserted blocks is the source's own
        if (task.tensor.stack, task.tensor.layer) not in plan.inserted:
            behind = [t.source_layer == task.source_layer for t in chained].count(True) - 1
            square, eps = options.identity_gain**2, plan.small.norm_epsilon
            yield task.source.rpartition(".")[0], partial(_repeat, square, eps, behind)


def _carry(
    shift: float, variance: float, norm: Any, _inputs: tuple[Tensor, ...], output: Tensor
) -> Tensor:
    """(2): the output of a norm whose input has extra coordinates."""
    t = (output - norm.bias).mean(-1, keepdim=True)
    y = output - norm.bias - norm.weight * t * shift
    return y * (1 - t**2 * variance / 2) + norm.bias


def _repeat(
    square: float, eps: float, norms: int, norm: Any, inputs: tuple[Tensor, ...], output: Tensor
) -> Tensor:
    """The output of a norm behind which inserted blocks repeat it."""
    # eps may be too small for float32
    v = inputs[0].double().var(-1, correction=0, keepdim=True)
    first = last = square * v / (v + eps)
    for _ in range(norms):
        last = (square + eps) * last / (last + eps)
    return (output - norm.bias) * (last / first).sqrt().to(output.dtype) + norm.bias


# exp(-10) = 4.5e-5. The token's row still gets its full gradient, and the bias is small enough for
# training to make up for it
NEW_TOKEN_MARGIN = 10.0
# logits of trained models stay below this, before a soft cap
LARGEST_LOGIT = 40.0


def predicts_tokens(model: ModelSpec) -> bool:
    """True if the model has a head over the vocabulary."""
    return any(
        "vocab" in t.axes and any(axis.startswith("read:") for axis in t.axes)
        for t in model.tensors
    )


def most_cost(plan: Blueprint) -> float:
    """(3), nats."""
    old, new = plan.small.size("vocab"), plan.large.size("vocab")
    has_bias = any(t.axes == ("vocab",) for t in plan.large.tensors)
    return math.log1p((new - old) / old * math.exp(-NEW_TOKEN_MARGIN if has_bias else 0.0))


def values_of(plan: Blueprint, name: str) -> Tensor | None:
    """A tensor of the source; None if it has no values in this process."""
    values = plan.source.read(plan.small.ties.get(name, name))
    return None if values.is_meta or is_dtensor(values) else values


def largest_capped(small: ModelSpec) -> float:
    """The logit up to which (3) holds under the model's soft cap; infinity without one."""
    field = small.family.softcap
    cap = float(getattr(small.text, field, None) or 0) if field is not None else 0.0
    return cap * math.atanh(math.sqrt(1 + 1 / cap**2) - 1 / cap) if cap else math.inf


def source_coordinates(plan: Blueprint, grown: Tensor, size: int) -> Tensor:
    """The entries of a grown output that the source has too, scaled as in the source."""
    if grown.shape[-1] == size:
        return grown
    if predicts_tokens(plan.small):
        # logits of a larger vocabulary
        return grown[..., :size]
    return grown[..., :size] / plan.layout.space(plan.small.output_space).write[:size]
