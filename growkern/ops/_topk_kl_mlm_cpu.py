"""The tail's gradient on a CPU: a few rows at a time, so that a pass stays in cache.

Equations are numbered in `topk_kl_mlm_loss.py`. Shape letters used in this file: B rows of one
block, N rows, V vocabulary.
"""

import torch
from torch import Tensor

from growkern.ops._kl_mlm_cpu import BLOCK_ELEMENTS
from growkern.ops._kl_mlm_options import MLM_ROW, Rows


def tail_gradient_on_cpu(rows: Rows, tail_5N: Tensor, dstudent_NV: Tensor) -> None:
    """Write the gradient of the tail, which may overwrite the logits; rows of kind 0 get zeros.

    `tail_5N` as in `_topk_kl_mlm_buckets.py`. What comes out in the tokens' places is to be
    overwritten.
    """
    student_NV, _, labels_N, kind_N, V, maths, _ = rows
    if V == 0:
        return
    is_here_N = ((kind_N & MLM_ROW) > 0) & (labels_N >= 0) & (labels_N < V)
    labels_N = torch.where(is_here_N, labels_N, 0)
    size = max(1, BLOCK_ELEMENTS // V)
    scratch = student_NV.new_empty(2, min(size, len(student_NV)), V)
    for start in range(0, len(student_NV), size):
        here = slice(start, start + size)
        s = student_NV[here]
        grad, on_tail = scratch[:, : len(s)]
        m, factor, weight, at_label, everywhere = tail_5N[:, here, None]
        torch.sub(s, m, out=on_tail)
        torch.exp(on_tail, out=grad)
        if maths.temperature != 1:
            on_tail = on_tail.mul_(1 / maths.temperature).exp_()
        else:
            on_tail.copy_(grad)
        grad.mul_(factor)
        label_B1, is_here_B1 = labels_N[here, None], is_here_N[here, None]
        grad.scatter_(1, label_B1, torch.where(is_here_B1, at_label, grad.gather(1, label_B1)))
        grad.addcmul_(on_tail, weight)
        if maths.label_smoothing:
            grad.sub_(everywhere)
        if maths.softcap:
            grad.mul_(1 - (s / maths.softcap).square_())
        dstudent_NV[here] = grad.masked_fill_((kind_N[here] == 0)[:, None], 0)
