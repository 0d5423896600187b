"""The loss of one batch beside a teacher, for any ...ForMaskedLM or ...ForCausalLM model.

The three loops next to this file call it; nothing else in them knows about growkern.
"""

from typing import Any

import torch
from torch import Tensor

from growkern.train.head import align_labels, head_inputs, head_swap, softcap_of
from growkern.train.inheritance import loss_beside
from growkern.train.load import is_causal


def count_labels(batches: list[dict[str, Tensor]], model: Any) -> Tensor:
    """Labels of a whole accumulated batch, what its loss is divided by."""
    causal = is_causal(model)
    return sum((align_labels(b["labels"], causal=causal) != -100).sum() for b in batches)


def inherited_loss(
    model: Any,
    teacher: Any,
    batch: dict[str, Tensor],
    *,
    alpha: float,
    num_items: Tensor | int | None = None,
    temperature: float = 2.0,
    wrapped: Any = None,
) -> Tensor:
    """(1 - alpha) of the labels' loss plus alpha of the divergence from `teacher`.

    Labels stand where the tokenizer put them: causal models' are shifted here. Logits are never
    made: the loss takes the place of the output projection while the model runs, whatever
    transform stands before it, tied weights or not. `wrapped` is the model as a launcher wraps it.
    """
    inputs = {name: x for name, x in batch.items() if name != "labels"}
    labels = align_labels(batch["labels"], causal=is_causal(model))
    teachers = []
    if alpha > 0:  # a teacher that weighs nothing does not run
        with torch.no_grad():
            teachers.append(head_inputs(teacher, inputs))

    loss = loss_beside(teachers, softcap=softcap_of(teacher))
    softcap = softcap_of(model)

    def loss_of(hidden: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return loss(
            hidden,
            weight,
            labels=labels,
            student_bias=bias,
            alpha=alpha,
            temperature=temperature,
            softcap=softcap,
            num_items=num_items,
        )

    with head_swap(model, loss_of):
        return (wrapped or model)(**inputs).logits
