"""Bounds on what a growth moves: outputs by norms and positions that are off, losses by new tokens.

Layers can shrink an error inside a model or enlarge it a thousand times: it depends on the weights.
So the source runs on random texts twice, as it is, and with the errors that the target will have.
Nothing is grown for it. Where attention is sharp, some texts move the outputs far more than others.
The bound on other texts is therefore

    ROOM  largest change  (largest change / median change),  over the random texts          (0)

Changes are relative to the largest output over all of these texts, in `verify` too.

Two kinds of norms err.

A LayerNorm with weight gamma and bias beta, whose input has extra coordinates that carry the mean,
gets coordinates delta e_k t, in units of the input's deviation (`growth.plan.tensors.extras`):

    t = mean(y - beta),   y = beta + gamma z the norm's output in the source                (1)

They shift the mean and add to the variance, so over N coordinates y becomes

    beta + gamma (z - t S_1) (1 - t^2 S_2 / 2),   S_i = delta^i sum_k e_k^i / N              (2)

The norms around inserted blocks repeat z at the size K (`growth.plan.tensors.norms`). z has the
variance v / (v + eps) for an input of variance v. Each norm behind the first one turns a square s
into (K^2 + eps) s / (s + eps).

Where `growth.plan.target` changes rope_theta, frequencies are off by the rounding of float32. The
short texts get the angles that the longest one can be off by.

`growth.plan.tensors.extras` starts a new token's logit at the mean of the old logits, minus
`NEW_TOKEN_MARGIN` where every token has a bias. With n new tokens and V old ones, the loss of any
text then rises by at most

    log(1 + n / V exp(-margin))                                                            (3)

In 16 bits rows are rounded. With the norm before the head, gamma z + beta and |z| <= sqrt(d) over
its d coordinates, a row that is off by the share r of every entry of the mean row w moves its logit
by at most

    r (sqrt(d) |gamma w| + sum_k |beta_k w_k|)                                             (4)

There z has the mean square 1. With maps that copy coordinates unequally often it may have up to
N / (d m), N the target's size and m the smallest number of copies.

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

from growkern.families.model import ModelSpec
from growkern.growth.models import is_dtensor, untrained_model
from growkern.growth.plan.blueprint import Blueprint
from growkern.growth.source.loading import (
    LARGEST,
    Float64,
    all_outputs,
    as_model,
    fits,
    random_inputs,
)
from growkern.growth.source.stored import row_blocks
from growkern.growth.space.maps import pair_step

# parameters of a model that is measured: beyond `LARGEST` in float32
MOST_MEASURED = 400_000_000
# `verify` compares outputs on the tokens of seed 0
SEED = 1
# random texts of up to 32 tokens, for a model in float64 and for a larger one
TEXTS, FEW_TEXTS = 64, 16
# In 184 random models, weights of queries and keys enlarged up to 30 times, the largest change on
# 48 other texts was 1 time (0) without this factor as a rule, and up to 1.7 times
ROOM = 8.0
# A norm over n coordinates that centres meets inputs of a variance below the share s of the usual
# one with probability s^((n - 1) / 2). With few coordinates, single texts err far more than others
FEWEST = 8

Disturb = Callable[[Any, tuple[Tensor, ...], Tensor], Tensor]


@torch.no_grad()
def output_bound(plan: Blueprint) -> float | None:
    """(0): a bound on the relative change of outputs by the target's errors.

    No change counts as less than the rounding of the dtype that the source is run in. Infinity if
    texts differ too much. None if the source cannot be run: it is too large, spread over processes
    or without weights, or transformers cannot run it on tokens alone.
    """
    if not fits(plan.source, MOST_MEASURED):
        return None
    if plan.small.family.norm.centres and plan.small.size("stream") < FEWEST:
        return math.inf
    tokens = _texts(plan)
    try:
        model = _measured_model(plan)
        old = outputs_on(model, tokens)
        if angle_error(plan):
            _turn_further(plan, model, tokens.shape[1])
        for name, disturb in _disturbances(plan):
            model.get_submodule(name).register_forward_hook(disturb)
        new = outputs_on(model, tokens)
    except Exception:
        # classes of transformers that need other inputs raise errors of any type
        return None
    # the largest change of every text over the largest output
    shares = [(new[name] - x).abs() / x.abs().max() for name, x in old.items()]
    texts = [share.reshape(len(tokens), -1).amax(1) for share in shares]
    change = torch.stack(texts).amax(0).clamp(min=torch.finfo(model.dtype).eps)
    return (ROOM * change.max() * (change.max() / change.median())).item()


@torch.no_grad()
def largest_output(plan: Blueprint, source: Any) -> float:
    """The largest main output of the source on the texts of (0), which (0) is relative to.

    A model with few outputs, such as one label, may have a small one on a single text.
    """
    return next(iter(all_outputs(source, _texts(plan)).values())).abs().max().item()


@torch.no_grad()
def largest_logit(plan: Blueprint) -> float | None:
    """The largest logit of the source on the texts of (0); None if the source cannot be run."""
    if not fits(plan.source, MOST_MEASURED):
        return None
    try:
        outputs = outputs_on(_measured_model(plan), _texts(plan))
    except Exception:
        # as in `output_bound`
        return None
    return next(iter(outputs.values())).max().item()


def _measured_model(plan: Blueprint) -> Any:
    return as_model(plan.source, torch.float64 if fits(plan.source, LARGEST) else torch.float32)


def _texts(plan: Blueprint) -> Tensor:
    """The random texts of (0), (texts, length) int64."""
    return random_inputs(plan.source, SEED, TEXTS if fits(plan.source, LARGEST) else FEW_TEXTS)


def carries_exactly(plan: Blueprint) -> bool:
    """True if t of (1) is 0 in every norm that carries the mean."""
    for task in plan.tasks:
        if task.tensor.norm and task.tensor.row.extra == "carry" and not task.tensor.is_bias:
            gamma = plan.source.read(task.source)
            # weights on the meta device have no values, and sharded ones lie elsewhere
            if gamma.is_meta or is_dtensor(gamma) or bool((gamma != gamma[0]).any()):
                return False
    return True


def angle_error(plan: Blueprint) -> float:
    """How far rotary pairs of the target turn too far at the last position, radians."""
    small, large = plan.small, plan.large
    heads = small.family.query_heads[0]
    is_same = small.head_dim(heads) == large.head_dim(heads)
    if small.family.attention.positions != "rotary" or is_same:
        return 0.0
    if pair_step(*plan.layout.turning) is not None:
        return 0.0
    length: int = getattr(small.text, "max_position_embeddings", 1)
    return length * torch.finfo(torch.float32).eps


def _turn_further(plan: Blueprint, model: Any, tokens: int) -> None:
    """Let rotary pairs of a model turn further, at the end of a text of so many tokens.

    That is as far as those of the target do at the last position. A frequency counts as off by half
    a rounding at least, as another machine may round it otherwise.
    """
    longest: int = getattr(plan.small.text, "max_position_embeddings", 1)
    grown = dict(untrained_model(plan.large, plan.source.dtype).named_buffers())
    for path, buffer in model.named_buffers():
        module, _, name = path.rpartition(".")
        if name.endswith("inv_freq"):
            own = buffer.double()
            error = own * (torch.finfo(torch.float32).eps / 2)
            if path in grown:
                error = error.maximum((grown[path][: len(own)].to(own) - own).abs())
            model.get_submodule(module)._buffers[name] = own + error * (longest / tokens)


def outputs_on(model: Any, tokens: Tensor) -> dict[str, Tensor]:
    """`all_outputs` of a model, without casts to float32 if it is in float64."""
    if model.dtype != torch.float64:
        return all_outputs(model, tokens)
    with Float64():
        return all_outputs(model, tokens)


def _disturbances(plan: Blueprint) -> Iterator[tuple[str, Disturb]]:
    """The norms of the source that err, by the names of their modules, and how."""
    space, options = plan.layout.space("stream"), plan.options
    shift = options.carry * space.extra_signs.sum().item() / space.target
    variance = options.carry**2 * space.extra_signs.square().sum().item() / space.target
    weights = [task for task in plan.tasks if task.tensor.norm and not task.tensor.is_bias]
    if plan.layout.is_carried:
        carrying = {task.source for task in weights if task.tensor.row.extra == "carry"}
        for source in carrying:
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
# how often a 16-bit row may be rounded: as a mean, when it is scaled, and when it is shared
ROUNDINGS = 3
# exp of more is larger than any other number of the bound
MOST_SHIFT = 30.0
# logits of trained models stay below this, before a soft cap
LARGEST_LOGIT = 40.0
# how far logits of other texts may exceed those of `largest_logit`, before a soft cap
LOGIT_ROOM = 1.5


def predicts_tokens(model: ModelSpec) -> bool:
    """True if the model has a head over the vocabulary."""
    return any(
        "vocab" in t.axes and any(axis.startswith("read:") for axis in t.axes)
        for t in model.tensors
    )


def new_mass(plan: Blueprint) -> float:
    """n / V exp(-margin) of (3). The loss rises by at most log(1 + that) if no row is rounded."""
    old, new = plan.small.size("vocab"), plan.large.size("vocab")
    has_bias = any(t.axes == ("vocab",) for t in plan.large.tensors)
    return (new - old) / old * math.exp(-NEW_TOKEN_MARGIN if has_bias else 0.0)


def most_cost(plan: Blueprint) -> float | None:
    """(3), with (4) in 16 bits: the largest rise of the loss by new tokens, nats, if known."""
    mass, shift = new_mass(plan), 0.0
    if plan.dtype.itemsize == 2:
        shift = plan.cache.get("rounded new tokens", lambda: _largest_shift(plan))
        if shift is None:
            return None
    # exp(shift) may overflow, and this is the same
    return math.log1p(mass) + shift if shift > MOST_SHIFT else math.log1p(mass * math.exp(shift))


def _largest_shift(plan: Blueprint) -> float | None:
    """(4); None if a tensor that it needs has no values here."""
    model, eps = plan.small, torch.finfo(plan.dtype).eps
    head = next(t for t in model.tensors if t.axes[0] == "vocab" and "read:" in t.axes[-1])
    space = head.axes[-1].removeprefix("read:")
    norms = [t for t in model.tensors if t.norm and t.norm[1] == space]
    # where the last layer's norm is the last one, take the largest (4) over all norms like it
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
        # (4) takes the norm of weights, and the absolute values of biases
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
    """The largest |z| of (4)."""
    entries = plan.layout.space(space)
    if plan.options.scheme != "paper":
        return math.sqrt(entries.source)
    return math.sqrt(entries.target / entries.read_index.bincount().min().item())


def values_of(plan: Blueprint, name: str) -> Tensor | None:
    """A tensor of the source; None if it has no values in this process."""
    values = plan.source.read(plan.small.ties.get(name, name))
    return None if values.is_meta or is_dtensor(values) else values


def largest_capped(small: ModelSpec) -> float:
    """The logit up to which (3) holds under the model's soft cap; infinity without one."""
    cap = _cap(small)
    return cap * math.atanh(math.sqrt(1 + 1 / cap**2) - 1 / cap) if cap else math.inf


def is_capped_too_low(plan: Blueprint) -> bool:
    """True if logits of the source come near `largest_capped`, on random texts or as a rule."""
    cap, limit = _cap(plan.small), largest_capped(plan.small)
    if not cap:
        return False
    largest = plan.cache.get("largest logit", lambda: largest_logit(plan))
    if largest is None:
        return limit < LARGEST_LOGIT
    # rounding may reach the cap itself
    share = min(largest / cap, 1 - 1e-12)
    return limit < max(LARGEST_LOGIT, LOGIT_ROOM * cap * math.atanh(share))


def _cap(small: ModelSpec) -> float:
    """The soft cap of a model's logits; 0 without one."""
    field = small.family.softcap
    return float(getattr(small.text, field, None) or 0) if field is not None else 0.0


def source_coordinates(plan: Blueprint, grown: Tensor, size: int) -> Tensor:
    """The entries of a grown output that the source has too, scaled as in the source."""
    if grown.shape[-1] == size:
        return grown
    if predicts_tokens(plan.small):
        # logits of a larger vocabulary
        return grown[..., :size]
    return grown[..., :size] / plan.layout.space(plan.small.output_space).write[:size]
