"""The loss of one batch with a teacher, for any ...ForMaskedLM or ...ForCausalLM model.

The three training loops in this folder call it.
"""

from typing import Any

import torch
from torch import Tensor

from growkern.train.head import align_labels, head_inputs, head_swap, softcap_of
from growkern.train.inheritance import loss_beside
from growkern.train.load import is_causal


def count_labels(batches: list[dict[str, Tensor]], model: Any) -> Tensor:
    """The number of labels of an accumulated batch, by which its loss is divided."""
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
    """(1 - alpha) times the loss of the labels, plus alpha times the KL from the teacher.

    No logits are made: while the model runs, the loss takes the place of its output projection.

    Args:
        model: the student.
        teacher: runs only if alpha is positive.
        batch: {input_ids, labels, ...}; labels of causal models are not shifted.
        alpha: share of the teacher.
        num_items: labels of the whole accumulated batch; None takes those of this batch.
        temperature: of the softmax in the KL.
        wrapped: the model as DistributedDataParallel or another launcher wraps it.
    """
    inputs = {name: x for name, x in batch.items() if name != "labels"}
    labels = align_labels(batch["labels"], causal=is_causal(model))
    teachers = []
    if alpha > 0:
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
