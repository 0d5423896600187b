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

Shape letters used in this file: N rows (tokens), V vocabulary, K teachers, S statistics per row.
Read on in this order: reference, op, autograd, public function; then `_kl_mlm_kernel.py` for a
GPU, `_kl_mlm_cpu.py` for a CPU.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from growkern.errors import GrowthError
from growkern.ops._backend import choose_backend
from growkern.ops._kl_mlm_cpu import rows_on_cpu
from growkern.ops._kl_mlm_kernel import rows_on_triton
from growkern.ops._kl_mlm_options import (
    IGNORE_INDEX,
    KL_ROW,
    MLM_ROW,
    LossParts,
    Maths,
    Rows,
    as_teachers,
    check_labels,
    check_options,
    check_vocabulary,
    loss_parts,
    refuse_second_derivative,
    row_kinds,
    row_weights,
)
from growkern.ops._launch import acc_torch_dtype

# ---------------------------------------------------------------- reference


def kl_mlm_rows_reference(
    student_NV: Tensor,
    teachers_NV: Sequence[Tensor],
    labels_N: Tensor,
    kind_N: Tensor,
    maths: Maths,
) -> Tensor:
    """Plain PyTorch definition: (1), then (2) per teacher, student entropy, top-1 per teacher.

    Any float dtype, differentiable in `student_NV`; (2 + 2K, N), 0 outside a row's kind.
    """

    def capped(x: Tensor, cap: float) -> Tensor:
        x = x.to(acc_torch_dtype(x))
        return cap * torch.tanh(x / cap) if cap else x

    mlm_N, kl_N = (kind_N & MLM_ROW) > 0, (kind_N & KL_ROW) > 0
    z_NV = capped(student_NV, maths.softcap)
    log_q_NV = z_NV.log_softmax(-1)
    log_qT_NV = (z_NV / maths.temperature).log_softmax(-1)
    label_N1 = torch.where(mlm_N, labels_N, 0)[:, None]
    rows = [torch.where(mlm_N, -log_q_NV.gather(1, label_N1).squeeze(1), 0)]
    agreement = []
    for teacher_NV in teachers_NV:
        u_NV = capped(teacher_NV, maths.teacher_softcap)
        log_p_NV = (u_NV / maths.temperature).log_softmax(-1)
        p_NV = log_p_NV.exp()
        kl_NV = torch.where(p_NV > 0, p_NV * (log_p_NV - log_qT_NV), 0)
        rows.append(torch.where(kl_N, kl_NV.sum(-1), 0))
        agreement.append(((u_NV.argmax(-1) == z_NV.argmax(-1)) & kl_N).to(z_NV.dtype))
    entropy_N = torch.special.entr(log_q_NV.detach().exp()).sum(-1)
    rows.append(torch.where(kind_N > 0, entropy_N, 0))
    return torch.stack(rows + agreement)


# ----------------------------------------------------------------------- op


def row_layout(n_teachers: int) -> int:
    """S: mlm, kl per teacher, entropy, top-1 per teacher; then what the gradient kernel needs.

    That is the student's maximum, its sum of exponentials, the same without the label, the sum at
    temperature T; then maximum and sum per teacher.
    """
    return 6 + 4 * n_teachers


@torch.library.custom_op("growkern::kl_mlm_rows", mutates_args=())
def kl_mlm_rows_op(
    student_NV: Tensor,
    teachers_NV: list[Tensor],
    labels_N: Tensor,
    kind_N: Tensor,
    vocab: int,
    maths: list[float],
    parts: bool,
    backend: str,
) -> Tensor:
    rows_SN = _empty_rows(student_NV, teachers_NV)
    run = rows_on_triton if backend == "triton" else rows_on_cpu
    run(Rows(student_NV, teachers_NV, labels_N, kind_N, vocab, Maths(*maths), parts), rows_SN)
    return rows_SN


def _empty_rows(student_NV: Tensor, teachers_NV: Sequence[Tensor]) -> Tensor:
    size = (row_layout(len(teachers_NV)), student_NV.shape[0])
    return student_NV.new_empty(size, dtype=acc_torch_dtype(student_NV))


@kl_mlm_rows_op.register_fake
def _(student_NV, teachers_NV, *_) -> Tensor:
    return _empty_rows(student_NV, teachers_NV)


@torch.library.custom_op("growkern::kl_mlm_rows_backward", mutates_args=())
def kl_mlm_rows_backward_op(
    drows_SN: Tensor,
    student_NV: Tensor,
    teachers_NV: list[Tensor],
    labels_N: Tensor,
    kind_N: Tensor,
    rows_SN: Tensor,
    vocab: int,
    maths: list[float],
    backend: str,
) -> Tensor:
    dstudent_NV = torch.empty_like(student_NV, memory_format=torch.contiguous_format)
    rows = Rows(student_NV, teachers_NV, labels_N, kind_N, vocab, Maths(*maths), False)
    if backend == "triton":
        rows_on_triton(rows, rows_SN, drows_SN, dstudent_NV, have_rows=True)
    else:
        # a CPU has the row in cache when it needs the sums: again is cheaper than from memory
        rows_on_cpu(rows, None, drows_SN, dstudent_NV)
    return dstudent_NV


@kl_mlm_rows_backward_op.register_fake
def _(drows_SN, student_NV, *_) -> Tensor:
    return torch.empty_like(student_NV, memory_format=torch.contiguous_format)


# ----------------------------------------------------------------- autograd


def _setup_context(ctx, inputs, output) -> None:
    student_NV, teachers_NV, labels_N, kind_N, vocab, maths, _parts, backend = inputs
    ctx.options = (vocab, maths, backend)
    ctx.save_for_backward(student_NV, labels_N, kind_N, output, *teachers_NV)


def _backward(ctx, drows_SN) -> tuple:
    student_NV, labels_N, kind_N, rows_SN, *teachers_NV = ctx.saved_tensors
    dstudent_NV = kl_mlm_rows_backward_op(
        drows_SN, student_NV, teachers_NV, labels_N, kind_N, rows_SN, *ctx.options
    )
    return (dstudent_NV, [None] * len(teachers_NV), *[None] * 6)


kl_mlm_rows_op.register_autograd(_backward, setup_context=_setup_context)
kl_mlm_rows_backward_op.register_autograd(refuse_second_derivative)


# ------------------------------------------------------------------- public


def kl_mlm_loss(
    student_logits: Tensor,
    teacher_logits: Tensor | Sequence[Tensor] | None,
    labels: Tensor,
    *,
    alpha: float | Tensor = 0.5,
    temperature: float = 1.0,
    ignore_index: int = IGNORE_INDEX,
    kl_rows: str | Tensor = "labels",
    teacher_weights: Sequence[float] | None = None,
    vocab_size: int | None = None,
    softcap: float | None = None,
    teacher_softcap: float | None = None,
    reduction: str = "mean",
    num_items: float | Tensor | tuple[float | Tensor, float | Tensor] | None = None,
    return_parts: bool = False,
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
        kl_rows: rows that carry the KL term: "labels" (those of the MLM mask), "all", or a bool
            mask of the labels' shape.
        teacher_weights: one number per teacher, sum 1. Default: equal.
        vocab_size: columns from here on are padding on either side: they count as -inf and get a
            gradient of exactly 0. Default: all, which must then be equally many everywhere.
        softcap, teacher_softcap: cap logits to c * tanh(z / c).
        reduction: "mean" divides each term by its number of rows, "sum" by nothing, "none" gives
            the loss per row, (...).
        num_items: divides instead of the local counts (gradient accumulation): one number for
            both terms, or (rows of the MLM term, rows of the KL term).
        return_parts: also return `LossParts`.
        backend: "reference", "cpu" or "triton". Default: what fits the device.

    Returns:
        The loss, 0-d (or (...) with "none"), float32 (float64 for float64 logits); with
        ``return_parts`` a tuple of it and `LossParts`. 0 when no row counts.

    Raises:
        GrowthError: shapes, dtypes or options that do not fit, or a teacher that requires grad.
    """
    teachers = as_teachers(teacher_logits, alpha)
    options = check_options(
        len(teachers),
        alpha,
        temperature,
        teacher_weights,
        softcap,
        teacher_softcap,
        reduction,
        num_items,
        return_parts,
    )
    _check_logits(student_logits, teachers)
    vocab = check_vocabulary(vocab_size, student_logits.shape[-1], [t.shape[-1] for t in teachers])
    labels_N = check_labels(labels, student_logits.shape[:-1], "student_logits")
    kind_N = row_kinds(labels_N, kl_rows, ignore_index, options)

    student_NV, *teachers_NV = (x.reshape(-1, x.shape[-1]) for x in (student_logits, *teachers))
    chosen = choose_backend(backend, student_logits.device, library=False)
    if chosen == "reference":
        z_NV, *u_NV = (x[:, :vocab] for x in (student_NV, *teachers_NV))
        rows_SN = kl_mlm_rows_reference(z_NV, u_NV, labels_N, kind_N, options.maths)
    else:
        rows = (student_NV, teachers_NV, labels_N, kind_N, vocab, list(options.maths), return_parts)
        rows_SN = kl_mlm_rows_op(*rows, chosen)
    weight_WN = row_weights(kind_N, options, rows_SN.dtype)
    loss_N = (weight_WN * rows_SN[: 1 + len(teachers)]).sum(0)
    loss = loss_N.reshape(labels.shape) if reduction == "none" else loss_N.sum()
    return (loss, loss_parts(rows_SN, kind_N, options)) if return_parts else loss


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
