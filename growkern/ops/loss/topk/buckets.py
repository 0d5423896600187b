"""What lies between the two readings of the logits: all that is about the teachers' tokens.

Here the tokens that any teacher kept are one more slice of the vocabulary beside the tail, whose
sums a reading has brought (`rows/state.py`). Few numbers, so all of it is in float64: q - p of
two close distributions then keeps its digits as it stands.

Equations are numbered in `topk_kl_mlm_loss.py`. Shape letters used in this file: C rows of one
chunk, k entries of one teacher, U tokens of all of them, B = U + 1 with the tail in the last place,
K teachers, T = 2 + 2 K numbers of a row.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from growkern.ops.loss.rows.options import KL_ROW, MLM_ROW, Maths
from growkern.ops.loss.rows.state import label_gradient, merge, terms

INF = float("inf")


class Kept(NamedTuple):
    """What one teacher says of the rows: log p of its tokens and log P of (1)."""

    ids_Ck: Tensor
    place_Ck: Tensor  # of its tokens among the U
    log_p_Ck: Tensor
    log_tail_C: Tensor


class Solved(NamedTuple):
    """The rows' numbers, and their gradient but for the factor of the softcap."""

    terms_TC: Tensor  # mlm, divergence per teacher, entropy, top-1 per teacher
    # of the tail, where the gradient is factor exp(z - m) + on_tail exp((z - m) / T) - everywhere,
    # at the label at_label + on_tail exp((z - m) / T) - everywhere
    tail_5C: Tensor  # m, factor, on_tail, at_label, everywhere
    tokens_CU: Tensor


def union(ids: Sequence[Tensor]) -> tuple[Tensor, list[Tensor]]:
    """Every token that a row has with any teacher, once, (C, U), and each teacher's places there.

    In the place of a repetition stands -1.
    """
    ids_CU = torch.cat(list(ids), 1)
    here_CU = torch.arange(ids_CU.shape[1], device=ids_CU.device).expand_as(ids_CU)
    place_CU = here_CU
    if len(ids) > 1:
        sorted_CU, order_CU = ids_CU.sort(stable=True)
        is_first_CU = F.pad(sorted_CU[:, 1:] != sorted_CU[:, :-1], (1, 0), value=True)
        first_CU = torch.where(is_first_CU, here_CU, 0).cummax(1).values
        place_CU = here_CU.scatter(1, order_CU, order_CU.gather(1, first_CU))
    ids_CU = torch.where(place_CU == here_CU, ids_CU, -1)
    return ids_CU, list(place_CU.split([x.shape[1] for x in ids], 1))


def divergence(log_p_CB: Tensor, log_q_CB: Tensor, beta: float) -> tuple[Tensor, Tensor]:
    """D of (3), (C,), and its pull on every bucket, (C, B)."""
    p, q = log_p_CB.exp(), log_q_CB.exp()

    def mean(weight: Tensor, x: Tensor) -> Tensor:
        # 0 * inf is 0 here, not NaN: what has no mass costs nothing
        return torch.where(weight > 0, weight * x, 0).sum(-1)

    if beta == 0:
        return mean(p, log_p_CB - log_q_CB), q - p
    if beta == 1:
        share, log_m = 1.0, log_p_CB
    else:
        share = 1 - beta
        log_m = torch.logaddexp(log_p_CB + math.log(beta), log_q_CB + math.log1p(-beta))
    log_qm = log_q_CB - log_m
    centre = mean(q, log_qm)
    pull = torch.where(q > 0, share * q * (log_qm - centre[:, None]), 0)
    return share * centre + (0 if beta == 1 else beta * mean(p, log_p_CB - log_m)), pull


def first_top(values_Ck: Tensor, ids_Ck: Tensor) -> Tensor:
    """The smallest id among those of the largest value, (C,): ties as argmax breaks them."""
    beyond = torch.iinfo(torch.int64).max
    top = values_Ck == values_Ck.amax(-1, keepdim=True)
    return ids_Ck.masked_fill(~top, beyond).amin(-1)


def solve(
    tail_SC: Tensor,
    tokens: tuple[Tensor, Tensor],
    teachers: Sequence[Kept],
    rows: tuple[Tensor, Tensor, Tensor],
    maths: Maths,
    parts: bool,
) -> Solved:
    """`tokens` are ids and logits (C, U), -inf if nowhere; `rows` labels, kinds and weights."""
    tail_SC, (ids_CU, z_CU) = tail_SC.double(), tokens
    label_C, kind_C, drows_WC = rows
    mlm_C, kl_C = (kind_C & MLM_ROW) > 0, (kind_C & KL_ROW) > 0
    z_CU, is_label_CU = z_CU.double(), ids_CU == label_C[:, None]
    whole_SC = merge(torch.stack([tail_SC, _state(z_CU, is_label_CU, maths)]), maths)
    m, _, d_t = whole_SC[:3]
    m_tail, _, tail_t, _, _, best = tail_SC[:6]
    has_tail = tail_t > 0
    x_CB = torch.cat([z_CU, torch.where(has_tail, m_tail, -INF)[:, None]], 1)
    log_q_CB = (x_CB - m[:, None]) / maths.temperature - d_t.log()[:, None]
    log_q_CB[:, -1] += tail_t.log()

    mlm, entropy = terms(whole_SC, kind_C, maths, parts)
    top_C = first_top(x_CB, torch.cat([ids_CU, best.long()[:, None]], 1)) if parts else None
    values, agreement, on_CB = [], [], torch.zeros_like(x_CB)
    for kept, dkl_C in zip(teachers, drows_WC[1:], strict=True):
        value, pull_CB = _against(kept, log_q_CB, maths.beta)
        on_CB.addcmul_(pull_CB, (dkl_C.double() / maths.temperature)[:, None])
        values.append(torch.where(kl_C, value, 0))
        agrees = kl_C & (top_C == first_top(kept.log_p_Ck, kept.ids_Ck)) if parts else kl_C & False
        agreement.append(agrees.to(value.dtype))
    on_CB.masked_fill_(~kl_C[:, None], 0)

    dmlm_C = torch.where(mlm_C, drows_WC[0].double(), 0)
    factor, at_label, everywhere = label_gradient(whole_SC, dmlm_C, maths)
    on_tokens_CU = torch.where(
        is_label_CU, at_label[:, None], factor[:, None] * (z_CU - m[:, None]).exp()
    )
    on_tokens_CU += on_CB[:, :-1] - everywhere[:, None]
    on_tail = torch.where(has_tail, on_CB[:, -1] / tail_t, 0)
    factor = torch.where(has_tail, factor * (m_tail - m).exp(), 0)
    return Solved(
        torch.stack([mlm, *values, entropy, *agreement]),
        torch.stack([m_tail, factor, on_tail, at_label, everywhere]),
        on_tokens_CU,
    )


def _state(z_CU: Tensor, is_label_CU: Tensor, maths: Maths) -> Tensor:
    """The numbers of the tokens' slice, (8, C). Its columns are counted, and summed, elsewhere."""
    m = z_CU.amax(-1)
    m = m.masked_fill(m == -INF, 0)
    x_CU = z_CU - m[:, None]
    e_CU = x_CU.exp()
    rest = e_CU.masked_fill(is_label_CU, 0).sum(-1)
    d_t = (x_CU / maths.temperature).exp().sum(-1)
    z_y = z_CU.masked_fill(~is_label_CU, -INF).amax(-1)
    moment = torch.where(e_CU > 0, e_CU * z_CU, 0).sum(-1)
    none = torch.zeros_like(m)
    return torch.stack([m, rest, d_t, z_y, moment, none, none, none])


def _against(kept: Kept, log_q_CB: Tensor, beta: float) -> tuple[Tensor, Tensor]:
    """D of one teacher, and its pull on every token and on the tail, (C, B), by (4).

    Tokens of other teachers lie in this one's last bucket, together with the tail.
    """
    beside_CB = log_q_CB.scatter(1, kept.place_Ck, -INF)
    log_rest_C1 = beside_CB.logsumexp(-1, keepdim=True)
    share_CB = torch.where(beside_CB > -INF, (beside_CB - log_rest_C1).exp(), 0)
    log_q_CB = log_q_CB.masked_fill(beside_CB > -INF, -INF)
    log_q_CB[:, -1:] = log_rest_C1
    log_p_CB = torch.full_like(log_q_CB, -INF).scatter_(1, kept.place_Ck, kept.log_p_Ck)
    log_p_CB[:, -1] = kept.log_tail_C
    value, pull_CB = divergence(log_p_CB, log_q_CB, beta)
    on_rest_C1 = pull_CB[:, -1:].clone()
    pull_CB[:, -1] = 0
    return value, pull_CB.addcmul_(share_CB, on_rest_C1)
