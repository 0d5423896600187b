"""KL to frozen teachers plus cross-entropy of the labels, from hidden states.

The loss of `kl_mlm_loss` on the logits of two linear heads

    z = X W^T + b        u_k = X_k W_k^T + b_k                                              (1)

without holding all of them. Rows without a term never reach a GEMM. The others are processed in
chunks: while the logits of a chunk exist, their gradient is written over them, and

    dX = dz W        dW = dz^T X        db = sum_rows dz                                    (2)

are computed from it. So a chunk costs its three GEMMs (plus one per teacher) once, in forward, and
backward only multiplies by the incoming scalar. With reduction="none" the rows' gradients are known
only in backward, which then repeats the sweep.

Logits leave the GEMM in float32, for bfloat16 inputs too. Beside a close teacher (1 % drift)
bfloat16 logits would give the KL gradient an error of 69-80 %; float32 logits give 0.2 %. For
float32 inputs the GEMM of the logits is the largest error, 8e-5: there the logits can be float64.
Sums of 4 float32 products, added up almost exactly, give 5e-6. Products in float64 give 3e-7.

Shape letters used in this file: N rows, H student width, V vocabulary, K teachers, W = 1 + K
terms, R = 2 W terms and measurements of a row.

Reading order: the reference and the public function here, on top of `kl_mlm_loss.py` (equations and
reference of the rows); `rows/options.py`, `rows/label_options.py` and `linear/heads.py`
(arguments); `linear/op.py` (chunks, sweep and custom op); `linear/gemm.py`; `rows/op.py` (the table
of row functions); `rows/state.py` (the numbers of a row). The row functions follow: on a CPU
`rows/on_cpu.py`, `csrc/cpu/kl_mlm_body.cpp` and `csrc/cpu/gemm_body.cpp`, 12 files in all; on a GPU
`rows/on_triton.py`, `rows/triton_kernel.py` and `rows/triton_blocks.py`, 12 in all, or
`rows/on_cuda.py` and `csrc/cuda/kl_mlm_rows.cu`, 11 in all. CONTRIBUTING.md says how these are
counted. Heads that are spread over ranks also use `rows/vocab_parallel.py`.
"""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Literal, overload

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional as F

from growkern.ops.backend.choose import choose_backend
from growkern.ops.backend.transforms import apply
from growkern.ops.loss.keywords import Divergence, KLRows, LinearKeywords, Reduction
from growkern.ops.loss.kl_mlm_loss import (
    in_row_blocks,
    kl_mlm_rows_reference,
    live_hidden,
    student_logits_of,
)
from growkern.ops.loss.linear.heads import (
    Head,
    Settings,
    anchor_of,
    as_arguments,
    checked_heads,
    settings_of,
)
from growkern.ops.loss.linear.op import LINEAR_KL_MLM
from growkern.ops.loss.rows.options import (
    IGNORE_INDEX,
    LossParts,
    as_teachers,
    check_options,
    check_row_weights,
    check_vocabulary,
    outcome,
    row_inputs,
)
from growkern.ops.loss.rows.state import Maths, RowInputs, weighted
from growkern.ops.loss.rows.vocab_parallel import refuse_reference

if TYPE_CHECKING:
    from typing_extensions import Unpack

# ---------------------------------------------------------------- reference


def linear_kl_mlm_rows_reference(
    student: Head,
    teachers: Sequence[Head],
    rows: RowInputs,
    vocab: int,
    maths: Maths,
    dtype: torch.dtype,
) -> Tensor:
    """Plain PyTorch definition: (1) in `dtype`, then the reference of `kl_mlm_loss`, (R, N)."""

    def logits(head: Head) -> Tensor:
        bias = head.bias[:vocab].to(dtype) if head.bias.numel() else None
        return F.linear(
            live_hidden(head.hidden, rows.kinds).to(dtype), head.weight[:vocab].to(dtype), bias
        )

    with torch.autocast(rows.labels.device.type, enabled=False):
        teachers_NV = [logits(teacher) for teacher in teachers]
        z_NV = student_logits_of(logits(student), rows.weights, maths)
        return kl_mlm_rows_reference(z_NV, teachers_NV, rows.labels, rows.kinds, maths)


# ------------------------------------------------------------------- public


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
            (`python -m bench.bench_linear_kl_mlm_loss` has all three).
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
    chosen = choose_backend(backend, labels.device)
    if shard.group:
        refuse_reference(chosen)
    vocab = check_vocabulary(
        vocab_size, len(student.weight), [len(t.weight) for t in teachers], shard
    )
    rows = row_inputs(labels, student_hidden, kl_rows, ignore_index, options, vocab, shard)
    limits = {"chunk_bytes": chunk_bytes, "max_rows": max_rows, "vocab_tile": vocab_tile}
    settings = settings_of(student, options, vocab, shard, limits, logits_dtype, chosen)
    loss, rows_RN = linear_loss_and_rows(student, teachers, rows, settings)
    return outcome(loss, rows_RN, rows.kinds, options, labels.shape)


def linear_loss_and_rows(
    student: Head,
    teachers: Sequence[Head],
    rows: RowInputs,
    settings: Settings,
) -> tuple[Tensor, Tensor]:
    """The loss, 0-d or (N,), and the rows' terms (R, N), by the backend of `settings`."""
    if settings.backend == "reference":

        def terms_of(some: slice) -> Tensor:
            heads = [head._replace(hidden=head.hidden[some]) for head in (student, *teachers)]
            return linear_kl_mlm_rows_reference(
                heads[0], heads[1:], RowInputs(*(x[..., some] for x in rows)),
                settings.sizes.vocab, settings.maths, settings.logits_dtype,
            )  # fmt: skip

        return reference_loss(terms_of, rows.weights, settings)
    flat = [x for teacher in teachers for x in teacher]
    arguments = (*rows, anchor_of(student), *as_arguments(settings))
    loss, rows_RN, *_ = apply(LINEAR_KL_MLM, list(student), flat, *arguments)
    return loss, rows_RN


def reference_loss(
    terms_of: Callable[[slice], Tensor], weight_WN: Tensor, settings: Settings
) -> tuple[Tensor, Tensor]:
    """The loss and the rows' terms, from a function that gives the terms of a slice of rows."""
    N = weight_WN.shape[1]
    rows_RN = in_row_blocks(terms_of, N, settings.sizes.vocab).to(weight_WN.dtype)
    loss_N = weighted(weight_WN, rows_RN)
    return loss_N if settings.per_row else loss_N.sum(), rows_RN
