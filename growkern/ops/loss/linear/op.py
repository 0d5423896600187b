"""The custom op of the linear loss, its gradients and their refusal to be differentiated again.

Equations are numbered in `linear_kl_mlm_loss.py`. Shape letters used in this file: N rows, H
width, V vocabulary, K teachers, W = 1 + K terms, S statistics per row.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, library

from growkern.ops.backend.native import advise_huge_pages
from growkern.ops.loss.linear.heads import Settings
from growkern.ops.loss.linear.sweep import Chunk, sweep
from growkern.ops.loss.rows.options import refuse_second_derivative

# ----------------------------------------------------------------------- op


@library.custom_op("growkern::linear_kl_mlm", mutates_args=())
def linear_kl_mlm_op(
    student: list[Tensor],
    teachers: list[Tensor],
    labels_N: Tensor,
    kind_N: Tensor,
    weight_WN: Tensor,
    anchor: Tensor,
    sizes: list[int],
    maths: list[float],
    parts: bool,
    per_row: bool,
    want: list[bool],
    logits_dtype: torch.dtype,
    group: str,
    backend: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """loss, rows, dX, dW, db. Heads are (hidden, weight, bias), a missing bias has no elements.

    `want` asks for dX, dW, db; what is not wanted comes back empty. `per_row` gives the loss of
    every row and no gradient. `anchor` is `anchor_of` of the student.
    """
    settings = Settings(sizes, maths, parts, per_row, want, logits_dtype, group, backend)
    heads = [student, *(teachers[k : k + 3] for k in range(0, len(teachers), 3))]
    return swept(heads, (labels_N, kind_N, weight_WN), settings)


def swept(
    heads: Sequence[Sequence[Tensor]],
    row_inputs: tuple[Tensor, Tensor, Tensor],
    settings: Settings,
    make_chunk: Callable[..., Chunk] = Chunk,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """loss, rows, dX, dW, db of one sweep over `heads`, the student's first."""
    labels_N, _, weight_WN = row_inputs
    outputs = cleared_outputs(heads[0], weight_WN, settings.per_row, settings.want)
    loss, rows_SN, *grads = outputs
    wanted = [
        grad if wish and not settings.per_row else None
        for grad, wish in zip(grads, settings.want, strict=True)
    ]
    with torch.autocast(labels_N.device.type, enabled=False):
        rows_SN.copy_(sweep(heads, row_inputs, settings, wanted, make_chunk))
    loss_N = (weight_WN * rows_SN[: weight_WN.shape[0]]).sum(0)
    loss.copy_(loss_N if settings.per_row else loss_N.sum())
    return outputs


def empty_outputs(
    student: Sequence[Tensor], weight_WN: Tensor, per_row: bool, want: Sequence[bool]
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    W, N = weight_WN.shape
    loss = weight_WN.new_empty((N,) if per_row else ())
    rows_SN = weight_WN.new_empty(2 * W, N)
    # a loss scaler acts in backward: until then float16 gradients would fall under 6e-8
    dtype = weight_WN.dtype if student[0].dtype == torch.float16 else student[0].dtype
    dx, dw, db = (
        torch.empty_like(x, dtype=dtype, memory_format=torch.contiguous_format)
        if wish and not per_row
        else x.new_empty(0)
        for x, wish in zip(student, want, strict=True)
    )
    return loss, rows_SN, dx, dw, db


def cleared_outputs(*arguments: Any) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """`empty_outputs`, but for dW and db, which a sweep writes whole, filled with zeros."""
    outputs = empty_outputs(*arguments)
    loss, rows_SN, dx, dw, _ = outputs
    advise_huge_pages(dw)
    for x in (loss, rows_SN, dx):
        x.zero_()
    return outputs


@linear_kl_mlm_op.register_fake
def _(student, teachers, labels_N, kind_N, weight_WN, anchor, *settings) -> tuple:
    _, _, _, per_row, want, *_ = settings
    return empty_outputs(student, weight_WN, per_row, want)


@library.custom_op("growkern::linear_kl_mlm_backward", mutates_args=())
def linear_kl_mlm_backward_op(
    dloss: Tensor, grads: list[Tensor], anchor: Tensor, dtype: torch.dtype
) -> list[Tensor]:
    """The gradients of forward times the incoming scalar: new tensors, so it can run twice.

    `anchor` ties them to the student under create_graph, so that a second derivative is refused
    and not silently zero.
    """
    scaled = [torch.empty_like(grad) for grad in grads]
    for x, grad in zip(scaled, grads, strict=True):
        advise_huge_pages(x)
        torch.mul(grad, dloss.to(grad.dtype), out=x)
    return [x.to(dtype) for x in scaled]


@linear_kl_mlm_backward_op.register_fake
def _(dloss, grads, anchor, dtype) -> list:
    return [torch.empty_like(grad, dtype=dtype) for grad in grads]


# ----------------------------------------------------------------- autograd


def anchor_of(student: Sequence[Tensor]) -> Tensor:
    """No elements, but a function of the whole student: saved for backward it holds no memory."""
    return torch.cat([x[:0].reshape(0) for x in student])


def setup_context(ctx, inputs, output) -> None:
    student, teachers, labels_N, kind_N, weight_WN, anchor, *settings = inputs
    _, rows_SN, *grads = output
    ctx.mark_non_differentiable(rows_SN, *grads)
    ctx.set_materialize_grads(False)
    ctx.n_teachers, ctx.dtype = len(teachers), student[0].dtype
    ctx.settings = Settings(*settings)
    if ctx.settings.per_row:
        ctx.save_for_backward(anchor, labels_N, kind_N, weight_WN, *student, *teachers)
    else:
        ctx.save_for_backward(anchor, *grads)


def backward_of(op: Callable[..., Any]) -> Callable[..., tuple[Any, ...]]:
    """The backward of `op`: what forward has found, or, for losses per row, another sweep."""

    def backward(ctx: Any, dloss: Tensor | None, *_: Any) -> tuple[Any, ...]:
        none = [None] * (4 + len(Settings._fields))
        if dloss is None:
            return [None] * 3, [None] * ctx.n_teachers, *none
        anchor, *saved = ctx.saved_tensors
        if ctx.settings.per_row:
            labels_N, kind_N, weight_WN, *heads = saved
            settings = ctx.settings._replace(parts=False, per_row=False)
            with torch.no_grad():
                rows = (labels_N, kind_N, weight_WN * dloss)
                _, _, *saved = op(heads[:3], heads[3:], *rows, anchor, *settings)
            dloss = dloss.new_ones(())
        grads = linear_kl_mlm_backward_op(dloss, saved, anchor, ctx.dtype)
        wanted = zip(grads, ctx.settings.want, strict=True)
        student = [grad if wish else None for grad, wish in wanted]
        return student, [None] * ctx.n_teachers, *none

    return backward


linear_kl_mlm_op.register_autograd(backward_of(linear_kl_mlm_op), setup_context=setup_context)
linear_kl_mlm_backward_op.register_autograd(refuse_second_derivative)
