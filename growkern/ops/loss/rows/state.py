"""What is known of a row after its logits have been read: a few numbers, and the row's terms.

The numbers of two slices of the vocabulary give those of both, whether the slices are tiles that
one device takes in turn or columns that several hold. Equations are numbered in `kl_mlm_loss.py`.

Shape letters used in this file: N rows, K teachers, L slices, S = 8 + 6 K numbers of a row:

    0 m        the student's maximum, 0 if there is no finite logit
    1 rest     sum exp(z - m) beside the label
    2 d_T      sum exp((z - m) / T)
    3 z_y      the label's logit, -inf if the slice does not hold it
    4 moment   sum exp(z - m) z, if the entropy is wanted
    5 best     the column of the first maximum, if agreement is wanted
    6 sum_z    sum z, if labels are smoothed
    7 count    the number of columns

and for teacher k at 8 + 6 k: maximum m_u; d_u, sum exp((u - m_u) / T); cross, the sum of
exp((u - m_u) / T) (u - z) / T for (2); best; then centre, sum q log(q / m), and spread,
sum p log(p / m), of (7), which take a second reading: they need the sums of the whole row.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from growkern.ops.loss.rows.options import KL_ROW, MLM_ROW, Maths

STUDENT_NUMBERS, TEACHER_NUMBERS = 8, 6


class Steps(NamedTuple):
    """What one call of a row function does; in one call it needs the whole vocabulary."""

    sums: bool = False  # fill the state but for centre and spread
    diverge: bool = False  # fill centre and spread
    grad: bool = False


def n_numbers(n_teachers: int) -> int:
    return STUDENT_NUMBERS + TEACHER_NUMBERS * n_teachers


def clear(state_SN: Tensor) -> None:
    """The state of rows nobody has read."""
    state_SN.zero_()
    state_SN[3] = float("-inf")


def needs_second_reading(n_teachers: int, maths: Maths) -> bool:
    """Whether the divergence needs centre and spread: all but the forward one do."""
    return n_teachers > 0 and maths.beta != 0


def merge(states_LSN: Tensor, maths: Maths) -> Tensor:
    """The state of all slices together, (S, N); columns are in the order of the slices."""
    parts = list(states_LSN.unbind(1))
    m_LN, rest, d_t, z_y, moment, best, sum_z, count = parts[:STUDENT_NUMBERS]
    before = count.cumsum(0) - count  # columns of the slices in front
    m, near, near_t, first = _together(m_LN, d_t, maths.temperature)
    merged = [m, (rest * near).sum(0), (d_t * near_t).sum(0), z_y.amax(0)]
    merged += [(moment * near).sum(0), _pick(best + before, first), sum_z.sum(0), count.sum(0)]
    for k in range(STUDENT_NUMBERS, len(parts), TEACHER_NUMBERS):
        m_LN, d_u, cross, best, centre, spread = parts[k : k + TEACHER_NUMBERS]
        m, _, near_t, first = _together(m_LN, d_u, maths.temperature)
        merged += [m, (d_u * near_t).sum(0), (cross * near_t).sum(0), _pick(best + before, first)]
        merged += [centre.sum(0), spread.sum(0)]
    return torch.stack(merged)


def _together(m_LN: Tensor, d_LN: Tensor, temperature: float) -> tuple[Tensor, ...]:
    """The common maximum, what brings sums to it (at temperatures 1 and T), the slice it is in."""
    # the 0 that stands for the maximum of a slice without a finite logit is none
    m_LN = m_LN.masked_fill(d_LN == 0, float("-inf"))
    m, first = m_LN.max(0)
    m = m.masked_fill(m == float("-inf"), 0)
    return m, (m_LN - m).exp(), ((m_LN - m) / temperature).exp(), first


def _pick(x_LN: Tensor, slice_N: Tensor) -> Tensor:
    return x_LN.gather(0, slice_N[None]).squeeze(0)


def add_second_reading(state_SN: Tensor, partial_SN: Tensor) -> None:
    """Add the centre and spread of one more slice."""
    for k in range(STUDENT_NUMBERS, len(state_SN), TEACHER_NUMBERS):
        state_SN[k + 4 : k + 6] += partial_SN[k + 4 : k + 6]


def label_gradient(state_SN: Tensor, dmlm_N: Tensor, maths: Maths) -> tuple[Tensor, Tensor, Tensor]:
    """(4) and (8) of whole rows, (N,) each, in three parts.

    The factor of exp(z - m) beside the label, what stands there at the label, and what is taken
    from every column.
    """
    m, rest, _, z_y = state_SN[:4]
    e_y = (z_y - m).exp()
    d = rest + e_y
    pull = dmlm_N * 2 * maths.z_loss * (d.log() + m) if maths.z_loss else torch.zeros_like(d)
    smooth = dmlm_N * maths.label_smoothing
    at_y = (pull * e_y - dmlm_N * rest) / d + smooth
    everywhere = smooth / state_SN[7] if maths.label_smoothing else smooth
    return (dmlm_N + pull) / d, at_y, everywhere


def terms(state_SN: Tensor, kind_N: Tensor, maths: Maths, parts: bool) -> Tensor:
    """mlm, divergence per teacher, entropy, top-1 per teacher: (2 + 2K, N), 0 outside the kind."""
    m, rest, d_t, z_y, moment, best, sum_z, count = state_SN[:STUDENT_NUMBERS]
    mlm_N, kl_N = (kind_N & MLM_ROW) > 0, (kind_N & KL_ROW) > 0
    d = rest + (z_y - m).exp()
    lse = d.log() + m
    mlm = lse - z_y  # (1)
    if maths.label_smoothing:
        mlm = mlm + maths.label_smoothing * (z_y - sum_z / count)  # (8)
    if maths.z_loss:
        mlm = mlm + maths.z_loss * lse.square()  # (8)
    rows, agreement = [torch.where(mlm_N, mlm, 0)], []
    beta = maths.beta
    for k in range(STUDENT_NUMBERS, len(state_SN), TEACHER_NUMBERS):
        m_u, d_u, cross, best_u, centre, spread = state_SN[k : k + TEACHER_NUMBERS]
        if beta == 0:
            value = cross / d_u + ((m - m_u) / maths.temperature + (d_t / d_u).log())  # (2)
        else:
            value = centre if beta == 1 else beta * spread + (1 - beta) * centre  # (7)
        rows.append(torch.where(kl_N, value, 0))
        agreement.append(((best == best_u) & kl_N & parts).to(value.dtype))
    entropy = torch.where(kind_N > 0, lse - moment / d, 0) if parts else torch.zeros_like(m)
    return torch.stack([*rows, entropy, *agreement])
