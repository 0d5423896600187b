"""An output projection as one matrix, also with LoRA adapters of PEFT on it."""

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from growkern.errors import GrowthError


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
