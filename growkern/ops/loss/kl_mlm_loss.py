"""KL to frozen teachers plus cross-entropy of the labels, on logits that exist.

For a row with student logits z, logits u_k and weights w_k (sum 1) of K teachers, label y,
temperature T and inheritance rate alpha (Qin et al. 2022, Knowledge Inheritance, Eq. 2-4):

    q = softmax(z)    q_T = softmax(z / T)    p_k = softmax(u_k / T)
    MLM  = -log q[y] = lse(z) - z[y]                                                        (1)
    KL_k = sum_v p_k[v] (u_k[v] - z[v]) / T - lse(u_k / T) + lse(z / T)                     (2)
    loss = (1 - alpha) * sum_{rows in M} MLM / n_M
         + alpha * T^2 * sum_{rows in K} sum_k w_k KL_k / n_K                               (3)
    dMLM/dz  = q - onehot(y);   at y it is -sum_{v != y} q[v], not q[y] - 1                 (4)
    dKL_k/dz = (q_T - p_k) / T                                                              (5)

M are the rows whose label is not ignored, K those of `kl_rows`. With a softcap c the logits are
c * tanh(z / c) and the gradient gains the factor 1 - tanh(z / c)^2 (6).
A GPU's exp is good to 4e-7 only, so there (5) is p_k * expm1(log q_T - log p_k) / T where the two
are close: a grown student starts beside its teacher.

In place of the forward KL of (2) stands, with m = beta p + (1 - beta) q_T and its gradient,

    JSD      = beta * sum_v p log(p / m) + (1 - beta) * sum_v q_T log(q_T / m)              (7)
    dJSD/dz  = (1 - beta) * q_T * (log(q_T / m) - sum_v q_T log(q_T / m)) / T               (9)

after Agarwal et al. 2024 (GKD): symmetric at beta = 0.5, over beta it tends to the forward KL as
beta goes to 0, over 1 - beta to the reverse KL sum_v q_T log(q_T / p) as beta goes to 1. The
reverse KL is (9) with m = p, without its factor 1 - beta.
Label smoothing e and a z-loss c change the MLM term to

    MLM = lse(z) - (1 - e) z[y] - e * mean_v z + c * lse(z)^2                               (8)

Shape letters used in this file: N rows (tokens), V vocabulary, K teachers, R = 2 + 2 K terms and
S numbers of a row.
Read on in this order: reference, public function; then `rows/op.py`, `rows/state.py`, and
`rows/triton_kernel.py` for a GPU, `rows/on_cpu.py` for a CPU.
"""

import math
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from growkern.errors import GrowthError
from growkern.ops.backend.choose import choose_backend
from growkern.ops.backend.launch import acc_torch_dtype
from growkern.ops.loss.rows.labels import (
    check_labels,
    check_row_weights,
    checked_labels,
    row_kinds,
    term_weights,
)
from growkern.ops.loss.rows.op import kl_mlm_rows_op
from growkern.ops.loss.rows.options import (
    IGNORE_INDEX,
    KL_ROW,
    MLM_ROW,
    LossParts,
    Maths,
    as_teachers,
    check_options,
    check_vocabulary,
    outcome,
)
from growkern.ops.loss.rows.vocab_parallel import check_shard, refuse_sharded_reference

# ---------------------------------------------------------------- reference


def kl_mlm_rows_reference(
    student_NV: Tensor,
    teachers_NV: Sequence[Tensor],
    labels_N: Tensor,
    kind_N: Tensor,
    maths: Maths,
) -> Tensor:
    """Plain PyTorch definition: (8), then (2) or (7) per teacher, entropy, top-1 per teacher.

    Any float dtype, differentiable in `student_NV`; (2 + 2K, N), 0 outside a row's kind. In
    float64 but for half precision: of float32 the difference (5) leaves 1e-5 of itself.
    """

    def capped(x: Tensor, cap: float, live_N: Tensor) -> Tensor:
        x = x.to(torch.float32 if x.element_size() == 2 else torch.float64)
        # what stands in other rows, NaN maybe, reaches no gradient
        x = torch.where(live_N[:, None], x, 0)
        return cap * torch.tanh(x / cap) if cap else x

    mlm_N, kl_N = (kind_N & MLM_ROW) > 0, (kind_N & KL_ROW) > 0
    z_NV = capped(student_NV, maths.softcap, kind_N > 0)
    log_q_NV = z_NV.log_softmax(-1)
    log_qT_NV = (z_NV / maths.temperature).log_softmax(-1)
    label_N1 = torch.where(mlm_N, labels_N, 0)[:, None]
    mlm = -(1 - maths.label_smoothing) * log_q_NV.gather(1, label_N1).squeeze(1)
    if maths.label_smoothing:
        mlm = mlm - maths.label_smoothing * log_q_NV.mean(-1)
    rows = [torch.where(mlm_N, mlm + maths.z_loss * z_NV.logsumexp(-1).square(), 0)]
    agreement = []
    for teacher_NV in teachers_NV:
        u_NV = capped(teacher_NV, maths.teacher_softcap, kl_N)
        log_p_NV = (u_NV / maths.temperature).log_softmax(-1)
        rows.append(torch.where(kl_N, divergence_reference(log_p_NV, log_qT_NV, maths.beta), 0))
        agreement.append(((u_NV.argmax(-1) == z_NV.argmax(-1)) & kl_N).to(z_NV.dtype))
    entropy_N = torch.special.entr(log_q_NV.detach().exp()).sum(-1)
    rows.append(torch.where(kind_N > 0, entropy_N, 0))
    return torch.stack(rows + agreement)


def divergence_reference(log_p_NV: Tensor, log_q_NV: Tensor, beta: float) -> Tensor:
    """(2), (7) or the reverse KL, (N,)."""

    def kl(log_a_NV: Tensor, log_b_NV: Tensor) -> Tensor:
        a_NV = log_a_NV.exp()
        # the factor, not the product: what is masked there gives no gradient of 0 * inf
        return (a_NV * torch.where(a_NV > 0, log_a_NV - log_b_NV, 0)).sum(-1)

    if beta in (0.0, 1.0):
        return kl(log_p_NV, log_q_NV) if beta == 0 else kl(log_q_NV, log_p_NV)
    # where both are -inf so is m, but logaddexp would give NaN for its gradient
    neither_NV = torch.maximum(log_p_NV, log_q_NV) == -math.inf
    log_p0_NV, log_q0_NV = (x.masked_fill(neither_NV, 0) for x in (log_p_NV, log_q_NV))
    log_m_NV = torch.logaddexp(log_p0_NV + math.log(beta), log_q0_NV + math.log1p(-beta))
    log_m_NV = log_m_NV.masked_fill(neither_NV, -math.inf)
    return beta * kl(log_p_NV, log_m_NV) + (1 - beta) * kl(log_q_NV, log_m_NV)


# ------------------------------------------------------------------- public


def kl_mlm_loss(
    student_logits: Tensor,
    teacher_logits: Tensor | Sequence[Tensor] | None,
    labels: Tensor,
    *,
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
    teacher_softcap: float | None = None,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    reduction: str = "mean",
    num_items: float | Tensor | tuple[float | Tensor, float | Tensor] | None = None,
    return_parts: bool = False,
    group: dist.ProcessGroup | None = None,
    vocab_start: int | None = None,
    backend: str | None = None,
) -> Tensor | tuple[Tensor, LossParts]:
    """Cross-entropy of the labels mixed with the KL divergence to one or more frozen teachers.

    Equation (3) of this module, after Qin et al. 2022 (Knowledge Inheritance). Nothing is shifted:
    for a causal model align logits and labels before the call.

    Args:
        student_logits: logits being trained, (..., V), any float dtype.
        teacher_logits: frozen logits (..., V_k), a list of them, or None with ``alpha=0.0``.
        labels: integer token ids, (...); ``ignore_index`` outside the MLM mask.
        alpha: weight of the KL term, 0 to 1. The float 0 reads no teacher, the float 1 no label.
            Or a 0-d tensor: under torch.compile one graph serves all its values, and nothing
            waits for it. A changing float needs ``dynamic=True`` for that and compiles anew at 0
            and 1.
        temperature: T of (2) and (3).
        divergence: "forward", KL(teacher || student) of (2); "reverse", KL(student || teacher),
            infinite where the teacher alone rules a token out; or "jsd", (7) with 0 < ``beta`` < 1,
            by default 0.5. T^2 of (3) multiplies each.
        kl_rows: rows that carry the KL term: "labels" (those of the MLM mask), "all", or a bool
            mask of the labels' shape.
        teacher_weights: one number per teacher, sum 1. Default: equal.
        row_weights: float, (...): multiplies both terms of a row; counts and parts know nothing
            of it.
        vocab_size: columns from here on are padding on either side: they count as -inf and get a
            gradient of exactly 0. Default: all, which must then be equally many everywhere.
        softcap, teacher_softcap: cap logits to c * tanh(z / c).
        label_smoothing, z_loss: e in [0, 1) and c of (8); `LossParts.mlm` includes both.
        reduction: "mean" divides each term by its number of rows, "sum" by nothing, "none" gives
            the loss per row, (...).
        num_items: divides instead of the local counts (gradient accumulation): one number for
            both terms, or (rows of the MLM term, rows of the KL term).
        return_parts: also return `LossParts`.
        group: a process group whose ranks hold neighbouring slices of the columns of all logits,
            in the order of their ranks, equally wide or not. Every rank gives all rows and the same
            options, and gets the same loss and its own slice's gradient. A few numbers per row
            cross the network.
        vocab_start: with ``group``, this rank's first column; ``vocab_size`` is then required.
        backend: "reference", "cpu", "triton" or "cuda" (CUDA C++ for sm_90 and later, on request
            only: not measured yet). Default: what fits the device.

    Returns:
        The loss, 0-d (or (...) with "none"), float32 (float64 for float64 logits); with
        ``return_parts`` a tuple of it and `LossParts`. 0 when no row counts.

    Raises:
        GrowthError: shapes, dtypes or options that do not fit, or a teacher that requires grad; on
            a CPU also a label outside the vocabulary, which a GPU asserts without waiting.
    """
    teachers = as_teachers(teacher_logits, alpha)
    options = check_options(
        len(teachers), alpha, temperature, teacher_weights, softcap, teacher_softcap, reduction,
        num_items, return_parts, divergence=divergence, beta=beta, label_smoothing=label_smoothing,
        row_weights=check_row_weights(row_weights, labels), z_loss=z_loss,
    )  # fmt: skip
    _check_logits(student_logits, teachers)
    shard = check_shard(group, vocab_start, vocab_size)
    chosen = choose_backend(backend, student_logits.device, library=False)
    refuse_sharded_reference(chosen, shard.group)
    widths = [t.shape[-1] for t in teachers]
    vocab = check_vocabulary(vocab_size, student_logits.shape[-1], widths, shard)
    labels_N = check_labels(labels, student_logits.shape[:-1], "student_logits", ignore_index)
    kind_N = row_kinds(labels_N, kl_rows, ignore_index, options)
    labels_N = checked_labels(labels_N, kind_N, shard.vocab or vocab, shard.group)

    N = labels_N.numel()
    # not -1: a rank may hold no column
    student_NV, *teachers_NV = (x.reshape(N, x.shape[-1]) for x in (student_logits, *teachers))
    if chosen == "reference":
        z_NV, *u_NV = (x[:, :vocab] for x in (student_NV, *teachers_NV))
        rows_SN = kl_mlm_rows_reference(z_NV, u_NV, labels_N, kind_N, options.maths)
        rows_SN = rows_SN.to(acc_torch_dtype(student_NV))
    else:
        here = (labels_N - shard.start, kind_N, vocab, list(options.maths), return_parts)
        rows_SN, _ = kl_mlm_rows_op(student_NV, teachers_NV, *here, shard.group, chosen)
    weight_WN = term_weights(kind_N, options, rows_SN.dtype)
    loss_N = (weight_WN * rows_SN[: 1 + len(teachers)]).sum(0)
    loss = loss_N if reduction == "none" else loss_N.sum()
    return outcome(loss, rows_SN, kind_N, options, labels.shape)


def _check_logits(student: Tensor, teachers: Sequence[Tensor]) -> None:
    if student.ndim < 1 or not student.is_floating_point():
        raise GrowthError(f"student_logits must be float (..., V), got {student.dtype}")
    for k, teacher in enumerate(teachers):
        if teacher.shape[:-1] != student.shape[:-1]:
            raise GrowthError(
                f"teacher_logits[{k}] {tuple(teacher.shape)} and student_logits "
                f"{tuple(student.shape)} must have the same rows"
            )
        if teacher.requires_grad:
            raise GrowthError(f"the teacher is frozen: detach teacher_logits[{k}]")
        if teacher.device != student.device or not teacher.is_floating_point():
            raise GrowthError(
                f"teacher_logits[{k}] must be float on {student.device}, got {teacher.dtype} on "
                f"{teacher.device}"
            )
