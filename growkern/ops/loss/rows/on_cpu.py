"""The rows of the KL + MLM loss on a CPU: a few rows at a time, so that a pass stays in cache.

What the compiled library has no code for is done here, in PyTorch.

Equations are numbered in `kl_mlm_loss.py`. Shape letters used in this file: B rows of one block,
N rows, V vocabulary, K teachers, S numbers of a row (`rows/state.py`).
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from growkern.ops.backend.launch import acc_torch_dtype
from growkern.ops.loss.rows.on_cpu_compiled import library_takes, rows_in_library
from growkern.ops.loss.rows.options import KL_ROW, MLM_ROW, Maths, Rows
from growkern.ops.loss.rows.state import (
    STUDENT_NUMBERS,
    TEACHER_NUMBERS,
    Steps,
    clear,
    label_gradient,
)

# elements of one block: five float32 blocks of this size fit the private caches of two cores
BLOCK_ELEMENTS = 1 << 17
# of logits that are widened at a time: rows enough for all threads
WIDE_ELEMENTS = 1 << 20


def rows_on_cpu(
    rows: Rows,
    state_SN: Tensor,
    steps: Steps,
    drows_SN: Tensor | None = None,
    dstudent_NV: Tensor | None = None,
) -> None:
    """Fill `state_SN` and, given the gradient of the terms, `dstudent_NV`, as `steps` asks.

    Rows of kind 0 are not read; neither are columns from `vocab` on. `dstudent_NV` may be the
    memory of `student_NV`.
    """
    student_NV, teachers_NV, labels_N, kind_N, vocab, _, _ = rows
    if state_SN.dtype.itemsize > student_NV.dtype.itemsize == 4:
        _wider(rows, state_SN, steps, drows_SN, dstudent_NV)
        return
    K, acc = len(teachers_NV), acc_torch_dtype(student_NV)
    if steps.sums:
        clear(state_SN)
    in_place = dstudent_NV is not None and dstudent_NV.data_ptr() == student_NV.data_ptr()
    if dstudent_NV is not None and not in_place:
        dstudent_NV.zero_()
    if library_takes(rows, state_SN, steps, dstudent_NV):
        rows_in_library(rows, state_SN, steps, drows_SN, dstudent_NV)
        return
    live_R = kind_N.nonzero().squeeze(1)
    if dstudent_NV is not None and in_place and live_R.numel() < kind_N.numel():
        dstudent_NV[kind_N == 0] = 0
    if live_R.numel() == 0 or vocab == 0:
        return
    size = min(max(1, BLOCK_ELEMENTS // vocab), live_R.numel())
    scratch = [student_NV.new_empty(size, vocab, dtype=acc) for _ in range(5 + K)]
    for rows_B in live_R.split(size):
        blocks = [buffer[: rows_B.numel()] for buffer in scratch]
        # a run of neighbours is copied without an index
        first, last = int(rows_B[0]), int(rows_B[-1])
        where = slice(first, last + 1) if last - first + 1 == rows_B.numel() else rows_B
        for block, logits in zip(blocks, (student_NV, *teachers_NV), strict=False):
            block.copy_(logits[where, :vocab])
        block_rows = rows._replace(
            student_NV=blocks[0],
            teachers_NV=blocks[1 : 1 + K],
            labels_N=labels_N[where],
            kind_N=kind_N[where],
        )
        state_SB = state_SN[:, where].clone()
        drows_SB = None if drows_SN is None else drows_SN[: 1 + K, where].to(acc)
        grad = _block(block_rows, state_SB, steps, drows_SB, blocks[1 + K :])
        if steps.sums or steps.diverge:
            state_SN[:, where] = state_SB
        if dstudent_NV is not None and grad is not None:
            dstudent_NV[where, :vocab] = grad.to(dstudent_NV.dtype)


def _wider(
    rows: Rows,
    state_SN: Tensor,
    steps: Steps,
    drows_SN: Tensor | None,
    dstudent_NV: Tensor | None,
) -> None:
    """`rows_on_cpu` of float32 logits in the state's float64, a few rows at a time."""
    size = max(1, WIDE_ELEMENTS // max(1, rows.vocab))
    for start in range(0, len(rows.student_NV), size):
        here = slice(start, start + size)
        state_SB = state_SN[:, here].contiguous()
        rows_on_cpu(
            rows._replace(
                student_NV=rows.student_NV[here].to(state_SN.dtype),
                teachers_NV=[x[here].to(state_SN.dtype) for x in rows.teachers_NV],
                labels_N=rows.labels_N[here],
                kind_N=rows.kind_N[here],
            ),
            state_SB,
            steps,
            None if drows_SN is None else drows_SN[:, here],
            None if dstudent_NV is None else dstudent_NV[here],
        )
        if steps.sums or steps.diverge:
            state_SN[:, here] = state_SB


def _block(
    rows: Rows,
    state_SB: Tensor,
    steps: Steps,
    drows_SB: Tensor | None,
    scratch: Sequence[Tensor],
) -> Tensor | None:
    """Fill `state_SB`, return the gradient (B, V); overwrites the logits and `scratch`."""
    s, teachers, labels_B, kind_B, V, maths, parts = rows
    e, x, t, grad = scratch
    mlm_B, kl_B = (kind_B & MLM_ROW) > 0, (kind_B & KL_ROW) > 0
    here_B1 = (mlm_B & (labels_B >= 0) & (labels_B < V))[:, None]
    label = (torch.where(here_B1, labels_B[:, None], 0), here_B1)

    _cap(s, maths.softcap)
    if steps.sums:
        state_SB[0] = _top(s)
    torch.sub(s, state_SB[0][:, None], out=e).exp_()
    if steps.sums:
        _student_sums(s, e, t, label, parts, maths, state_SB)
    if drows_SB is not None:
        _label_gradient(e, label, torch.where(mlm_B, drows_SB[0], 0), state_SB, maths, grad)

    inv_t = 1 / maths.temperature
    if inv_t != 1 and (steps.sums or teachers):
        torch.sub(s, state_SB[0][:, None], out=e).mul_(inv_t).exp_()
        if steps.sums:
            state_SB[2] = e.sum(-1)
    for k, u in enumerate(teachers):
        numbers = state_SB[STUDENT_NUMBERS + TEACHER_NUMBERS * k :][:TEACHER_NUMBERS]
        _cap(u, maths.teacher_softcap)
        if steps.sums:
            numbers[0] = _top(u)
            if parts:
                numbers[3] = u.argmax(-1)
        if steps.sums or maths.beta:
            # before any maximum is taken off: beside a close teacher this difference is exact
            torch.sub(s, u, out=x).mul_(inv_t)
        w = u.sub_(numbers[0][:, None]).mul_(inv_t).exp_()
        if steps.sums:
            numbers[1] = w.sum(-1)
            if not maths.beta:
                numbers[2] = -_sum_product(w, x, t)
        dkl_B1 = None
        if drows_SB is not None:
            dkl_B1 = torch.where(kl_B, drows_SB[1 + k], 0)[:, None] * inv_t
        if maths.beta and (steps.diverge or dkl_B1 is not None):
            _other_divergence((e, w, x, t), state_SB, numbers, maths, dkl_B1, grad, steps)
        elif dkl_B1 is not None:
            q = torch.div(e, state_SB[2][:, None], out=t)
            # 0 times what such a row holds may be NaN
            pull = q.sub_(w.div_(numbers[1][:, None])).masked_fill_(dkl_B1 == 0, 0)
            grad.addcmul_(pull, dkl_B1)  # (5)
    if drows_SB is None:
        return None
    if maths.softcap:
        grad.mul_(1 - (s / maths.softcap).square_())  # (6)
    return grad


def _cap(x: Tensor, cap: float) -> None:
    if cap:
        x.div_(cap).tanh_().mul_(cap)


def _top(x: Tensor) -> Tensor:
    """Every row's maximum, 0 where no logit is finite."""
    top = x.amax(-1)
    return top.masked_fill_(top == float("-inf"), 0)


def _sum_product(weight: Tensor, x: Tensor, t: Tensor) -> Tensor:
    """Sum of weight * x over columns, where a weight of 0 silences even an infinity."""
    total = torch.mul(weight, x, out=t).sum(-1)
    if not total.isfinite().all():
        total = t.masked_fill_(weight == 0, 0).sum(-1)
    return total


def _student_sums(
    s: Tensor,
    e: Tensor,
    t: Tensor,
    label: tuple[Tensor, Tensor],
    parts: bool,
    maths: Maths,
    state_SB: Tensor,
) -> None:
    label_B1, here_B1 = label
    e_first = e.gather(1, label_B1)
    e_y = torch.where(here_B1, e_first, 0)
    # the mass beside the label is summed on its own: 1 - q[y] would lose it when q[y] is near 1
    rest = e.scatter_(1, label_B1, e_first - e_y).sum(-1)
    e.scatter_(1, label_B1, e_first)
    state_SB[1] = rest
    state_SB[2] = rest + e_y.squeeze(1)
    state_SB[3] = torch.where(here_B1, s.gather(1, label_B1), float("-inf")).squeeze(1)
    if parts:
        state_SB[4] = _sum_product(e, s, t)
        state_SB[5] = s.argmax(-1)
    if maths.label_smoothing:
        state_SB[6] = s.sum(-1)
    state_SB[7] = s.shape[1]


def _label_gradient(
    e: Tensor,
    label: tuple[Tensor, Tensor],
    dmlm_B: Tensor,
    state_SB: Tensor,
    maths: Maths,
    grad: Tensor,
) -> None:
    """(4) and (8) into `grad`."""
    label_B1, here_B1 = label
    factor_B1, at_y_B1, everywhere_B1 = (
        x[:, None] for x in label_gradient(state_SB, dmlm_B, maths)
    )
    torch.mul(e, factor_B1, out=grad)
    grad.scatter_(1, label_B1, torch.where(here_B1, at_y_B1, grad.gather(1, label_B1)))
    if maths.label_smoothing:
        grad.sub_(everywhere_B1)


def _other_divergence(
    blocks: tuple[Tensor, Tensor, Tensor, Tensor],
    state_SB: Tensor,
    numbers: Tensor,
    maths: Maths,
    dkl_B1: Tensor | None,
    grad: Tensor,
    steps: Steps,
) -> None:
    """Centre and spread of (7), and its gradient (9) added to `grad`."""
    e, w, x, t = blocks
    (m, _, d_t), (m_u, d_u), beta = state_SB[:3], numbers[:2], maths.beta
    log_ratio = x.sub_(((m - m_u) / maths.temperature + (d_t / d_u).log())[:, None])
    p = w.div_(d_u[:, None])
    q = torch.div(e, d_t[:, None])
    if beta == 1:
        log_qm, log_pm = log_ratio, None
    else:
        # of the larger of q and p, so that nothing overflows; exact where both are close
        gap = log_ratio.abs().neg_().expm1_()
        above = -torch.where(log_ratio < 0, gap * (1 - beta), gap * beta).log1p_()
        log_qm = torch.where(log_ratio < 0, above + log_ratio, above)
        log_pm = torch.where(log_ratio < 0, above, above - log_ratio)
    if steps.diverge:
        numbers[4] = _sum_product(q, log_qm, t)
        numbers[5] = 0 if log_pm is None else _sum_product(p, log_pm, t)
    if dkl_B1 is not None:
        pull = torch.sub(log_qm, numbers[4][:, None], out=t).mul_(q)
        pull.masked_fill_((q == 0) | (dkl_B1 == 0), 0)
        grad.addcmul_(pull, dkl_B1 * (1 if beta == 1 else 1 - beta))  # (9)
