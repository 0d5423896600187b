"""KL to frozen teachers plus cross-entropy of the labels, from hidden states.

The loss of `kl_mlm_loss` on the logits of two linear heads

    z = X W^T + b        u_k = X_k W_k^T + b_k                                              (1)

without ever holding those logits: rows that carry neither term never reach a GEMM, the others
come by in chunks, and while a chunk of logits exists its gradient is written over it and

    dX = dz W        dW = dz^T X        db = sum_rows dz                                    (2)

are taken from it. So a chunk costs its three (plus one per teacher) GEMMs once, in forward;
backward multiplies by the incoming scalar. With reduction="none" the rows' gradients are known
only in backward, which then repeats the sweep.

Logits leave the GEMM in float32 also for bfloat16 inputs: beside a close teacher bfloat16 logits
carry 69-80 % error into the KL gradient at 1 % drift, float32 logits 0.2 %. For float32 inputs the
GEMM of the logits is what is left, 8e-5 at 1 % drift: there they can be float64.

Shape letters used in this file: N rows, R live rows, C rows of one chunk, H student width, V
vocabulary, K teachers, W = 1 + K terms, S statistics per row.
Read on in this order: reference, public function; then `linear/op.py` and
`linear/sweep.py`.
"""

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional as F

from growkern.ops.backend.choose import choose_backend
from growkern.ops.loss.kl_mlm_loss import kl_mlm_rows_reference
from growkern.ops.loss.linear.heads import Head, Settings, checked_heads, settings_of
from growkern.ops.loss.linear.op import anchor_of, linear_kl_mlm_op
from growkern.ops.loss.rows.labels import check_row_weights, row_inputs
from growkern.ops.loss.rows.options import (
    IGNORE_INDEX,
    LossParts,
    Maths,
    as_teachers,
    check_options,
    check_vocabulary,
    outcome,
)
from growkern.ops.loss.rows.vocab_parallel import refuse_sharded_reference

# ---------------------------------------------------------------- reference


def linear_kl_mlm_rows_reference(
    student: Head,
    teachers: Sequence[Head],
    labels_N: Tensor,
    kind_N: Tensor,
    vocab: int,
    maths: Maths,
    dtype: torch.dtype,
) -> Tensor:
    """Plain PyTorch definition: (1) in `dtype`, then the rows of `kl_mlm_loss`."""

    def logits(hidden_NH: Tensor, weight_VH: Tensor, bias_V: Tensor) -> Tensor:
        bias = bias_V[:vocab].to(dtype) if bias_V.numel() else None
        return F.linear(hidden_NH.to(dtype), weight_VH[:vocab].to(dtype), bias)

    with torch.autocast(labels_N.device.type, enabled=False):
        teachers_NV = [logits(*teacher) for teacher in teachers]
        return kl_mlm_rows_reference(logits(*student), teachers_NV, labels_N, kind_N, maths)


# ------------------------------------------------------------------- public


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
    chunk_bytes: int | None = None,
    max_rows: int | None = None,
    vocab_tile: int | None = None,
    logits_dtype: torch.dtype | None = None,
    group: dist.ProcessGroup | None = None,
    vocab_start: int | None = None,
    backend: str | None = None,
) -> Tensor | tuple[Tensor, LossParts]:
    """`kl_mlm_loss` of the logits ``hidden @ weight.T + bias``, which never exist all at once.

    Options that are not listed here are those of `kl_mlm_loss`. Under autocast the student's and
    the teachers' heads run in autocast's dtype, as `torch.nn.functional.linear` would.

    Args:
        student_hidden: (..., H), float.
        student_weight: the student's output head, (V, H), dtype of `student_hidden`.
        teacher_hidden: (..., H_k), of any width and dtype; a list; or None with ``alpha=0.0``.
        teacher_weight: the teachers' heads, (V_k, H_k), one per entry of `teacher_hidden`.
        labels: integer token ids, (...).
        student_bias, teacher_bias: (V,), (V_k,), optional. A list may hold None.
        chunk_bytes: memory for the logits of one chunk, student and teachers together. Default:
            rows enough that accumulating dW costs under a tenth of the chunk's GEMMs.
        max_rows: the most rows that carry a term. Without it a GPU, which must not be asked how
            many there are, reserves work for all N. More rows than this are an error.
        vocab_tile: columns per tile of the vocabulary, for when chunks of whole rows need too much
            memory: logits are then computed twice, first for the rows' sums, then for the
            gradient (three times for "reverse" and "jsd"). Default: whole rows, unless
            ``chunk_bytes`` holds fewer than 32 of them.
        logits_dtype: what logits are computed and kept in. Default: float32, float64 for float64
            inputs and, beside a teacher, for float32 ones where float64 GEMMs are fast: a CPU, an
            A100, H100, H200 or B200. Their KL gradient is then within 1e-5 of exact at 1 % drift,
            where float32 logits leave 7e-5, for up to 1.4 times the time on a CPU
            (`python -m bench.bench_linear_kl_mlm_loss` has both) and twice the memory of a chunk.
            Elsewhere it has to be asked for.
        group, vocab_start: as `kl_mlm_loss`, with slices of the rows of every head and whole hidden
            states. The gradient of the student's hidden states is added up over the ranks here,
            that of its weight and bias is the slice's. Heads that are DTensors with Shard(0) on
            a one-dimensional mesh need neither, and beside them teachers may be whole. FSDP's are
            such DTensors too, but every rank has rows of its own: call this from the forward of a
            module that `fully_shard` wraps, where the head is whole.
        backend: "reference", "cpu", "triton" or "cuda" (CUDA C++ for sm_90 and later, on request
            only: not measured yet). Default: what fits the device.

    Returns:
        As `kl_mlm_loss`. Gradients reach hidden states, weight and bias as far as each requires
        one: a frozen head or trunk costs no GEMM.

    Raises:
        GrowthError: shapes, dtypes or options that do not fit, or a teacher that requires grad; on
            a CPU also a label outside the vocabulary, or other rows on other ranks of the group,
            which a GPU asserts without waiting.
    """
    hiddens = as_teachers(teacher_hidden, alpha)
    options = check_options(
        len(hiddens), alpha, temperature, teacher_weights, softcap, teacher_softcap, reduction,
        num_items, return_parts, divergence=divergence, beta=beta, label_smoothing=label_smoothing,
        row_weights=check_row_weights(row_weights, labels), z_loss=z_loss,
    )  # fmt: skip
    (student, *teachers), shard = checked_heads(
        (student_hidden, student_weight, student_bias), hiddens, teacher_weight, teacher_bias,
        (group, vocab_start, vocab_size),
    )  # fmt: skip
    chosen = choose_backend(backend, labels.device, library=False)
    refuse_sharded_reference(chosen, shard.group)
    vocab = check_vocabulary(vocab_size, len(student[1]), [len(t[1]) for t in teachers], shard)
    rows = row_inputs(labels, student_hidden, kl_rows, ignore_index, options, vocab, shard)
    limits = {"chunk_bytes": chunk_bytes, "max_rows": max_rows, "vocab_tile": vocab_tile}
    settings = settings_of(student, options, vocab, shard, limits, logits_dtype, chosen)
    loss, rows_SN = linear_loss_and_rows(student, teachers, rows, settings)
    return outcome(loss, rows_SN, rows[1], options, labels.shape)


def linear_loss_and_rows(
    student: Head,
    teachers: Sequence[Head],
    rows: tuple[Tensor, Tensor, Tensor],
    settings: Settings,
) -> tuple[Tensor, Tensor]:
    if settings.backend == "reference":
        labels_N, kind_N, weight_WN = rows
        rows_SN = linear_kl_mlm_rows_reference(
            student, teachers, labels_N, kind_N, settings.sizes[0], Maths(*settings.maths),
            settings.logits_dtype,
        ).to(weight_WN.dtype)  # fmt: skip
        loss_N = (weight_WN * rows_SN[: weight_WN.shape[0]]).sum(0)
        return loss_N if settings.per_row else loss_N.sum(), rows_SN
    flat = [x for teacher in teachers for x in teacher]
    loss, rows_SN, *_ = linear_kl_mlm_op(list(student), flat, *rows, anchor_of(student), *settings)
    return loss, rows_SN
