"""The custom op of the loss on ready logits, its gradient and the refusal of a second one.

Shape letters used in this file: N rows, V vocabulary, K teachers, R = 2 + 2 K terms and S numbers
of a row.
"""

from collections.abc import Sequence

import torch
from torch import Tensor, library

from growkern.ops.backend.launch import acc_torch_dtype
from growkern.ops.loss.rows.options import Maths, Rows, refuse_second_derivative
from growkern.ops.loss.rows.read import ROW_FUNCTIONS, read_rows, state_dtype
from growkern.ops.loss.rows.state import Steps, n_numbers, terms

# ----------------------------------------------------------------------- op


@library.custom_op("growkern::kl_mlm_rows", mutates_args=())
def kl_mlm_rows_op(
    student_NV: Tensor,
    teachers_NV: list[Tensor],
    labels_N: Tensor,
    kind_N: Tensor,
    vocab: int,
    maths: list[float],
    parts: bool,
    group: str,
    backend: str,
) -> tuple[Tensor, Tensor]:
    """The terms of every row, (R, N), and the state backward needs, (S, N)."""
    rows = Rows(student_NV, teachers_NV, labels_N, kind_N, vocab, Maths(*maths), parts)
    terms_RN, state_SN = _empty_rows(student_NV, teachers_NV, backend)
    read_rows(ROW_FUNCTIONS[backend], rows, group, state_SN)
    terms_RN.copy_(terms(state_SN, kind_N, rows.maths, parts))
    return terms_RN, state_SN


def _empty_rows(
    student_NV: Tensor, teachers_NV: Sequence[Tensor], backend: str
) -> tuple[Tensor, Tensor]:
    K, N, acc = len(teachers_NV), student_NV.shape[0], acc_torch_dtype(student_NV)
    terms_RN = student_NV.new_empty(2 + 2 * K, N, dtype=acc)
    return terms_RN, student_NV.new_empty(n_numbers(K), N, dtype=state_dtype(student_NV, backend))


@kl_mlm_rows_op.register_fake
def _(student_NV, teachers_NV, *others) -> tuple:
    return _empty_rows(student_NV, teachers_NV, others[-1])


@library.custom_op("growkern::kl_mlm_rows_backward", mutates_args=())
def kl_mlm_rows_backward_op(
    dterms_RN: Tensor,
    student_NV: Tensor,
    teachers_NV: list[Tensor],
    labels_N: Tensor,
    kind_N: Tensor,
    state_SN: Tensor,
    vocab: int,
    maths: list[float],
    backend: str,
) -> Tensor:
    dstudent_NV = torch.empty_like(student_NV, memory_format=torch.contiguous_format)
    rows = Rows(student_NV, teachers_NV, labels_N, kind_N, vocab, Maths(*maths), False)
    ROW_FUNCTIONS[backend](rows, state_SN, Steps(grad=True), dterms_RN, dstudent_NV)
    return dstudent_NV


@kl_mlm_rows_backward_op.register_fake
def _(dterms_RN, student_NV, *_) -> Tensor:
    return torch.empty_like(student_NV, memory_format=torch.contiguous_format)


# ----------------------------------------------------------------- autograd


def _setup_context(ctx, inputs, output) -> None:
    student_NV, teachers_NV, labels_N, kind_N, vocab, maths, _parts, _group, backend = inputs
    _, state_SN = output
    ctx.mark_non_differentiable(state_SN)
    ctx.options = (vocab, maths, backend)
    ctx.save_for_backward(student_NV, labels_N, kind_N, state_SN, *teachers_NV)


def _backward(ctx, dterms_RN, _) -> tuple:
    student_NV, labels_N, kind_N, state_SN, *teachers_NV = ctx.saved_tensors
    dstudent_NV = kl_mlm_rows_backward_op(
        dterms_RN, student_NV, teachers_NV, labels_N, kind_N, state_SN, *ctx.options
    )
    return (dstudent_NV, [None] * len(teachers_NV), *[None] * 7)


kl_mlm_rows_op.register_autograd(_backward, setup_context=_setup_context)
kl_mlm_rows_backward_op.register_autograd(refuse_second_derivative)
