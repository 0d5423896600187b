"""How much probability new tokens take, by a bound that holds for every input.

`growth.plan.tensors.extras` starts a new token's logit at the mean of the old logits, minus
`NEW_TOKEN_MARGIN` where every token has a bias. With n new tokens and V old ones, the loss of any
text then rises by at most

    log(1 + n / V exp(-margin))                                                            (1)

In 16 bits rows are rounded. With the norm before the head, gamma z + beta and |z| <= sqrt(d) over
its d coordinates, a row that is off by the share r of every entry of the mean row w moves its logit
by at most

    r (sqrt(d) |gamma w| + sum_k |beta_k w_k|)                                             (2)

There z has the mean square 1. With maps that copy coordinates unequally often it may have up to
N / (d m), N the target's size and m the smallest number of copies.

A soft cap c turns a logit z into c tanh(z / c). (1) needs exp(c tanh(z / c)) to be convex. It is
up to z = c artanh(t), t = sqrt(1 + 1 / c^2) - 1 / c.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from growkern.families.model import ModelSpec
from growkern.growth.models import is_dtensor
from growkern.growth.plan.blueprint import Blueprint
from growkern.growth.plan.probe import largest_logit
from growkern.growth.source.files import row_blocks

# exp(-10) = 4.5e-5. The token's row still gets its full gradient, and the bias is small enough for
# training to make up for it
NEW_TOKEN_MARGIN = 10.0
# how often a 16-bit row may be rounded: as a mean, when it is scaled, and when it is shared
ROUNDINGS = 3
# exp of more is larger than any other number of the bound
MOST_SHIFT = 30.0
# logits of trained models stay below this, before a soft cap
LARGEST_LOGIT = 40.0
# how far logits of other texts may exceed those of `probe.largest_logit`, before a soft cap
LOGIT_ROOM = 1.5


def predicts_tokens(model: ModelSpec) -> bool:
    """True if the model has a head over the vocabulary."""
    return any(
        "vocab" in t.axes and any(axis.startswith("read:") for axis in t.axes)
        for t in model.tensors
    )


def _mass(plan: Blueprint) -> float:
    """n / V exp(-margin) of (1)."""
    old, new = plan.small.size("vocab"), plan.large.size("vocab")
    has_bias = any(t.axes == ("vocab",) for t in plan.large.tensors)
    return (new - old) / old * math.exp(-NEW_TOKEN_MARGIN if has_bias else 0.0)


def unrounded_cost(plan: Blueprint) -> float:
    """(1): the largest rise of the loss by new tokens whose rows are not rounded, nats."""
    return math.log1p(_mass(plan))


def guessing_loss(plan: Blueprint) -> float:
    """The loss of a model that knows nothing and guesses one of the old tokens, nats.

    Its loss is above the source's by no more than that, on any text.
    """
    return math.log(plan.small.size("vocab"))


def most_cost(plan: Blueprint) -> float | None:
    """(1), with (2) in 16 bits: the largest rise of the loss by the new tokens, nats.

    Returns:
        None: it is not known, as weights have no values here.
    """
    mass, shift = _mass(plan), 0.0
    if plan.dtype.itemsize == 2:
        found = plan.cache.get("rounded new tokens", lambda: _largest_shift(plan))
        if found is None:
            return None
        shift = found
    # exp(shift) may overflow, and this is the same
    return math.log1p(mass) + shift if shift > MOST_SHIFT else math.log1p(mass * math.exp(shift))


def _largest_shift(plan: Blueprint) -> float | None:
    """(2); None if a tensor that it needs has no values here."""
    model, eps = plan.small, torch.finfo(plan.dtype).eps
    head = next(t for t in model.tensors if t.axes[0] == "vocab" and "read:" in t.axes[-1])
    space = head.axes[-1].removeprefix("read:")
    norms = [t for t in model.tensors if t.norm and t.norm[1] == space]
    # where the last layer's norm is the last one, take the largest (2) over all norms like it
    norms = norms or [t for t in model.tensors if t.norm and t.norm[1] == "stream"]
    weight = values_of(plan, head.name)
    if weight is None:
        return None
    narrow, wide = plan.layout.stream_sizes
    # then old rows are rounded too, and the mean of their absolute values counts
    is_rounded = narrow != wide or bool(plan.narrowed_tensors)
    mean = torch.zeros(weight.shape[1], dtype=torch.float64)
    for first, stop in row_blocks(tuple(weight.shape), weight.itemsize):
        rows = weight[first:stop].double().cpu()
        mean += (rows.abs() if is_rounded else rows).sum(0) / len(weight)
    sizes = [0.0, 0.0]
    for norm in norms:
        values = values_of(plan, norm.name)
        if values is None:
            return None
        offset = model.family.norm.offset(norm.is_bias)
        part = mean * (values.double().cpu() + offset)
        # (2) takes the norm of weights, and the absolute values of biases
        size = part.abs().sum() if norm.is_bias else part.norm() * _largest_z(plan, space)
        sizes[norm.is_bias] = max(sizes[norm.is_bias], size.item())
    tokens = [t.name for t in model.tensors if t.axes == ("vocab",)]
    offsets = [values_of(plan, name) for name in tokens]
    if any(x is None for x in offsets):
        return None
    most = sum(sizes)
    most += sum(float(x.double().abs().mean()) + NEW_TOKEN_MARGIN for x in offsets if x is not None)
    return ROUNDINGS * eps / 2 * most


def _largest_z(plan: Blueprint, space: str) -> float:
    """The largest |z| of (2)."""
    entries = plan.layout.space(space)
    if plan.options.scheme != "paper":
        return math.sqrt(entries.source)
    return math.sqrt(entries.target / entries.read_index.bincount().min().item())


def values_of(plan: Blueprint, name: str) -> Tensor | None:
    """A tensor of the source; None if it has no values in this process."""
    found = plan.source.read(plan.small.ties.get(name, name))
    return None if found.is_meta or is_dtensor(found) else found


def largest_capped(small: ModelSpec) -> float:
    """The logit up to which (1) holds under the model's soft cap; infinity without one."""
    cap = _cap(small)
    return cap * math.atanh(math.sqrt(1 + 1 / cap**2) - 1 / cap) if cap else math.inf


def is_capped_too_low(plan: Blueprint) -> bool:
    """True if logits of the source come near `largest_capped`, on random texts or as a rule."""
    cap, limit = _cap(plan.small), largest_capped(plan.small)
    if not cap:
        return False
    found = plan.cache.get("largest logit", lambda: largest_logit(plan))
    if found is None:
        return limit < LARGEST_LOGIT
    # rounding may reach the cap itself
    share = min(found / cap, 1 - 1e-12)
    return limit < max(LARGEST_LOGIT, LOGIT_ROOM * cap * math.atanh(share))


def _cap(small: ModelSpec) -> float:
    """The soft cap of a model's logits; 0 without one."""
    field = small.family.softcap
    return float(getattr(small.text, field, None) or 0) if field is not None else 0.0
