"""The loss of one batch with teachers, in one call, for any training loop."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, overload

import torch
from torch import Tensor

from growkern.arguments import check_kind
from growkern.ops.loss.keywords import Divergence, InheritedKeywords, KLRows
from growkern.ops.loss.kl_mlm_loss import LossParts
from growkern.ops.loss.rows.label_options import LabelArguments, check_names, show_label_options
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
from growkern.train.loss.rows import LossRows, take_rows
from growkern.train.model.head import (
    IGNORE_INDEX,
    align_labels,
    common_softcap,
    head_swap,
    take_logits,
)

if TYPE_CHECKING:
    from typing_extensions import Unpack


@overload
def inherited_loss(
    model: Any,
    teacher: Any,
    batch: Mapping[str, Any],
    *,
    return_parts: Literal[False] = False,
    **options: Unpack[InheritedKeywords],
) -> Tensor: ...


@overload
def inherited_loss(
    model: Any,
    teacher: Any,
    batch: Mapping[str, Any],
    *,
    return_parts: Literal[True],
    **options: Unpack[InheritedKeywords],
) -> tuple[Tensor, LossParts]: ...


@show_label_options
def inherited_loss(
    model: Any,
    teacher: Any,
    batch: Mapping[str, Any],
    *,
    alpha: float | Tensor = 0.5,
    temperature: float = 2.0,
    num_items: float | Tensor | tuple[float | Tensor, float | Tensor] | None = None,
    divergence: Divergence = "forward",
    beta: float | None = None,
    kl_rows: KLRows = "labels",
    teacher_weights: Sequence[float] | None = None,
    row_weights: Tensor | None = None,
    vocab_size: int | None = None,
    max_rows: int | None = None,
    causal: bool | None = None,
    return_parts: bool = False,
    **label_options: Unpack[LabelArguments],
) -> Tensor | tuple[Tensor, LossParts]:
    """(1 - alpha) times the cross-entropy of the labels, plus alpha times the KL from the teachers.

    Runs the models and `linear_kl_mlm_loss`. No logits are made: while the model runs, the loss
    takes the place of its output projection. Call it where you would call the model: under
    autocast, on a model that DistributedDataParallel or accelerate wrapped, that `fully_shard`
    sharded, or whose blocks are compiled. All processes of a tensor-parallel group
    (`from_pretrained(..., tp_plan="auto")`) pass the same batch and get the same loss.

    Args:
        model: a ...ForMaskedLM or ...ForCausalLM model; a model of an encoder and a decoder such
            as T5ForConditionalGeneration; or a tuple (hidden states (B, S, H), output projection).
            The projection is a linear module or its weight (V, H).
        teacher: the same; a list of them; or None to train on the labels alone. Teachers run
            without gradients and in evaluation mode. The root of a sharded teacher must keep its
            parameters after its forward pass (`reshard_after_forward` unset).
        batch: {input_ids, labels, ...}, (B, S) each. Labels of causal models are not shifted. With
            an encoder and a decoder the labels belong to the decoder, and each model makes its
            decoder_input_ids of them if the batch has none.
        alpha: share of the KL term, in [0, 1]. No teacher runs if it is the number 0.
        temperature: of the softmax in the KL term.
        num_items: the number by which the sum over rows is divided: the labels of the whole
            accumulated batch, of all processes (`count_labels`). Multiply the loss by the number of
            processes then, because DistributedDataParallel and FSDP average the gradients. A pair
            holds the rows of either term. None takes the rows of this batch.
        divergence, beta: as in `InheritanceSchedule`.
        kl_rows: rows with a KL term: "labels", or "all" for every real token. A decoder beside an
            encoder needs a decoder_attention_mask for "all".
        teacher_weights: one per teacher, with sum 1; None weighs all alike.
        row_weights: (B, S) float, the weight of each label. Not shifted. A label of weight 0 still
            counts in the number that the loss is divided by; a masked label does not.
        vocab_size: columns that mean the same token in all models; later columns are padding. None:
            the tokenizers beside the models, or else their special ids, must agree.
        max_rows: at least the number of rows with a term, counted on the CPU. A GPU then spends
            nothing on the others.
        causal: for a pair only: whether it predicts the next token. None: its labels are aligned
            with its hidden states already.
        return_parts: whether to return the parts of the loss too.
        label_options: label_smoothing, z_loss and all other fields of `LabelOptions`.

    Returns:
        The loss, 0-d; with `return_parts` also the parts. A batch without a single row with a term
        gives 0 and zero gradients, so that a loop may add it to others. Leave such batches out of
        the mean that you print.

    Raises:
        GrowthError: models, batch or options that do not fit together, or a model that would be
            trained wrongly.
    """
    check_names(label_options, "inherited_loss")
    teachers = [] if teacher is None else as_list(teacher)
    check_models(model, teachers, vocab_size=vocab_size)
    check_kind("batch", batch, Mapping, "a mapping with input_ids and labels")
    causal = shifts_labels(model, causal)
    if not teachers:
        alpha = 0.0
    inputs = dict(batch)
    if row_weights is not None:
        inputs["row_weights"] = row_weights
    weights = None if row_weights is None else "row_weights"
    rows = take_rows(
        inputs, causal=causal, kl_rows=kl_rows, row_weights=weights, decoder=is_two_stacks(model)
    )
    loss_function = _run_teachers(teachers, inputs, rows, alpha, teacher_weights)
    options = {
        **rows.options(),
        "alpha": alpha,
        "temperature": temperature,
        "num_items": num_items,
        "divergence": divergence,
        "beta": beta,
        **label_options,
        "vocab_size": vocab_size,
        "max_rows": max_rows,
        "softcap": softcap(model),
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
        with head_swap(unwrapped(model), loss_of):
            loss = take_logits(model(**inputs_of(model, inputs, rows.labels_BS)))
    return (loss, seen[0]) if return_parts else loss


def _run_teachers(
    teachers: Sequence[Any],
    inputs: dict[str, Any],
    rows: LossRows,
    alpha: float | Tensor,
    teacher_weights: Sequence[float] | None,
) -> Callable[..., Any]:
    """The loss function beside the teachers' predictions; without a KL term they do not run."""
    runs = isinstance(alpha, Tensor) or alpha != 0
    predictions = [predict(one, inputs, rows.labels_BS) for one in teachers] if runs else []
    return loss_beside(predictions, teacher_weights, common_softcap(map(softcap, teachers)))


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
    causal = bool(causal) if model is None else shifts_labels(model, causal)
    counts = [(align_labels(b["labels"], causal=causal) != IGNORE_INDEX).sum() for b in batches]
    return torch.stack(counts).sum()
