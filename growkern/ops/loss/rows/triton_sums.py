"""The sums of the row kernel in Triton: one reading of the logits, or two for some divergences.

All formulas that options of the loss change are here too, those of the gradient in the last part.

Equations are numbered in `kl_mlm_loss.py`.

Shape letters used in this file: N rows, V vocabulary, K teachers, R x L x E columns of a block.
"""

from growkern.ops.backend import jit, tl
from growkern.ops.loss.rows.options import Maths
from growkern.ops.loss.rows.triton_blocks import (
    base_of,
    exp_of,
    expm1,
    exponentials,
    first_of,
    in_lanes,
    lane_max,
    lane_sum,
    load_logits,
    log1p,
    merge_lanes,
    ratio,
    weighted,
)

# ------------------------------------------------------------------------- names
#
# Positions in tuples and in the state. A test compares them with the fields in `rows/state.py`.

# MATHS: 1 / temperature, then as in `Maths`
INV_T, SOFTCAP, TEACHER_SOFTCAP, BETA, LABEL_SMOOTHING, Z_LOSS = map(
    tl.constexpr, range(len(Maths._fields))
)
# STEPS: as in `Steps`, then whether parts are wanted
SUMS, DIVERGE, GRAD, PARTS = map(tl.constexpr, range(4))
# strides: between rows of the student and of its gradient, between terms, between rows of a teacher
STUDENT, DSTUDENT, DROWS, TEACHERS = map(tl.constexpr, range(4))
# `StudentSums`
MAXIMUM, REST, SUM_T, LABEL_LOGIT, MOMENT, BEST, SUM_Z, COLUMNS = map(tl.constexpr, range(8))
STUDENT_SUMS = tl.constexpr(8)
# `TeacherSums`
T_MAXIMUM, T_SUM_T, T_CROSS, T_BEST, T_CENTRE, T_SPREAD = map(tl.constexpr, range(6))
TEACHER_SUMS = tl.constexpr(6)
# bits of a row's kind
MLM_ROW, KL_ROW = tl.constexpr(1), tl.constexpr(2)


@jit
def logits_of(
    rows, biases, k: tl.constexpr, v, V,
    MASKED: tl.constexpr, MATHS: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    """A block of the student's row (k = 0) or of that of a teacher."""
    CAP: tl.constexpr = MATHS[TEACHER_SOFTCAP if k else SOFTCAP]
    return load_logits(rows[k], biases[k], v, V, MASKED, CAP, ACC)


@jit
def teacher_sums(state_ptr, k, N):
    """Where the numbers of teacher k = 1, ..., K begin."""
    return state_ptr + N * (STUDENT_SUMS + TEACHER_SUMS * (k - 1))


# -------------------------------------------------------------------------- sums


@jit
def _add_block(
    sums, rows, biases, label, v, V,
    MASKED: tl.constexpr, MATHS: tl.constexpr, STEPS: tl.constexpr, ACC: tl.constexpr,
    LANES: tl.constexpr,
):  # fmt: skip
    """The running numbers of student and teachers in each lane, with one more block of columns."""
    T_INV: tl.constexpr = MATHS[INV_T]
    WITH_PARTS: tl.constexpr = STEPS[PARTS]
    m, rest, d_t, moment, total, best = sums[0]
    s = in_lanes(logits_of(rows, biases, 0, v, V, MASKED, MATHS, ACC), LANES)  # (R, L, E)
    columns = in_lanes(v, LANES)
    if WITH_PARTS:
        best = first_of(m, best, s, columns, V)
    top = tl.maximum(m, lane_max(s))
    base = base_of(top)
    e, e_t = exponentials(s - base[None, :, None], T_INV)
    rescale, rescale_t = exponentials(m - base, T_INV)
    rest = rest * rescale + lane_sum(tl.where(columns == label, 0.0, e))
    if T_INV != 1:
        d_t = d_t * rescale_t + lane_sum(e_t)
    if WITH_PARTS:
        moment = moment * rescale + lane_sum(weighted(e, s))
    if MATHS[LABEL_SMOOTHING] != 0:
        total += lane_sum(tl.where(columns < V, s, 0.0) if MASKED else s)
    made = ((top, rest, d_t, moment, total, best),)
    for k in tl.static_range(1, len(rows)):
        m_u, d_u, cross, best_u = sums[k]
        u = in_lanes(logits_of(rows, biases, k, v, V, MASKED, MATHS, ACC), LANES)
        if WITH_PARTS:
            best_u = first_of(m_u, best_u, u, columns, V)
        top_u = tl.maximum(m_u, lane_max(u))
        base_u = base_of(top_u)
        w = exp_of(u - base_u[None, :, None], T_INV)
        rescale_u = exp_of(m_u - base_u, T_INV)
        d_u = d_u * rescale_u + lane_sum(w)
        if MATHS[BETA] == 0:
            cross = cross * rescale_u + lane_sum(weighted(w, u - s))
        made += ((top_u, d_u, cross, best_u),)  # type: ignore[assignment]
    return made


@jit
def store_sums(
    rows, biases, state_ptr, label, N, V,
    MATHS: tl.constexpr, STEPS: tl.constexpr, ACC: tl.constexpr, BLOCK_V: tl.constexpr,
    LANES: tl.constexpr,
):  # fmt: skip
    """Store `StudentSums` and `TeacherSums`. Centre and spread are 0 until the second reading."""
    T_INV: tl.constexpr = MATHS[INV_T]
    least = tl.full((LANES[0],), float("-inf"), ACC)
    none, best = tl.full((LANES[0],), 0.0, ACC), tl.full((LANES[0],), V, tl.int32)
    sums = ((least, none, none, none, none, best),)
    for _ in tl.static_range(1, len(rows)):
        sums += ((least, none, none, best),)  # type: ignore[assignment]
    whole = V // BLOCK_V * BLOCK_V
    for start in range(0, whole, BLOCK_V):
        v = start + tl.arange(0, BLOCK_V)
        sums = _add_block(sums, rows, biases, label, v, V, False, MATHS, STEPS, ACC, LANES)
    if whole < V:
        v = whole + tl.arange(0, BLOCK_V)
        sums = _add_block(sums, rows, biases, label, v, V, True, MATHS, STEPS, ACC, LANES)

    # outside of these columns the label's logit is read as -inf
    here = (label >= 0) & (label < V)
    z_y = logits_of(rows, biases, 0, tl.where(here, label, V), V, True, MATHS, ACC)
    m_L, rest, d_t, moment, total, best = sums[0]
    m, best, below = merge_lanes(m_L, best, V)
    factor, factor_t = exponentials(below, T_INV)
    rest, moment = tl.sum(rest * factor, axis=0), tl.sum(moment * factor, axis=0)
    total = tl.sum(total, axis=0)
    d_t = rest + tl.exp(z_y - m) if T_INV == 1 else tl.sum(d_t * factor_t, axis=0)
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
        m_L, d_u, cross, best_u = sums[k]  # type: ignore[misc]
        m_u, best_u, below = merge_lanes(m_L, best_u, V)
        factor_t = exp_of(below, T_INV)
        d_u, cross = tl.sum(d_u * factor_t, axis=0), tl.sum(cross * factor_t, axis=0) * T_INV
        to_ptr = teacher_sums(state_ptr, k, N)
        tl.store(to_ptr + N * T_MAXIMUM, m_u)
        tl.store(to_ptr + N * T_SUM_T, d_u)
        tl.store(to_ptr + N * T_CROSS, cross)
        tl.store(to_ptr + N * T_BEST, best_u.to(ACC))
        tl.store(to_ptr + N * T_CENTRE, 0.0)
        tl.store(to_ptr + N * T_SPREAD, 0.0)


# ------------------------------------------------------------------- divergences


@jit
def against_mixture(r, MATHS: tl.constexpr, ACC: tl.constexpr):
    """log(q / m) and log(p / m) of (7), given r = log(q / p)."""
    B: tl.constexpr = MATHS[BETA]
    if B == 1:
        return r, tl.zeros_like(r)
    # of the larger of q and p, so that nothing overflows; exact where both are close
    gap = expm1(-tl.abs(r), ACC)
    above = -log1p(tl.where(r < 0, gap * (1 - B), gap * B), ACC)
    return tl.where(r < 0, above + r, above), tl.where(r < 0, above, above - r)


@jit
def pull_of(q, p, r, centre, MATHS: tl.constexpr, ACC: tl.constexpr):
    """(5), or (8) with the divergence's factor, without 1 / T, given r = log(q / p)."""
    B: tl.constexpr = MATHS[BETA]
    if B == 0:
        # q - p; where they are close as p * expm1(log q - log p). False for NaN: both are 0
        return tl.where(tl.abs(r) < 0.25, p * expm1(r, ACC), q - p)
    log_qm, _ = against_mixture(r, MATHS, ACC)
    share: tl.constexpr = 1 if B == 1 else 1 - B
    return tl.where(q > 0, share * q * (log_qm - centre), 0.0)


@jit
def row_numbers(state_ptr, N, K: tl.constexpr, MATHS: tl.constexpr):
    """Numbers of a row, read once: (m, 1 / d_t), then of each teacher (m_u, 1 / d_u, shift).

    log(q / p) is (s - u) / T - shift.
    """
    m, d_t = tl.load(state_ptr + N * MAXIMUM), tl.load(state_ptr + N * SUM_T)
    numbers = ((m, 1 / d_t),)
    for k in tl.static_range(1, K + 1):
        sums_ptr = teacher_sums(state_ptr, k, N)
        m_u = tl.load(sums_ptr + N * T_MAXIMUM)
        d_u = tl.load(sums_ptr + N * T_SUM_T)
        shift = (m - m_u) * MATHS[INV_T] + tl.log(d_t / d_u)
        numbers += ((m_u, 1 / d_u, shift),)  # type: ignore[assignment]
    return numbers


@jit
def ratios_of(
    rows, biases, numbers, v, V,
    MASKED: tl.constexpr, MATHS: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    """q of a block of columns, and `ratio` for each teacher."""
    s = logits_of(rows, biases, 0, v, V, MASKED, MATHS, ACC)
    m, inv_d_t = numbers[0]
    q = tl.exp((s - m) * MATHS[INV_T]) * inv_d_t
    made = ()
    for k in tl.static_range(1, len(rows)):
        u = logits_of(rows, biases, k, v, V, MASKED, MATHS, ACC)
        made += (ratio(s, u, numbers[k], MATHS[INV_T]),)  # type: ignore[assignment]
    return q, made


@jit
def _add_divergences(
    sums, rows, biases, numbers, v, V,
    MASKED: tl.constexpr, MATHS: tl.constexpr, ACC: tl.constexpr, LANES: tl.constexpr,
):  # fmt: skip
    """Centre and spread of each teacher in each lane, with one more block of columns."""
    q, ratios = ratios_of(rows, biases, numbers, v, V, MASKED, MATHS, ACC)
    made = ()
    for k in tl.static_range(len(sums)):
        p, r = ratios[k]
        log_qm, log_pm = against_mixture(r, MATHS, ACC)
        centre, spread = sums[k]
        centre += lane_sum(in_lanes(tl.where(q > 0, q * log_qm, 0.0), LANES))
        spread += lane_sum(in_lanes(tl.where(p > 0, p * log_pm, 0.0), LANES))
        made += ((centre, spread),)  # type: ignore[assignment]
    return made


@jit
def second_reading(
    rows, biases, state_ptr, N, V,
    MATHS: tl.constexpr, ACC: tl.constexpr, BLOCK_V: tl.constexpr, LANES: tl.constexpr,
):  # fmt: skip
    """Store centre and spread of (7)."""
    K: tl.constexpr = len(rows) - 1
    numbers = row_numbers(state_ptr, N, K, MATHS)
    sums = ()
    for _ in tl.static_range(K):
        none = tl.full((LANES[0],), 0.0, ACC)
        sums += ((none, none),)  # type: ignore[assignment]
    whole = V // BLOCK_V * BLOCK_V
    for start in range(0, whole, BLOCK_V):
        v = start + tl.arange(0, BLOCK_V)
        sums = _add_divergences(sums, rows, biases, numbers, v, V, False, MATHS, ACC, LANES)
    if whole < V:
        v = whole + tl.arange(0, BLOCK_V)
        sums = _add_divergences(sums, rows, biases, numbers, v, V, True, MATHS, ACC, LANES)
    for k in tl.static_range(1, K + 1):
        tl.store(teacher_sums(state_ptr, k, N) + N * T_CENTRE, tl.sum(sums[k - 1][0], axis=0))
        tl.store(teacher_sums(state_ptr, k, N) + N * T_SPREAD, tl.sum(sums[k - 1][1], axis=0))


# ---------------------------------------------------------------------- gradient


@jit
def softmax_parts(x, MATHS: tl.constexpr):
    """exp(x) and exp(x / T); as exact as in `ratios_of`, except for the forward KL."""
    return exponentials(x, MATHS[INV_T], MATHS[BETA] == 0)


@jit
def _add_offsets(
    offsets, rows, biases, numbers, v, V,
    MASKED: tl.constexpr, MATHS: tl.constexpr, ACC: tl.constexpr, LANES: tl.constexpr,
):  # fmt: skip
    """The sum of q - p for each teacher in each lane, with one more block of columns."""
    q, ratios = ratios_of(rows, biases, numbers, v, V, MASKED, MATHS, ACC)
    made = ()
    for k in tl.static_range(len(offsets)):
        p, r = ratios[k]
        pull = pull_of(q, p, r, 0.0, MATHS, ACC)
        if MASKED:
            pull = tl.where(v < V, pull, 0.0)
        made += (offsets[k] + lane_sum(in_lanes(pull, LANES)),)  # type: ignore[assignment]
    return made


@jit
def corrected(
    numbers, rows, biases, dstudent_ptr, state_ptr, N, V,
    MATHS: tl.constexpr, ACC: tl.constexpr, BLOCK_V: tl.constexpr, LANES: tl.constexpr,
):  # fmt: skip
    """The numbers of a row with the rounding error of log(q / p) in each shift.

    The sum of q - p over a row should be 0; what remains is the error. It comes from the row's
    sums, which are good to 1e-7, and would be 1e-5 of the gradient at 1 % drift. A narrower
    gradient does not have those digits, and float64 has enough of them.
    """
    if MATHS[BETA] != 0 or dstudent_ptr.dtype.element_ty != tl.float32:
        return numbers
    K: tl.constexpr = len(rows) - 1
    offsets = ()
    for _ in tl.static_range(K):
        offsets += (tl.full((LANES[0],), 0.0, ACC),)  # type: ignore[assignment]
    whole = V // BLOCK_V * BLOCK_V
    for start in range(0, whole, BLOCK_V):
        v = start + tl.arange(0, BLOCK_V)
        offsets = _add_offsets(offsets, rows, biases, numbers, v, V, False, MATHS, ACC, LANES)
    if whole < V:
        v = whole + tl.arange(0, BLOCK_V)
        offsets = _add_offsets(offsets, rows, biases, numbers, v, V, True, MATHS, ACC, LANES)
    # over a slice of the vocabulary the sum is not 0
    is_row = tl.load(state_ptr + N * COLUMNS) == V
    made = (numbers[0],)
    for k in tl.static_range(1, K + 1):
        m_u, inv_d_u, shift = numbers[k]
        made += ((m_u, inv_d_u, shift + tl.where(is_row, tl.sum(offsets[k - 1], axis=0), 0.0)),)  # type: ignore[assignment]
    return made


@jit
def label_factors(drows_ptr, state_ptr, kind, N, MATHS: tl.constexpr, ACC: tl.constexpr):
    """(4) and (9) of a row in three numbers, as in `label_gradient` of `rows/state.py`."""
    m, rest = tl.load(state_ptr + N * MAXIMUM), tl.load(state_ptr + N * REST)
    e_y = tl.exp(tl.load(state_ptr + N * LABEL_LOGIT) - m)
    d = rest + e_y
    dmlm = tl.where((kind & MLM_ROW) != 0, tl.load(drows_ptr).to(ACC), 0.0)
    from_z_loss = dmlm * 2 * MATHS[Z_LOSS] * (tl.log(d) + m)
    smooth = dmlm * MATHS[LABEL_SMOOTHING]
    at_y = (from_z_loss * e_y - dmlm * rest) / d + smooth
    return (dmlm + from_z_loss) / d, at_y, smooth / tl.load(state_ptr + N * COLUMNS)


@jit
def smoothed(g, everywhere, MATHS: tl.constexpr):
    """A block of the gradient with the number of (9) that is subtracted at every column."""
    return g - everywhere if MATHS[LABEL_SMOOTHING] != 0 else g


@jit
def before_cap(g, s, MATHS: tl.constexpr):
    """The gradient of logits before their cap, (6), from that of the capped logits s."""
    CAP: tl.constexpr = MATHS[SOFTCAP]
    if CAP != 0:
        share = s * (1.0 / CAP)
        g *= 1 - share * share
    return g
