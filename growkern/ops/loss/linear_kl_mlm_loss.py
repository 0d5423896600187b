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

Reading order: the reference and the function here, on top of `kl_mlm_loss.py` (equations and
reference of the rows); `rows/options.py`, `rows/inputs.py` and `linear/heads.py` (arguments);
`linear/linear_op.py` (chunks, sweep and custom op); `linear/gemm.py`; `rows/rows_op.py` (the table
of row functions); `rows/state.py` (the numbers of a row). The row functions follow: on a CPU
`rows/on_cpu.py`, `csrc/cpu/kl_mlm_body.cpp` and `csrc/cpu/gemm_body.cpp`, 12 files in all; on a GPU
`rows/on_triton.py`, `rows/triton_kernel.py`, `rows/triton_sums.py` and `rows/triton_blocks.py`, 13
in all. Heads that are spread over ranks also use `rows/vocab_parallel.py`.
"""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Literal, overload

import torch
from torch import Tensor
from torch.nn import functional as F

from growkern.ops.backend import Rules, apply
from growkern.ops.loss.kl_mlm_loss import (
    in_row_blocks,
    kl_mlm_rows_reference,
    live_hidden,
    student_logits_of,
)
from growkern.ops.loss.linear.heads import (
    Head,
    HeadSettings,
    anchor_of,
    as_arguments,
    checked_heads,
    settings_of,
)
from growkern.ops.loss.linear.linear_op import LINEAR_KL_MLM, begun_rules
from growkern.ops.loss.rows.inputs import (
    LossParts,
    backend_of,
    check_columns,
    loss_of_rows,
)
from growkern.ops.loss.rows.options import (
    OF_CHUNKS,
    LinearKeywords,
    LossCall,
    Maths,
    Options,
    as_teachers,
    check_options,
    public,
)
from growkern.ops.loss.rows.state import RowInputs, weighted
from growkern.ops.loss.rows.vocab_parallel import Shard

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


# --------------------------------------------------------------------- loss


@overload
def linear_kl_mlm_loss(
    student_hidden: Tensor, student_weight: Tensor,
    teacher_hidden: Tensor | Sequence[Tensor] | None,
    teacher_weight: Tensor | Sequence[Tensor] | None, labels: Tensor, *,
    return_parts: Literal[False] = False, **options: "Unpack[LinearKeywords]",
) -> Tensor: ...  # fmt: skip


@overload
def linear_kl_mlm_loss(
    student_hidden: Tensor, student_weight: Tensor,
    teacher_hidden: Tensor | Sequence[Tensor] | None,
    teacher_weight: Tensor | Sequence[Tensor] | None, labels: Tensor, *,
    return_parts: Literal[True], **options: "Unpack[LinearKeywords]",
) -> tuple[Tensor, LossParts]: ...  # fmt: skip


@public(LinearKeywords, explained=OF_CHUNKS)
def linear_kl_mlm_loss(
    student_hidden: Tensor,
    student_weight: Tensor,
    teacher_hidden: Tensor | Sequence[Tensor] | None,
    teacher_weight: Tensor | Sequence[Tensor] | None,
    labels: Tensor,
    *,
    student_bias: Tensor | None = None,
    teacher_bias: Tensor | Sequence[Tensor | None] | None = None,
    **options: Any,
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
        **options: those of `LossCall`.
        group, vocab_start: as in `kl_mlm_loss`, with slices of the rows of every head and whole
            hidden states. The gradient of the student's hidden states is summed over the ranks;
            that of its weight and bias belongs to the slice. Heads that are DTensors with Shard(0)
            on a one-dimensional mesh need neither argument, and teachers beside them may be whole.
            Beside a whole student, a teacher's DTensors are gathered in each call.
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
    call = LossCall(**options)
    hiddens = as_teachers(teacher_hidden, call)
    checked = check_options(call, len(hiddens), labels)
    head = (student_hidden, student_weight, student_bias)
    heads, shard = checked_heads(head, hiddens, teacher_weight, teacher_bias, call)
    chosen = backend_of(call.backend, labels.device, shard)
    student, *teachers = heads
    columns = check_columns(call, len(student.weight), [len(t.weight) for t in teachers], shard)
    named = ("student_hidden", student_hidden)

    def loss_of(
        options: Options, vocab: int, shard: Shard
    ) -> Callable[[RowInputs], tuple[Tensor, Tensor]]:
        settings = settings_of(call, options, student, vocab, shard, chosen)
        return linear_loss(student, teachers if options.teacher_weights else [], settings)

    return loss_of_rows(loss_of, call, checked, labels, named, columns, shard)


def linear_loss(
    student: Head, teachers: Sequence[Head], settings: HeadSettings
) -> Callable[[RowInputs], tuple[Tensor, Tensor]]:
    """`loss_and_rows` of the inputs of the rows. On a GPU the first products start now."""

    def loss_of(rows: RowInputs) -> tuple[Tensor, Tensor]:
        def terms_of(some: slice) -> Tensor:
            heads = [head._replace(hidden=head.hidden[some]) for head in (student, *teachers)]
            return linear_kl_mlm_rows_reference(
                heads[0], heads[1:], rows.part(some),
                settings.sizes.vocab, settings.maths, settings.dtype,
            )  # fmt: skip

        flat = [x for teacher in teachers for x in teacher]
        return loss_and_rows(rules, student, flat, rows, settings, terms_of)

    is_reference = settings.backend == "reference"
    rules = LINEAR_KL_MLM if is_reference else begun_rules([student, *teachers], settings)
    return loss_of


def loss_and_rows(
    rules: Rules,
    student: Head,
    teachers: list[Tensor],
    rows: RowInputs,
    settings: HeadSettings,
    terms_of: Callable[[slice], Tensor],
) -> tuple[Tensor, Tensor]:
    """The loss, 0-d or (N,), and the rows' terms (R, N), by the backend of `settings`.

    `rules` are those of the op, and `terms_of` gives the reference's terms of a slice of rows.
    """
    weight_WN = rows.weights
    if settings.backend != "reference":
        arguments = (*rows, anchor_of(student), *as_arguments(settings))
        loss, rows_RN, *_ = apply(rules, list(student), teachers, *arguments)
        return loss, rows_RN
    rows_RN = in_row_blocks(terms_of, weight_WN.shape[1], settings.sizes.vocab)
    rows_RN = rows_RN.to(weight_WN.dtype)
    loss_N = weighted(weight_WN, rows_RN)
    return loss_N if settings.per_row else loss_N.sum(), rows_RN
