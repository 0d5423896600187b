"""KL to cached teachers plus cross-entropy of the labels, from hidden states.

The loss of `linear_kl_mlm_loss` with teachers that were run once and kept: of each row the k
likeliest tokens, their ids S and the logarithms l of their probabilities at temperature T. With
the student's logits z, taken to q_T = softmax(z / T), what is missing on either side is

    P = 1 - sum_S p,  p = exp(l)       Q = sum_{v not in S} q_T[v]                          (1)
    log P = log1p(-exp(L)) or log(-expm1(L)),  L = logsumexp(l)                             (2)

and counts as one bucket (`tail="bucket"`). The divergence D of the k + 1 masses, p and P beside q_T
and Q, is a lower bound of the whole one and equal to it at k = V. The forward KL, for one, is

    KL = sum_S p[v] (l[v] - log q_T[v]) + P (log P - log Q)                                 (3)

and "reverse" and "jsd" are (7) of `kl_mlm_loss.py` over the same k + 1. Token v of bucket b, which
has the mass q_b, gets the gradient

    dD/dz[v] = t[v] pull_b / T,   t[v] = q_T[v] / q_b                                       (4)
    pull_b = q_b - p_b (forward), and in (9) of `kl_mlm_loss.py` what stands before 1 / T   (5)

where t is 1 for the k tokens and else the student's own distribution over the tail: the bucket
moves the tail as a whole and says nothing about its inside. `tail="renormalise"` takes l - L for l
and 0 for P: the teacher then rules out all but S. The MLM term, T^2, alpha and the means are (1),
(3), (4) and (8) of `kl_mlm_loss.py`. Of several teachers, each has k + 1 buckets of its own.

Neither 1 - sum nor a teacher row of V numbers is ever formed: Q is a sum over the tail, from which
the tokens of all teachers have been taken out, and P is (2) in float64.

Shape letters used in this file: N rows, H student width, V vocabulary, k entries of a teacher,
K teachers.
Read on in this order: reference, public function; then `topk/op.py` (the readings),
`topk/buckets.py` (what is between them) and `topk/tail_on_triton.py`.
"""

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional as F

from growkern.ops.backend.choose import choose_backend
from growkern.ops.loss.kl_mlm_loss import divergence_reference, kl_mlm_rows_reference
from growkern.ops.loss.linear.heads import Head, Settings, checked_heads, settings_of
from growkern.ops.loss.linear.op import anchor_of
from growkern.ops.loss.linear_kl_mlm_loss import linear_loss_and_rows
from growkern.ops.loss.rows.labels import check_row_weights, row_inputs
from growkern.ops.loss.rows.options import (
    IGNORE_INDEX,
    KL_ROW,
    LossParts,
    Maths,
    as_teachers,
    check_options,
    check_vocabulary,
    outcome,
)
from growkern.ops.loss.rows.vocab_parallel import refuse_sharded_reference
from growkern.ops.loss.topk.op import topk_kl_mlm_op
from growkern.ops.loss.topk.teacher import check_tail, check_topk, check_topk_values, teacher_masses

# ---------------------------------------------------------------- reference


def topk_kl_mlm_rows_reference(
    student: Head,
    topk: Sequence[Tensor],
    labels_N: Tensor,
    kind_N: Tensor,
    vocab: int,
    maths: Sequence[float],
    acc: torch.dtype,
) -> Tensor:
    """Plain PyTorch definition: MLM, divergence per teacher, student entropy, top-1 per teacher.

    `maths` is `Maths` and whether the tail is dropped; (2 + 2K, N).
    """
    *floats, drop_tail = maths
    numbers = Maths(*floats)
    kl_N = (kind_N & KL_ROW) > 0
    hidden_NH, weight_VH, bias_V = student
    bias = bias_V[:vocab].to(acc) if bias_V.numel() else None
    with torch.autocast(labels_N.device.type, enabled=False):
        z_NV = F.linear(hidden_NH.to(acc), weight_VH[:vocab].to(acc), bias)
    mlm, entropy = kl_mlm_rows_reference(z_NV, [], labels_N, kind_N, numbers)
    z_NV = numbers.softcap * torch.tanh(z_NV / numbers.softcap) if numbers.softcap else z_NV
    log_q_NV = (z_NV / numbers.temperature).log_softmax(-1)
    values, agreement = [], []
    for ids_Nk, logprobs_Nk in zip(topk[::2], topk[1::2], strict=True):
        pair = (ids_Nk, logprobs_Nk)
        check_topk_values(pair, kind_N, vocab, drop_tail != 0)
        ids_Nk, log_p_Nk, log_tail_N = (
            x.to(acc) if x.is_floating_point() else x.clamp(min=0)
            for x in teacher_masses(pair, kl_N, vocab, drop_tail != 0, numbers.beta)
        )
        log_q_Nb, log_p_Nb = log_q_NV.gather(1, ids_Nk), log_p_Nk
        if ids_Nk.shape[1] < vocab:
            log_rest_N = log_q_NV.scatter(1, ids_Nk, float("-inf")).logsumexp(-1)
            log_q_Nb = torch.cat([log_q_Nb, log_rest_N[:, None]], 1)
            log_p_Nb = torch.cat([log_p_Nb, log_tail_N[:, None]], 1)
        # of a row without the term even an infinite one has the gradient 0
        log_p_Nb = torch.where(kl_N[:, None], log_p_Nb, log_q_Nb.detach())
        value_N = divergence_reference(log_p_Nb, log_q_Nb, numbers.beta)
        values.append(torch.where(kl_N, value_N, 0))
        is_top_Nk = log_p_Nk == log_p_Nk.amax(-1, keepdim=True)
        top_N = torch.where(is_top_Nk, ids_Nk, vocab).amin(-1)
        agreement.append(((z_NV.argmax(-1) == top_N) & kl_N).to(acc))
    return torch.stack([mlm, *values, entropy, *agreement])


# ------------------------------------------------------------------- public


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
    divergence: str = "forward",
    beta: float | None = None,
    ignore_index: int = IGNORE_INDEX,
    kl_rows: str | Tensor = "labels",
    teacher_weights: Sequence[float] | None = None,
    vocab_size: int | None = None,
    row_weights: Tensor | None = None,
    softcap: float | None = None,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    tail: str = "bucket",
    reduction: str = "mean",
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
    """`linear_kl_mlm_loss` beside teachers of which k ids and log-probs per row were kept.

    Equations (3) to (5) of this module. Options that are not listed here are those of
    `linear_kl_mlm_loss`; `growkern.cache_teacher` writes such a teacher.

    Args:
        student_hidden: (..., H), float.
        student_weight: the student's output head, (V, H), dtype of `student_hidden`.
        teacher_topk_ids: int32 or int64 (..., k), no id twice in a row, in any order; a list, in
            which k may differ; or None with ``alpha=0.0``.
        teacher_topk_logprobs: their natural log-probs (..., k), any float dtype, normalised over
            the whole vocabulary and taken at `temperature`. -inf is a probability of 0.
        labels: integer token ids, (...).
        student_bias: (V,), optional.
        divergence: as in `kl_mlm_loss`. For "reverse" the teacher's tail counts as no smaller than
            the rounding of the stored log-probs, and must not be dropped: it would be infinite.
        tail: what becomes of the teacher's mass beside the k: "bucket" compares it as a whole
            with the student's, "renormalise" gives it to the k.
        group, vocab_start: as `linear_kl_mlm_loss`. Every rank gives all of the ids, which count
            the columns of all ranks.
        backend: "reference", "cpu" or "triton". Default: what fits the device.

    Returns:
        As `linear_kl_mlm_loss`; `LossParts.kl` is that of (3). Rows that carry no KL may hold
        anything in the teachers' place.

    Raises:
        GrowthError: shapes, dtypes or options that do not fit; on a CPU also ids or
            labels outside the vocabulary, ids twice in a row, and log-probs that sum to more than
            1. A GPU asserts, without waiting, that ids and labels lie inside; ids that stand there
            twice go unseen.
    """
    cached = as_teachers(teacher_topk_logprobs, alpha)
    options = check_options(
        len(cached), alpha, temperature, teacher_weights, softcap, None, reduction, num_items,
        return_parts, divergence=divergence, beta=beta, label_smoothing=label_smoothing,
        row_weights=check_row_weights(row_weights, labels), z_loss=z_loss,
    )  # fmt: skip
    drop_tail = check_tail(tail, options.maths.beta)
    head = (student_hidden, student_weight, student_bias)
    (student,), shard = checked_heads(head, [], None, None, (group, vocab_start, vocab_size))
    chosen = choose_backend(backend, labels.device, ("reference", "cpu", "triton"), library=False)
    refuse_sharded_reference(chosen, shard.group)
    vocab = check_vocabulary(vocab_size, len(student[1]), [], shard)
    topk = check_topk(teacher_topk_ids, cached, student_hidden, shard.vocab or vocab)
    limits = {"chunk_bytes": chunk_bytes, "max_rows": max_rows, "vocab_tile": vocab_tile}
    rows = row_inputs(labels, student_hidden, kl_rows, ignore_index, options, vocab, shard)
    settings = settings_of(
        student, options, vocab, shard, limits, logits_dtype, chosen, float(drop_tail)
    )
    loss, rows_SN = _loss_and_rows(student, topk, rows, settings)
    return outcome(loss, rows_SN, rows[1], options, labels.shape)


def _loss_and_rows(
    student: Head,
    topk: list[Tensor],
    rows: tuple[Tensor, Tensor, Tensor],
    settings: Settings,
) -> tuple[Tensor, Tensor]:
    if not topk:
        settings = settings._replace(maths=settings.maths[:-1])
        return linear_loss_and_rows(student, [], rows, settings)
    if settings.backend == "reference":
        labels_N, kind_N, weight_WN = rows
        rows_SN = topk_kl_mlm_rows_reference(
            student, topk, labels_N, kind_N, settings.sizes[0], settings.maths,
            settings.logits_dtype,
        ).to(weight_WN.dtype)  # fmt: skip
        loss_N = (weight_WN * rows_SN[: len(weight_WN)]).sum(0)
        return loss_N if settings.per_row else loss_N.sum(), rows_SN
    loss, rows_SN, *_ = topk_kl_mlm_op(list(student), topk, *rows, anchor_of(student), *settings)
    return loss, rows_SN
