"""The rows of the top-k loss on a CPU: a few rows at a time, so that a pass stays in cache.

Equations are numbered in `topk_kl_mlm_loss.py`. Shape letters used in this file: B rows of one
block, N rows, V vocabulary, k entries of the teacher per row.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from growkern.ops._kl_mlm_cpu import BLOCK_ELEMENTS
from growkern.ops._kl_mlm_options import KL_ROW, MLM_ROW
from growkern.ops._launch import acc_torch_dtype
from growkern.ops._topk_kl_mlm_teacher import teacher_masses


def topk_rows_on_cpu(
    student_NV: Tensor,
    topk: Sequence[Tensor],
    labels_N: Tensor,
    kind_N: Tensor,
    vocab: int,
    maths: Sequence[float],
    parts: bool,
    rows_SN: Tensor,
    drows_SN: Tensor,
    dstudent_NV: Tensor | None,
) -> None:
    """Fill `rows_SN` (mlm, kl, entropy, top-1) and, given a place for it, the gradient.

    Overwrites the logits; `dstudent_NV` may be the same memory. Rows of kind 0 get zeros.
    """
    acc = acc_torch_dtype(student_NV)
    mlm_N, kl_N = (kind_N & MLM_ROW) > 0, (kind_N & KL_ROW) > 0
    ids_NK, log_p_NK, log_tail_N = teacher_masses(topk, kl_N, vocab, maths[2] != 0, acc)
    dmlm_N, dkl_N = drows_SN.to(acc)[:2].where(torch.stack([mlm_N, kl_N]), 0)
    size = max(1, BLOCK_ELEMENTS // vocab)
    scratch = student_NV.new_empty(3, size, vocab, dtype=acc)
    for start in range(0, kind_N.numel(), size):
        rows = slice(start, start + size)
        s = student_NV[rows]
        state = _Rows(s, ids_NK[rows], labels_N[rows], mlm_N[rows], maths, scratch[:, : len(s)])
        teacher = (log_p_NK[rows], log_tail_N[rows][:, None])
        live_B = kind_N[rows] > 0
        measured_SB = state.measure(*teacher, parts)
        measured_SB[0].mul_(mlm_N[rows])
        measured_SB[1:4:2] = measured_SB[1:4:2].where(kl_N[rows], 0)
        rows_SN[:4, rows] = measured_SB.where(live_B, 0)
        if dstudent_NV is not None:
            grad = state.gradient(*teacher, dmlm_N[rows][:, None], dkl_N[rows][:, None])
            dstudent_NV[rows] = grad.masked_fill_(~live_B[:, None], 0)


class _Rows:
    """A block of student rows with the teacher's k tokens taken out of it: the sums of (2).

    `_B1` columns hold one number per row; e is exp(s - m), e_t the same at temperature T, both in
    `scratch`, 0 at the k tokens.
    """

    def __init__(
        self,
        s: Tensor,
        ids_Bk: Tensor,
        labels_B: Tensor,
        mlm_B: Tensor,
        maths: Sequence[float],
        scratch: Tensor,
    ) -> None:
        self.s, self.ids_Bk = s, ids_Bk
        self.temperature, self.cap, _ = maths
        self.e, self.e_t, self.grad = scratch
        if self.cap:
            s.div_(self.cap).tanh_().mul_(self.cap)
        self.label_B1 = torch.where(mlm_B, labels_B, 0)[:, None]
        self.z_y = s.gather(1, self.label_B1)
        self.s_Bk = s.gather(1, ids_Bk)
        s.scatter_(1, ids_Bk, float("-inf"))

        m = s.amax(-1, keepdim=True)
        # an empty tail has no maximum, and -inf - -inf is none either
        base = m.masked_fill(m == float("-inf"), 0)
        self.top = torch.maximum(m, self.s_Bk.amax(-1, keepdim=True))
        self.shift = (m - self.top).exp()
        torch.sub(s, base, out=self.e).exp_()
        self.e_Bk = (self.s_Bk - self.top).exp()
        # the mass beside the label is summed on its own: 1 - q[y] would lose it when q[y] is near 1
        e_y = self.e.gather(1, self.label_B1)
        rest = self.e.scatter_(1, self.label_B1, 0).sum(-1, keepdim=True) * self.shift
        self.e.scatter_(1, self.label_B1, e_y)
        self.is_label_Bk = ids_Bk == self.label_B1
        self.rest = rest + self.e_Bk.masked_fill(self.is_label_Bk, 0).sum(-1, keepdim=True)
        self.d = self.rest + (self.z_y - self.top).exp()

        if self.temperature == 1:
            self.e_t = self.e
        else:
            torch.sub(s, base, out=self.e_t).mul_(1 / self.temperature).exp_()
        self.tail = self.e_t.sum(-1, keepdim=True)
        x_Bk, x_m = (self.s_Bk - self.top) / self.temperature, (m - self.top) / self.temperature
        log_d = (self.tail * x_m.exp() + x_Bk.exp().sum(-1, keepdim=True)).log()
        self.log_q_Bk = x_Bk - log_d
        self.log_Q = self.tail.log() + x_m - log_d

    def measure(self, log_p_Bk: Tensor, log_P: Tensor, parts: bool) -> Tensor:
        """mlm, kl, entropy, top-1 agreement: (4, B)."""
        mlm = self.d.log() + self.top - self.z_y
        # 0 * inf is 0 here, not NaN: what the teacher rules out costs nothing
        p_Bk, P = log_p_Bk.exp(), log_P.exp()
        kl_Bk = (p_Bk * (log_p_Bk - self.log_q_Bk)).masked_fill_(p_Bk == 0, 0)
        kl = kl_Bk.sum(-1, keepdim=True) + (P * (log_P - self.log_Q)).masked_fill_(P == 0, 0)  # (3)
        entropy = agree = torch.zeros_like(mlm)
        if parts:
            q = torch.mul(self.e, self.shift / self.d, out=self.grad)
            entropy = torch.special.entr(q).sum(-1, keepdim=True)
            entropy = entropy + torch.special.entr(self.e_Bk / self.d).sum(-1, keepdim=True)
            agree = (self._student_top() == first_top(log_p_Bk, self.ids_Bk)).to(mlm.dtype)
        return torch.cat([mlm, kl, entropy, agree], 1).t()

    def _student_top(self) -> Tensor:
        """The first of the likeliest tokens, which may stand on either side: (B, 1)."""
        value, token = self.s.max(-1, keepdim=True)
        value_k = self.s_Bk.amax(-1, keepdim=True)
        token_k = first_top(self.s_Bk, self.ids_Bk)
        return torch.where(value > value_k, token, token_k).where(
            value != value_k, torch.minimum(token, token_k)
        )

    def gradient(self, log_p_Bk: Tensor, log_P: Tensor, dmlm: Tensor, dkl: Tensor) -> Tensor:
        """(4) and (5), overwriting scratch: (B, V)."""
        dkl = dkl / self.temperature
        on_tail = dkl * (self.log_Q.exp() - log_P.exp()) / self.tail
        on_tail = on_tail.masked_fill_(self.tail == 0, 0)
        grad = torch.mul(self.e, dmlm * self.shift / self.d, out=self.grad)
        grad.scatter_(1, self.label_B1, -dmlm * self.rest / self.d)
        grad.addcmul_(self.e_t, on_tail)
        grad_Bk = dmlm / self.d * torch.where(self.is_label_Bk, -self.rest, self.e_Bk)
        grad_Bk = torch.addcmul(grad_Bk, dkl, self.log_q_Bk.exp() - log_p_Bk.exp())
        if self.cap:
            grad.mul_(1 - (self.s / self.cap).square_())
            grad_Bk = grad_Bk * (1 - (self.s_Bk / self.cap).square())
        return grad.scatter_(1, self.ids_Bk, grad_Bk)


def first_top(values_Bk: Tensor, ids_Bk: Tensor) -> Tensor:
    """The smallest id among those of the largest value, (B, 1): ties as argmax breaks them."""
    beyond = torch.iinfo(torch.int64).max
    top = values_Bk == values_Bk.amax(-1, keepdim=True)
    return ids_Bk.masked_fill(~top, beyond).amin(-1, keepdim=True)
