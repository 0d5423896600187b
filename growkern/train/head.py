"""The loss in place of the output projection: hidden states before the LM head, for any model.

For the span of one model call the forward of the output projection is shadowed on the instance by
a function of (hidden, weight, bias). What it returns takes the place of the logits. The function
runs inside the model's own call: casts, hooks and wrappers all apply, a sharded weight is whole,
and whatever transform the model has before its projection (BERT's dense + norm) has run.
"""

import contextlib
import math
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from growkern.errors import GrowthError
from growkern.ops._kl_mlm_options import IGNORE_INDEX

HeadFunction = Callable[[Tensor, Tensor, Tensor | None], Tensor]


class HeadInputs(NamedTuple):
    """What an output projection was given."""

    hidden: Tensor  # (..., H)
    weight: Tensor  # (V, H)
    bias: Tensor | None  # (V,)


@contextlib.contextmanager
def head_swap(model: Any, function: HeadFunction) -> Iterator[None]:
    """Inside: `model(...)` returns function(hidden, weight, bias) as its logits."""
    head = model.get_output_embeddings()

    def forward(hidden: Tensor) -> Tensor:
        return function(hidden, head.weight, head.bias)

    head.forward = forward  # shadows the method of the class
    try:
        yield
    finally:
        del head.forward


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
    """Refuse a model whose logits are not exactly head(hidden).

    The head is replaced by one that returns a ramp of large numbers, and the logits must be that
    ramp: a softcap or a scale shows at once, where real logits of a fresh model would hide it.
    Runs the model once, on its own tiny dummy inputs, without dropout and without a graph.

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

    def ramp(hidden: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        shape = (*hidden.shape[:-1], weight.shape[0])
        ramps.append(torch.linspace(-300, 300, math.prod(shape), device=hidden.device).view(shape))
        return ramps[-1]

    inputs = {key: value.to(head.weight.device) for key, value in model.dummy_inputs.items()}
    training = model.training
    model.eval()
    try:
        with torch.no_grad(), head_swap(model, ramp):
            logits = model(**inputs).logits
    finally:
        model.train(training)
    if len(ramps) != 1 or not torch.equal(logits.to(ramps[0].dtype), ramps[0]):
        raise GrowthError(
            f"{name} changes its logits after the output projection (softcap or scale): the fused "
            "loss would train another function. Train it with kl_mlm_loss on its own logits"
        )


def align_labels(labels_BS: Tensor, *, causal: bool) -> Tensor:
    """Labels at the positions whose hidden states predict them: shifted left for causal models."""
    return _shift(labels_BS, IGNORE_INDEX) if causal else labels_BS


def align_rows(mask_BS: Tensor, *, causal: bool) -> Tensor:
    """The same alignment for a mask of real tokens: a row counts if what it predicts is real."""
    return _shift(mask_BS.bool(), False) if causal else mask_BS.bool()


def _shift(x_BS: Tensor, filler: int | bool) -> Tensor:
    return torch.cat([x_BS[:, 1:], x_BS.new_full((x_BS.shape[0], 1), filler)], dim=1)
