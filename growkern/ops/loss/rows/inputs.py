"""The rows of a loss: their labels, kinds and weights, and the result of the call.

Shape letters used in this file: N rows, V vocabulary, K teachers, W = 1 + K terms, L ranks that
hold slices of the vocabulary.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor, library

from growkern.errors import GrowthError
from growkern.ops.backend import NAMESPACE, acc_torch_dtype, choose_backend, without_graph
from growkern.ops.loss.rows.options import LossCall, Options
from growkern.ops.loss.rows.state import KL_ROW, MLM_ROW, RowInputs, live_kinds, named_terms
from growkern.ops.loss.rows.vocab_parallel import WHOLE, Shard, check_shard, gather


def shard_of_call(call: LossCall) -> Shard:
    """The columns on this rank, as the options of a call say."""
    if call.group is None and call.vocab_start is None:
        return WHOLE
    return check_shard(call.group, call.vocab_start, call.vocab_size)


def backend_of(asked: str | None, device: torch.device, shard: Shard) -> str:
    """The backend of a loss. The reference cannot use a slice of the vocabulary."""
    chosen = choose_backend(asked, device)
    if shard.group and chosen == "reference":
        raise GrowthError(
            "backend='reference' needs the whole vocabulary and takes no group; if it was chosen "
            "because another backend is missing, `growkern info` says how to get that"
        )
    return chosen


class Columns(NamedTuple):
    """Numbers of columns on this rank."""

    vocab: int  # that are not padding
    known: int | None  # that the teachers know; None: all, on every rank
    known_of_all: int  # that the teachers know, on all ranks together


def check_columns(
    call: LossCall, student: int, teachers: Sequence[int], shard: Shard = WHOLE
) -> Columns:
    """The numbers of columns here, from the widths of the logits."""
    known = call.teacher_vocab_size
    vocab = _columns(call.vocab_size, student, teachers if known is None else [], shard)
    total = shard.vocab or vocab
    if known is None:
        return Columns(vocab, None, total)
    if not isinstance(known, int) or isinstance(known, bool) or known < 1:
        raise GrowthError(f"teacher_vocab_size must be a positive integer, got {known!r}")
    here = min(max(0, known - shard.start), vocab)
    # not by `default`: torch.compile breaks its graph at one that is a symbol
    if min(*teachers, here, here) < here:
        raise GrowthError(
            f"teacher_vocab_size={known}, but the teachers have {list(teachers)} columns here, "
            f"fewer than {here}"
        )
    return Columns(vocab, here if known < total else None, min(total, known))


def _columns(vocab_size: int | None, student: int, teachers: Sequence[int], shard: Shard) -> int:
    """The number of columns here that are not padding."""
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
                f"{min(widths)} if the rest is padding, or teacher_vocab_size if the student has "
                "more tokens"
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
    """Labels as int64 (N,); `rows` is the shape of the rows of the tensor that `what` names."""
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
    """Bits MLM_ROW and KL_ROW per row, (N,) int32; labels are (...) int64."""
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
    # at alpha = 1 the labels have no weight: their term is computed only if it is to be reported
    has_mlm = isinstance(options.alpha, Tensor) or options.alpha < 1 or options.parts
    own = MLM_ROW * has_mlm
    if not options.teacher_weights:
        # MLM_ROW is 1
        return labelled_N.int() if has_mlm else torch.zeros_like(labelled_N).int()
    if isinstance(options.alpha, Tensor):
        # at 0 the term is left out, also where it is infinite
        kl_N = kl_N & (_alpha_beside(options.alpha, kl_N) != 0)
    if kl_N is labelled_N:
        return labelled_N.int() * (own + KL_ROW)
    return labelled_N.int() * own + kl_N.int() * KL_ROW


def _alpha_beside(alpha: Tensor, x: Tensor) -> Tensor:
    """`alpha` for use with `x`. One on the CPU stays there: its copy breaks a CUDA graph."""
    return alpha if alpha.device.type == "cpu" else alpha.to(x.device)


def term_weights(kind_N: Tensor, options: Options, dtype: torch.dtype) -> Tensor:
    """The factors in (3) of each row's MLM and of each teacher's KL, (W, N)."""
    n_mlm: Any = 1
    n_kl: Any = 1
    if options.reduction == "mean":
        n_mlm, n_kl = options.num_items or (None, None)
    alpha = options.alpha
    alpha = _alpha_beside(alpha, kind_N).to(dtype) if isinstance(alpha, Tensor) else alpha
    given = options.row_weights
    row_N = torch.ones_like(kind_N, dtype=dtype) if given is None else given.to(dtype)

    # no union here: torch.compile of PyTorch 2.9 cannot evaluate one within a graph
    def share(bit: int, part: Any, count: Any) -> Tensor:
        bit_N = kind_N & bit
        count = bit_N.count_nonzero().clamp(min=1) if count is None else count
        # not a product with the mask: a batch without a row may have a count of 0, and 0 / 0 is NaN
        return (row_N * part / count).masked_fill(bit_N == 0, 0)

    weights = [share(MLM_ROW, 1 - alpha, n_mlm)]
    if options.teacher_weights:
        kl_weight_N = share(KL_ROW, alpha, n_kl)
        # inside: before Python 3.12 torch.compile reads what even an empty comprehension needs
        weights += [
            kl_weight_N * (w * options.maths.temperature**2) for w in options.teacher_weights
        ]
    return torch.stack(weights).to(dtype)


def row_inputs(
    call: LossCall,
    options: Options,
    labels: Tensor,
    student: tuple[str, Tensor],
    vocab: int,
    shard: Shard,
) -> RowInputs:
    """The checked inputs of the rows.

    `student` is the name and the value of the argument with the student's rows: the weights have
    the dtype of sums over them. `vocab` counts the columns here.
    """
    name, x = student
    labels_N = check_labels(labels, x.shape[:-1], name, call.ignore_index)
    counted_N = row_kinds(labels_N.view(labels.shape), call.kl_rows, call.ignore_index, options)
    if call.teacher_vocab_size is not None:
        is_new_N = (labels_N >= call.teacher_vocab_size) & (labels_N != call.ignore_index)
        counted_N = torch.where(is_new_N, counted_N & MLM_ROW, counted_N)
    weight_WN = term_weights(counted_N, options, acc_torch_dtype(x))
    kind_N = live_kinds(counted_N, options.row_weights)
    labels_N = without_graph(checked_labels, labels_N, kind_N, shard.vocab or vocab, shard.group)
    return RowInputs(labels_N - shard.start if shard.start else labels_N, kind_N, weight_WN)


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
    outside_N = (kind_N & MLM_ROW) * (labels_N.clamp(0, vocab - 1) != labels_N)
    is_outside = outside_N.any()
    if not on_cpu:
        torch._assert_async(~is_outside, f"a label is outside 0..{vocab - 1}")
    elif is_outside:
        row = int(outside_N.nonzero()[0])
        raise GrowthError(
            f"the label of row {row} is {int(labels_N[row])}, outside 0..{vocab - 1}: give rows "
            "without a label ignore_index"
        )
    return labels_N.clone()


@checked_labels.register_fake
def _(labels_N, kind_N, vocab, group) -> Tensor:
    return torch.empty_like(labels_N)


def _counts(labels_N: Tensor, group: str) -> Tensor:
    """Each rank's number of rows and a checksum of its labels, (L, 2) int64."""
    order_N = torch.arange(1, 2 * len(labels_N), 2, device=labels_N.device)
    return gather(torch.stack([torch.ones_like(labels_N).sum(), (labels_N * order_N).sum()]), group)


# ------------------------------------------------------------------------ result


class LossParts(NamedTuple):
    """Detached 0-d measurements of the pass that computed the loss.

    ``mlm`` and ``kl`` are means over their rows, before ``alpha`` weighs them. ``top1_agreement``
    is the share of KL rows where student and teacher have the same likeliest token. ``entropy`` is
    the student's mean entropy in nats, over all rows with a term. ``kl`` and ``top1_agreement`` are
    None without a teacher, and 0 where a tensor ``alpha`` is 0. ``aux_loss`` is the auxiliary loss
    of a mixture's routers in `growkern.inherited_loss`, before its coefficient weighs it.
    """

    mlm: Tensor
    kl: Tensor | None
    top1_agreement: Tensor | None
    entropy: Tensor
    aux_loss: Tensor | None = None


def loss_parts(rows_SN: Tensor, kind_N: Tensor, options: Options) -> LossParts:
    """Means over the rows of `rows_SN`: MLM, KL per teacher, entropy, top-1 per teacher."""
    n_mlm = (kind_N & MLM_ROW).count_nonzero().clamp(min=1)
    n_any = kind_N.count_nonzero().clamp(min=1) if options.teacher_weights else n_mlm
    of = named_terms(rows_SN.detach())
    kl = top1 = None
    if options.teacher_weights:
        n_kl = (kind_N & KL_ROW).count_nonzero().clamp(min=1)
        teachers = list(zip(options.teacher_weights, of.divergences, of.agreements, strict=True))
        kl = sum(w * kl_N.sum() for w, kl_N, _ in teachers) * options.maths.temperature**2 / n_kl
        top1 = sum(w * top1_N.sum() for w, _, top1_N in teachers) / n_kl
    return LossParts(of.mlm.sum() / n_mlm, kl, top1, of.entropy.sum() / n_any)


# from the inputs of the rows the loss, 0-d or (N,), and the terms (R, N). Without teachers if the
# options have no weights. What needs no inputs of rows may start as soon as the first is called
LossOf: TypeAlias = Callable[[Options, int, Shard], Callable[[RowInputs], tuple[Tensor, Tensor]]]


def _over_columns(
    loss_of: LossOf,
    call: LossCall,
    options: Options,
    columns: Columns,
    shard: Shard,
    rows: RowInputs,
) -> tuple[Tensor, Tensor]:
    """The loss and the terms: of the labels over all columns, of teachers over those they know."""
    assert columns.known is not None and call.teacher_vocab_size is not None
    labels_N, kind_N, weight_WN = rows
    # the entropy is wanted of rows without a label too
    own_N = kind_N if options.parts else kind_N & MLM_ROW
    alone = options._replace(teacher_weights=())
    loss, own_RN = loss_of(alone, columns.vocab, shard)(RowInputs(labels_N, own_N, weight_WN[:1]))
    kl_WN = torch.cat([torch.zeros_like(weight_WN[:1]), weight_WN[1:]])
    known = shard._replace(vocab=min(shard.vocab, call.teacher_vocab_size))
    taught = RowInputs(labels_N, kind_N & KL_ROW, kl_WN)
    kl, taught_RN = loss_of(options, columns.known, known)(taught)
    of, terms = named_terms(own_RN), named_terms(taught_RN)
    return loss + kl, terms._replace(mlm=of.mlm, entropy=of.entropy).stacked()


def loss_of_rows(
    loss_of: LossOf,
    call: LossCall,
    options: Options,
    labels: Tensor,
    student: tuple[str, Tensor],
    columns: Columns,
    shard: Shard,
) -> Tensor | tuple[Tensor, LossParts]:
    """The return value of a loss; arguments as in `row_inputs`."""
    of_rows: Callable[[RowInputs], tuple[Tensor, Tensor]]
    if columns.known is None or not options.teacher_weights:
        of_rows = loss_of(options, columns.vocab, shard)
    else:
        of_rows = functools.partial(_over_columns, loss_of, call, options, columns, shard)
    rows = row_inputs(call, options, labels, student, columns.vocab, shard)
    loss, rows_RN = of_rows(rows)
    if options.reduction == "none":
        loss = loss.reshape(labels.shape)
    elif loss.ndim:
        loss = loss.sum()
    return (loss, loss_parts(rows_RN, rows.kinds, options)) if options.parts else loss
