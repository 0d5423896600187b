"""Top-k loss terms and gradients of a chunk, from the kept tokens and the tail.

The tokens that any teacher kept are treated as one more slice of the vocabulary. The other slice is
the tail, whose sums a reading has found (`rows/state.py`). These are few numbers, so all of it is
computed in float64: there q - p of two close distributions keeps its digits.

Equations are numbered in `topk_kl_mlm_loss.py`. Shape letters used in this file: C rows of one
chunk, k entries of one teacher, U tokens of all teachers, B = U + 1 with the tail in the last
place, K teachers, S numbers of a state, T = 2 + 2 K terms of a row.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from growkern.ops.loss.rows.state import (
    KL_ROW,
    MLM_ROW,
    Maths,
    RowInputs,
    StudentSums,
    label_gradient,
    merge,
    named_terms,
    terms,
    unpack,
)

INF = float("inf")


class Kept(NamedTuple):
    """One teacher's probabilities of the rows."""

    ids_Ck: Tensor
    place_Ck: Tensor  # position of each id among the U tokens
    log_p_Ck: Tensor
    log_tail_C: Tensor  # log P of (1)


class TailFactors(NamedTuple):
    """The gradient of the tail's columns, (C,) each, except for the factor of the softcap.

    It is softmax exp(z - m) + softmax_t exp((z - m) / T) - everywhere. At the label `at_label`
    replaces the first of the three.
    """

    maximum: Tensor  # m
    softmax: Tensor
    softmax_t: Tensor
    at_label: Tensor
    everywhere: Tensor


class Solved(NamedTuple):
    """The rows' terms, and their gradient except for the factor of the softcap."""

    terms_TC: Tensor  # `Terms`, stacked
    tail_5C: Tensor  # `TailFactors`
    tokens_CU: Tensor


def union(ids: Sequence[Tensor]) -> tuple[Tensor, list[Tensor]]:
    """The tokens of all teachers, (C, U), and each teacher's positions among them.

    A token that occurs again has -1 there, and the position of its first occurrence.
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


def divergence(log_p_CB: Tensor, log_q_CB: Tensor, maths: Maths) -> tuple[Tensor, Tensor]:
    """D of (3), (C,), and (5), (C, B)."""
    p, q = log_p_CB.exp(), log_q_CB.exp()

    def mean(weight: Tensor, x: Tensor) -> Tensor:
        # 0 * inf counts as 0, not NaN: a token of probability 0 costs nothing
        return torch.where(weight > 0, weight * x, 0).sum(-1)

    if maths.is_forward():
        return mean(p, log_p_CB - log_q_CB), q - p
    log_m = maths.log_mixture(log_p_CB, log_q_CB)
    log_qm = log_q_CB - log_m
    centre = mean(q, log_qm)
    pull = torch.where(q > 0, maths.student_share() * q * (log_qm - centre[:, None]), 0)
    return maths.mixed(mean(p, log_p_CB - log_m), centre), pull


def first_top(values_Ck: Tensor, ids_Ck: Tensor) -> Tensor:
    """The smallest id among those of the largest value, (C,): argmax breaks ties like that."""
    top = values_Ck == values_Ck.amax(-1, keepdim=True)
    return ids_Ck.masked_fill(~top, torch.iinfo(torch.int64).max).amin(-1)


def solve(
    tail_SC: Tensor,
    tokens: tuple[Tensor, Tensor],
    teachers: Sequence[Kept],
    rows: RowInputs,
    maths: Maths,
    parts: bool,
) -> Solved:
    """Terms and gradients of some rows.

    Args:
        tail_SC: state of the logits without the tokens.
        tokens: ids and logits (C, U); -inf where the id is -1 or on no rank.
        rows: with the gradient of their terms as weights.
        parts: whether entropy and top-1 agreement are wanted.
    """
    tail_SC, (ids_CU, z_CU) = tail_SC.double(), tokens
    label_C, kind_C, drows_WC = rows
    mlm_C, kl_C = (kind_C & MLM_ROW) > 0, (kind_C & KL_ROW) > 0
    z_CU, is_label_CU = z_CU.double(), ids_CU == label_C[:, None]
    whole_SC = merge(torch.stack([tail_SC, _state(z_CU, is_label_CU, maths)]), maths)
    whole, tail = unpack(whole_SC).student, unpack(tail_SC).student
    m, has_tail = whole.maximum, tail.sum_t > 0
    x_CB = torch.cat([z_CU, torch.where(has_tail, tail.maximum, -INF)[:, None]], 1)
    log_q_CB = (x_CB - m[:, None]) / maths.temperature - whole.sum_t.log()[:, None]
    log_q_CB[:, -1] += tail.sum_t.log()

    alone = named_terms(terms(whole_SC, kind_C, maths, parts))
    top_C = first_top(x_CB, torch.cat([ids_CU, tail.best.long()[:, None]], 1)) if parts else None
    values, agreement, on_CB = [], [], torch.zeros_like(x_CB)
    for kept, dkl_C in zip(teachers, drows_WC[1:], strict=True):
        value, pull_CB = _against(kept, log_q_CB, maths)
        # the pull of the reverse KL may be infinite, and 0 * inf is NaN
        pull_CB.masked_fill_((dkl_C == 0)[:, None], 0)
        on_CB.addcmul_(pull_CB, (dkl_C.double() / maths.temperature)[:, None])
        values.append(torch.where(kl_C, value.clamp(min=0), 0))
        agrees = kl_C & (top_C == first_top(kept.log_p_Ck, kept.ids_Ck)) if parts else kl_C & False
        agreement.append(agrees.to(value.dtype))
    on_CB.masked_fill_(~kl_C[:, None], 0)

    dmlm_C = torch.where(mlm_C, drows_WC[0].double(), 0)
    softmax, at_label, everywhere = label_gradient(whole_SC, dmlm_C, maths)
    on_tokens_CU = torch.where(
        is_label_CU, at_label[:, None], softmax[:, None] * (z_CU - m[:, None]).exp()
    )
    on_tokens_CU += on_CB[:, :-1] - everywhere[:, None]
    factors = TailFactors(
        maximum=tail.maximum,
        softmax=torch.where(has_tail, softmax * (tail.maximum - m).exp(), 0),
        softmax_t=torch.where(has_tail, on_CB[:, -1] / tail.sum_t, 0),
        at_label=at_label,
        everywhere=everywhere,
    )
    return Solved(
        alone._replace(divergences=values, agreements=agreement).stacked(),
        torch.stack(factors),
        on_tokens_CU,
    )


def _state(z_CU: Tensor, is_label_CU: Tensor, maths: Maths) -> Tensor:
    """The state of the tokens' slice, without its columns: the tail's state has those of both."""
    m = z_CU.amax(-1)
    m = m.masked_fill(m == -INF, 0)
    x_CU = z_CU - m[:, None]
    e_CU, none = x_CU.exp(), torch.zeros_like(m)
    sums = StudentSums(
        maximum=m,
        rest=e_CU.masked_fill(is_label_CU, 0).sum(-1),
        sum_t=(x_CU / maths.temperature).exp().sum(-1),
        label_logit=z_CU.masked_fill(~is_label_CU, -INF).amax(-1),
        moment=torch.where(e_CU > 0, e_CU * z_CU, 0).sum(-1),
        best=none,
        sum_z=none,
        columns=none,
    )
    return torch.stack(sums)


def _against(kept: Kept, log_q_CB: Tensor, maths: Maths) -> tuple[Tensor, Tensor]:
    """D of one teacher, (C,), and T times (4) of every token and of the tail, (C, B).

    The tokens of other teachers are in this teacher's last bucket, together with the tail.
    """
    beside_CB = log_q_CB.scatter(1, kept.place_Ck, -INF)
    log_rest_C1 = beside_CB.logsumexp(-1, keepdim=True)
    share_CB = torch.where(beside_CB > -INF, (beside_CB - log_rest_C1).exp(), 0)
    log_q_CB = log_q_CB.masked_fill(beside_CB > -INF, -INF)
    log_q_CB[:, -1:] = log_rest_C1
    log_p_CB = torch.full_like(log_q_CB, -INF).scatter_(1, kept.place_Ck, kept.log_p_Ck)
    log_p_CB[:, -1] = kept.log_tail_C
    value, pull_CB = divergence(log_p_CB, log_q_CB, maths)
    on_rest_C1 = pull_CB[:, -1:].clone()
    pull_CB[:, -1] = 0
    return value, pull_CB.addcmul_(share_CB, on_rest_C1)
