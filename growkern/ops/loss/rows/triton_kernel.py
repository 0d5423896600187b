"""The row kernel in Triton: sums in one reading of the logits, the gradient in a second one.

`rows/on_triton.py` launches it. Equations are numbered in `kl_mlm_loss.py`.

Shape letters used in this file: N rows, V vocabulary, K teachers, S numbers of a row.
"""

from growkern.ops.backend.launch import jit, tl

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

# --------------------------------------------------------- elementary functions
#
# Triton lacks these, and a GPU's exp is only good to 4e-7. They keep their digits near 0 in
# float32; in float64 the plain formula is accurate enough.


@jit
def tanh(x, ACC: tl.constexpr):
    """tanh(x), good to 2e-10 below 0.25."""
    e = tl.exp(-2 * tl.abs(x))
    far = tl.where(x < 0, -1.0, 1.0) * (1 - e) / (1 + e)
    if tl.float64 == ACC:
        return far
    # near 0 the formula above loses the digits of 1 - e
    y = x * x
    near = 62.0 / 2835 + y * (-1382.0 / 155925)
    near = x * (1 + y * (-1.0 / 3 + y * (2.0 / 15 + y * (-17.0 / 315 + y * near))))
    return tl.where(y < 0.0625, near, far)


@jit
def expm1(r, ACC: tl.constexpr):
    """exp(r) - 1, good to 4e-11 below 0.25."""
    far = tl.exp(r) - 1
    if tl.float64 == ACC:
        return far
    tail = 1 + r / 5 * (1 + r / 6 * (1 + r / 7 * (1 + r / 8)))
    return tl.where(tl.abs(r) < 0.25, r * (1 + r / 2 * (1 + r / 3 * (1 + r / 4 * tail))), far)


@jit
def log1p(x, ACC: tl.constexpr):
    """log(1 + x) = 2 atanh(x / (2 + x)), good to 3e-10 below 0.25."""
    far = tl.log(1 + x)
    if tl.float64 == ACC:
        return far
    y = x / (2 + x)
    y2 = y * y
    near = 2 * y * (1 + y2 * (1.0 / 3 + y2 * (1.0 / 5 + y2 * (1.0 / 7 + y2 / 9))))
    return tl.where(tl.abs(x) < 0.25, near, far)


@jit
def against_mixture(r, BETA: tl.constexpr, ACC: tl.constexpr):
    """log(q / m) and log(p / m) of (7), given r = log(q / p)."""
    if BETA == 1:
        return r, tl.zeros_like(r)
    # of the larger of q and p, so that nothing overflows; exact where both are close
    gap = expm1(-tl.abs(r), ACC)
    above = -log1p(tl.where(r < 0, gap * (1 - BETA), gap * BETA), ACC)
    return tl.where(r < 0, above + r, above), tl.where(r < 0, above, above - r)


# ------------------------------------------------------------------------ logits


@jit
def load_logits(row_ptr, v, V, CAP: tl.constexpr, ACC: tl.constexpr):
    x = tl.load(row_ptr + v, mask=v < V, other=float("-inf")).to(ACC)
    if CAP != 0:
        x = tl.where(v < V, CAP * tanh(x / CAP, ACC), float("-inf"))
    return x


@jit
def _raise_max(m, x):
    """The new running maximum; 0 while all logits are -inf, so that inf - inf does not occur."""
    top = tl.maximum(m, tl.max(x, axis=0))
    return tl.where(top == float("-inf"), 0.0, top)


@jit
def _first_of(m, best, x, v, V):
    """Column of the first maximum so far, given the maximum m before this block."""
    top = tl.max(x, axis=0)
    return tl.where(top > m, tl.min(tl.where(x == top, v, V), axis=0), best)


@jit
def _student_logits(student_ptr, v, V, MATHS: tl.constexpr, ACC: tl.constexpr):
    return load_logits(student_ptr, v, V, MATHS[SOFTCAP], ACC)


@jit
def _teacher_logits(teacher_ptr, v, V, MATHS: tl.constexpr, ACC: tl.constexpr):
    return load_logits(teacher_ptr, v, V, MATHS[TEACHER_SOFTCAP], ACC)


@jit
def _teacher_sums(state_ptr, k, N):
    """Where the numbers of teacher k begin."""
    return state_ptr + N * (STUDENT_SUMS + TEACHER_SUMS * k)


# -------------------------------------------------------------------------- sums


@jit
def _student_pass(
    student_ptr, state_ptr, label, N, V,
    MATHS: tl.constexpr, STEPS: tl.constexpr, ACC: tl.constexpr, BLOCK_V: tl.constexpr,
):  # fmt: skip
    """Store `StudentSums`."""
    T_INV: tl.constexpr = MATHS[INV_T]
    WITH_PARTS: tl.constexpr = STEPS[PARTS]
    WITH_TOTAL: tl.constexpr = MATHS[LABEL_SMOOTHING] != 0
    m = tl.full((), float("-inf"), ACC)
    rest = tl.zeros((), ACC)
    d_t = tl.zeros((), ACC)
    moment = tl.zeros((), ACC)
    total = tl.zeros((), ACC)
    best = V
    for start in range(0, V, BLOCK_V):
        v = start + tl.arange(0, BLOCK_V)
        s = _student_logits(student_ptr, v, V, MATHS, ACC)  # (BLOCK_V,)
        if WITH_PARTS:
            best = _first_of(m, best, s, v, V)
        m_new = _raise_max(m, s)
        e = tl.exp(s - m_new)
        rescale = tl.exp(m - m_new)
        rest = rest * rescale + tl.sum(tl.where(v == label, 0.0, e), axis=0)
        if T_INV != 1:
            rescale_t = tl.exp((m - m_new) * T_INV)
            d_t = d_t * rescale_t + tl.sum(tl.exp((s - m_new) * T_INV), axis=0)
        if WITH_PARTS:
            moment = moment * rescale + tl.sum(tl.where(e > 0, e * s, 0.0), axis=0)
        if WITH_TOTAL:
            total += tl.sum(tl.where(v < V, s, 0.0), axis=0)
        m = m_new

    # outside of these columns the label's logit is read as -inf
    here = (label >= 0) & (label < V)
    z_y = _student_logits(student_ptr, tl.where(here, label, V), V, MATHS, ACC)
    if T_INV == 1:
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


@jit
def _teacher_pass(
    student_ptr, teacher_ptr, sums_ptr, N, V,
    MATHS: tl.constexpr, STEPS: tl.constexpr, ACC: tl.constexpr, BLOCK_V: tl.constexpr,
):  # fmt: skip
    """Store `TeacherSums`; centre and spread are 0 until the second reading."""
    T_INV: tl.constexpr = MATHS[INV_T]
    WITH_PARTS: tl.constexpr = STEPS[PARTS]
    m = tl.full((), float("-inf"), ACC)
    d = tl.zeros((), ACC)
    cross = tl.zeros((), ACC)
    best = V
    for start in range(0, V, BLOCK_V):
        v = start + tl.arange(0, BLOCK_V)
        u = _teacher_logits(teacher_ptr, v, V, MATHS, ACC)
        if WITH_PARTS:
            best = _first_of(m, best, u, v, V)
        m_new = _raise_max(m, u)
        w = tl.exp((u - m_new) * T_INV)
        rescale = tl.exp((m - m_new) * T_INV)
        d = d * rescale + tl.sum(w, axis=0)
        if MATHS[BETA] == 0:
            s = _student_logits(student_ptr, v, V, MATHS, ACC)
            # 0 * (-inf - z) counts as 0, not NaN: a token of probability 0 costs nothing
            cross = cross * rescale + tl.sum(tl.where(w > 0, w * (u - s) * T_INV, 0.0), axis=0)
        m = m_new
    tl.store(sums_ptr + N * T_MAXIMUM, m)
    tl.store(sums_ptr + N * T_SUM_T, d)
    tl.store(sums_ptr + N * T_CROSS, cross)
    tl.store(sums_ptr + N * T_BEST, best.to(ACC))
    tl.store(sums_ptr + N * T_CENTRE, 0.0)
    tl.store(sums_ptr + N * T_SPREAD, 0.0)


# ------------------------------------------------------------------- divergences


@jit
def _ratio(
    student_ptr, teacher_ptr, state_ptr, sums_ptr, v, N, V,
    MATHS: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    """q, p and log(q / p) at temperature T, of a block of columns."""
    T_INV: tl.constexpr = MATHS[INV_T]
    s = _student_logits(student_ptr, v, V, MATHS, ACC)
    u = _teacher_logits(teacher_ptr, v, V, MATHS, ACC)
    m = tl.load(state_ptr + N * MAXIMUM)
    d_t = tl.load(state_ptr + N * SUM_T)
    m_u = tl.load(sums_ptr + N * T_MAXIMUM)
    d_u = tl.load(sums_ptr + N * T_SUM_T)
    q = tl.exp((s - m) * T_INV) / d_t
    p = tl.exp((u - m_u) * T_INV) / d_u
    return q, p, (s - u) * T_INV - ((m - m_u) * T_INV + tl.log(d_t / d_u))


@jit
def _second_reading(
    student_ptr, teacher_ptr, state_ptr, sums_ptr, N, V,
    MATHS: tl.constexpr, ACC: tl.constexpr, BLOCK_V: tl.constexpr,
):  # fmt: skip
    """Store centre and spread of (7)."""
    centre = tl.zeros((), ACC)
    spread = tl.zeros((), ACC)
    for start in range(0, V, BLOCK_V):
        v = start + tl.arange(0, BLOCK_V)
        q, p, r = _ratio(student_ptr, teacher_ptr, state_ptr, sums_ptr, v, N, V, MATHS, ACC)
        log_qm, log_pm = against_mixture(r, MATHS[BETA], ACC)
        centre += tl.sum(tl.where(q > 0, q * log_qm, 0.0), axis=0)
        spread += tl.sum(tl.where(p > 0, p * log_pm, 0.0), axis=0)
    tl.store(sums_ptr + N * T_CENTRE, centre)
    tl.store(sums_ptr + N * T_SPREAD, spread)


# ---------------------------------------------------------------------- gradient


@jit
def _pull(q, p, r, sums_ptr, N, MATHS: tl.constexpr, ACC: tl.constexpr):
    """(5), or (8) with the divergence's factor, without 1 / T."""
    if MATHS[BETA] == 0:
        # q - p; where they are close as p * expm1(log q - log p). False for NaN: both are 0
        return tl.where(tl.abs(r) < 0.25, p * expm1(r, ACC), q - p)
    log_qm, _ = against_mixture(r, MATHS[BETA], ACC)
    share: tl.constexpr = 1 if MATHS[BETA] == 1 else 1 - MATHS[BETA]
    return tl.where(q > 0, share * q * (log_qm - tl.load(sums_ptr + N * T_CENTRE)), 0.0)


@jit
def _offsets(
    student_ptr, teacher_ptrs, state_ptr, strides, n, N, V,
    MATHS: tl.constexpr, ACC: tl.constexpr, BLOCK_V: tl.constexpr,
):  # fmt: skip
    """The rounding error of log(q / p), one number per teacher.

    The sum of q - p over a row should be 0; what remains is the error. It comes from the row's
    sums, which are good to 1e-7, and would be 1e-5 of the gradient at 1 % drift.
    """
    offsets = ()
    for k in tl.static_range(len(teacher_ptrs)):
        offset = tl.zeros((), ACC)
        teacher_ptr = teacher_ptrs[k] + n * strides[TEACHERS + k]
        sums_ptr = _teacher_sums(state_ptr, k, N)
        for start in range(0, V, BLOCK_V):
            v = start + tl.arange(0, BLOCK_V)
            q, p, r = _ratio(student_ptr, teacher_ptr, state_ptr, sums_ptr, v, N, V, MATHS, ACC)
            pull = _pull(q, p, r, sums_ptr, N, MATHS, ACC)
            offset += tl.sum(tl.where(v < V, pull, 0.0), axis=0)
        # over a slice of the vocabulary the sum is not 0
        whole = tl.load(state_ptr + N * COLUMNS) == V
        offsets += (tl.where(whole, offset, 0.0),)  # type: ignore[assignment]
    return offsets


@jit
def _gradient_pass(
    student_ptr, teacher_ptrs, dstudent_ptr, drows_ptr, state_ptr, strides, n, label, kind, N, V,
    MATHS: tl.constexpr, ACC: tl.constexpr, BLOCK_V: tl.constexpr,
):  # fmt: skip
    """Write one row of the gradient, (4) to (6), (8) and (9), possibly over the student's row."""
    CAP: tl.constexpr = MATHS[SOFTCAP]
    m = tl.load(state_ptr + N * MAXIMUM)
    rest = tl.load(state_ptr + N * REST)
    e_y = tl.exp(tl.load(state_ptr + N * LABEL_LOGIT) - m)
    d = rest + e_y
    dmlm = tl.where((kind & MLM_ROW) != 0, tl.load(drows_ptr).to(ACC), 0.0)
    from_z_loss = dmlm * 2 * MATHS[Z_LOSS] * (tl.log(d) + m)
    smooth = dmlm * MATHS[LABEL_SMOOTHING]
    at_y = (from_z_loss * e_y - dmlm * rest) / d + smooth
    # a narrower gradient does not have those digits, and float64 has enough of them
    CORRECTED: tl.constexpr = MATHS[BETA] == 0 and dstudent_ptr.dtype.element_ty == tl.float32
    if CORRECTED:
        offsets = _offsets(
            student_ptr, teacher_ptrs, state_ptr, strides, n, N, V, MATHS, ACC, BLOCK_V
        )
    for start in range(0, V, BLOCK_V):
        v = start + tl.arange(0, BLOCK_V)
        s = _student_logits(student_ptr, v, V, MATHS, ACC)  # (BLOCK_V,)
        g = tl.where(v == label, at_y, (dmlm + from_z_loss) * (tl.exp(s - m) / d))  # (4)
        if MATHS[LABEL_SMOOTHING] != 0:
            g -= smooth / tl.load(state_ptr + N * COLUMNS)  # (9)
        for k in tl.static_range(len(teacher_ptrs)):
            teacher_ptr = teacher_ptrs[k] + n * strides[TEACHERS + k]
            sums_ptr = _teacher_sums(state_ptr, k, N)
            q, p, r = _ratio(student_ptr, teacher_ptr, state_ptr, sums_ptr, v, N, V, MATHS, ACC)
            if CORRECTED:
                r -= offsets[k]
            dkl = tl.load(drows_ptr + (1 + k) * N).to(ACC) * MATHS[INV_T]
            pull = dkl * _pull(q, p, r, sums_ptr, N, MATHS, ACC)
            # not a factor of 0: a row without the KL term may hold NaN
            g += tl.where((kind & KL_ROW) != 0, pull, 0.0)
        if CAP != 0:
            g *= 1 - (s / CAP) * (s / CAP)  # (6)
        # the gradient may overwrite the logits and be narrower than they are. All of this block is
        # read before any of it is written, and no write reaches past the block just read
        tl.debug_barrier()
        tl.store(dstudent_ptr + v, g.to(dstudent_ptr.dtype.element_ty), mask=v < V)


@jit
def zero_row(row_ptr, V, BLOCK_V: tl.constexpr):
    for start in range(0, V, BLOCK_V):
        v = start + tl.arange(0, BLOCK_V)
        tl.store(row_ptr + v, tl.zeros((BLOCK_V,), tl.float32), mask=v < V)


# ------------------------------------------------------------------------ kernel


@jit
def kl_mlm_rows_kernel(
    student_ptr,  # (N, V)
    teacher_ptrs,  # K times (N, V)
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
    K: tl.constexpr = len(teacher_ptrs)
    # int64: n * stride passes 2**31 at 65k rows x 32k vocabulary
    n = tl.program_id(0).to(tl.int64)
    student_ptr += n * strides[STUDENT]
    state_ptr += n
    kind = tl.load(kind_ptr + n)
    label = tl.where((kind & MLM_ROW) != 0, tl.load(labels_ptr + n), -1)

    if STEPS[SUMS]:
        if kind == 0:
            for j in tl.static_range(STUDENT_SUMS + TEACHER_SUMS * K):
                tl.store(state_ptr + N * j, float("-inf") if j == LABEL_LOGIT else 0.0)
        else:
            _student_pass(student_ptr, state_ptr, label, N, V, MATHS, STEPS, ACC, BLOCK_V)
            for k in tl.static_range(K):
                teacher_ptr = teacher_ptrs[k] + n * strides[TEACHERS + k]
                sums_ptr = _teacher_sums(state_ptr, k, N)
                _teacher_pass(student_ptr, teacher_ptr, sums_ptr, N, V, MATHS, STEPS, ACC, BLOCK_V)
        # the next steps read sums that other threads of this program have just stored
        tl.debug_barrier()

    if STEPS[DIVERGE]:
        if kind != 0:
            for k in tl.static_range(K):
                teacher_ptr = teacher_ptrs[k] + n * strides[TEACHERS + k]
                sums_ptr = _teacher_sums(state_ptr, k, N)
                _second_reading(
                    student_ptr, teacher_ptr, state_ptr, sums_ptr, N, V, MATHS, ACC, BLOCK_V
                )
        tl.debug_barrier()

    if STEPS[GRAD]:
        dstudent_ptr += n * strides[DSTUDENT]
        if kind == 0:
            zero_row(dstudent_ptr, V, BLOCK_V)
        else:
            _gradient_pass(
                student_ptr, teacher_ptrs, dstudent_ptr, drows_ptr + n, state_ptr, strides,
                n, label, kind, N, V, MATHS, ACC, BLOCK_V,
            )  # fmt: skip
