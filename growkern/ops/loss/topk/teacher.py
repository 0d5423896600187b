"""A teacher that is k ids and log-probs per row: its checks, and its masses.

Equations are numbered in `topk_kl_mlm_loss.py`. Shape letters used in this file: N rows, k entries
per row.
"""

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from growkern.errors import GrowthError
from growkern.ops.loss.rows.options import KL_ROW

TAILS = ("bucket", "renormalise")
_LOG_HALF = math.log(0.5)


def check_tail(tail: str, beta: float) -> bool:
    """Whether the tail is dropped."""
    if tail not in TAILS:
        raise GrowthError(f"tail must be one of {TAILS}, got {tail!r}")
    if tail == "renormalise" and beta == 1:
        raise GrowthError(
            "divergence='reverse' is infinite with tail='renormalise', which rules out all but the "
            "k tokens: use tail='bucket'"
        )
    return tail == "renormalise"


def check_topk(ids: Any, given: list[Tensor], hidden: Tensor, vocab: int) -> list[Tensor]:
    """Checked ids and log-probs as (N, k), teacher after teacher; `given` are the log-probs."""
    if not given:
        return []
    listed = list(ids) if isinstance(ids, (list, tuple)) else [ids]
    if len(listed) != len(given) or any(x is None for x in listed):
        raise GrowthError(
            f"{len(given)} teacher_topk_logprobs need as many teacher_topk_ids, got "
            f"{sum(x is not None for x in listed)}"
        )
    flat = []
    for j, pair in enumerate(zip(listed, given, strict=True)):
        _check_pair(f"[{j}]" if len(given) > 1 else "", pair, hidden, vocab)
        flat += [x.reshape(-1, x.shape[-1]) for x in pair]
    return flat


def _check_pair(which: str, pair: tuple[Tensor, Tensor], hidden: Tensor, vocab: int) -> None:
    names = [f"teacher_topk_{what}{which}" for what in ("ids", "logprobs")]
    for name, x in zip(names, pair, strict=True):
        if x.ndim < 1 or x.shape[:-1] != hidden.shape[:-1] or x.device != hidden.device:
            raise GrowthError(
                f"{name} {tuple(x.shape)} on {x.device} needs the rows {tuple(hidden.shape[:-1])} "
                f"of student_hidden, k entries each, on {hidden.device}"
            )
    ids, logprobs = pair
    if ids.shape != logprobs.shape or not 0 < ids.shape[-1] <= vocab:
        raise GrowthError(
            f"{names[0]} {tuple(ids.shape)} and {names[1]} {tuple(logprobs.shape)} must have the "
            f"same k, 1 to {vocab} (the vocabulary)"
        )
    if ids.dtype not in (torch.int32, torch.int64):
        raise GrowthError(f"{names[0]} must be int32 or int64, got {ids.dtype}")
    if not logprobs.is_floating_point():
        raise GrowthError(f"{names[1]} must be float, got {logprobs.dtype}")
    if logprobs.requires_grad:
        raise GrowthError(f"the teacher is frozen: detach {names[1]}")


def check_topk_values(
    pair: Sequence[Tensor], kind_N: Tensor, vocab: int, renormalise: bool
) -> None:
    """Refuse what is no distribution on a CPU; a GPU is not asked, and asserts the range alone.

    Rows that carry no KL are not looked at.
    """
    (ids_NK, logprobs_NK), kl_N = pair, (kind_N & KL_ROW) > 0
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
    stored = logprobs_NK.dtype
    allowed_R = 1 + torch.finfo(stored).eps + _rounding(p_RK, stored)
    refuse(
        ~(p_RK.sum(-1) <= allowed_R),  # written so that NaN is refused
        "teacher_topk_logprobs sum to more than 1 or are NaN: they must be natural logarithms of "
        "probabilities, normalised over the whole vocabulary at this temperature",
    )
    if renormalise:
        refuse(p_RK.sum(-1) == 0, "no mass among the k entries, nothing to renormalise")


def teacher_masses(
    pair: Sequence[Tensor], kl_N: Tensor, vocab: int, drop_tail: bool, beta: float
) -> tuple[Tensor, Tensor, Tensor]:
    """ids and log p, (N, k), and log P, (N,), of (1) in float64.

    A row that carries no KL may hold anything: it gets k times -1, with no mass.
    """
    ids_NK, logprobs_NK = pair
    kl_N1 = kl_N[:, None]
    ids_NK = torch.where(kl_N1, ids_NK.long(), -1)
    log_p_NK = torch.where(kl_N1, logprobs_NK.double(), -math.log(vocab))
    log_sum_N = log_p_NK.logsumexp(-1)
    # all of the vocabulary has no tail, whatever its stored numbers add up to
    whole = drop_tail or ids_NK.shape[1] == vocab
    # in a bucket the sum is above 1 only by the rounding of what was stored
    excess_N = log_sum_N if whole else log_sum_N.clamp(min=0)
    log_p_NK = (log_p_NK - excess_N[:, None]).masked_fill(~kl_N1, -math.inf)
    log_sum_N = (log_sum_N - excess_N).masked_fill(~kl_N, 0)
    log_tail_N = torch.where(
        log_sum_N > _LOG_HALF, (-log_sum_N.expm1()).log(), (-log_sum_N.exp()).log1p()
    )  # (2)
    if beta == 1 and not whole:
        # what rounding has left of a tail would cost without limit
        lost_N = _rounding(log_p_NK.exp(), logprobs_NK.dtype) / 2
        log_tail_N = torch.maximum(log_tail_N, lost_N.log())
    return ids_NK, log_p_NK, log_tail_N


def _rounding(p_NK: Tensor, stored: torch.dtype) -> Tensor:
    """Twice how far sum p may be off, (N,): log p is stored to half an eps of itself."""
    return torch.special.entr(p_NK).clamp(min=0).sum(-1) * torch.finfo(stored).eps
