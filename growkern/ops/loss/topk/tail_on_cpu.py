"""The tail's gradient on a CPU: a few rows at a time, so that a pass stays in cache.

Equations are numbered in `topk_kl_mlm_loss.py`. Shape letters used in this file: B rows of one
block, N rows, V vocabulary.
"""

import torch
from torch import Tensor

from growkern.ops.loss.rows.on_cpu import BLOCK_ELEMENTS
from growkern.ops.loss.rows.options import MLM_ROW, Rows


def tail_gradient_on_cpu(rows: Rows, tail_5N: Tensor, dstudent_NV: Tensor) -> None:
    """Write the gradient of the tail, which may overwrite the logits; rows of kind 0 get zeros.

    `tail_5N` as in `topk/buckets.py`. What comes out in the tokens' places is to be
    overwritten.
    """
    student_NV, _, labels_N, kind_N, V, maths, _ = rows
    if V == 0:
        return
    has_label_N = ((kind_N & MLM_ROW) > 0) & (labels_N >= 0) & (labels_N < V)
    size = max(1, BLOCK_ELEMENTS // V)
    scratch = student_NV.new_empty(2, min(size, len(student_NV)), V)
    for start in range(0, len(student_NV), size):
        here = slice(start, start + size)
        s = student_NV[here]
        e, grad = scratch[:, : len(s)]
        m, factor, on_tail, at_label, everywhere = tail_5N[:, here, None]
        torch.sub(s, m, out=e)
        if maths.temperature == 1:
            torch.mul(e.exp_(), factor, out=grad)
        else:
            torch.exp(e, out=grad).mul_(factor)
            e.mul_(1 / maths.temperature).exp_()
        rows_R = has_label_N[here].nonzero().squeeze(1)
        grad[rows_R, labels_N[here][rows_R]] = at_label[rows_R, 0]
        grad.addcmul_(e, on_tail)
        if maths.label_smoothing:
            grad.sub_(everywhere)
        if maths.softcap:
            grad.mul_(1 - (s / maths.softcap).square_())
        dstudent_NV[here] = grad
    dstudent_NV[kind_N == 0] = 0
