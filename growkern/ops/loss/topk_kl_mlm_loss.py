"""KL to cached teachers plus cross-entropy of the labels, from hidden states.

The loss of `linear_kl_mlm_loss` with teachers that were run once and stored. Of each row a teacher
has the k likeliest tokens: their ids S, and the logarithms l of their probabilities at temperature
T. The student has q_T = softmax(z / T). The tokens outside of S have together the probability

    P = 1 - sum_S p,  p = exp(l)       Q = sum_{v not in S} q_T[v]                          (1)
    log P = log1p(-exp(L)) or log(-expm1(L)),  L = logsumexp(l)                             (2)

of the teacher and of the student. They count as one bucket (`tail="bucket"`), the tail. The
divergence D compares k + 1 probabilities, p and P with those of q_T and Q. It is a lower bound of
the divergence over the whole vocabulary, and equal to it at k = V. The forward KL is

    KL = sum_S p[v] (l[v] - log q_T[v]) + P (log P - log Q)                                 (3)

"reverse" and "jsd" are (7) of `kl_mlm_loss.py` over the same k + 1 buckets. Token v of bucket b,
which has the student's probability q_b, gets the gradient

    dD/dz[v] = t[v] pull_b / T,   t[v] = q_T[v] / q_b                                       (4)
    pull_b = q_b - p_b (forward), or (8) of `kl_mlm_loss.py` without 1 / T                  (5)

t is 1 for the k tokens. In the tail it is the student's own distribution: the bucket moves the tail
as a whole and says nothing about its inside. `tail="renormalise"` replaces l by l - L and P by 0:
the teacher then gives probability 0 to all other tokens. The MLM term, T^2, alpha and the means are
(1), (3), (4) and (9) of `kl_mlm_loss.py`. With several teachers, each has k + 1 buckets of its own.

The tokens that the teachers know are all that q_T is over, as in (10) of `kl_mlm_loss.py`.

Neither 1 - sum nor a teacher's row of V numbers is ever computed. Q is a sum over the tail, without
the tokens of all teachers, and P is (2) in float64.

Shape letters used in this file: N rows, H student width, V vocabulary, k entries of a teacher,
K teachers, R = 2 + 2 K terms of a row.

Reading order: the reference and the function here, then `topk/topk_op.py` (the readings of the
logits), `topk/buckets.py` (the mathematics between them) and the tail's gradient:
`rows/on_cpu.py` for a CPU, `topk/tail_on_triton.py` for a GPU.
"""

import functools
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Literal, overload

import torch
from torch import Tensor
from torch.nn import functional as F

from growkern.ops.loss.kl_mlm_loss import (
    divergence_reference,
    kl_mlm_rows_reference,
    live_hidden,
    student_logits_of,
    student_reference,
)
from growkern.ops.loss.linear.heads import (
    Head,
    HeadSettings,
    checked_heads,
    settings_of,
)
from growkern.ops.loss.linear_kl_mlm_loss import linear_loss, loss_and_rows
from growkern.ops.loss.rows.inputs import (
    LossParts,
    backend_of,
    check_columns,
    loss_of_rows,
)
from growkern.ops.loss.rows.options import (
    LossCall,
    Maths,
    Options,
    TopKKeywords,
    as_teachers,
    check_options,
    public,
)
from growkern.ops.loss.rows.state import KL_ROW, RowInputs, named_terms
from growkern.ops.loss.rows.vocab_parallel import Shard
from growkern.ops.loss.topk.teacher import (
    check_topk,
    check_topk_values,
    teacher_probabilities,
)
from growkern.ops.loss.topk.topk_op import TOPK_KL_MLM

if TYPE_CHECKING:
    from typing_extensions import Unpack

# ---------------------------------------------------------------- reference


def topk_kl_mlm_rows_reference(
    student: Head,
    topk: Sequence[Tensor],
    rows: RowInputs,
    vocab: int,
    maths: Maths,
    acc: torch.dtype,
    drop_tail: bool,
) -> Tensor:
    """Plain PyTorch definition of `Terms`, stacked, computed in `acc`.

    `topk` has ids and log-probs of each teacher. `drop_tail` is tail="renormalise".
    """
    kl_N = (rows.kinds & KL_ROW) > 0
    bias = student.bias[:vocab].to(acc) if student.bias.numel() else None
    with torch.autocast(rows.labels.device.type, enabled=False):
        x_NH = live_hidden(student.hidden, rows.kinds).to(acc)
        z_NV = F.linear(x_NH, student.weight[:vocab].to(acc), bias)
    z_NV = student_logits_of(z_NV, rows.weights, maths)
    alone = named_terms(kl_mlm_rows_reference(z_NV, [], rows.labels, rows.kinds, maths))
    z_NV, _, log_q_NV = student_reference(z_NV, maths)
    values, agreement = [], []
    for ids_Nk, logprobs_Nk in zip(topk[::2], topk[1::2], strict=True):
        ids_Nk, log_p_Nk, log_tail_N = (
            x.to(acc) if x.is_floating_point() else x.clamp(min=0)
            for x in teacher_probabilities((ids_Nk, logprobs_Nk), kl_N, vocab, drop_tail, maths)
        )
        log_q_Nb, log_p_Nb = log_q_NV.gather(1, ids_Nk), log_p_Nk
        if ids_Nk.shape[1] < vocab:
            log_rest_N = log_q_NV.scatter(1, ids_Nk, float("-inf")).logsumexp(-1)
            log_q_Nb = torch.cat([log_q_Nb, log_rest_N[:, None]], 1)
            log_p_Nb = torch.cat([log_p_Nb, log_tail_N[:, None]], 1)
        # a row without the KL term has the gradient 0, even if the term would be infinite
        log_p_Nb = torch.where(kl_N[:, None], log_p_Nb, log_q_Nb.detach())
        values.append(torch.where(kl_N, divergence_reference(log_p_Nb, log_q_Nb, maths), 0))
        top_N = torch.where(log_p_Nk == log_p_Nk.amax(-1, keepdim=True), ids_Nk, vocab).amin(-1)
        agreement.append(((z_NV.argmax(-1) == top_N) & kl_N).to(acc))
    return alone._replace(divergences=values, agreements=agreement).stacked()


# --------------------------------------------------------------------- loss


@overload
def topk_kl_mlm_loss(
    student_hidden: Tensor, student_weight: Tensor,
    teacher_topk_ids: Tensor | Sequence[Tensor] | None,
    teacher_topk_logprobs: Tensor | Sequence[Tensor] | None, labels: Tensor, *,
    return_parts: Literal[False] = False, **options: "Unpack[TopKKeywords]",
) -> Tensor: ...  # fmt: skip


@overload
def topk_kl_mlm_loss(
    student_hidden: Tensor, student_weight: Tensor,
    teacher_topk_ids: Tensor | Sequence[Tensor] | None,
    teacher_topk_logprobs: Tensor | Sequence[Tensor] | None, labels: Tensor, *,
    return_parts: Literal[True], **options: "Unpack[TopKKeywords]",
) -> tuple[Tensor, LossParts]: ...  # fmt: skip


@public(TopKKeywords, explained=("tail",))
def topk_kl_mlm_loss(
    student_hidden: Tensor,
    student_weight: Tensor,
    teacher_topk_ids: Tensor | Sequence[Tensor] | None,
    teacher_topk_logprobs: Tensor | Sequence[Tensor] | None,
    labels: Tensor,
    *,
    student_bias: Tensor | None = None,
    **options: Any,
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
        **options: those of `LossCall`.
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
    call = LossCall(**options)
    cached = as_teachers(teacher_topk_logprobs, call)
    checked = check_options(call, len(cached), labels)
    head = (student_hidden, student_weight, student_bias)
    (student,), shard = checked_heads(head, [], None, None, call)
    chosen = backend_of(call.backend, labels.device, shard)
    columns = check_columns(call, len(student.weight), [], shard)
    topk = check_topk(teacher_topk_ids, cached, student_hidden, columns.known_of_all)
    named = ("student_hidden", student_hidden)

    def loss_of(
        options: Options, vocab: int, shard: Shard
    ) -> Callable[[RowInputs], tuple[Tensor, Tensor]]:
        settings = settings_of(call, options, student, vocab, shard, chosen)
        if not (topk and options.teacher_weights):
            return linear_loss(student, [], settings)
        return functools.partial(_loss_and_rows, student, topk, settings)

    return loss_of_rows(loss_of, call, checked, labels, named, columns, shard)


def _loss_and_rows(
    student: Head, topk: list[Tensor], settings: HeadSettings, rows: RowInputs
) -> tuple[Tensor, Tensor]:
    """As `loss_and_rows`."""
    if settings.backend == "reference":
        for pair in zip(topk[::2], topk[1::2], strict=True):
            check_topk_values(pair, rows.kinds, settings.sizes.vocab, settings.drop_tail)

    def terms_of(some: slice) -> Tensor:
        return topk_kl_mlm_rows_reference(
            student._replace(hidden=student.hidden[some]), [x[some] for x in topk],
            rows.part(some), settings.sizes.vocab,
            settings.maths, settings.dtype, settings.drop_tail,
        )  # fmt: skip

    return loss_and_rows(TOPK_KL_MLM, student, topk, rows, settings, terms_of)
