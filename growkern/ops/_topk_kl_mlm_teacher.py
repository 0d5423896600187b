"""A teacher that is k ids and log-probs per row: its checks, and its masses.

Equations are numbered in `topk_kl_mlm_loss.py`. Shape letters used in this file: N rows, k entries
per row.
"""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from growkern.errors import GrowthError
from growkern.ops._kl_mlm_options import KL_ROW

TAILS = ("bucket", "renormalise")
_LOG_HALF = math.log(0.5)


def check_tail(tail: str) -> bool:
    """Whether the tail is dropped."""
    if tail not in TAILS:
        raise GrowthError(f"tail must be one of {TAILS}, got {tail!r}")
    return tail == "renormalise"


def check_topk(
    ids: Tensor | None, given: list[Tensor], hidden: Tensor, vocab: int
) -> tuple[Tensor, Tensor]:
    """Checked ids and log-probs as (N, k); `given` holds the log-probs of one teacher."""
    if isinstance(ids, (list, tuple)) or len(given) > 1:
        raise GrowthError("a cached teacher is one: give tensors, not lists of them")
    (logprobs,) = given
    if ids is None:
        raise GrowthError("teacher_topk_logprobs needs teacher_topk_ids")
    for name, x in (("teacher_topk_ids", ids), ("teacher_topk_logprobs", logprobs)):
        if x.ndim < 1 or x.shape[:-1] != hidden.shape[:-1] or x.device != hidden.device:
            raise GrowthError(
                f"{name} {tuple(x.shape)} on {x.device} needs the rows {tuple(hidden.shape[:-1])} "
                f"of student_hidden, k entries each, on {hidden.device}"
            )
    if ids.shape != logprobs.shape or not 0 < ids.shape[-1] <= vocab:
        raise GrowthError(
            f"teacher_topk_ids {tuple(ids.shape)} and teacher_topk_logprobs "
            f"{tuple(logprobs.shape)} must have the same k, 1 to {vocab} (the vocabulary)"
        )
    if ids.dtype not in (torch.int32, torch.int64):
        raise GrowthError(f"teacher_topk_ids must be int32 or int64, got {ids.dtype}")
    if not logprobs.is_floating_point():
        raise GrowthError(f"teacher_topk_logprobs must be float, got {logprobs.dtype}")
    if logprobs.requires_grad:
        raise GrowthError("the teacher is frozen: detach teacher_topk_logprobs")
    k = ids.shape[-1]
    return ids.reshape(-1, k), logprobs.reshape(-1, k)


def check_topk_values(
    ids_NK: Tensor, logprobs_NK: Tensor, kind_N: Tensor, vocab: int, renormalise: bool
) -> None:
    """Refuse what is no distribution on a CPU; a GPU is not asked, and asserts the range alone.

    Rows that carry no KL are not looked at.
    """
    kl_N = (kind_N & KL_ROW) > 0
    inside_N = ((ids_NK >= 0) & (ids_NK < vocab)).all(-1)
    if kind_N.device.type != "cpu":
        torch._assert_async((inside_N | ~kl_N).all(), "a teacher_topk_id is outside the vocabulary")
        return
    rows_R = kl_N.nonzero().squeeze(1)
    ids_RK, logprobs_RK = ids_NK[rows_R].long(), logprobs_NK[rows_R].double()

    def refuse(bad_R: Tensor, what: str) -> None:
        if bad_R.any():
            row = int(bad_R.nonzero()[0])
            raise GrowthError(f"row {int(rows_R[row])} of the teacher: {what}")

    refuse(~inside_N[rows_R], f"an id of teacher_topk_ids is outside 0..{vocab - 1}")
    in_order_RK = ids_RK.sort(-1).values
    twice_R = (in_order_RK[:, 1:] == in_order_RK[:, :-1]).any(-1)
    refuse(twice_R, "an id of teacher_topk_ids stands there twice: its mass would count twice")
    p_RK = logprobs_RK.exp()
    # a stored log-prob is off by half an eps of itself, so p by half an eps times p |log p|
    slack_R = 1 + torch.special.entr(p_RK).clamp(min=0).sum(-1)
    allowed_R = 1 + slack_R * torch.finfo(logprobs_NK.dtype).eps
    refuse(
        ~(p_RK.sum(-1) <= allowed_R),  # written so that NaN is refused
        "teacher_topk_logprobs sum to more than 1 or are NaN: they must be natural logarithms of "
        "probabilities, normalised over the whole vocabulary at this temperature",
    )
    if renormalise:
        refuse(p_RK.sum(-1) == 0, "no mass among the k entries, nothing to renormalise")


def teacher_masses(
    topk: Sequence[Tensor], kl_N: Tensor, vocab: int, drop_tail: bool, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor]:
    """ids and log p, (N, k), and log P, (N,), of (1): float64 inside, `dtype` outside.

    A row that carries no KL may hold anything: it gets k tokens that exist, with no mass on them.
    """
    ids_NK, logprobs_NK = topk
    k = ids_NK.shape[1]
    kl_N1 = kl_N[:, None]
    ids_NK = torch.where(kl_N1, ids_NK.long(), torch.arange(k, device=ids_NK.device))
    log_p_NK = torch.where(kl_N1, logprobs_NK.double(), -math.log(vocab))
    log_sum_N = log_p_NK.logsumexp(-1)
    # all of the vocabulary has no tail, whatever its stored numbers add up to
    whole = drop_tail or k == vocab
    # in a bucket the sum is above 1 only by the rounding of what was stored
    excess_N = log_sum_N if whole else log_sum_N.clamp(min=0)
    log_p_NK = (log_p_NK - excess_N[:, None]).masked_fill(~kl_N1, float("-inf"))
    log_sum_N = (log_sum_N - excess_N).masked_fill(~kl_N, 0)
    log_tail_N = torch.where(
        log_sum_N > _LOG_HALF, (-log_sum_N.expm1()).log(), (-log_sum_N.exp()).log1p()
    )  # (2)
    return ids_NK, log_p_NK.to(dtype), log_tail_N.to(dtype)
