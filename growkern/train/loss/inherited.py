"""The loss of one batch with teachers, in one call, for any training loop."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from growkern.arguments import check_kind
from growkern.ops.loss.rows.inputs import LossParts
from growkern.ops.loss.rows.options import KLRows
from growkern.train.loss.inheritance import loss_beside
from growkern.train.loss.models import (
    as_list,
    check_models,
    head_of_pair,
    inputs_of,
    is_pair,
    is_two_stacks,
    predict,
    shifts_labels,
    softcap,
    unwrapped,
)
from growkern.train.loss.router import router_inputs, router_term, router_weight
from growkern.train.loss.rows import LossRows, real_rows, take_rows
from growkern.train.model.head import (
    IGNORE_INDEX,
    align_labels,
    check_row_length,
    common_softcap,
    head_swap,
    take_logits,
)


def inherited_loss(
    model: Any,
    teacher: Any,
    batch: Mapping[str, Any],
    *,
    alpha: float | Tensor,
    kl_rows: KLRows,
    teacher_weights: Sequence[float] | None,
    row_weights: Tensor | None,
    vocab_size: int | None,
    teacher_vocab_size: int | None,
    causal: bool | None,
    return_parts: bool,
    **options: Any,
) -> Tensor | tuple[Tensor, LossParts]:
    """The loss behind `growkern.inherited_loss`, whose arguments and result it has."""
    teachers = [] if teacher is None else as_list(teacher)
    known = check_models(model, teachers, vocab_size=vocab_size, known=teacher_vocab_size)
    check_kind("batch", batch, Mapping, "a mapping with input_ids and labels")
    causal = shifts_labels(model, causal)
    if not teachers:
        alpha = 0.0
    inputs = dict(batch)
    if row_weights is not None:
        inputs["row_weights"] = row_weights
    weights = None if row_weights is None else "row_weights"
    runs = isinstance(alpha, Tensor) or alpha != 0
    known = known if runs else None
    rows = take_rows(
        inputs, causal=causal, kl_rows=kl_rows, row_weights=weights,
        decoder=is_two_stacks(model), known=known,
    )  # fmt: skip
    # without a KL term no teacher runs
    read = [predict(one, inputs, rows.labels_BS, known) for one in teachers] if runs else []
    loss_function = loss_beside(read, teacher_weights, common_softcap(map(softcap, teachers)))
    options |= {
        **rows.options(),
        **{"alpha": alpha, "vocab_size": vocab_size, "softcap": softcap(model)},
        "teacher_vocab_size": known,
        "return_parts": True,
    }
    seen: list[LossParts] = []

    def loss_of(hidden: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        loss, parts = loss_function(hidden, weight, student_bias=bias, **options)
        seen.append(parts)
        return loss

    if is_pair(model):
        loss = loss_of(*head_of_pair(model))
    else:
        inputs = inputs_of(model, inputs, rows.labels_BS)
        check_row_length("model", unwrapped(model), inputs)
        inner = unwrapped(model)
        with head_swap(inner, loss_of):
            outputs = model(**inputs, **router_inputs(inner))
        loss, aux = _with_router(take_logits(outputs), inner, outputs, batch, rows, options)
        seen[0] = seen[0]._replace(aux_loss=aux)
    return (loss, seen[0]) if return_parts else loss


def _with_router(
    loss: Tensor,
    model: Any,
    outputs: Any,
    batch: Mapping[str, Any],
    rows: LossRows,
    options: Mapping[str, Any],
) -> tuple[Tensor, Tensor | None]:
    """The loss with that of a mixture's routers; and that one, None if there is none."""
    if not (weight := router_weight(model)):
        return loss, None
    of_batch = router_term(model, outputs, real_rows(batch, rows.labels_BS, causal=False))
    if of_batch is None:
        return loss, None
    aux = of_batch.mean()
    term, num_items = weight * aux, options["num_items"]
    if num_items is not None:
        # by the share of the labels of the whole accumulated batch
        every = num_items[0] if isinstance(num_items, tuple) else num_items
        term = term * (rows.labels_BS != IGNORE_INDEX).sum() / every
    return loss + term, aux.detach()


def count_labels(
    batches: Iterable[Mapping[str, Any]], model: Any = None, *, causal: bool | None = None
) -> Tensor:
    """The number of labels of an accumulated batch, by which its loss is divided.

    Args:
        batches: {labels, ...}, of this process.
        model: the model in training; a causal one does not predict the first label of a row.
        causal: whether the model predicts the next token, if no model is given.

    Returns:
        0-d int64, on the device of the labels. Add it up over all processes.
    """
    check_kind("batches", batches, Iterable, "the batches of a step, in a list")
    causal = bool(causal) if model is None else shifts_labels(model, causal)
    counts = [(align_labels(b["labels"], causal=causal) != IGNORE_INDEX).sum() for b in batches]
    return torch.stack(counts).sum()
