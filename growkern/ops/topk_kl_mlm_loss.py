"""KL to a cached teacher plus cross-entropy of the labels, from hidden states.

The loss of `linear_kl_mlm_loss` with a teacher that was run once and kept: of each row the k
likeliest tokens, their ids S and the logarithms l of their probabilities at temperature T. With
the student's logits z, taken to q_T = softmax(z / T), what is missing on either side is

    P = 1 - sum_S p,  p = exp(l)       Q = sum_{v not in S} q_T[v]                          (1)
    log P = log1p(-exp(L)) or log(-expm1(L)),  L = logsumexp(l)                             (2)

and counts as one bucket (`tail="bucket"`), whose KL is a lower bound of the whole one and equal to
it at k = V:

    KL = sum_S p[v] (l[v] - log q_T[v]) + P (log P - log Q)                                 (3)
    dKL/dz[v] = (q_T[v] - p[v]) / T                              v in S                     (4)
    dKL/dz[v] = q_T[v] (1 - P / Q) / T = t[v] (Q - P) / T        v not in S                 (5)

with t = q_T / Q, the student's own distribution over the tail: the bucket moves the tail as a
whole and says nothing about its inside. `tail="renormalise"` takes l - L for l and 0 for P: the
teacher then rules out all but S. The MLM term, T^2, alpha and the means are (1), (3) and (4) of
`kl_mlm_loss.py`.

Neither 1 - sum nor a teacher row of V numbers is ever formed: Q is a sum over the tail, from which
the k tokens have been taken out, and P is (2) in float64.

Shape letters used in this file: N rows, H student width, V vocabulary, k entries of the teacher.
Read on in this order: reference, public function; then `_topk_kl_mlm_op.py` and
`_topk_kl_mlm_kernel.py`.
"""

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

from growkern.errors import GrowthError
from growkern.ops._backend import choose_backend
from growkern.ops._kl_mlm_labels import check_labels, checked_labels
from growkern.ops._kl_mlm_options import (
    IGNORE_INDEX,
    KL_ROW,
    MLM_ROW,
    LossParts,
    as_teachers,
    check_options,
    check_row_weights,
    check_vocabulary,
    loss_parts,
    row_kinds,
    term_weights,
)
from growkern.ops._launch import acc_torch_dtype
from growkern.ops._linear_kl_mlm_heads import (
    Head,
    Settings,
    Sizes,
    check_limits,
    check_logits_dtype,
    checked_heads,
)
from growkern.ops._linear_kl_mlm_op import anchor_of
from growkern.ops._topk_kl_mlm_op import topk_kl_mlm_op
from growkern.ops._topk_kl_mlm_teacher import (
    check_tail,
    check_topk,
    check_topk_values,
    teacher_masses,
)
from growkern.ops.linear_kl_mlm_loss import linear_kl_mlm_loss

# ---------------------------------------------------------------- reference


def topk_kl_mlm_rows_reference(
    student: Head,
    topk: tuple[Tensor, Tensor],
    labels_N: Tensor,
    kind_N: Tensor,
    vocab: int,
    maths: Sequence[float],
    acc: torch.dtype,
) -> Tensor:
    """Plain PyTorch definition: MLM, (3), student entropy, top-1 agreement; (4, N)."""
    temperature, cap, drop_tail = maths
    mlm_N, kl_N = (kind_N & MLM_ROW) > 0, (kind_N & KL_ROW) > 0
    hidden_NH, weight_VH, bias_V = student
    bias = bias_V[:vocab].to(acc) if bias_V.numel() else None
    with torch.autocast(labels_N.device.type, enabled=False):
        z_NV = F.linear(hidden_NH.to(acc), weight_VH[:vocab].to(acc), bias)
    z_NV = cap * torch.tanh(z_NV / cap) if cap else z_NV
    log_q_NV = z_NV.log_softmax(-1)
    label_N1 = torch.where(mlm_N, labels_N, 0)[:, None]
    mlm = torch.where(mlm_N, -log_q_NV.gather(1, label_N1).squeeze(1), 0)

    ids_Nk, log_p_Nk, log_tail_N = teacher_masses(topk, kl_N, vocab, drop_tail != 0, acc)
    log_qT_NV = (z_NV / temperature).log_softmax(-1)
    p_Nk = log_p_Nk.exp()
    kl_Nk = torch.where(p_Nk > 0, p_Nk * (log_p_Nk - log_qT_NV.gather(1, ids_Nk)), 0)
    kl = kl_Nk.sum(-1)
    if ids_Nk.shape[1] < vocab:
        log_rest_N = log_qT_NV.scatter(1, ids_Nk, float("-inf")).logsumexp(-1)
        tail_N = log_tail_N.exp()
        kl = kl + torch.where(tail_N > 0, tail_N * (log_tail_N - log_rest_N), 0)  # (3)
    entropy = torch.where(kind_N > 0, torch.special.entr(log_q_NV.detach().exp()).sum(-1), 0)
    top_N1 = torch.where(p_Nk == p_Nk.amax(-1, keepdim=True), ids_Nk, vocab).amin(-1)
    agreement = ((z_NV.argmax(-1) == top_N1) & kl_N).to(acc)
    return torch.stack([mlm, torch.where(kl_N, kl, 0), entropy, agreement])


# ------------------------------------------------------------------- public


def topk_kl_mlm_loss(
    student_hidden: Tensor,
    student_weight: Tensor,
    teacher_topk_ids: Tensor | None,
    teacher_topk_logprobs: Tensor | None,
    labels: Tensor,
    *,
    student_bias: Tensor | None = None,
    alpha: float | Tensor = 0.5,
    temperature: float = 1.0,
    ignore_index: int = IGNORE_INDEX,
    kl_rows: str | Tensor = "labels",
    vocab_size: int | None = None,
    row_weights: Tensor | None = None,
    softcap: float | None = None,
    tail: str = "bucket",
    reduction: str = "mean",
    num_items: float | Tensor | tuple[float | Tensor, float | Tensor] | None = None,
    return_parts: bool = False,
    chunk_bytes: int | None = None,
    max_rows: int | None = None,
    logits_dtype: torch.dtype | None = None,
    backend: str | None = None,
) -> Tensor | tuple[Tensor, LossParts]:
    """`linear_kl_mlm_loss` beside a teacher of which k ids and log-probs per row were kept.

    Equations (3) to (5) of this module. Options that are not listed here are those of
    `linear_kl_mlm_loss`; `growkern.cache_teacher` writes such a teacher.

    Args:
        student_hidden: (..., H), float.
        student_weight: the student's output head, (V, H), dtype of `student_hidden`.
        teacher_topk_ids: int32 or int64 (..., k), no id twice in a row, in any order; None with
            ``alpha=0.0``.
        teacher_topk_logprobs: their natural log-probs (..., k), any float dtype, normalised over
            the whole vocabulary and taken at `temperature`. -inf is a probability of 0.
        labels: integer token ids, (...).
        student_bias: (V,), optional.
        tail: what becomes of the teacher's mass beside the k: "bucket" compares it as a whole
            with the student's, "renormalise" gives it to the k.

    Returns:
        As `linear_kl_mlm_loss`; `LossParts.kl` is that of (3). Rows that carry no KL may hold
        anything in the teacher's place.

    Raises:
        GrowthError: shapes, dtypes or options that do not fit; on a CPU also ids or
            labels outside the vocabulary, ids twice in a row, and log-probs that sum to more than
            1. A GPU asserts, without waiting, that ids and labels lie inside; ids that stand there
            twice go unseen.
    """
    cached = as_teachers(teacher_topk_logprobs, alpha)
    options = check_options(
        len(cached), alpha, temperature, None, softcap, None, reduction, num_items, return_parts,
        row_weights=check_row_weights(row_weights, labels),
    )  # fmt: skip
    drop_tail = check_tail(tail)
    head = (student_hidden, student_weight, student_bias)
    (student,), shard = checked_heads(head, [], None, None, (None, None, vocab_size))
    if shard.group:
        raise GrowthError("a cached teacher takes a whole head: gather the DTensor's slices")
    vocab = check_vocabulary(vocab_size, student[1].shape[0], [])
    if not cached:
        return linear_kl_mlm_loss(
            student_hidden, student_weight, None, None, labels, student_bias=student_bias,
            alpha=alpha, ignore_index=ignore_index, vocab_size=vocab_size, row_weights=row_weights,
            softcap=softcap, reduction=reduction, num_items=num_items, backend=backend,
            return_parts=return_parts, chunk_bytes=chunk_bytes, max_rows=max_rows,
            logits_dtype=logits_dtype,
        )  # fmt: skip
    topk = check_topk(teacher_topk_ids, cached, student_hidden, vocab)
    labels_N = check_labels(labels, student_hidden.shape[:-1], "student_hidden", ignore_index)
    kind_N = row_kinds(labels_N, kl_rows, ignore_index, options)
    labels_N = checked_labels(labels_N, kind_N, vocab, shard.group)
    weight_WN = term_weights(kind_N, options, acc_torch_dtype(student[0]))
    limits = check_limits(chunk_bytes=chunk_bytes, max_rows=max_rows)
    want = [torch.is_grad_enabled() and x.requires_grad for x in student]
    maths = [options.maths.temperature, options.maths.softcap, float(drop_tail)]
    settings = Settings(
        list(Sizes(vocab, vocab, **limits)), maths, return_parts, reduction == "none", want,
        check_logits_dtype(logits_dtype, student[0]), "",
        choose_backend(backend, labels.device, library=False),
    )  # fmt: skip
    rows = (labels_N, kind_N, weight_WN)
    loss, rows_SN = _loss_and_rows(student, topk, rows, settings)
    loss = loss.reshape(labels.shape) if settings.per_row else loss
    return (loss, loss_parts(rows_SN, kind_N, options)) if return_parts else loss


def _loss_and_rows(
    student: Head,
    topk: tuple[Tensor, Tensor],
    rows: tuple[Tensor, Tensor, Tensor],
    settings: Settings,
) -> tuple[Tensor, Tensor]:
    if settings.backend == "reference":
        labels_N, kind_N, weight_WN = rows
        vocab, maths = settings.sizes[0], settings.maths
        check_topk_values(*topk, kind_N, vocab, maths[2] != 0)
        rows_SN = topk_kl_mlm_rows_reference(
            student, topk, labels_N, kind_N, vocab, maths, settings.logits_dtype
        ).to(weight_WN.dtype)
        loss_N = (weight_WN * rows_SN[:2]).sum(0)
        return loss_N if settings.per_row else loss_N.sum(), rows_SN
    anchor = anchor_of(student)
    loss, rows_SN, *_ = topk_kl_mlm_op(list(student), list(topk), *rows, anchor, *settings)
    return loss, rows_SN
