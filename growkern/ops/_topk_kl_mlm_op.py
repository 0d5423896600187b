"""The custom op of the top-k loss: a sweep over the live rows, chunk by chunk, and its gradients.

Equations are numbered in `topk_kl_mlm_loss.py`. Shape letters used in this file: N rows, R live
rows (capacity on a GPU), C rows of one chunk, H width, V vocabulary, k entries of the teacher.
"""

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

from growkern.ops._linear_kl_mlm_gemm import gemm_dtype, project
from growkern.ops._linear_kl_mlm_heads import Settings, Sizes
from growkern.ops._linear_kl_mlm_op import (
    backward_of,
    cleared_outputs,
    empty_outputs,
    setup_context,
)
from growkern.ops._linear_kl_mlm_sweep import (
    _fit_to_dtype,
    _gradient_place,
    _Sums,
    chunk_size,
    live_rows,
    may_ask,
)
from growkern.ops._topk_kl_mlm_cpu import topk_rows_on_cpu
from growkern.ops._topk_kl_mlm_kernel import topk_rows_on_triton
from growkern.ops._topk_kl_mlm_teacher import check_topk_values

# ----------------------------------------------------------------------- op


@torch.library.custom_op("growkern::topk_kl_mlm", mutates_args=())
def topk_kl_mlm_op(
    student: list[Tensor],
    topk: list[Tensor],
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
    """loss, rows, dX, dW, db; as `linear_kl_mlm_op`, with (ids, log-probs) for the teachers."""
    check_topk_values(topk[0], topk[1], kind_N, sizes[0], maths[2] != 0)
    settings = Settings(sizes, maths, parts, per_row, want, logits_dtype, group, backend)
    outputs = cleared_outputs(student, weight_WN, per_row, want)
    loss, rows_SN, *grads = outputs
    wanted = [
        grad if wish and not per_row else None for grad, wish in zip(grads, want, strict=True)
    ]
    with torch.autocast(labels_N.device.type, enabled=False):
        _sweep(student, topk, (labels_N, kind_N, weight_WN), settings, rows_SN, wanted)
    loss_N = (weight_WN * rows_SN[:2]).sum(0)
    loss.copy_(loss_N if per_row else loss_N.sum())
    return outputs


def _sweep(
    student: Sequence[Tensor],
    topk: Sequence[Tensor],
    row_inputs: Sequence[Tensor],
    settings: Settings,
    rows_SN: Tensor,
    grads: Sequence[Tensor | None],
) -> None:
    """Fill `rows_SN`, (4, N), and the wanted ones of dX, dW, db, with dX zeros on entry."""
    labels_N, kind_N, weight_WN = row_inputs
    x_NH, weight_VH, bias_V = student
    # rows stay whole: the k tokens of one lie anywhere
    sizes = Sizes(*settings.sizes)._replace(vocab_tile=settings.sizes[0])
    N, vocab = len(x_NH), sizes.vocab
    rows_R, R = live_rows(kind_N, sizes.max_rows)
    C, _ = chunk_size(R, [x_NH.shape[1]], x_NH, settings.logits_dtype.itemsize, sizes)
    logits_CV = x_NH.new_empty(min(C, R), vocab, dtype=settings.logits_dtype)
    sums = _Sums(grads, vocab if R else 0, not may_ask(x_NH.device))
    # row N: what an unused place reads (a row of no kind) and where it writes
    weight_WN, unscale = _fit_to_dtype(weight_WN, x_NH.dtype)
    labels_P, kind_P, weight_WP = (F.pad(x, (0, 1)) for x in (labels_N, kind_N, weight_WN))
    rows_SP = F.pad(rows_SN, (0, 1))
    run = topk_rows_on_triton if settings.backend == "triton" else topk_rows_on_cpu
    for rows_C in rows_R.split(C) if R else ():
        source_C = rows_C.clamp(max=N - 1)
        x_CH, *topk_C = (x.index_select(0, source_C) for x in (x_NH, *topk))
        z_CV = logits_CV[: len(rows_C)]
        project(x_CH, weight_VH[:vocab], bias_V[:vocab], z_CV)
        dz_CV = _gradient_place(z_CV, gemm_dtype(x_NH)) if sums.wanted else None
        rows_SC = z_CV.new_empty(4, len(rows_C))
        labels_C, kind_C, drows_WC = (x[..., rows_C] for x in (labels_P, kind_P, weight_WP))
        maths, parts = settings.maths, settings.parts
        run(z_CV, topk_C, labels_C, kind_C, vocab, maths, parts, rows_SC, drows_WC, dz_CV)
        rows_SP[:, rows_C] = rows_SC.to(rows_SP.dtype)
        if dz_CV is not None:
            sums.add(dz_CV, x_CH, weight_VH, slice(0, vocab))
            sums.store_rows(rows_C, "", unscale)
    rows_SN.copy_(rows_SP[:, :N])
    sums.store(unscale)


@topk_kl_mlm_op.register_fake
def _(student, topk, labels_N, kind_N, weight_WN, anchor, *settings) -> tuple:
    _, _, _, per_row, want, *_ = settings
    return empty_outputs(student, weight_WN, per_row, want)


topk_kl_mlm_op.register_autograd(backward_of(topk_kl_mlm_op), setup_context=setup_context)
