"""The row kernel in Triton: sums in one reading of the logits, the gradient in a second one.

`rows/on_triton.py` launches it. Equations are numbered in `kl_mlm_loss.py`.

Shape letters used in this file: N rows, V vocabulary, K teachers, S numbers of a row.
"""

from growkern.ops.backend.launch import jit, tl
from growkern.ops.loss.rows.triton_blocks import (
    against_mixture,
    exponentials,
    first_of,
    load_logits,
    pull_of,
    raise_max,
    store_gradient,
    zero_row,
)

# ------------------------------------------------------------------------- names
#
# Positions in tuples and in the state. A test compares them with the fields in `rows/state.py`.

# MATHS: 1 / temperature, then as in `Maths`
INV_T, SOFTCAP, TEACHER_SOFTCAP, BETA, LABEL_SMOOTHING, Z_LOSS = map(tl.constexpr, range(6))
# STEPS: as in `Steps`, then whether parts are wanted
SUMS, DIVERGE, GRAD, PARTS = map(tl.constexpr, range(4))
# strides between rows: of the student, of its gradient, of the first teacher
STUDENT, DSTUDENT, TEACHERS = map(tl.constexpr, range(3))
# `StudentSums`
MAXIMUM, REST, SUM_T, LABEL_LOGIT, MOMENT, BEST, SUM_Z, COLUMNS = map(tl.constexpr, range(8))
STUDENT_SUMS = tl.constexpr(8)
# `TeacherSums`
T_MAXIMUM, T_SUM_T, T_CROSS, T_BEST, T_CENTRE, T_SPREAD = map(tl.constexpr, range(6))
TEACHER_SUMS = tl.constexpr(6)
# bits of a row's kind
MLM_ROW, KL_ROW = tl.constexpr(1), tl.constexpr(2)


@jit
def _logits(
    rows, biases, k: tl.constexpr, v, V,
    MASKED: tl.constexpr, MATHS: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    """A block of the student's row (k = 0) or of that of a teacher."""
    CAP: tl.constexpr = MATHS[TEACHER_SOFTCAP if k else SOFTCAP]
    return load_logits(rows[k], biases[k], v, V, MASKED, CAP, ACC)


@jit
def _teacher_sums(state_ptr, k, N):
    """Where the numbers of teacher k = 1, ..., K begin."""
    return state_ptr + N * (STUDENT_SUMS + TEACHER_SUMS * (k - 1))


# -------------------------------------------------------------------------- sums


@jit
def _add_block(
    sums, rows, biases, label, v, V,
    MASKED: tl.constexpr, MATHS: tl.constexpr, STEPS: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    """The running numbers of the student and of each teacher, with one more block of columns."""
    T_INV: tl.constexpr = MATHS[INV_T]
    WITH_PARTS: tl.constexpr = STEPS[PARTS]
    m, rest, d_t, moment, total, best = sums[0]
    s = _logits(rows, biases, 0, v, V, MASKED, MATHS, ACC)  # (BLOCK_V,)
    if WITH_PARTS:
        best = first_of(m, best, s, v, V)
    top = raise_max(m, s)
    e, e_t = exponentials(s - top, T_INV)
    rescale, rescale_t = exponentials(m - top, T_INV)
    rest = rest * rescale + tl.sum(tl.where(v == label, 0.0, e), axis=0)
    if T_INV != 1:
        d_t = d_t * rescale_t + tl.sum(e_t, axis=0)
    if WITH_PARTS:
        moment = moment * rescale + tl.sum(tl.where(e > 0, e * s, 0.0), axis=0)
    if MATHS[LABEL_SMOOTHING] != 0:
        total += tl.sum(tl.where(v < V, s, 0.0) if MASKED else s, axis=0)
    made = ((top, rest, d_t, moment, total, best),)
    for k in tl.static_range(1, len(rows)):
        m_u, d_u, cross, best_u = sums[k]
        u = _logits(rows, biases, k, v, V, MASKED, MATHS, ACC)
        if WITH_PARTS:
            best_u = first_of(m_u, best_u, u, v, V)
        top_u = raise_max(m_u, u)
        w = tl.exp((u - top_u) * T_INV)
        rescale_u = tl.exp((m_u - top_u) * T_INV)
        d_u = d_u * rescale_u + tl.sum(w, axis=0)
        if MATHS[BETA] == 0:
            # 0 * (-inf - z) counts as 0, not NaN: a token of probability 0 costs nothing
            cross = cross * rescale_u + tl.sum(tl.where(w > 0, w * (u - s) * T_INV, 0.0), axis=0)
        made += ((top_u, d_u, cross, best_u),)  # type: ignore[assignment]
    return made


@jit
def _store_sums(
    rows, biases, state_ptr, label, N, V,
    MATHS: tl.constexpr, STEPS: tl.constexpr, ACC: tl.constexpr, BLOCK_V: tl.constexpr,
):  # fmt: skip
    """Store `StudentSums` and `TeacherSums`. Centre and spread are 0 until the second reading."""
    least = tl.full((), float("-inf"), ACC)
    none, best = tl.zeros((), ACC), tl.full((), V, tl.int32)
    sums = ((least, none, none, none, none, best),)
    for _ in tl.static_range(1, len(rows)):
        sums += ((least, none, none, best),)  # type: ignore[assignment]
    whole = V // BLOCK_V * BLOCK_V
    for start in range(0, whole, BLOCK_V):
        v = start + tl.arange(0, BLOCK_V)
        sums = _add_block(sums, rows, biases, label, v, V, False, MATHS, STEPS, ACC)
    if whole < V:
        v = whole + tl.arange(0, BLOCK_V)
        sums = _add_block(sums, rows, biases, label, v, V, True, MATHS, STEPS, ACC)

    # outside of these columns the label's logit is read as -inf
    here = (label >= 0) & (label < V)
    z_y = _logits(rows, biases, 0, tl.where(here, label, V), V, True, MATHS, ACC)
    m, rest, d_t, moment, total, best = sums[0]
    if MATHS[INV_T] == 1:
        d_t = rest + tl.exp(z_y - m)
    tl.store(state_ptr + N * MAXIMUM, m)
    tl.store(state_ptr + N * REST, rest)
    tl.store(state_ptr + N * SUM_T, d_t)
    tl.store(state_ptr + N * LABEL_LOGIT, z_y)
    tl.store(state_ptr + N * MOMENT, moment)
    tl.store(state_ptr + N * BEST, best.to(ACC))
    tl.store(state_ptr + N * SUM_Z, total)
    # Triton makes an argument of 1 a constant, which has no method `to`
    tl.store(state_ptr + N * COLUMNS, tl.full((), V, ACC))
    for k in tl.static_range(1, len(rows)):
        m_u, d_u, cross, best_u = sums[k]  # type: ignore[misc]
        to_ptr = _teacher_sums(state_ptr, k, N)
        tl.store(to_ptr + N * T_MAXIMUM, m_u)
        tl.store(to_ptr + N * T_SUM_T, d_u)
        tl.store(to_ptr + N * T_CROSS, cross)
        tl.store(to_ptr + N * T_BEST, best_u.to(ACC))
        tl.store(to_ptr + N * T_CENTRE, 0.0)
        tl.store(to_ptr + N * T_SPREAD, 0.0)


# ------------------------------------------------------------------- divergences


@jit
def _row_numbers(state_ptr, N, K: tl.constexpr, MATHS: tl.constexpr):
    """Numbers of a row, read once: (m, 1 / d_t), then of each teacher (m_u, 1 / d_u, shift).

    log(q / p) is (s - u) / T - shift.
    """
    m, d_t = tl.load(state_ptr + N * MAXIMUM), tl.load(state_ptr + N * SUM_T)
    numbers = ((m, 1 / d_t),)
    for k in tl.static_range(1, K + 1):
        sums_ptr = _teacher_sums(state_ptr, k, N)
        m_u = tl.load(sums_ptr + N * T_MAXIMUM)
        d_u = tl.load(sums_ptr + N * T_SUM_T)
        shift = (m - m_u) * MATHS[INV_T] + tl.log(d_t / d_u)
        numbers += ((m_u, 1 / d_u, shift),)  # type: ignore[assignment]
    return numbers


@jit
def _ratio(s, u, numbers, k: tl.constexpr, MATHS: tl.constexpr):
    """p and log(q / p) at temperature T, of a block of columns and teacher k = 1, ..., K."""
    T_INV: tl.constexpr = MATHS[INV_T]
    m_u, inv_d_u, shift = numbers[k]
    return tl.exp((u - m_u) * T_INV) * inv_d_u, (s - u) * T_INV - shift


@jit
def _ratios(
    rows, biases, numbers, v, V,
    MASKED: tl.constexpr, MATHS: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    """q of a block of columns, and `_ratio` for each teacher."""
    s = _logits(rows, biases, 0, v, V, MASKED, MATHS, ACC)
    m, inv_d_t = numbers[0]
    q = tl.exp((s - m) * MATHS[INV_T]) * inv_d_t
    made = ()
    for k in tl.static_range(1, len(rows)):
        u = _logits(rows, biases, k, v, V, MASKED, MATHS, ACC)
        made += (_ratio(s, u, numbers, k, MATHS),)  # type: ignore[assignment]
    return q, made


@jit
def _add_divergences(
    sums, rows, biases, numbers, v, V,
    MASKED: tl.constexpr, MATHS: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    """Centre and spread of each teacher with one more block of columns."""
    q, ratios = _ratios(rows, biases, numbers, v, V, MASKED, MATHS, ACC)
    made = ()
    for k in tl.static_range(len(sums)):
        p, r = ratios[k]
        log_qm, log_pm = against_mixture(r, MATHS[BETA], ACC)
        centre, spread = sums[k]
        centre += tl.sum(tl.where(q > 0, q * log_qm, 0.0), axis=0)
        spread += tl.sum(tl.where(p > 0, p * log_pm, 0.0), axis=0)
        made += ((centre, spread),)  # type: ignore[assignment]
    return made


@jit
def _second_reading(
    rows, biases, state_ptr, N, V,
    MATHS: tl.constexpr, ACC: tl.constexpr, BLOCK_V: tl.constexpr,
):  # fmt: skip
    """Store centre and spread of (7)."""
    K: tl.constexpr = len(rows) - 1
    numbers = _row_numbers(state_ptr, N, K, MATHS)
    sums = ()
    for _ in tl.static_range(K):
        sums += ((tl.zeros((), ACC), tl.zeros((), ACC)),)  # type: ignore[assignment]
    whole = V // BLOCK_V * BLOCK_V
    for start in range(0, whole, BLOCK_V):
        v = start + tl.arange(0, BLOCK_V)
        sums = _add_divergences(sums, rows, biases, numbers, v, V, False, MATHS, ACC)
    if whole < V:
        v = whole + tl.arange(0, BLOCK_V)
        sums = _add_divergences(sums, rows, biases, numbers, v, V, True, MATHS, ACC)
    for k in tl.static_range(1, K + 1):
        tl.store(_teacher_sums(state_ptr, k, N) + N * T_CENTRE, sums[k - 1][0])
        tl.store(_teacher_sums(state_ptr, k, N) + N * T_SPREAD, sums[k - 1][1])


# ---------------------------------------------------------------------- gradient


@jit
def _add_offsets(
    offsets, rows, biases, numbers, v, V,
    MASKED: tl.constexpr, MATHS: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    """The sum of q - p for each teacher with one more block of columns."""
    q, ratios = _ratios(rows, biases, numbers, v, V, MASKED, MATHS, ACC)
    made = ()
    for k in tl.static_range(len(offsets)):
        p, r = ratios[k]
        pull = pull_of(q, p, r, 0.0, MATHS[BETA], ACC)
        if MASKED:
            pull = tl.where(v < V, pull, 0.0)
        made += (offsets[k] + tl.sum(pull, axis=0),)  # type: ignore[assignment]
    return made


@jit
def _corrected(
    numbers, rows, biases, state_ptr, N, V,
    MATHS: tl.constexpr, ACC: tl.constexpr, BLOCK_V: tl.constexpr,
):  # fmt: skip
    """The numbers of a row with the rounding error of log(q / p) in each shift.

    The sum of q - p over a row should be 0; what remains is the error. It comes from the row's
    sums, which are good to 1e-7, and would be 1e-5 of the gradient at 1 % drift.
    """
    K: tl.constexpr = len(rows) - 1
    offsets = ()
    for _ in tl.static_range(K):
        offsets += (tl.zeros((), ACC),)  # type: ignore[assignment]
    whole = V // BLOCK_V * BLOCK_V
    for start in range(0, whole, BLOCK_V):
        v = start + tl.arange(0, BLOCK_V)
        offsets = _add_offsets(offsets, rows, biases, numbers, v, V, False, MATHS, ACC)
    if whole < V:
        v = whole + tl.arange(0, BLOCK_V)
        offsets = _add_offsets(offsets, rows, biases, numbers, v, V, True, MATHS, ACC)
    # over a slice of the vocabulary the sum is not 0
    is_row = tl.load(state_ptr + N * COLUMNS) == V
    made = (numbers[0],)
    for k in tl.static_range(1, K + 1):
        m_u, inv_d_u, shift = numbers[k]
        made += ((m_u, inv_d_u, shift + tl.where(is_row, offsets[k - 1], 0.0)),)  # type: ignore[assignment]
    return made


@jit
def _write_block(
    rows, biases, dstudent_ptr, numbers, factors, pulls, label, v, V,
    MASKED: tl.constexpr, MATHS: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    """Write a block of the gradient.

    `factors` are those of exp(z - m), the number at the label, and the number that is subtracted
    everywhere. `pulls` has for each teacher whether the row has the term, its factor and centre.
    """
    CAP: tl.constexpr = MATHS[SOFTCAP]
    s = _logits(rows, biases, 0, v, V, MASKED, MATHS, ACC)  # (BLOCK_V,)
    m, inv_d_t = numbers[0]
    per_e, at_y, everywhere = factors
    e, e_t = exponentials(s - m, MATHS[INV_T])
    g = tl.where(v == label, at_y, per_e * e)  # (4)
    if MATHS[LABEL_SMOOTHING] != 0:
        g -= everywhere  # (9)
    for k in tl.static_range(1, len(rows)):
        u = _logits(rows, biases, k, v, V, MASKED, MATHS, ACC)
        p, r = _ratio(s, u, numbers, k, MATHS)
        has_kl, dkl, centre = pulls[k - 1]
        pull = dkl * pull_of(e_t * inv_d_t, p, r, centre, MATHS[BETA], ACC)
        # not a factor of 0: a row without the KL term may hold NaN
        g += tl.where(has_kl, pull, 0.0)
    if CAP != 0:
        g *= 1 - (s / CAP) * (s / CAP)  # (6)
    store_gradient(dstudent_ptr, v, V, g, MASKED)


@jit
def _write_gradient(
    rows, biases, dstudent_ptr, drows_ptr, state_ptr, label, kind, N, V,
    MATHS: tl.constexpr, ACC: tl.constexpr, BLOCK_V: tl.constexpr,
):  # fmt: skip
    """Write one row of the gradient, (4) to (6), (8) and (9), possibly over the student's row."""
    K: tl.constexpr = len(rows) - 1
    rest = tl.load(state_ptr + N * REST)
    numbers = _row_numbers(state_ptr, N, K, MATHS)
    m, _ = numbers[0]
    e_y = tl.exp(tl.load(state_ptr + N * LABEL_LOGIT) - m)
    d = rest + e_y
    dmlm = tl.where((kind & MLM_ROW) != 0, tl.load(drows_ptr).to(ACC), 0.0)
    from_z_loss = dmlm * 2 * MATHS[Z_LOSS] * (tl.log(d) + m)
    smooth = dmlm * MATHS[LABEL_SMOOTHING]
    at_y = (from_z_loss * e_y - dmlm * rest) / d + smooth
    factors = ((dmlm + from_z_loss) / d, at_y, smooth / tl.load(state_ptr + N * COLUMNS))
    # a narrower gradient does not have those digits, and float64 has enough of them
    if MATHS[BETA] == 0 and dstudent_ptr.dtype.element_ty == tl.float32:
        numbers = _corrected(numbers, rows, biases, state_ptr, N, V, MATHS, ACC, BLOCK_V)
    pulls = ()
    for k in tl.static_range(1, K + 1):
        dkl = tl.load(drows_ptr + k * N).to(ACC) * MATHS[INV_T]
        centre = tl.load(_teacher_sums(state_ptr, k, N) + N * T_CENTRE)
        # at a weight of 0 too: the pull of the reverse KL may be infinite
        has_kl = ((kind & KL_ROW) != 0) & (dkl != 0)
        pulls += ((has_kl, dkl, centre),)  # type: ignore[assignment]
    whole = V // BLOCK_V * BLOCK_V
    for start in range(0, whole, BLOCK_V):
        v = start + tl.arange(0, BLOCK_V)
        _write_block(
            rows, biases, dstudent_ptr, numbers, factors, pulls, label, v, V, False, MATHS, ACC
        )
    if whole < V:
        v = whole + tl.arange(0, BLOCK_V)
        _write_block(
            rows, biases, dstudent_ptr, numbers, factors, pulls, label, v, V, True, MATHS, ACC
        )


# ------------------------------------------------------------------------ kernel


@jit
def kl_mlm_rows_kernel(
    logit_ptrs,  # 1 + K times (N, V), the student's first
    biases,  # 1 + K times (V,); None: the logits have theirs already
    labels_ptr,  # (N,)
    kind_ptr,  # (N,)
    drows_ptr,  # (1 + K, N)
    state_ptr,  # (S, N)  in and out
    dstudent_ptr,  # (N, V)  out with GRAD
    strides,  # rows of student, dstudent, teachers
    N,
    V,
    MATHS: tl.constexpr,  # numbers of the formulas, see the names above
    STEPS: tl.constexpr,  # what to do, see the names above
    ACC: tl.constexpr,
    BLOCK_V: tl.constexpr,
):
    K: tl.constexpr = len(logit_ptrs) - 1
    # int64: n * stride passes 2**31 at 65k rows x 32k vocabulary
    n = tl.program_id(0).to(tl.int64)
    rows = (logit_ptrs[0] + n * strides[STUDENT],)
    for k in tl.static_range(K):
        rows += (logit_ptrs[1 + k] + n * strides[TEACHERS + k],)  # type: ignore[assignment]
    state_ptr += n
    kind = tl.load(kind_ptr + n)
    label = tl.where((kind & MLM_ROW) != 0, tl.load(labels_ptr + n), -1)

    if STEPS[SUMS]:
        if kind == 0:
            for j in tl.static_range(STUDENT_SUMS + TEACHER_SUMS * K):
                tl.store(state_ptr + N * j, float("-inf") if j == LABEL_LOGIT else 0.0)
        else:
            _store_sums(rows, biases, state_ptr, label, N, V, MATHS, STEPS, ACC, BLOCK_V)
        # the next steps read sums that other threads of this program have just stored
        tl.debug_barrier()

    if STEPS[DIVERGE]:
        if kind != 0:
            _second_reading(rows, biases, state_ptr, N, V, MATHS, ACC, BLOCK_V)
        tl.debug_barrier()

    if STEPS[GRAD]:
        dstudent_ptr += n * strides[DSTUDENT]
        if kind == 0:
            zero_row(dstudent_ptr, V, BLOCK_V)
        else:
            _write_gradient(
                rows, biases, dstudent_ptr, drows_ptr + n, state_ptr, label, kind, N, V,
                MATHS, ACC, BLOCK_V,
            )  # fmt: skip
