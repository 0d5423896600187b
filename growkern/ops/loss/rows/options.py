"""Arguments that the three losses share: their checks, the weights of rows, and the result.

Options come first, then labels and rows, then the returned loss and its parts.

Shape letters used in this file: N rows (tokens), V vocabulary, K teachers, W = 1 + K terms, L ranks
that hold slices of the vocabulary.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, library

from growkern.errors import GrowthError
from growkern.ops.backend.dtypes import acc_torch_dtype, check_tensors
from growkern.ops.backend.namespace import NAMESPACE
from growkern.ops.loss.rows.label_options import RULES
from growkern.ops.loss.rows.state import KL_ROW, MLM_ROW, Maths, RowInputs, live_kinds, named_terms
from growkern.ops.loss.rows.vocab_parallel import WHOLE, Shard, gather

IGNORE_INDEX = -100
REDUCTIONS = ("mean", "sum", "none")
DIVERGENCES = ("forward", "reverse", "jsd")


class LossParts(NamedTuple):
    """Detached 0-d measurements of the pass that computed the loss.

    ``mlm`` and ``kl`` are means over their rows, before ``alpha`` weighs them. ``top1_agreement``
    is the share of KL rows where student and teacher have the same likeliest token. ``entropy`` is
    the student's mean entropy in nats, over all rows with a term. ``kl`` and ``top1_agreement`` are
    None without a teacher, and 0 where a tensor ``alpha`` is 0.
    """

    mlm: Tensor
    kl: Tensor | None
    top1_agreement: Tensor | None
    entropy: Tensor


class Options(NamedTuple):
    """The checked options of one call; the tensors among them are 0-d or (N,)."""

    alpha: float | Tensor
    maths: Maths
    teacher_weights: tuple[float, ...]
    reduction: str
    num_items: tuple[Any, Any] | None
    parts: bool
    row_weights: Tensor | None


# ----------------------------------------------------------------------- options


def as_teachers(teacher: Any, alpha: float | Tensor) -> list[Any]:
    """One teacher, several or none, as a list; empty if ``alpha`` is the float 0.

    Raises:
        GrowthError: `alpha` is outside 0..1, or needs a teacher and there is none.
    """
    if isinstance(alpha, Tensor):
        if alpha.ndim != 0 or alpha.requires_grad:
            raise GrowthError("alpha must be a float or a 0-d tensor without gradient: detach it")
    else:
        _check_number("alpha", alpha, lambda x: 0 <= x <= 1, "lie in [0, 1]")
    if teacher is None:
        teachers = []
    else:
        teachers = list(teacher) if isinstance(teacher, Sequence) else [teacher]
    if not teachers and (isinstance(alpha, Tensor) or alpha > 0):
        raise GrowthError(
            "alpha > 0 needs a teacher: pass one, or alpha=0.0 for the plain MLM loss"
        )
    return [] if not isinstance(alpha, Tensor) and alpha == 0 else teachers


def _check_number(name: str, x: Any, inside: Callable[[Any], bool], must: str) -> None:
    # known non-numbers are refused instead of known numbers accepted: when torch.compile traces a
    # call, a number has a type of its own
    if x is None or isinstance(x, (str, list, tuple, dict)) or not inside(x):
        raise GrowthError(f"{name} must {must}, got {x!r}")


def check_options(
    n_teachers: int,
    alpha: float | Tensor,
    temperature: float,
    teacher_weights: Sequence[float] | None,
    softcap: float | None,
    teacher_softcap: float | None,
    reduction: str,
    num_items: Any,
    parts: bool,
    *,
    divergence: str = "forward",
    beta: float | None = None,
    row_weights: Tensor | None = None,
    **label_options: float,
) -> Options:
    """The options of `kl_mlm_loss`, checked; `row_weights` is the result of `check_row_weights`.

    `label_options` are the fields of `LabelOptions`.

    Raises:
        GrowthError: an option is out of range, or does not go with another one.
    """

    def positive(x: float) -> bool:
        return 0 < x < math.inf  # math.isinf cannot be traced

    _check_number("temperature", temperature, positive, "be positive and finite")
    for name, cap in (("softcap", softcap), ("teacher_softcap", teacher_softcap)):
        if cap is not None:
            _check_number(name, cap, positive, "be positive and finite, or None for no cap")
    if reduction not in REDUCTIONS:
        raise GrowthError(f"reduction must be one of {REDUCTIONS}, got {reduction!r}")
    num_items = _checked_num_items(num_items, reduction)
    for name, x in label_options.items():
        _check_number(name, x, *RULES[name])
    maths = Maths(
        # without a teacher nothing is computed at the temperature
        temperature=float(temperature) if n_teachers else 1.0,
        softcap=float(softcap or 0.0),
        teacher_softcap=float(teacher_softcap or 0.0),
        beta=_checked_beta(divergence, beta),
        **{name: float(x) for name, x in label_options.items()},
    )
    weights = _checked_teacher_weights(teacher_weights, n_teachers)
    return Options(alpha, maths, weights, reduction, num_items, parts, row_weights)


def _checked_teacher_weights(given: Sequence[float] | None, n_teachers: int) -> tuple[float, ...]:
    if given is None or n_teachers == 0:
        return (1.0 / n_teachers,) * n_teachers if n_teachers else ()
    weights = tuple(float(w) for w in given)
    # written so that NaN fails
    if len(weights) != n_teachers or not (min(weights) >= 0 and abs(sum(weights) - 1) <= 1e-6):
        raise GrowthError(
            f"teacher_weights must be {n_teachers} numbers (one per teacher), none negative, "
            f"that sum to 1, got {weights}"
        )
    return weights


def _checked_num_items(num_items: Any, reduction: str) -> tuple[Any, Any] | None:
    """Numbers or 0-d tensors. In another shape a tensor would multiply the rows' weights."""
    if num_items is None:
        return None
    if reduction != "mean":
        raise GrowthError(f"num_items works only with reduction='mean', got {reduction!r}")
    counts = num_items if isinstance(num_items, (tuple, list)) else (num_items,) * 2
    # the value of a tensor is not read: that would wait for a GPU
    right = [
        x.numel() == 1
        if isinstance(x, Tensor)
        else isinstance(x, (int, float)) and 0 < x < math.inf
        for x in counts
    ]
    if len(counts) != 2 or not all(right):
        raise GrowthError(
            "num_items must be a positive number or 0-d tensor, or two of them (rows of the MLM "
            f"term, rows of the KL term), got {num_items!r}"
        )
    n_mlm, n_kl = (x.reshape(()) if isinstance(x, Tensor) else x for x in counts)
    return n_mlm, n_kl


def _checked_beta(divergence: str, beta: float | None) -> float:
    """`Maths.beta`."""
    if divergence not in DIVERGENCES:
        raise GrowthError(f"divergence must be one of {DIVERGENCES}, got {divergence!r}")
    if divergence != "jsd":
        if beta is not None:
            raise GrowthError(f"beta belongs to divergence='jsd', not to {divergence!r}")
        return float(divergence == "reverse")
    beta = 0.5 if beta is None else float(beta)
    if not 0 < beta < 1:
        raise GrowthError(
            f"beta must lie between 0 and 1, got {beta} (at both ends the divergence is 0): "
            "use 'forward' or 'reverse'"
        )
    return beta


def check_vocabulary(
    vocab_size: int | None, student: int, teachers: Sequence[int], shard: Shard = WHOLE
) -> int:
    """The number of columns here that are not padding, given the widths of all logits.

    Raises:
        GrowthError: the widths differ, and `vocab_size` does not say what is padding.
    """
    widths = (student, *teachers)
    if shard.group:
        here = max(0, shard.vocab - shard.start)
        if here > min(widths) and max(widths) > min(widths):
            raise GrowthError(
                f"the slice from column {shard.start} has {student} columns of the student and "
                f"{list(teachers)} of the teachers: cut all heads at the same columns"
            )
        return min(here, student)
    if vocab_size is None:
        if any(width != student for width in teachers):
            raise GrowthError(
                f"student has {student} columns, teachers {list(teachers)}: pass vocab_size="
                f"{min(widths)} if the rest is padding"
            )
        vocab_size = student
    if not 0 < vocab_size <= min(widths):
        raise GrowthError(
            f"vocab_size={vocab_size} must lie in 1..{min(widths)}: student "
            f"has {student} columns, teachers {list(teachers)}"
        )
    return vocab_size


# --------------------------------------------------------------- labels and rows


def check_labels(labels: Tensor, rows: torch.Size, what: str, ignore_index: int) -> Tensor:
    """Labels as int64 (N,); `rows` is the shape of the rows of the tensor that `what` names.

    Raises:
        GrowthError: labels are not integers, or have another shape.
    """
    if labels.shape != rows:
        raise GrowthError(
            f"labels {tuple(labels.shape)} must match the rows {tuple(rows)} of {what}; this op "
            "does not shift: align causal labels before the call"
        )
    if labels.is_floating_point() or labels.dtype == torch.bool:
        raise GrowthError(f"labels must be integer token ids, got {labels.dtype}")
    if not isinstance(ignore_index, int):
        raise GrowthError(f"ignore_index must be an integer, got {ignore_index!r}")
    return labels.reshape(-1).long()


def row_kinds(labels: Tensor, kl_rows: str | Tensor, ignore_index: int, options: Options) -> Tensor:
    """Bits MLM_ROW and KL_ROW per row, (N,) int32; labels are (...) int64.

    Raises:
        GrowthError: `kl_rows` is neither a known name nor a bool mask of the labels' shape.
    """
    labelled_N = (labels != ignore_index).reshape(-1)
    if isinstance(kl_rows, Tensor):
        if kl_rows.dtype != torch.bool or kl_rows.shape != labels.shape:
            raise GrowthError(
                f"kl_rows must be a bool mask of the labels' shape {tuple(labels.shape)}, got "
                f"{kl_rows.dtype} {tuple(kl_rows.shape)}"
            )
        kl_N = kl_rows.reshape(-1)
    elif kl_rows in ("labels", "all"):
        kl_N = labelled_N if kl_rows == "labels" else torch.ones_like(labelled_N)
    else:
        raise GrowthError(f"kl_rows must be 'labels', 'all' or a bool mask, got {kl_rows!r}")
    kind_N = torch.zeros_like(labelled_N, dtype=torch.int32)
    # at alpha = 1 the labels have no weight: their term is computed only if it is to be reported
    if isinstance(options.alpha, Tensor) or options.alpha < 1 or options.parts:
        kind_N += MLM_ROW * labelled_N.int()
    if options.teacher_weights:
        if isinstance(options.alpha, Tensor):
            # at 0 the term is left out, also where it is infinite
            kl_N = kl_N & (_alpha_beside(options.alpha, kl_N) != 0)
        kind_N += KL_ROW * kl_N.int()
    return kind_N


def _alpha_beside(alpha: Tensor, x: Tensor) -> Tensor:
    """`alpha` for use with `x`. One on the CPU stays there: its copy breaks a CUDA graph."""
    return alpha if alpha.device.type == "cpu" else alpha.to(x.device)


def check_row_weights(weights: Tensor | None, labels: Tensor) -> Tensor | None:
    """Row weights as (N,); a GrowthError if they do not fit the labels."""
    check_tensors({"labels": labels})
    if weights is None:
        return None
    check_tensors({"row_weights": weights})
    if weights.shape != labels.shape or not weights.is_floating_point() or weights.requires_grad:
        raise GrowthError(
            f"row_weights must be a float tensor of the labels' shape {tuple(labels.shape)} "
            f"without gradient, got {weights.dtype} {tuple(weights.shape)}"
        )
    return weights.reshape(-1)


def term_weights(kind_N: Tensor, options: Options, dtype: torch.dtype) -> Tensor:
    """The factors in (3) of each row's MLM and of each teacher's KL, (W, N)."""
    mlm_N, kl_N = (kind_N & MLM_ROW) > 0, (kind_N & KL_ROW) > 0
    n_mlm: Any = 1
    n_kl: Any = 1
    if options.reduction == "mean":
        if options.num_items is None:
            n_mlm, n_kl = mlm_N.sum().clamp(min=1), kl_N.sum().clamp(min=1)
        else:
            n_mlm, n_kl = options.num_items
    alpha = options.alpha
    alpha = _alpha_beside(alpha, kind_N).to(dtype) if isinstance(alpha, Tensor) else alpha
    row_N = 1 if options.row_weights is None else options.row_weights.to(dtype)
    one_N = torch.ones_like(kind_N, dtype=dtype)
    # not a product with the mask: a batch without a row may have a count of 0, and 0 / 0 is NaN
    weights = [torch.where(mlm_N, one_N * row_N * (1 - alpha) / n_mlm, 0)]
    kl_weight_N = torch.where(kl_N, one_N * row_N * alpha / n_kl, 0)
    weights += [kl_weight_N * (w * options.maths.temperature**2) for w in options.teacher_weights]
    return torch.stack(weights).to(dtype)


def row_inputs(
    labels: Tensor,
    hidden: Tensor,
    kl_rows: str | Tensor,
    ignore_index: int,
    options: Options,
    vocab: int,
    shard: Shard,
) -> RowInputs:
    """The checked inputs of the rows.

    `vocab` counts the columns here. The weights have the dtype of sums over rows of `hidden`.
    """
    labels_N = check_labels(labels, hidden.shape[:-1], "student_hidden", ignore_index)
    counted_N = row_kinds(labels_N.view(labels.shape), kl_rows, ignore_index, options)
    weight_WN = term_weights(counted_N, options, acc_torch_dtype(hidden))
    kind_N = live_kinds(counted_N, options.row_weights)
    labels_N = checked_labels(labels_N, kind_N, shard.vocab or vocab, shard.group)
    return RowInputs(labels_N - shard.start, kind_N, weight_WN)


# an op, so that a compiled graph checks the values too
@library.custom_op(f"{NAMESPACE}::checked_labels", mutates_args=())
def checked_labels(labels_N: Tensor, kind_N: Tensor, vocab: int, group: str) -> Tensor:
    """The same labels, (N,) int64; `vocab` counts the columns of all ranks of `group`.

    Raises:
        GrowthError: on a CPU, when the label of a row with an MLM term is not in 0..vocab-1, or
            the ranks have different rows. On a GPU the check is a device assertion, as in
            PyTorch's own losses: nothing waits for it.
    """
    on_cpu = labels_N.device.type == "cpu"
    if group:
        counts_L2 = _counts(labels_N, group)
        is_same = (counts_L2 == counts_L2[:1]).all()
        if on_cpu and not is_same:
            raise GrowthError(
                "the ranks of the group have different rows or labels (numbers of rows: "
                f"{counts_L2[:, 0].tolist()}): every rank must pass the same ones. FSDP gives each "
                "rank rows of its own: call the loss from the forward of a module that fully_shard "
                "wraps, where the head is whole"
            )
        torch._assert_async(is_same, "the ranks of the group have different rows or labels")
    inside_N = ((labels_N >= 0) & (labels_N < vocab)) | ((kind_N & MLM_ROW) == 0)
    if on_cpu and not inside_N.all():
        row = int((~inside_N).nonzero()[0])
        raise GrowthError(
            f"the label of row {row} is {int(labels_N[row])}, outside 0..{vocab - 1}: give rows "
            "without a label ignore_index"
        )
    torch._assert_async(inside_N.all(), f"a label is outside 0..{vocab - 1}")
    return labels_N.clone()


@checked_labels.register_fake
def _(labels_N, kind_N, vocab, group) -> Tensor:
    return torch.empty_like(labels_N)


def _counts(labels_N: Tensor, group: str) -> Tensor:
    """Each rank's number of rows and a checksum of its labels, (L, 2) int64."""
    order_N = torch.arange(1, 2 * len(labels_N), 2, device=labels_N.device)
    mine_2 = torch.stack([torch.ones_like(labels_N).sum(), (labels_N * order_N).sum()])
    return gather(mine_2, group)


# ------------------------------------------------------------------------ result


def loss_parts(rows_SN: Tensor, kind_N: Tensor, options: Options) -> LossParts:
    """Means over the rows of `rows_SN`: MLM, KL per teacher, entropy, top-1 per teacher."""
    rows_SN = rows_SN.detach()
    n_mlm = ((kind_N & MLM_ROW) > 0).sum().clamp(min=1)
    n_kl = ((kind_N & KL_ROW) > 0).sum().clamp(min=1)
    n_any = (kind_N > 0).sum().clamp(min=1)
    of = named_terms(rows_SN)
    kl = top1 = None
    if options.teacher_weights:
        teachers = list(zip(options.teacher_weights, of.divergences, of.agreements, strict=True))
        kl = sum(w * kl_N.sum() for w, kl_N, _ in teachers) * options.maths.temperature**2 / n_kl
        top1 = sum(w * top1_N.sum() for w, _, top1_N in teachers) / n_kl
    return LossParts(of.mlm.sum() / n_mlm, kl, top1, of.entropy.sum() / n_any)


def outcome(
    loss: Tensor, rows_SN: Tensor, kind_N: Tensor, options: Options, shape: torch.Size
) -> Tensor | tuple[Tensor, LossParts]:
    """The return value of a loss; `shape` is that of the labels."""
    loss = loss.reshape(shape) if options.reduction == "none" else loss
    return (loss, loss_parts(rows_SN, kind_N, options)) if options.parts else loss
