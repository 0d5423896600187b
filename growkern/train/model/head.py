"""Replaces the output projection of a language model by a function, so that no logits are made.

The fused loss needs the hidden states, the weight and the bias of the output projection. During one
call of the model, `head_swap` replaces the forward of the projection by a function of these three.
Its result takes the place of the logits.

The function runs inside the model's own call. Casts, hooks and wrappers apply, a sharded weight is
complete, and a transform before the projection (such as BERT's dense layer and norm) has run.

Some models change their logits to c * tanh(s * logits / c). This is switched off during the call:
the scale s is applied to the hidden states and the bias, and the loss applies the softcap c. A bias
that BART adds after the projection joins the bias of the projection. With LoRA adapters of PEFT the
projection still is one matrix.
"""

import contextlib
import math
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_module

from growkern.errors import GrowthError
from growkern.ops.loss import IGNORE_INDEX
from growkern.train.model.language_model import probe_inputs, probing, setting

HeadFunction = Callable[[Tensor, Tensor, Tensor | None], Tensor]
Changes: TypeAlias = Sequence[tuple[Any, str, float]]

# attributes of models or configs that change the logits, each with the value that changes nothing
NEUTRAL = {"logit_scale": 1.0, "logits_scaling": 1.0, "final_logit_softcapping": None}

# buffer (1, V) of BART and its relatives, added to the logits
ADDED_BIAS = "final_logits_bias"


def _added_bias(model: Any) -> Tensor | None:
    return getattr(model, ADDED_BIAS, None)


def _changes(model: Any) -> Changes:
    """Owner, name and value of the attributes of NEUTRAL that are numbers.

    Some models keep a copy of their config's number.
    """
    return [
        (owner, name, value)
        for owner in (*_configs(model), model)
        for name in NEUTRAL
        if isinstance(value := getattr(owner, name, None), (int, float))
    ]


def _configs(model: Any) -> list[Any]:
    """The config of a model, and that of its decoder where it is another (T5Gemma)."""
    own, decoder = model.config, model.config.get_text_config(decoder=True)
    return [own] if decoder is own else [own, decoder]


def softcap_of(model: Any) -> float | None:
    """The c of the model's c * tanh(logits / c); None stands for a head without a model."""
    if model is None:
        return None
    return {name: value for _, name, value in _changes(model)}.get("final_logit_softcapping")


def head_options(model: Any) -> dict[str, Any]:
    """The options of a loss that the student's head asks for; see `softcap_of`."""
    return {"softcap": softcap_of(model)}


def teacher_options(models: Iterable[Any]) -> dict[str, Any]:
    """The options of a loss that the heads of the teachers ask for; see `softcap_of`."""
    different = set(map(softcap_of, models)) or {None}
    if len(different) > 1:
        raise GrowthError(f"the teachers have different softcaps: {different}. They must be equal")
    return {"teacher_softcap": different.pop()}


def _scale_of(changes: Changes) -> float:
    values = {name: value for _, name, value in changes}
    return values.get("logit_scale", 1.0) / values.get("logits_scaling", 1.0)


@contextlib.contextmanager
def _neutral(model: Any, changes: Changes) -> Iterator[None]:
    """While active, the model does not change its logits after the output projection."""
    added = _added_bias(model)
    with contextlib.ExitStack() as stack:
        for owner, name, _ in changes:
            stack.enter_context(setting(owner, name, NEUTRAL[name]))
        if added is not None:
            stack.enter_context(setting(model, ADDED_BIAS, added.new_zeros(())))
        yield


@contextlib.contextmanager
def _shadowed(head: Any, function: Callable[[Tensor], Tensor]) -> Iterator[None]:
    """While active, a head returns what a function makes of its hidden states, which are whole."""

    def forward(hidden: Tensor) -> Tensor:
        if isinstance(hidden, DTensor):
            if not all(place.is_replicate() for place in hidden.placements):
                raise GrowthError(
                    "inherited_loss takes an output projection that is whole or that "
                    "ColwiseParallel split along the vocabulary. This one gets hidden states that "
                    f"are placed as {hidden.placements}: gather them and the output matrix, and "
                    "call linear_kl_mlm_loss"
                )
            hidden = hidden.to_local()
        return function(hidden)

    # those of `parallelize_module` place logits, which are DTensors there
    placing = distribute_module.__globals__
    hooks = head._forward_hooks.items()
    kept = ((key, f) for key, f in hooks if getattr(f, "__globals__", None) is not placing)
    head.forward = forward  # shadows the method of the class
    try:
        with setting(head, "_forward_hooks", OrderedDict(kept)):
            yield
    finally:
        del head.forward


@contextlib.contextmanager
def head_swap(model: Any, function: HeadFunction) -> Iterator[None]:
    """While active, `model(...)` returns function(hidden, weight, bias) as its logits.

    A softcap of the model is not applied while active. Call `softcap_of` before, and give the
    softcap to the loss.

    Args:
        model: a model that passed `check_head`.
        function: gets hidden states (..., H), the weight (V, H), and the bias (V,) or None.
    """
    # a config searches long for an attribute that it lacks
    changes = _changes(model)
    head, scale, added = model.get_output_embeddings(), _scale_of(changes), _added_bias(model)

    def forward(hidden: Tensor) -> Tensor:
        hidden, weight, bias = projected(head, hidden)
        if added is not None:
            bias = added[0] if bias is None else bias + added[0]
        if scale != 1:
            hidden, bias = hidden * scale, None if bias is None else bias * scale
        return function(hidden, weight, bias)

    with _neutral(model, changes), _shadowed(head, forward):
        yield


def take_logits(outputs: Any) -> Tensor:
    """Remove the logits of the output projection from the outputs of a model."""
    # BertForPreTraining has logits of two heads
    name = "logits" if hasattr(outputs, "logits") else "prediction_logits"
    logits: Tensor = getattr(outputs, name)
    setattr(outputs, name, None)
    return logits


def check_head(model: Any) -> None:
    """Check that the fused loss computes the same function as the model's own logits.

    The logits must be head(hidden), or c * tanh(s * head(hidden) / c); a constant bias may be
    added. To test this, the head is replaced by one that returns a ramp of large numbers. With the
    small logits of a new model, other changes would not be visible. The model runs on its own tiny
    dummy inputs, without dropout and without gradients.
    """
    name = type(model).__name__
    head = model.get_output_embeddings()
    if not is_linear(head):
        raise GrowthError(f"{name} {why_not_linear(head)}")
    made: list[Tensor] = []

    def ramp(hidden: Tensor) -> Tensor:
        # without dimensions, as a loss is: what is added to it, zeros too, gives it a shape
        shape = () if made else (*hidden.shape[:-1], head.weight.shape[0])
        made.append(torch.linspace(-300, 300, math.prod(shape), device=hidden.device).view(shape))
        return made[-1]

    inputs = tokens_to_try(model)
    changes = _changes(model)
    with probing(model), _shadowed(head, ramp):
        changed, is_known = take_logits(model(**inputs)), False
        if len(made) == 1:
            scaled, cap, added = made[0] * _scale_of(changes), softcap_of(model), _added_bias(model)
            scaled = scaled if added is None else scaled + added
            expected = cap * torch.tanh(scaled / cap) if cap else scaled
            is_known = torch.allclose(changed.to(expected.dtype), expected, rtol=1e-3)
        if is_known:
            with _neutral(model, changes):
                bare = take_logits(model(**inputs))
            is_known = torch.equal(bare.to(made[1].dtype), made[1])
    if not is_known:
        raise GrowthError(
            f"{name} changes its logits after the output projection in a way that is not "
            f"supported (supported: {', '.join(NEUTRAL)}). The fused loss would ignore the change: "
            "use kl_mlm_loss on the model's own logits instead"
        )


def tokens_to_try(model: Any) -> dict[str, Tensor]:
    """A small input. Some of its tokens may be padding by their ids; the mask says they are not."""
    inputs = probe_inputs(model)
    return {**inputs, "attention_mask": torch.ones_like(inputs["input_ids"])}


def align_labels(x_BS: Tensor, *, causal: bool, filler: float = IGNORE_INDEX) -> Tensor:
    """Move labels or their weights (B, S) to the positions that predict them.

    That is one to the left for causal models, whose last position gets the filler.
    """
    return _shift(x_BS, filler) if causal else x_BS


def align_rows(mask_BS: Tensor, *, causal: bool) -> Tensor:
    """Move a mask of real tokens (B, S) to the positions that predict these tokens.

    The last position of a causal model is False.
    """
    return _shift(mask_BS.bool(), False) if causal else mask_BS.bool()


def _shift(x_BS: Tensor, filler: float) -> Tensor:
    return torch.cat([x_BS[:, 1:], x_BS.new_full((x_BS.shape[0], 1), filler)], dim=1)


class HeadInputs(NamedTuple):
    """The inputs of an output projection."""

    hidden: Tensor  # (..., H)
    weight: Tensor  # (V, H)
    bias: Tensor | None  # (V,)


def _in_use(head: Any) -> Any:
    """The module that computes the logits, of one that PEFT trains beside the adapters."""
    if not hasattr(head, "modules_to_save"):
        return head
    is_off = head.disable_adapters or not head.active_adapters
    return head.original_module if is_off else head.modules_to_save[head.active_adapters[0]]


def _adapters(head: Any) -> list[str]:
    """The LoRA adapters that add to the logits."""
    if not hasattr(head, "lora_A") or head.disable_adapters or head.merged:
        return []
    return [name for name in head.active_adapters if name in head.lora_A]


def is_linear(head: Any) -> bool:
    """Whether `projected` has all that a head computes."""
    head = _in_use(head)
    linear = getattr(head, "base_layer", head)
    if linear is None or type(linear).forward is not nn.Linear.forward:
        return False
    return linear is head or hasattr(head, "lora_A")


def why_not_linear(head: Any) -> str:
    """What keeps a head from being one matrix, and what to use, as the end of a message."""
    kind, weight = "none" if head is None else type(head).__name__, getattr(head, "weight", None)
    # the quantised layers of PyTorch have a method of this name, others packed integers
    is_packed = isinstance(weight, Tensor) and not weight.is_floating_point()
    if is_packed or callable(weight) or hasattr(head, "qweight"):
        return (
            f"has a quantised output projection ({kind}): keep this layer in full precision, as "
            "bitsandbytes does by default. The other layers of a teacher may be quantised"
        )
    return (
        f"has no linear output projection (found: {kind}): "
        "use a ...ForMaskedLM or ...ForCausalLM model"
    )


def projected(head: Any, hidden: Tensor) -> HeadInputs:
    """What the loss multiplies for the logits of a head, W h + b.

    An adapter adds s B A h. That is a second product: its hidden states s A h and its weight B join
    h and W, side by side.
    """
    head = _in_use(head)
    linear = getattr(head, "base_layer", head)
    hiddens, weights = [hidden], [linear.weight]
    for name in _adapters(head):
        down, up = head.lora_A[name], head.lora_B[name]
        if name in getattr(head, "lora_variant", {}) or up.bias is not None:
            raise GrowthError(
                f"adapter {name!r} of the output projection is not plain LoRA (DoRA, or with a "
                "bias), so the fused loss cannot apply it: use kl_mlm_loss on the model's logits"
            )
        low = down(head.lora_dropout[name](hidden.to(down.weight.dtype))) * head.scaling[name]
        hiddens.append(low.to(hidden.dtype))
        weights.append(up.weight.to(linear.weight.dtype))
    if len(hiddens) == 1:
        return HeadInputs(hidden, linear.weight, linear.bias)
    return HeadInputs(torch.cat(hiddens, -1), torch.cat(weights, 1), linear.bias)
