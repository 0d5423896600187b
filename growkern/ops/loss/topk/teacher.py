"""Teachers that are k ids and log-probs per row: their checks, and their probabilities.

Equations are numbered in `topk_kl_mlm_loss.py`. Shape letters used in this file: N rows, k entries
per row.
"""

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from growkern.errors import GrowthError
from growkern.ops.backend import check_tensors
from growkern.ops.loss.rows.options import Maths
from growkern.ops.loss.rows.state import KL_ROW

_LOG_HALF = math.log(0.5)

# a teacher may compute l = z - lse(z) in float32. The rounding of lse is the same for a whole row,
# so it moves the sum of p by up to |lse| / 2^24. This is 2^-14 for logits of up to 2^10. What must
# be refused is far above it: logits, or log-probs that were divided by a temperature
_COMPUTED = 2.0**-14


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
    check_tensors(dict(zip(names, pair, strict=True)))
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
    """Check that ids and log-probs are distributions; rows without the KL term are not checked.

    A GPU and compiled code only assert that ids are inside the vocabulary, as nothing waits for the
    answer.

    Raises:
        GrowthError: on a CPU, ids outside of it or twice in a row, or log-probs that sum to more
            than 1 or, with `renormalise`, to 0.
    """
    (ids_NK, logprobs_NK), kl_N = pair, (kind_N & KL_ROW) > 0
    inside_N = ((ids_NK >= 0) & (ids_NK < vocab)).all(-1)
    if kind_N.device.type != "cpu" or torch.compiler.is_compiling():
        torch._assert_async((inside_N | ~kl_N).all(), "a teacher_topk_id is outside the vocabulary")
        return
    rows_R = kl_N.nonzero().squeeze(1)
    ids_RK, logprobs_RK = ids_NK[rows_R].long(), logprobs_NK[rows_R].double()

    def refuse(bad_R: Tensor, what: str) -> None:
        if bad_R.any():
            row = int(bad_R.nonzero()[0])
            raise GrowthError(f"row {int(rows_R[row])} of the teacher: {what}")

    refuse(
        (ids_RK == -1).all(-1),
        "all of its ids are -1, which marks a position without a row: leave it out of kl_rows",
    )
    refuse(~inside_N[rows_R], f"an id of teacher_topk_ids is outside 0..{vocab - 1}")
    in_order_RK = ids_RK.sort(-1).values
    twice_R = (in_order_RK[:, 1:] == in_order_RK[:, :-1]).any(-1)
    refuse(twice_R, "an id occurs twice in teacher_topk_ids: its probability would count twice")
    p_RK = logprobs_RK.exp()
    # float64 numbers may come from float32 ones
    stored = torch.float32 if logprobs_NK.dtype == torch.float64 else logprobs_NK.dtype
    allowed_R = 1 + torch.finfo(stored).eps + _rounding(p_RK, stored) + _COMPUTED
    refuse(
        ~(p_RK.sum(-1) <= allowed_R),  # written so that NaN is refused
        "teacher_topk_logprobs sum to more than 1 or are NaN: they must be natural logarithms of "
        "probabilities, normalised over the whole vocabulary at this temperature",
    )
    if renormalise:
        refuse(p_RK.sum(-1) == 0, "the k entries have probability 0: nothing to renormalise")


def teacher_probabilities(
    pair: Sequence[Tensor], kl_N: Tensor, vocab: int, drop_tail: bool, maths: Maths
) -> tuple[Tensor, Tensor, Tensor]:
    """Ids and log p, (N, k), and log P, (N,), of (1) in float64.

    A row without the KL term may hold anything. Its ids become -1, with probability 0.
    """
    ids_NK, logprobs_NK = pair
    kl_N1 = kl_N[:, None]
    ids_NK = torch.where(kl_N1, ids_NK.long(), -1)
    log_p_NK = torch.where(kl_N1, logprobs_NK.double(), -math.log(vocab))
    log_sum_N = log_p_NK.logsumexp(-1)
    # with k = V there is no tail, whatever the stored numbers add up to
    whole = drop_tail or ids_NK.shape[1] == vocab
    # else a sum above 1 comes from the rounding of the stored numbers
    excess_N = log_sum_N if whole else log_sum_N.clamp(min=0)
    log_p_NK = (log_p_NK - excess_N[:, None]).masked_fill(~kl_N1, -math.inf)
    log_sum_N = (log_sum_N - excess_N).masked_fill(~kl_N, 0)
    log_tail_N = torch.where(
        log_sum_N > _LOG_HALF, (-log_sum_N.expm1()).log(), (-log_sum_N.exp()).log1p()
    )  # (2)
    if maths.is_reverse() and not whole:
        # the reverse KL has no limit as the tail goes to 0: it counts as no less than the rounding
        lost_N = _rounding(log_p_NK.exp(), logprobs_NK.dtype) / 2
        log_tail_N = torch.maximum(log_tail_N, lost_N.log())
    return ids_NK, log_p_NK, log_tail_N


def _rounding(p_NK: Tensor, stored: torch.dtype) -> Tensor:
    """Twice the rounding error of sum p, (N,): log p is stored to half an eps of itself."""
    return torch.special.entr(p_NK).clamp(min=0).sum(-1) * torch.finfo(stored).eps
