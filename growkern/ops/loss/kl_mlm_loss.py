"""KL to frozen teachers plus cross-entropy of the labels, from logits.

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
c * tanh(z / c), and the gradient is multiplied by

    1 - tanh(z / c)^2                                                                       (6)

The exp of a GPU is only good to 4e-7. There (5) is p_k * expm1(log q_T - log p_k) / T where q_T and
p_k are close, as they are when a grown student starts beside its teacher.

The forward KL of (2) can be replaced by the generalised Jensen-Shannon divergence of Agarwal et al.
2024 (GKD). With m = beta p + (1 - beta) q_T it is

    JSD      = beta * sum_v p log(p / m) + (1 - beta) * sum_v q_T log(q_T / m)              (7)
    dJSD/dz  = (1 - beta) * q_T * (log(q_T / m) - sum_v q_T log(q_T / m)) / T               (8)

It is symmetric at beta = 0.5. JSD / beta tends to the forward KL as beta goes to 0, and
JSD / (1 - beta) to the reverse KL, sum_v q_T log(q_T / p), as beta goes to 1. The reverse KL itself
has the gradient (8) with m = p and without the factor 1 - beta.

Label smoothing e and a z-loss c change the MLM term to

    MLM = lse(z) - (1 - e) z[y] - e * mean_v z + c * lse(z)^2                               (9)

If the student has tokens that its teachers lack, and these know the first A alone,
the KL term has

    q_T = softmax(z[:A] / T)    p_k = softmax(u_k[:A] / T)                                  (10)

and dKL_k/dz[v] = 0 for v >= A. It is 0 for a student that was grown exactly, and labels alone say
how likely the new tokens are. Over all of z the KL would push them to 0, as p_k is 0 there, and the
reverse KL would be infinite.

Shape letters used in this file: N rows (tokens), V vocabulary, K teachers, R = 2 + 2 K terms.

Reading order: the reference and the function here, then `rows/options.py` (options),
`rows/inputs.py` (labels and rows), `rows/rows_op.py` (custom op), `rows/state.py` (the numbers of a
row), and the row function of a backend: `rows/on_cpu.py` and `csrc/cpu/kl_mlm_body.cpp` for a CPU;
for a GPU `rows/on_triton.py`, `rows/triton_kernel.py`, `rows/triton_sums.py` and
`rows/triton_blocks.py`.
"""

import functools
import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Literal, overload

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from growkern.errors import GrowthError, warn
from growkern.ops.backend import apply, check_tensors
from growkern.ops.loss.rows.inputs import (
    LossParts,
    backend_of,
    check_columns,
    loss_of_rows,
    shard_of_call,
)
from growkern.ops.loss.rows.options import (
    LogitKeywords,
    LossCall,
    Maths,
    Options,
    as_teachers,
    check_options,
    public,
)
from growkern.ops.loss.rows.rows_op import KL_MLM_ROWS
from growkern.ops.loss.rows.state import KL_ROW, MLM_ROW, RowInputs, Terms, weighted
from growkern.ops.loss.rows.vocab_parallel import Shard

if TYPE_CHECKING:
    from typing_extensions import Unpack

# logits of a teacher that the reference widens at a time: 128 MiB in float64
REFERENCE_ELEMENTS = 1 << 24

# ---------------------------------------------------------------- reference


def kl_mlm_rows_reference(
    student_NV: Tensor,
    teachers_NV: Sequence[Tensor],
    labels_N: Tensor,
    kind_N: Tensor,
    maths: Maths,
) -> Tensor:
    """Plain PyTorch definition of `Terms`, stacked: (9), (2) or (7), entropy, top-1 agreement.

    All is computed in float32 if student and teachers have half precision, and in float64 if one
    of them has more: in float32 the difference (5) would keep five digits. Differentiable in
    `student_NV`. A row has 0 where it has no such term.
    """
    is_half = all(x.element_size() == 2 for x in (student_NV, *teachers_NV))

    def live(x: Tensor, live_N: Tensor) -> Tensor:
        # other rows may hold NaN, which must not reach a gradient
        return torch.where(live_N[:, None], x.to(torch.float32 if is_half else torch.float64), 0)

    mlm_N, kl_N = (kind_N & MLM_ROW) > 0, (kind_N & KL_ROW) > 0
    z_NV, log_q_NV, log_qT_NV = student_reference(live(student_NV, kind_N > 0), maths)
    label_N1 = torch.where(mlm_N, labels_N, 0)[:, None]
    mlm = -(1 - maths.label_smoothing) * log_q_NV.gather(1, label_N1).squeeze(1)
    if maths.label_smoothing:
        mlm = mlm - maths.label_smoothing * log_q_NV.mean(-1)
    mlm = torch.where(mlm_N, mlm + maths.z_loss * z_NV.logsumexp(-1).square(), 0)
    divergences, agreements = [], []
    for teacher_NV in teachers_NV:
        u_NV = _capped(live(teacher_NV, kl_N), maths.teacher_softcap)
        log_p_NV = (u_NV / maths.temperature).log_softmax(-1)
        divergences.append(torch.where(kl_N, divergence_reference(log_p_NV, log_qT_NV, maths), 0))
        agreements.append(((u_NV.argmax(-1) == z_NV.argmax(-1)) & kl_N).to(z_NV.dtype))
    entropy_N = torch.special.entr(log_q_NV.detach().exp()).sum(-1)
    entropy_N = torch.where(kind_N > 0, entropy_N, 0)
    return Terms(mlm, divergences, entropy_N, agreements).stacked()


def student_reference(z_NV: Tensor, maths: Maths) -> tuple[Tensor, Tensor, Tensor]:
    """The capped logits of the student, log q and log q_T."""
    z_NV = _capped(z_NV, maths.softcap)
    return z_NV, z_NV.log_softmax(-1), (z_NV / maths.temperature).log_softmax(-1)


def _capped(x_NV: Tensor, cap: float) -> Tensor:
    return cap * torch.tanh(x_NV / cap) if cap else x_NV


def divergence_reference(log_p_NV: Tensor, log_q_NV: Tensor, maths: Maths) -> Tensor:
    """(2), (7) or the reverse KL, (N,), from log-probabilities."""
    beta = maths.beta

    def kl(log_a_NV: Tensor, log_b_NV: Tensor) -> Tensor:
        a_NV = log_a_NV.exp()
        # masks the factor, not the product: a masked product would have the gradient 0 * inf
        return (a_NV * torch.where(a_NV > 0, log_a_NV - log_b_NV, 0)).sum(-1)

    if beta in (0.0, 1.0):
        return kl(log_p_NV, log_q_NV) if beta == 0 else kl(log_q_NV, log_p_NV)
    # where both are -inf, m is too, but the gradient of logaddexp would be NaN
    neither_NV = torch.maximum(log_p_NV, log_q_NV) == -math.inf
    log_p0_NV, log_q0_NV = (x.masked_fill(neither_NV, 0) for x in (log_p_NV, log_q_NV))
    log_m_NV = torch.logaddexp(log_p0_NV + math.log(beta), log_q0_NV + math.log1p(-beta))
    log_m_NV = log_m_NV.masked_fill(neither_NV, -math.inf)
    return beta * kl(log_p_NV, log_m_NV) + (1 - beta) * kl(log_q_NV, log_m_NV)


def live_hidden(hidden_NH: Tensor, kind_N: Tensor) -> Tensor:
    """The same hidden states, but 0 in rows without a term, whose NaN would make dW NaN."""
    return torch.where(kind_N[:, None] > 0, hidden_NH, 0)


def student_logits_of(z_NV: Tensor, weight_WN: Tensor, maths: Maths) -> Tensor:
    """The same logits, but rows whose terms all have the weight 0 get no gradient.

    The reverse KL may be infinite. Its gradient times 0 is then NaN.
    """
    if not maths.is_reverse():
        return z_NV
    return torch.where((weight_WN != 0).any(0)[:, None], z_NV, z_NV.detach())


def in_row_blocks(terms_of: Callable[[slice], Tensor], N: int, vocab: int) -> Tensor:
    """The reference's terms of N rows, (R, N), a block of rows at a time to bound its memory.

    `terms_of` gives those of a slice of rows. Backward calls it again for each block.
    """
    # a compiled graph plans its own memory, and its number of rows may vary
    if torch.compiler.is_compiling() or N * vocab <= REFERENCE_ELEMENTS:
        return terms_of(slice(0, N))
    size = max(1, REFERENCE_ELEMENTS // vocab)
    blocks = [slice(start, min(N, start + size)) for start in range(0, N, size)]
    return torch.cat([checkpoint(terms_of, rows, use_reentrant=False) for rows in blocks], 1)


# --------------------------------------------------------------------- loss


@overload
def kl_mlm_loss(
    student_logits: Tensor, teacher_logits: Tensor | Sequence[Tensor] | None, labels: Tensor, *,
    return_parts: Literal[False] = False, **options: "Unpack[LogitKeywords]",
) -> Tensor: ...  # fmt: skip


@overload
def kl_mlm_loss(
    student_logits: Tensor, teacher_logits: Tensor | Sequence[Tensor] | None, labels: Tensor, *,
    return_parts: Literal[True], **options: "Unpack[LogitKeywords]",
) -> tuple[Tensor, LossParts]: ...  # fmt: skip


@public(LogitKeywords)
def kl_mlm_loss(
    student_logits: Tensor,
    teacher_logits: Tensor | Sequence[Tensor] | None,
    labels: Tensor,
    **options: Any,
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
        **options: those of `LossCall`.

    Returns:
        The loss: 0-d, or (...) with "none"; float32, or float64 for float64 logits. It is 0 if no
        row has a term. With ``return_parts``, a tuple of the loss and `LossParts`.

    Raises:
        GrowthError: shapes, dtypes or options that do not fit, or a teacher that requires grad. On
            a CPU also a label outside the vocabulary; a GPU asserts that without waiting.
    """
    call = LossCall(**options)
    teachers = as_teachers(teacher_logits, call)
    checked = check_options(call, len(teachers), labels)
    _check_logits(student_logits, teachers)
    shard = shard_of_call(call)
    chosen = backend_of(call.backend, student_logits.device, shard)
    columns = check_columns(call, student_logits.shape[-1], [t.shape[-1] for t in teachers], shard)

    def loss_of(
        options: Options, vocab: int, shard: Shard
    ) -> Callable[[RowInputs], tuple[Tensor, Tensor]]:
        def of_rows(rows: RowInputs) -> tuple[Tensor, Tensor]:
            given = (student_logits, *(teachers if options.teacher_weights else ()))
            # -1 instead of the number of rows would fail on a rank without columns
            here = [x.reshape(labels.numel(), x.shape[-1]) for x in given]
            if chosen == "reference":
                rows_RN = _reference_of_all(here, rows, vocab, options.maths)
            else:
                inputs = (rows.labels, rows.kinds, vocab, list(options.maths), options.parts)
                rows_RN, _ = apply(KL_MLM_ROWS, here[0], here[1:], *inputs, shard.group, chosen)
            return weighted(rows.weights, rows_RN), rows_RN

        return of_rows

    student = ("student_logits", student_logits)
    return loss_of_rows(loss_of, call, checked, labels, student, columns, shard)


def _reference_of_all(
    logits: Sequence[Tensor], inputs: RowInputs, vocab: int, maths: Maths
) -> Tensor:
    """The reference's terms of all rows, (R, N), in the dtype of their weights."""

    def terms_of(rows: slice) -> Tensor:
        z_NV, *u_NV = (x[rows, :vocab] for x in logits)
        z_NV = student_logits_of(z_NV, inputs.weights[:, rows], maths)
        return kl_mlm_rows_reference(z_NV, u_NV, inputs.labels[rows], inputs.kinds[rows], maths)

    return in_row_blocks(terms_of, len(inputs.labels), vocab).to(inputs.weights.dtype)


# torch.compile calls this while it traces: compiled code warns when it is compiled
@torch.compiler.assume_constant_result
def _warn_of_half(dtype: torch.dtype) -> None:
    _warn_once_of_half(dtype)


@functools.cache
def _warn_once_of_half(dtype: torch.dtype) -> None:
    """Warn once per dtype. How close the teacher is would have to be asked of a GPU."""
    digits = {torch.bfloat16: "81 %", torch.float16: "10 %"}[dtype]
    warn(
        f"kl_mlm_loss got {dtype} logits: if student and teacher nearly agree, the gradient of the "
        f"KL term is as inexact as they are ({digits} off at 1 % drift). Use linear_kl_mlm_loss, "
        "which computes float32 logits from hidden states, or compute the logits in float32"
    )


def _check_logits(student: Tensor, teachers: Sequence[Tensor]) -> None:
    check_tensors({"student_logits": student})
    check_tensors({f"teacher_logits[{k}]": teacher for k, teacher in enumerate(teachers)})
    if student.ndim < 1 or not student.is_floating_point():
        raise GrowthError(f"student_logits must be float (..., V), got {student.dtype}")
    halves = [x.dtype for x in (student, *teachers) if x.element_size() == 2]
    if teachers and halves:
        _warn_of_half(halves[0])
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
