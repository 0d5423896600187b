"""The rows of the KL + MLM loss on a CPU: a few rows at a time, so that a pass stays in cache.

Equations are numbered in `kl_mlm_loss.py`. Shape letters used in this file: B rows of one block,
N rows, V vocabulary, K teachers, S statistics per row (`row_layout`).
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from growkern.ops._kl_mlm_options import KL_ROW, MLM_ROW
from growkern.ops._launch import acc_torch_dtype

# elements of one block: five float32 blocks of this size fit the private caches of two cores
BLOCK_ELEMENTS = 1 << 17
# below this difference of log-probabilities q - p is formed as p * expm1(log q - log p)
NEAR = 0.25


def rows_on_cpu(
    student_NV: Tensor,
    teachers_NV: Sequence[Tensor],
    labels_N: Tensor,
    kind_N: Tensor,
    vocab: int,
    maths: Sequence[float],
    parts: bool,
    rows_SN: Tensor,
    drows_SN: Tensor | None = None,
    dstudent_NV: Tensor | None = None,
) -> None:
    """Fill `rows_SN`, (2 + 2K, N) or more, and, given the rows' gradient, `dstudent_NV`.

    Rows of kind 0 are not read; neither are columns from `vocab` on. `dstudent_NV` may be
    `student_NV` itself.
    """
    K, acc = len(teachers_NV), acc_torch_dtype(student_NV)
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
        rows, grad = _block(
            blocks[0],
            blocks[1 : 1 + K],
            labels_N[where],
            kind_N[where],
            maths,
            parts,
            drows_SB,
            blocks[1 + K :],
        )
        rows_SN[: 2 + 2 * K, where] = rows
        if dstudent_NV is not None and grad is not None:
            dstudent_NV[where, :vocab] = grad.to(dstudent_NV.dtype)


def _shift(x: Tensor, cap: float) -> Tensor:
    """Cap the logits and move every row's maximum to 0, in place; the maximum, (B, 1)."""
    if cap:
        x.div_(cap).tanh_().mul_(cap)
    top = x.amax(-1, keepdim=True)
    x.sub_(top)
    return top


def _block(
    s: Tensor,
    teachers: Sequence[Tensor],
    labels_B: Tensor,
    kind_B: Tensor,
    maths: Sequence[float],
    parts: bool,
    drows_SB: Tensor | None,
    scratch: Sequence[Tensor],
) -> tuple[Tensor, Tensor | None]:
    """Statistics (2 + 2K, B) and gradient (B, V) of one block; overwrites s, teachers, scratch."""
    temperature, cap, teacher_cap = maths
    K = len(teachers)
    e, x, t, grad = scratch
    mlm_B, kl_B = (kind_B & MLM_ROW) > 0, (kind_B & KL_ROW) > 0
    label_B1 = torch.where(mlm_B, labels_B, 0)[:, None]
    rows = s.new_zeros(2 + 2 * K, s.shape[0])

    m_s = _shift(s, cap)
    student_top = s.argmax(-1) if parts and K else None
    torch.exp(s, out=e)
    e_y = e.gather(1, label_B1)
    # the mass beside the label is summed on its own: 1 - q[y] would lose it when q[y] is near 1
    rest = e.scatter_(1, label_B1, 0).sum(-1, keepdim=True)
    d = rest + e_y
    rows[0] = torch.where(mlm_B, (d.log() - s.gather(1, label_B1)).squeeze(1), 0)  # (1)
    if drows_SB is not None:
        dmlm_B1 = torch.where(mlm_B, drows_SB[0], 0)[:, None]
        torch.mul(e, dmlm_B1 / d, out=grad)
        grad.scatter_(1, label_B1, -dmlm_B1 * rest / d)  # (4)
    e.scatter_(1, label_B1, e_y)
    if parts:
        rows[1 + K] = torch.special.entr(torch.div(e, d, out=x), out=t).sum(-1)

    if K and temperature != 1:
        torch.mul(s, 1 / temperature, out=t)
        d = torch.exp(t, out=e).sum(-1, keepdim=True)
    for k, u in enumerate(teachers):
        _shift(u, teacher_cap)
        if student_top is not None:
            rows[2 + K + k] = (u.argmax(-1) == student_top) & kl_B
        torch.sub(s, u, out=x)
        if temperature != 1:
            x.mul_(1 / temperature)
            u.mul_(1 / temperature)
        w = u.exp_()
        d_u = w.sum(-1, keepdim=True)
        shift = d.log() - d_u.log()
        # a token the teacher rules out costs nothing: 0 * inf is 0 here, not NaN
        cross = torch.mul(w, x, out=t).masked_fill_(w == 0, 0).sum(-1, keepdim=True)
        kl = shift - cross / d_u  # (2)
        rows[1 + k] = torch.where(kl_B, kl.squeeze(1), 0)
        if drows_SB is not None:
            dkl_B1 = torch.where(kl_B, drows_SB[1 + k], 0)[:, None] / temperature
            _add_difference(grad, dkl_B1, w.div_(d_u), x.sub_(shift), e, d, t)
    if drows_SB is None:
        return rows, None
    if cap:
        grad.mul_(1 - ((s + m_s) / cap).square_())  # (6)
    return rows, grad


def _add_difference(
    grad: Tensor, scale: Tensor, p: Tensor, log_ratio: Tensor, e: Tensor, d: Tensor, t: Tensor
) -> None:
    """grad += scale * (q - p) of (5), q = e / d, without cancellation where the two are close.

    On a student 1 % away from its teacher q - p in float32 keeps four digits, p * expm1 six.
    """
    near = log_ratio.abs() < NEAR  # False for NaN: both sides rule the token out
    torch.div(e, d, out=t).sub_(p)
    p.mul_(log_ratio.expm1_())
    grad.addcmul_(torch.where(near, p, t), scale)
