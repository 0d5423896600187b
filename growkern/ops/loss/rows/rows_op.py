"""The row functions of all backends, and the custom op of the loss on logits.

Shape letters used in this file: N rows, V vocabulary, K teachers, R = 2 + 2 K terms, S numbers of a
row.
"""

from collections.abc import Sequence

import torch
from torch import Tensor, library

from growkern.ops.backend import (
    NAMESPACE,
    Rules,
    acc_torch_dtype,
    advise_huge_pages,
    apply,
    refuse_second_derivative,
)
from growkern.ops.loss.rows.on_cpu import rows_on_cpu
from growkern.ops.loss.rows.on_triton import rows_on_triton
from growkern.ops.loss.rows.state import (
    Maths,
    RowFunction,
    Rows,
    Steps,
    n_numbers,
    read_rows,
    terms,
)

ROW_FUNCTIONS: dict[str, RowFunction] = {"cpu": rows_on_cpu, "triton": rows_on_triton}

# ----------------------------------------------------------------------- op


@library.custom_op(f"{NAMESPACE}::kl_mlm_rows", mutates_args=())
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
    """The terms of every row, (R, N), and the state that backward needs, (S, N).

    `maths` are the fields of `Maths`.
    """
    rows = Rows(student_NV, teachers_NV, labels_N, kind_N, vocab, Maths(*maths), parts)
    terms_RN, state_SN = _empty_rows(student_NV, teachers_NV, backend)
    read_rows(ROW_FUNCTIONS[backend], rows, group, state_SN)
    terms_RN.copy_(terms(state_SN, kind_N, rows.maths, parts))
    return terms_RN, state_SN


def _state_dtype(student_NV: Tensor, backend: str) -> torch.dtype:
    """The dtype of the sums of given logits.

    A CPU sums float32 logits in float64: in float32, q - p of (5) would keep only five digits at
    1 % drift. A GPU keeps them in other ways (`rows/triton_kernel.py`).
    """
    is_wide = backend == "cpu" and student_NV.dtype == torch.float32
    return torch.float64 if is_wide else acc_torch_dtype(student_NV)


def _empty_rows(
    student_NV: Tensor, teachers_NV: Sequence[Tensor], backend: str
) -> tuple[Tensor, Tensor]:
    K, N, acc = len(teachers_NV), student_NV.shape[0], acc_torch_dtype(student_NV)
    terms_RN = student_NV.new_empty(2 + 2 * K, N, dtype=acc)
    return terms_RN, student_NV.new_empty(n_numbers(K), N, dtype=_state_dtype(student_NV, backend))


@kl_mlm_rows_op.register_fake
def _(student_NV, teachers_NV, *others) -> tuple:
    return _empty_rows(student_NV, teachers_NV, others[-1])


@library.custom_op(f"{NAMESPACE}::kl_mlm_rows_backward", mutates_args=())
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
    """The gradient of the student's logits, (N, V)."""
    dstudent_NV = torch.empty_like(student_NV, memory_format=torch.contiguous_format)
    advise_huge_pages(dstudent_NV)
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
    arguments = (dterms_RN, student_NV, teachers_NV, labels_N, kind_N, state_SN, *ctx.options)
    return (apply(_BACKWARD_RULES, *arguments), [None] * len(teachers_NV), *[None] * 7)


_BACKWARD_RULES = Rules(kl_mlm_rows_backward_op, refuse_second_derivative)
KL_MLM_ROWS = Rules(kl_mlm_rows_op, _backward, _setup_context)
kl_mlm_rows_op.register_autograd(_backward, setup_context=_setup_context)
kl_mlm_rows_backward_op.register_autograd(refuse_second_derivative)
