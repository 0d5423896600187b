"""The rows of the KL + MLM loss on a CPU: a few rows at a time, so that a pass stays in cache.

Equations are numbered in `kl_mlm_loss.py`. Shape letters used in this file: B rows of one block,
N rows, V vocabulary, K teachers, S statistics per row (`row_layout`).
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from growkern.ops._kl_mlm_options import KL_ROW, MLM_ROW, Maths, Rows
from growkern.ops._launch import acc_torch_dtype

# elements of one block: five float32 blocks of this size fit the private caches of two cores
BLOCK_ELEMENTS = 1 << 17


def rows_on_cpu(
    rows: Rows,
    rows_SN: Tensor | None,
    drows_SN: Tensor | None = None,
    dstudent_NV: Tensor | None = None,
) -> None:
    """Fill `rows_SN` (unless None), (2 + 2K, N) or more, and, given its gradient, `dstudent_NV`.

    Rows of kind 0 are not read; neither are columns from `vocab` on. `dstudent_NV` may be
    `student_NV` itself.
    """
    student_NV, teachers_NV, labels_N, kind_N, vocab, maths, parts = rows
    K, acc = len(teachers_NV), acc_torch_dtype(student_NV)
    if rows_SN is not None:
        rows_SN.zero_()
    in_place = dstudent_NV is not None and dstudent_NV.data_ptr() == student_NV.data_ptr()
    if dstudent_NV is not None and not in_place:
        dstudent_NV.zero_()
    live_R = kind_N.nonzero().squeeze(1)
    if dstudent_NV is not None and in_place and live_R.numel() < kind_N.numel():
        dstudent_NV[kind_N == 0] = 0
    if live_R.numel() == 0:
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
        drows_SB = None if drows_SN is None else drows_SN[: 1 + K, where].to(acc)
        rows_SB = None if rows_SN is None else rows_SN.new_zeros(2 + 2 * K, rows_B.numel())
        kind_B, teachers = kind_N[where], blocks[1 : 1 + K]
        inputs = (blocks[0], teachers, labels_N[where], kind_B, maths, parts)
        grad = _block(*inputs, rows_SB, drows_SB, blocks[1 + K :])
        if rows_SN is not None and rows_SB is not None:
            rows_SN[: 2 + 2 * K, where] = rows_SB
        if dstudent_NV is not None and grad is not None:
            dstudent_NV[where, :vocab] = grad.to(dstudent_NV.dtype)


def _top(x: Tensor, cap: float) -> Tensor:
    """Cap the logits in place; every row's maximum, (B, 1)."""
    if cap:
        x.div_(cap).tanh_().mul_(cap)
    return x.amax(-1, keepdim=True)


def _block(
    s: Tensor,
    teachers: Sequence[Tensor],
    labels_B: Tensor,
    kind_B: Tensor,
    maths: Maths,
    parts: bool,
    rows_SB: Tensor | None,
    drows_SB: Tensor | None,
    scratch: Sequence[Tensor],
) -> Tensor | None:
    """Fill `rows_SB` (2 + 2K, B), return the gradient (B, V); overwrites s, teachers, scratch."""
    temperature, cap, teacher_cap = maths
    K = len(teachers)
    e, x, t, grad = scratch
    mlm_B, kl_B = (kind_B & MLM_ROW) > 0, (kind_B & KL_ROW) > 0
    label_B1 = torch.where(mlm_B, labels_B, 0)[:, None]

    m_s = _top(s, cap)
    student_top = s.argmax(-1) if rows_SB is not None and parts and K else None
    torch.sub(s, m_s, out=e).exp_()
    e_y = e.gather(1, label_B1)
    # the mass beside the label is summed on its own: 1 - q[y] would lose it when q[y] is near 1
    rest = e.scatter_(1, label_B1, 0).sum(-1, keepdim=True)
    d = rest + e_y
    if rows_SB is not None:
        mlm = d.log() + m_s - s.gather(1, label_B1)  # (1)
        rows_SB[0] = torch.where(mlm_B, mlm.squeeze(1), 0)
    if drows_SB is not None:
        dmlm_B1 = torch.where(mlm_B, drows_SB[0], 0)[:, None]
        torch.mul(e, dmlm_B1 / d, out=grad)
        grad.scatter_(1, label_B1, -dmlm_B1 * rest / d)  # (4)
    e.scatter_(1, label_B1, e_y)
    if rows_SB is not None and parts:
        rows_SB[1 + K] = torch.special.entr(torch.div(e, d, out=x), out=t).sum(-1)

    if K and temperature != 1:
        d = torch.sub(s, m_s, out=e).mul_(1 / temperature).exp_().sum(-1, keepdim=True)
    for k, u in enumerate(teachers):
        m_u = _top(u, teacher_cap)
        if rows_SB is not None and student_top is not None:
            rows_SB[2 + K + k] = (u.argmax(-1) == student_top) & kl_B
        if rows_SB is not None:
            # before any maximum is taken off: beside a close teacher this difference is exact
            torch.sub(s, u, out=x).mul_(1 / temperature)
        w = u.sub_(m_u).mul_(1 / temperature).exp_()
        d_u = w.sum(-1, keepdim=True)
        if rows_SB is not None:
            log_ratio = x.sub_((m_s - m_u) / temperature + (d / d_u).log())
            kl = _divergence(w, d_u, log_ratio, t)
            rows_SB[1 + k] = torch.where(kl_B, kl.squeeze(1), 0)
        if drows_SB is not None:
            dkl_B1 = torch.where(kl_B, drows_SB[1 + k], 0)[:, None] / temperature
            grad.addcmul_(torch.div(e, d, out=t).sub_(w.div_(d_u)), dkl_B1)  # (5)
    if drows_SB is None:
        return None
    if cap:
        grad.mul_(1 - (s / cap).square_())  # (6)
    return grad


def _divergence(w: Tensor, d_u: Tensor, log_ratio: Tensor, t: Tensor) -> Tensor:
    """(2) as -sum p * (log q_T - log p), p = w / d_u: (B, 1)."""
    kl = -torch.mul(w, log_ratio, out=t).sum(-1, keepdim=True) / d_u
    if not kl.isfinite().all():
        # a token the teacher rules out costs nothing: 0 * inf is 0 here, not NaN
        kl = -t.masked_fill_(w == 0, 0).sum(-1, keepdim=True) / d_u
    return kl
