"""The losses as users call them, with all of their options.

`python -m docs.options` writes the signatures, the keywords for type checkers and the entries of
options, from `growkern/ops/loss/rows/options.py`. Change an option there. All other words of the
docstrings are written here.
"""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, TypedDict, overload

import torch
import torch.distributed as dist
from torch import Tensor

from growkern.ops.loss.kl_mlm_loss import kl_mlm_loss as of_logits
from growkern.ops.loss.linear_kl_mlm_loss import linear_kl_mlm_loss as of_heads
from growkern.ops.loss.rows.inputs import LossParts
from growkern.ops.loss.rows.options import IGNORE_INDEX, Divergence, KLRows, Reduction, Tail
from growkern.ops.loss.topk_kl_mlm_loss import topk_kl_mlm_loss as of_topk

if TYPE_CHECKING:
    from typing_extensions import Unpack


class CommonKeywords(TypedDict, total=False):
    alpha: float | Tensor
    temperature: float
    divergence: Divergence
    beta: float | None
    teacher_weights: Sequence[float] | None
    vocab_size: int | None
    teacher_vocab_size: int | None
    row_weights: Tensor | None
    label_smoothing: float
    z_loss: float
    num_items: float | Tensor | tuple[float | Tensor, float | Tensor] | None


class RowKeywords(CommonKeywords, total=False):
    ignore_index: int
    kl_rows: KLRows | Tensor
    softcap: float | None
    reduction: Reduction
    group: dist.ProcessGroup | None
    vocab_start: int | None
    backend: str | None


class HeadKeywords(RowKeywords, total=False):
    chunk_bytes: int | None
    max_rows: int | None
    vocab_tile: int | None
    logits_dtype: torch.dtype | None


class LogitKeywords(RowKeywords, total=False):
    teacher_softcap: float | None


@overload
def kl_mlm_loss(
    student_logits: Tensor,
    teacher_logits: Tensor | Sequence[Tensor] | None,
    labels: Tensor,
    *,
    return_parts: Literal[False] = False,
    **options: "Unpack[LogitKeywords]",
) -> Tensor: ...


@overload
def kl_mlm_loss(
    student_logits: Tensor,
    teacher_logits: Tensor | Sequence[Tensor] | None,
    labels: Tensor,
    *,
    return_parts: Literal[True],
    **options: "Unpack[LogitKeywords]",
) -> tuple[Tensor, LossParts]: ...


def kl_mlm_loss(
    student_logits: Tensor,
    teacher_logits: Tensor | Sequence[Tensor] | None,
    labels: Tensor,
    *,
    alpha: float | Tensor = 0.5,
    temperature: float = 1.0,
    divergence: Divergence = "forward",
    beta: float | None = None,
    ignore_index: int = IGNORE_INDEX,
    kl_rows: KLRows | Tensor = "labels",
    teacher_weights: Sequence[float] | None = None,
    vocab_size: int | None = None,
    teacher_vocab_size: int | None = None,
    row_weights: Tensor | None = None,
    softcap: float | None = None,
    teacher_softcap: float | None = None,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    reduction: Reduction = "mean",
    num_items: float | Tensor | tuple[float | Tensor, float | Tensor] | None = None,
    return_parts: bool = False,
    group: dist.ProcessGroup | None = None,
    vocab_start: int | None = None,
    backend: str | None = None,
) -> Tensor | tuple[Tensor, LossParts]:
    """Cross-entropy of the labels mixed with the KL divergence to one or more frozen teachers.

    loss = (1 - alpha) * cross-entropy(labels) + alpha * temperature^2 * KL(teacher || student),
    after Qin et al. 2022 (Knowledge Inheritance). Each term is a mean over its rows. The loss does
    not shift labels: for a causal model, align logits and labels before the call.

    Args:
        student_logits: logits being trained, (..., V), any float dtype. The KL gradient is a
            difference of probabilities, so it is only as exact as the logits. At 1 % drift between
            student and teacher it is 81 % off with bfloat16 logits, and 10 % with float16; the
            first such call warns. `linear_kl_mlm_loss` computes float32 logits itself.
        teacher_logits: frozen logits (..., V_k), a list of them, or None with ``alpha=0.0``.
        labels: integer token ids, (...); ``ignore_index`` outside the MLM mask.
        alpha: weight of the KL term, 0 to 1. At the float 0 no teacher is read, at the float 1 no
            label. With a 0-d tensor, torch.compile makes one graph for all values, and nothing
            waits for the value. A changing float needs ``dynamic=True`` for one graph, and is
            compiled again at 0 and 1.
        temperature: of the softmax of student and teachers in the KL term.
        divergence: "forward", KL(teacher || student), infinite if the student alone gives
            probability 0 to a token. "reverse", KL(student || teacher), infinite if the teacher
            alone does. "jsd", the generalised Jensen-Shannon divergence of GKD (Agarwal et al.
            2024), always finite. A token of probability 0 in both adds nothing.
        beta: of "jsd", in (0, 1): small values are close to "forward". Default: 0.5.
        ignore_index: the label of rows without the MLM term.
        kl_rows: rows with the KL term: "labels" (rows with a label) or "all" (in training every
            real token). The losses of tensors also take a bool mask of the labels' shape.
        teacher_weights: one number per teacher, sum 1. Default: equal.
        row_weights: float, (...): multiplies both terms of a row. A row of weight 0 may hold
            anything: its terms are not computed. It still counts in the number of rows that "mean"
            divides by; a label of ``ignore_index`` does not. `LossParts` leaves it out, and uses no
            other weights.
        vocab_size: columns from here on are padding, of student and teachers: they count as -inf
            and get a gradient of exactly 0. Default: no padding; all must then be equally wide.
        teacher_vocab_size: tokens that the teachers know, where the student has more. The KL term
            is then over the softmax of these alone, so it moves no later token. A row whose label
            is a later token has no KL term. The student's logits are computed twice. Default: the
            teachers know all tokens.
        softcap, teacher_softcap: cap logits to c * tanh(z / c).
        label_smoothing: share of the label that is spread over the whole vocabulary, in [0, 1).
        z_loss: factor of the squared log of the softmax's denominator.
        reduction: "mean" divides each term by its number of rows, "sum" does not divide, "none"
            returns the loss per row, (...).
        num_items: the divisor of "mean" instead of the local counts, for gradient accumulation:
            one number for both terms, or (rows of the MLM term, rows of the KL term).
        return_parts: also return `LossParts`. Its ``mlm`` includes label smoothing and z-loss.
        group: a process group whose ranks hold neighbouring slices of the columns of all logits, in
            the order of the ranks. Slices may differ in width. Every rank passes all rows and the
            same options, and gets the same loss and the gradient of its own slice. The ranks
            exchange a few numbers per row.
        vocab_start: with ``group``, this rank's first column; ``vocab_size`` is then required.
        backend: "reference", "cpu" (the compiled library) or "triton". Default: the fastest for the
            device; "reference" where the compiled library or Triton is missing.

    Returns:
        The loss: 0-d, or (...) with "none"; float32, or float64 for float64 logits. It is 0 if no
        row has a term. With ``return_parts``, a tuple of the loss and `LossParts`.

    Raises:
        GrowthError: shapes, dtypes or options that do not fit, or a teacher that requires grad. On
            a CPU also a label outside the vocabulary; a GPU asserts that without waiting.
    """
    return of_logits(
        student_logits, teacher_logits, labels, alpha=alpha, temperature=temperature,
        divergence=divergence, beta=beta, ignore_index=ignore_index, kl_rows=kl_rows,
        teacher_weights=teacher_weights, vocab_size=vocab_size,
        teacher_vocab_size=teacher_vocab_size, row_weights=row_weights, softcap=softcap,
        teacher_softcap=teacher_softcap, label_smoothing=label_smoothing, z_loss=z_loss,
        reduction=reduction, num_items=num_items, return_parts=return_parts, group=group,
        vocab_start=vocab_start, backend=backend,
    )  # fmt: skip


class LinearKeywords(HeadKeywords, total=False):
    student_bias: Tensor | None
    teacher_bias: Tensor | Sequence[Tensor | None] | None
    teacher_softcap: float | None


@overload
def linear_kl_mlm_loss(
    student_hidden: Tensor,
    student_weight: Tensor,
    teacher_hidden: Tensor | Sequence[Tensor] | None,
    teacher_weight: Tensor | Sequence[Tensor] | None,
    labels: Tensor,
    *,
    return_parts: Literal[False] = False,
    **options: "Unpack[LinearKeywords]",
) -> Tensor: ...


@overload
def linear_kl_mlm_loss(
    student_hidden: Tensor,
    student_weight: Tensor,
    teacher_hidden: Tensor | Sequence[Tensor] | None,
    teacher_weight: Tensor | Sequence[Tensor] | None,
    labels: Tensor,
    *,
    return_parts: Literal[True],
    **options: "Unpack[LinearKeywords]",
) -> tuple[Tensor, LossParts]: ...


def linear_kl_mlm_loss(
    student_hidden: Tensor,
    student_weight: Tensor,
    teacher_hidden: Tensor | Sequence[Tensor] | None,
    teacher_weight: Tensor | Sequence[Tensor] | None,
    labels: Tensor,
    *,
    student_bias: Tensor | None = None,
    teacher_bias: Tensor | Sequence[Tensor | None] | None = None,
    alpha: float | Tensor = 0.5,
    temperature: float = 1.0,
    divergence: Divergence = "forward",
    beta: float | None = None,
    ignore_index: int = IGNORE_INDEX,
    kl_rows: KLRows | Tensor = "labels",
    teacher_weights: Sequence[float] | None = None,
    vocab_size: int | None = None,
    teacher_vocab_size: int | None = None,
    row_weights: Tensor | None = None,
    softcap: float | None = None,
    teacher_softcap: float | None = None,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    reduction: Reduction = "mean",
    num_items: float | Tensor | tuple[float | Tensor, float | Tensor] | None = None,
    return_parts: bool = False,
    chunk_bytes: int | None = None,
    max_rows: int | None = None,
    vocab_tile: int | None = None,
    logits_dtype: torch.dtype | None = None,
    group: dist.ProcessGroup | None = None,
    vocab_start: int | None = None,
    backend: str | None = None,
) -> Tensor | tuple[Tensor, LossParts]:
    """`kl_mlm_loss` of the logits ``hidden @ weight.T + bias``, without holding all of them.

    Options that are not listed here are those of `kl_mlm_loss`. Under autocast the heads of student
    and teachers run in autocast's dtype, as `torch.nn.functional.linear` would.

    Args:
        student_hidden: (..., H), float.
        student_weight: the student's output head, (V, H), dtype of `student_hidden`.
        teacher_hidden: (..., H_k), of any width and dtype; a list; or None with ``alpha=0.0``.
        teacher_weight: the teachers' heads, (V_k, H_k), one per entry of `teacher_hidden`.
        labels: integer token ids, (...).
        student_bias, teacher_bias: (V,), (V_k,), optional. A list may hold None.
        chunk_bytes: memory for the logits of one chunk, student and teachers together. Default:
            enough rows that accumulating dW takes under a tenth of the time of the chunk's GEMMs.
            It bounds logits alone. On a GPU, 16-bit heads then also need float32 sums of dW, 4 V H
            bytes, if there are several chunks. The least memory has ``vocab_tile``.
        max_rows: the largest number of rows with a term; more are an error. Without it a GPU
            computes the products of all N rows, because reading their number would make it wait.
        vocab_tile: columns per tile of the vocabulary, if chunks of whole rows need too much
            memory. Logits are then computed twice, for the rows' sums and for the gradient (three
            times for "reverse" and "jsd"). For 2048 rows and heads of (128256, 4096) in bfloat16,
            tiles of 1024 columns take an eighth of plain PyTorch's memory on a GPU, and the
            default 0.17. Default: whole rows, unless ``chunk_bytes`` holds fewer than 32 of them.
        logits_dtype: dtype of the logits. Default: float32, or float64 for float64 inputs. On a CPU
            with a teacher, float32 inputs get float64 logits too, and twice the memory of a chunk.
            The KL gradient is then within 1e-5 of exact at 1 % drift instead of up to 8e-5, and
            off by 6e-5 at 0.1 %. With AVX-512 products are float32, and their sums nearly exact.
            ``torch.float64`` asks for float64 products: the error is 3e-7 at any drift, and the
            products of the logits take 1.6 times the time
            (`python -m bench.speed.linear_kl_mlm_loss` has all three).
            Float32 products obey ``torch.set_float32_matmul_precision``.
        group, vocab_start: as in `kl_mlm_loss`, with slices of the rows of every head and whole
            hidden states. The gradient of the student's hidden states is summed over the ranks;
            that of its weight and bias belongs to the slice. Heads that are DTensors with Shard(0)
            on a one-dimensional mesh need neither argument, and teachers beside them may be whole.
            FSDP's heads are such DTensors, but every rank has rows of its own: call the loss from
            the forward of a module that `fully_shard` wraps, where the head is whole.
        backend: as in `kl_mlm_loss`.

    Returns:
        As `kl_mlm_loss`. Hidden states, weight and bias get a gradient if they require one: a
        frozen head or trunk costs no GEMM. float16 tensors get float16 gradients, which underflow
        beside a close teacher: the weight's is 2.4 % off at 1 % drift and 24 % at 0.1 %, and the
        hidden states' 4 % and 40 %. A loss scaler (`torch.amp.GradScaler`) helps: with a scale of
        1024 both are 0.02 % and 0.04 % off.

    Raises:
        GrowthError: shapes, dtypes or options that do not fit, or a teacher that requires grad. On
            a CPU also a label outside the vocabulary, or different rows on the ranks of the group;
            a GPU asserts those without waiting.
    """
    return of_heads(
        student_hidden, student_weight, teacher_hidden, teacher_weight, labels,
        student_bias=student_bias, teacher_bias=teacher_bias, alpha=alpha, temperature=temperature,
        divergence=divergence, beta=beta, ignore_index=ignore_index, kl_rows=kl_rows,
        teacher_weights=teacher_weights, vocab_size=vocab_size,
        teacher_vocab_size=teacher_vocab_size, row_weights=row_weights, softcap=softcap,
        teacher_softcap=teacher_softcap, label_smoothing=label_smoothing, z_loss=z_loss,
        reduction=reduction, num_items=num_items, return_parts=return_parts,
        chunk_bytes=chunk_bytes, max_rows=max_rows, vocab_tile=vocab_tile,
        logits_dtype=logits_dtype, group=group, vocab_start=vocab_start, backend=backend,
    )  # fmt: skip


class TopKKeywords(HeadKeywords, total=False):
    student_bias: Tensor | None
    tail: Tail


@overload
def topk_kl_mlm_loss(
    student_hidden: Tensor,
    student_weight: Tensor,
    teacher_topk_ids: Tensor | Sequence[Tensor] | None,
    teacher_topk_logprobs: Tensor | Sequence[Tensor] | None,
    labels: Tensor,
    *,
    return_parts: Literal[False] = False,
    **options: "Unpack[TopKKeywords]",
) -> Tensor: ...


@overload
def topk_kl_mlm_loss(
    student_hidden: Tensor,
    student_weight: Tensor,
    teacher_topk_ids: Tensor | Sequence[Tensor] | None,
    teacher_topk_logprobs: Tensor | Sequence[Tensor] | None,
    labels: Tensor,
    *,
    return_parts: Literal[True],
    **options: "Unpack[TopKKeywords]",
) -> tuple[Tensor, LossParts]: ...


def topk_kl_mlm_loss(
    student_hidden: Tensor,
    student_weight: Tensor,
    teacher_topk_ids: Tensor | Sequence[Tensor] | None,
    teacher_topk_logprobs: Tensor | Sequence[Tensor] | None,
    labels: Tensor,
    *,
    student_bias: Tensor | None = None,
    alpha: float | Tensor = 0.5,
    temperature: float = 1.0,
    divergence: Divergence = "forward",
    beta: float | None = None,
    ignore_index: int = IGNORE_INDEX,
    kl_rows: KLRows | Tensor = "labels",
    teacher_weights: Sequence[float] | None = None,
    vocab_size: int | None = None,
    teacher_vocab_size: int | None = None,
    row_weights: Tensor | None = None,
    softcap: float | None = None,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    tail: Tail = "bucket",
    reduction: Reduction = "mean",
    num_items: float | Tensor | tuple[float | Tensor, float | Tensor] | None = None,
    return_parts: bool = False,
    chunk_bytes: int | None = None,
    max_rows: int | None = None,
    vocab_tile: int | None = None,
    logits_dtype: torch.dtype | None = None,
    group: dist.ProcessGroup | None = None,
    vocab_start: int | None = None,
    backend: str | None = None,
) -> Tensor | tuple[Tensor, LossParts]:
    """`linear_kl_mlm_loss` with teachers of which k ids and log-probs per row were stored.

    Options that are not listed here are those of `linear_kl_mlm_loss`; `growkern.cache_teacher`
    writes such a teacher.

    Args:
        student_hidden: (..., H), float.
        student_weight: the student's output head, (V, H), dtype of `student_hidden`.
        teacher_topk_ids: int32 or int64 (..., k), in any order, no id twice in a row. Or a list,
            one tensor per teacher, with any k each. Or None with ``alpha=0.0``.
        teacher_topk_logprobs: natural log-probs of those tokens (..., k), any float dtype, at
            `temperature` and normalised over the whole vocabulary. -inf is a probability of 0.
        labels: integer token ids, (...).
        student_bias: (V,), optional.
        divergence: as in `kl_mlm_loss`. For "reverse" the teacher's remaining probability counts as
            no smaller than the rounding error of the stored log-probs, because the divergence is
            infinite without it. So "reverse" does not go with tail="renormalise".
        tail: of a teacher known by its k likeliest tokens, the use of its remaining probability.
            "bucket", the default, compares it as a whole with the student's. "renormalise" spreads
            it over the k tokens, as Knowledge Inheritance does, with a wrong gradient for small k.
        group, vocab_start: as in `linear_kl_mlm_loss`. Every rank passes all ids, which count the
            columns of all ranks.
        backend: "reference", "cpu" or "triton". Default: as in `kl_mlm_loss`.

    Returns:
        As `linear_kl_mlm_loss`; `LossParts.kl` is over the k tokens and the bucket of all others.
        Rows without the KL term may hold anything in place of the teachers.

    Raises:
        GrowthError: shapes, dtypes or options that do not fit. On a CPU also ids or labels outside
            the vocabulary, ids twice in a row, and log-probs whose sum is above 1 by more than
            rounding. A GPU asserts without waiting that ids and labels are inside; it does not
            notice repeated ids.
    """
    return of_topk(
        student_hidden, student_weight, teacher_topk_ids, teacher_topk_logprobs, labels,
        student_bias=student_bias, alpha=alpha, temperature=temperature, divergence=divergence,
        beta=beta, ignore_index=ignore_index, kl_rows=kl_rows, teacher_weights=teacher_weights,
        vocab_size=vocab_size, teacher_vocab_size=teacher_vocab_size, row_weights=row_weights,
        softcap=softcap, label_smoothing=label_smoothing, z_loss=z_loss, tail=tail,
        reduction=reduction, num_items=num_items, return_parts=return_parts,
        chunk_bytes=chunk_bytes, max_rows=max_rows, vocab_tile=vocab_tile,
        logits_dtype=logits_dtype, group=group, vocab_start=vocab_start, backend=backend,
    )  # fmt: skip


class InheritedKeywords(CommonKeywords, total=False):
    kl_rows: KLRows
    max_rows: int | None
    causal: bool | None


@overload
def inherited_loss(
    model: Any,
    teacher: Any,
    batch: Mapping[str, Any],
    *,
    return_parts: Literal[False] = False,
    **options: "Unpack[InheritedKeywords]",
) -> Tensor: ...


@overload
def inherited_loss(
    model: Any,
    teacher: Any,
    batch: Mapping[str, Any],
    *,
    return_parts: Literal[True],
    **options: "Unpack[InheritedKeywords]",
) -> tuple[Tensor, LossParts]: ...


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
    teacher_vocab_size: int | None = None,
    max_rows: int | None = None,
    causal: bool | None = None,
    return_parts: bool = False,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
) -> Tensor | tuple[Tensor, LossParts]:
    """(1 - alpha) times the cross-entropy of the labels, plus alpha times the KL from the teachers.

    Runs the models and `linear_kl_mlm_loss`. No logits are made: while the model runs, the loss
    takes the place of its output projection. Call it where you would call the model: under
    autocast, on a model that DistributedDataParallel or accelerate wrapped, that `fully_shard`
    sharded, or whose blocks are compiled. All processes of a tensor-parallel group
    (`from_pretrained(..., tp_plan="auto")`) pass the same batch and get the same loss.

    A mixture of experts whose config has `output_router_logits=True` adds `router_aux_loss_coef`
    times the auxiliary loss of its routers, as in transformers. With `num_items` this term counts
    by the batch's share of the labels. Teachers add none.

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
            the tokenizers beside the models, or else their special ids and
            families, must agree.
        teacher_vocab_size: tokens that the teachers know, if the student has more. A row whose
            label or context holds a later token has no KL term, and the KL of other rows is over
            the teachers' tokens alone. None: the tokenizers beside the models tell it.
        max_rows: at least the number of rows with a term, counted on the CPU. A GPU then spends
            nothing on the others.
        causal: for a pair only: whether it predicts the next token. None: its labels are aligned
            with its hidden states already.
        return_parts: whether to return the parts of the loss too.
        label_smoothing: share of the label that is spread over the whole vocabulary, in [0, 1).
        z_loss: factor of the squared log of the softmax's denominator.

    Returns:
        The loss, 0-d; with `return_parts` also the parts. A batch without a single row with a term
        gives 0 and zero gradients, so that a loop may add it to others. Leave such batches out of
        the mean that you print.

    Raises:
        GrowthError: models, batch or options that do not fit together, or a model that would be
            trained wrongly.
    """
    # loads transformers, which the other losses do without
    from growkern.train.loss.inherited import inherited_loss as of_models

    return of_models(
        model, teacher, batch, alpha=alpha, temperature=temperature, num_items=num_items,
        divergence=divergence, beta=beta, kl_rows=kl_rows, teacher_weights=teacher_weights,
        row_weights=row_weights, vocab_size=vocab_size, teacher_vocab_size=teacher_vocab_size,
        max_rows=max_rows, causal=causal, return_parts=return_parts,
        label_smoothing=label_smoothing, z_loss=z_loss,
    )  # fmt: skip
