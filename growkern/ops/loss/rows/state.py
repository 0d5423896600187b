"""Running sums of a row, and the loss terms computed from them.

A reading of a row's logits leaves a few sums, the state. States of slices of the vocabulary merge
into the state of the whole row. A slice may be a tile that one device processes in turn, or the
columns that one rank of a process group holds.

The compiled library and Triton keep the same numbers in the same order: see the enums of
`csrc/cpu/kl_mlm.h` and the constants of `rows/triton_sums.py`. A test compares them.
Equations are numbered in `kl_mlm_loss.py`.

Shape letters used in this file: N rows, V columns of a slice, K teachers, L slices, W = 1 + K
terms, S numbers of a row.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple, TypeAlias

import torch
from torch import Tensor

from growkern.ops.loss.rows.options import Maths
from growkern.ops.loss.rows.vocab_parallel import add_up, gather

# -------------------------------------------------------------------------- rows

MLM_ROW, KL_ROW = 1, 2  # bits of kind_N: which terms a row has; a row of kind 0 is not read


class Rows(NamedTuple):
    """The rows that a row function works on."""

    student_NV: Tensor
    teachers_NV: Sequence[Tensor]
    labels_N: Tensor  # columns of these logits; a label outside of them is on another slice
    kind_N: Tensor
    vocab: int  # columns from here on are padding
    maths: Maths
    parts: bool  # whether entropy and top-1 agreement are wanted
    # (vocab,) to add to the student's logits and to each teacher's; (): there are none. GPUs only
    biases: Sequence[Tensor | None] = ()


class RowInputs(NamedTuple):
    """The inputs of the rows of a loss besides their logits."""

    labels: Tensor  # (N,) int64, counted from the first column here
    kinds: Tensor  # (N,) int32, the bits of `kind_N`
    weights: Tensor  # (W, N): the loss's gradient by the terms that it sums

    def part(self, rows: slice | Tensor | None) -> "RowInputs":
        """The inputs of some rows; None: of all."""
        if rows is None:
            return self
        if isinstance(rows, Tensor):
            return RowInputs(*(x.index_select(-1, rows) for x in self))
        return RowInputs(*(x[..., rows] for x in self))


def live_kinds(counted_N: Tensor, row_weights_N: Tensor | None) -> Tensor:
    """The kinds of rows without the rows of weight 0. A mean counts them all the same.

    Their terms are not computed, because a product with 0 would not remove NaN.
    """
    return counted_N if row_weights_N is None else counted_N * (row_weights_N != 0)


class Steps(NamedTuple):
    """The steps of one call of a row function. More than one step needs the whole vocabulary."""

    sums: bool = False  # fill the state except centre and spread
    diverge: bool = False  # fill centre and spread
    grad: bool = False  # write the gradient


# (rows, state_SN, steps, drows_WN, dstudent_NV): fills the state and, given the gradient of the
# terms, writes that of the student's logits
RowFunction: TypeAlias = Callable[..., None]

# ------------------------------------------------------------------------- state


class StudentSums(NamedTuple):
    """The numbers of a row that do not depend on a teacher: the first rows of a state."""

    maximum: Tensor  # m, the largest logit; 0 if none is finite
    rest: Tensor  # sum of exp(z - m) over all columns except the label
    sum_t: Tensor  # sum of exp((z - m) / T)
    label_logit: Tensor  # -inf if the slice does not hold the label
    moment: Tensor  # sum of exp(z - m) z, if the entropy is wanted
    best: Tensor  # column of the first maximum, if the agreement is wanted
    sum_z: Tensor  # sum of z, if labels are smoothed
    columns: Tensor  # number of columns


class TeacherSums(NamedTuple):
    """The numbers of a row and one teacher: they follow in the state, teacher after teacher.

    Centre and spread need the sums of the whole row, and so a second reading of the logits.
    """

    maximum: Tensor  # m_u, as the student's
    sum_t: Tensor  # sum of exp((u - m_u) / T)
    cross: Tensor  # sum of exp((u - m_u) / T) (u - z) / T, for (2)
    best: Tensor  # as the student's
    centre: Tensor  # sum of q log(q / m), for (7)
    spread: Tensor  # sum of p log(p / m), for (7)


class State(NamedTuple):
    """Views of the rows of a state; (N,) each, or (L, N) of the states of several slices."""

    student: StudentSums
    teachers: list[TeacherSums]


def unpack(state_SN: Tensor) -> State:
    """The named rows of a state (S, N), or of states (S, L, N)."""
    size, each, rows = len(StudentSums._fields), len(TeacherSums._fields), state_SN.unbind()
    teachers = [TeacherSums(*rows[k : k + each]) for k in range(size, len(rows), each)]
    return State(StudentSums(*rows[:size]), teachers)


def n_numbers(n_teachers: int) -> int:
    """S, the number of rows of a state."""
    return len(StudentSums._fields) + len(TeacherSums._fields) * n_teachers


def clear(state_SN: Tensor) -> None:
    """Make `state_SN` the state of rows that have not been read."""
    state_SN.zero_()
    state_SN[StudentSums._fields.index("label_logit")].fill_(float("-inf"))


def merge(states_LSN: Tensor, maths: Maths) -> Tensor:
    """The state of all slices together, (S, N). The slices are in the order of their columns."""
    student, teachers = unpack(states_LSN.transpose(0, 1))
    columns_before = student.columns.cumsum(0) - student.columns
    m, near, near_t, first = _common_maximum(student.maximum, student.sum_t, maths.temperature)
    merged: list[Tensor] = [
        *StudentSums(
            maximum=m,
            rest=(student.rest * near).sum(0),
            sum_t=(student.sum_t * near_t).sum(0),
            label_logit=student.label_logit.amax(0),
            moment=(student.moment * near).sum(0),
            best=_pick(student.best + columns_before, first),
            sum_z=student.sum_z.sum(0),
            columns=student.columns.sum(0),
        )
    ]
    for teacher in teachers:
        m, _, near_t, first = _common_maximum(teacher.maximum, teacher.sum_t, maths.temperature)
        merged += TeacherSums(
            maximum=m,
            sum_t=(teacher.sum_t * near_t).sum(0),
            cross=(teacher.cross * near_t).sum(0),
            best=_pick(teacher.best + columns_before, first),
            centre=teacher.centre.sum(0),
            spread=teacher.spread.sum(0),
        )
    return torch.stack(merged)


def _common_maximum(m_LN: Tensor, sum_LN: Tensor, temperature: float) -> tuple[Tensor, ...]:
    """The maximum, the factors that rescale sums to it (at 1 and T), and the slice it is in."""
    # a slice without a finite logit has no maximum, and 0 in its place
    m_LN = m_LN.masked_fill(sum_LN == 0, float("-inf"))
    m, first = m_LN.max(0)
    m = m.masked_fill(m == float("-inf"), 0)
    return m, (m_LN - m).exp(), ((m_LN - m) / temperature).exp(), first


def _pick(x_LN: Tensor, slice_N: Tensor) -> Tensor:
    return x_LN.gather(0, slice_N[None]).squeeze(0)


# ----------------------------------------------------------------------- reading


def needs_second_reading(n_teachers: int, maths: Maths) -> bool:
    """Whether the divergence needs centre and spread: every one except the forward KL does."""
    return n_teachers > 0 and not maths.is_forward()


def read_rows(run: RowFunction, rows: Rows, group: str, state_SN: Tensor) -> None:
    """Fill the state from the logits of the whole vocabulary, or of one rank's columns."""
    second = needs_second_reading(len(rows.teachers_NV), rows.maths)
    if group:
        read_slices(run, lambda: (rows,), group, state_SN)
    else:
        run(rows, state_SN, Steps(sums=True, diverge=second))


def read_slices(
    run: RowFunction, slices: Callable[[], Iterable[Rows]], group: str, state_SN: Tensor
) -> None:
    """Fill the state from slices that come one at a time, here and on the ranks of `group`."""
    merged_SN = state_SN.clone()
    clear(merged_SN)
    for rows in slices():
        run(rows, state_SN, Steps(sums=True))
        merged_SN = merge(torch.stack([merged_SN, state_SN]), rows.maths)
    if group:
        merged_SN = merge(gather(merged_SN, group), rows.maths)
    if needs_second_reading(len(rows.teachers_NV), rows.maths):
        second_SN = torch.zeros_like(merged_SN)
        for rows in slices():
            state_SN.copy_(merged_SN)
            run(rows, state_SN, Steps(diverge=True))
            _add_second_reading(second_SN, state_SN)
        if group:
            add_up(second_SN, group)
        _add_second_reading(merged_SN, second_SN)
    state_SN.copy_(merged_SN)


def _add_second_reading(state_SN: Tensor, slice_SN: Tensor) -> None:
    """Add the centre and spread of one more slice."""
    for total, teacher in zip(unpack(state_SN).teachers, unpack(slice_SN).teachers, strict=True):
        total.centre.add_(teacher.centre)
        total.spread.add_(teacher.spread)


# ------------------------------------------------------------- from state to loss


def label_gradient(state_SN: Tensor, dmlm_N: Tensor, maths: Maths) -> tuple[Tensor, Tensor, Tensor]:
    """(4) and (9) of whole rows, in three parts of shape (N,).

    The factor of exp(z - m) at every column except the label, the number that replaces that
    product at the label, and the number that is subtracted at every column.
    """
    student = unpack(state_SN).student
    e_y = (student.label_logit - student.maximum).exp()
    d = student.rest + e_y
    from_z_loss = torch.zeros_like(d)
    if maths.z_loss:
        from_z_loss = dmlm_N * 2 * maths.z_loss * (d.log() + student.maximum)
    smooth = dmlm_N * maths.label_smoothing
    at_label = (from_z_loss * e_y - dmlm_N * student.rest) / d + smooth
    everywhere = smooth / student.columns if maths.label_smoothing else smooth
    return (dmlm_N + from_z_loss) / d, at_label, everywhere


class Terms(NamedTuple):
    """What the loss and its measurements are made of, for some rows."""

    mlm: Tensor  # (N,)
    divergences: Sequence[Tensor]  # (N,) per teacher
    entropy: Tensor  # (N,)
    agreements: Sequence[Tensor]  # (N,) per teacher: 1 where both have the same likeliest token

    def stacked(self) -> Tensor:
        """All of them, (2 W, N): first the W terms that the loss sums."""
        return torch.stack([self.mlm, *self.divergences, self.entropy, *self.agreements])


def fit_to_dtype(
    weight_WN: Tensor, dtype: torch.dtype, maths: Maths
) -> tuple[Tensor, Tensor | None]:
    """Row weights times a power of two, for float16 gradients, and the inverse factor.

    float16 ends at 2^16 and has no numbers under 6e-8. An element of a row's gradient is at most
    the sum of its weights times

        MLM, (4) and (9):   1 + 2 c |lse|, where c is the z-loss
        forward KL, (5):    1 / T, as |q - p| <= 1
        JSD, (8):           0.54 / T. With b = 1 - beta, q log(q / m) is above -1 / e and the mean
                            of log(q / m) lies in 0 .. -log b: b (1 / e - log b) is the most
        reverse KL:         R / 4 T^2, where R is the range of z - u over the columns. It is
                            q (f - mean of f) / T with f = (z - u) / T, and q (1 - q) <= 1 / 4

    and, beside a close teacher, 1e-6 of a weight. The first three come to 2^12. This leaves room
    for a z-loss of large logits. R is not known before the logits are: the reverse KL comes to 2^15
    at R = 1024, and overflows from twice this on. Its elements under 5e-10 of a weight are lost at
    T = 1, and the others' under 2e-11. The float32 sums are multiplied by the inverse.
    """
    if dtype != torch.float16 or not weight_WN.numel():
        return weight_WN, None
    T = maths.temperature
    on_kl = max(1 / T, 256 / T**2 / 8) if maths.is_reverse() else 1 / T
    bound_N = weight_WN[0].abs() + on_kl * weight_WN[1:].abs().sum(0)
    power = (12 - bound_N.amax().clamp(min=1e-30).log2()).floor()
    return weight_WN * power.exp2(), (-power).exp2()


def weighted(weight_WN: Tensor, terms_RN: Tensor) -> Tensor:
    """The loss of each row, (N,): the sum of its first W terms times their weights."""
    # 0 * inf counts as 0: a label that the student rules out costs nothing without a weight
    return (weight_WN * terms_RN[: len(weight_WN)]).masked_fill(weight_WN == 0, 0).sum(0)


def named_terms(terms_RN: Tensor) -> Terms:
    """The inverse of `Terms.stacked`."""
    rows, W = terms_RN.unbind(), len(terms_RN) // 2
    return Terms(rows[0], rows[1:W], rows[W], rows[W + 1 :])


def terms(state_SN: Tensor, kind_N: Tensor, maths: Maths, parts: bool) -> Tensor:
    """`Terms` of the rows, stacked: (2 W, N).

    Rows without a term have 0 there. `parts` says whether the last two are wanted.
    """
    student, teachers = unpack(state_SN)
    kl_N = (kind_N & KL_ROW) > 0 if teachers else kind_N
    m = student.maximum
    d = student.rest + (student.label_logit - m).exp()
    lse = d.log() + m
    mlm = lse - student.label_logit  # (1)
    if maths.label_smoothing:
        mean_z = student.sum_z / student.columns
        mlm = mlm + maths.label_smoothing * (student.label_logit - mean_z)  # (9)
    if maths.z_loss:
        mlm = mlm + maths.z_loss * lse.square()  # (9)
    divergences, agreements = [], []
    for teacher in teachers:
        if maths.is_forward():
            log_ratio = (student.sum_t / teacher.sum_t).log()
            shift = (m - teacher.maximum) / maths.temperature + log_ratio
            value = teacher.cross / teacher.sum_t + shift  # (2)
        else:
            value = maths.mixed(teacher.spread, teacher.centre)  # (7)
        # rounding may leave it below 0, where no divergence is
        divergences.append(torch.where(kl_N, value.clamp(min=0), 0))
        agreements.append(((student.best == teacher.best) & kl_N & parts).to(value.dtype))
    mlm = mlm.masked_fill((kind_N & MLM_ROW) == 0, 0)
    entropy = (
        (lse - student.moment / d).masked_fill_(kind_N == 0, 0) if parts else torch.zeros_like(m)
    )
    return Terms(mlm, divergences, entropy, agreements).stacked()
