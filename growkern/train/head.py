"""The loss in place of the output projection: hidden states before the LM head, for any model.

For the span of one model call the forward of the output projection is shadowed on the instance by
a function of (hidden, weight, bias). What it returns takes the place of the logits. The function
runs inside the model's own call: casts, hooks and wrappers all apply, a sharded weight is whole,
and whatever transform the model has before its projection (BERT's dense + norm) has run.

What some models do to their logits afterwards, c * tanh(s * logits / c), is taken out of that call:
the scale s goes into the hidden states and the bias, the softcap c is the loss's.
"""

import contextlib
import math
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from growkern.errors import GrowthError
from growkern.ops.loss.rows.options import IGNORE_INDEX

HeadFunction = Callable[[Tensor, Tensor, Tensor | None], Tensor]


class HeadInputs(NamedTuple):
    """What an output projection was given."""

    hidden: Tensor  # (..., H)
    weight: Tensor  # (V, H)
    bias: Tensor | None  # (V,)


# attributes of models or their configs that change logits, and the values that do not
NEUTRAL = {"logit_scale": 1.0, "logits_scaling": 1.0, "final_logit_softcapping": None}


def _changes(model: Any) -> dict[str, tuple[Any, float]]:
    """Attribute -> whose it is and its value, of those that are numbers."""
    found = {}
    for owner in (model.config, model):
        for name in NEUTRAL:
            value = getattr(owner, name, None)
            if isinstance(value, (int, float)):
                found[name] = (owner, value)
    return found


def softcap_of(model: Any) -> float | None:
    """c of the model's c * tanh(logits / c), for the loss's `softcap`; None: it has none."""
    return _changes(model).get("final_logit_softcapping", (None, None))[1]


def _scale_of(model: Any) -> float:
    changes = _changes(model)
    by = {name: changes.get(name, (None, 1.0))[1] for name in ("logit_scale", "logits_scaling")}
    return by["logit_scale"] / by["logits_scaling"]


@contextlib.contextmanager
def _neutral(model: Any) -> Iterator[None]:
    """Inside, the model leaves its logits as they come from the output projection."""
    changes = _changes(model)
    for name, (owner, _) in changes.items():
        setattr(owner, name, NEUTRAL[name])
    try:
        yield
    finally:
        for name, (owner, value) in changes.items():
            setattr(owner, name, value)


@contextlib.contextmanager
def _shadowed(head: Any, forward: Callable[[Tensor], Tensor]) -> Iterator[None]:
    head.forward = forward  # shadows the method of the class
    try:
        yield
    finally:
        del head.forward


@contextlib.contextmanager
def head_swap(model: Any, function: HeadFunction) -> Iterator[None]:
    """Inside: `model(...)` returns function(hidden, weight, bias) as its logits.

    Of a model with a softcap they are the logits before it: ask `softcap_of` outside, where the
    model still has one, and give it to the loss.
    """
    head, scale = model.get_output_embeddings(), _scale_of(model)

    def forward(hidden: Tensor) -> Tensor:
        bias = head.bias
        if scale != 1:
            hidden, bias = hidden * scale, None if bias is None else bias * scale
        return function(hidden, head.weight, bias)

    with _neutral(model), _shadowed(head, forward):
        yield


def head_inputs(model: Any, inputs: dict[str, Any]) -> HeadInputs:
    """Run a model up to its output projection; no logits are made."""
    seen: list[HeadInputs] = []

    def keep(hidden: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        seen.append(HeadInputs(hidden, weight, bias))
        return hidden.new_zeros(())

    with head_swap(model, keep):
        model(**inputs)
    return seen[0]


def check_head(model: Any) -> None:
    """Refuse a model whose logits are not c * tanh(s * head(hidden) / c), or head(hidden) alone.

    The head is replaced by one that returns a ramp of large numbers, and the logits must be what
    that becomes: another change shows at once, where real logits of a fresh model would hide it.
    Runs the model on its own tiny dummy inputs, without dropout and without a graph.

    raises: GrowthError naming the model and what to do instead.
    """
    name = type(model).__name__
    head = model.get_output_embeddings()
    if head is None or type(head).forward is not nn.Linear.forward:
        found = "none" if head is None else type(head).__name__
        raise GrowthError(
            f"{name} has no linear output projection (found: {found}): "
            "use a ...ForMaskedLM or ...ForCausalLM model"
        )
    ramps: list[Tensor] = []

    def ramp(hidden: Tensor) -> Tensor:
        shape = (*hidden.shape[:-1], head.weight.shape[0])
        ramps.append(torch.linspace(-300, 300, math.prod(shape), device=hidden.device).view(shape))
        return ramps[-1]

    inputs = {key: value.to(head.weight.device) for key, value in model.dummy_inputs.items()}
    training = model.training
    model.eval()
    try:
        with torch.no_grad(), _shadowed(head, ramp):
            changed = model(**inputs).logits
            with _neutral(model):
                bare = model(**inputs).logits
    finally:
        model.train(training)
    is_known = False
    if len(ramps) == 2:
        scaled, cap = ramps[0] * _scale_of(model), softcap_of(model)
        expected = cap * torch.tanh(scaled / cap) if cap else scaled
        is_known = torch.equal(bare.to(ramps[1].dtype), ramps[1]) and torch.allclose(
            changed.to(expected.dtype), expected, rtol=1e-3
        )
    if not is_known:
        raise GrowthError(
            f"{name} changes its logits after the output projection in a way that is not known "
            f"here (known: {', '.join(NEUTRAL)}): the fused loss would train another function. "
            "Train it with kl_mlm_loss on its own logits"
        )


def align_labels(labels_BS: Tensor, *, causal: bool) -> Tensor:
    """Labels at the positions whose hidden states predict them: shifted left for causal models."""
    return _shift(labels_BS, IGNORE_INDEX) if causal else labels_BS


def align_rows(mask_BS: Tensor, *, causal: bool) -> Tensor:
    """The same alignment for a mask of real tokens: a row counts if what it predicts is real."""
    return _shift(mask_BS.bool(), False) if causal else mask_BS.bool()


def _shift(x_BS: Tensor, filler: int | bool) -> Tensor:
    return torch.cat([x_BS[:, 1:], x_BS.new_full((x_BS.shape[0], 1), filler)], dim=1)
