"""The rows of the KL + MLM loss in Triton: online sums first, the gradient in a second read.

Equations are numbered in `kl_mlm_loss.py`. Shape letters used in this file: N rows, V vocabulary,
K teachers, S = 8 + 6 K numbers of a row in the order of `rows/state.py`.
`rows/on_triton.py` launches them.
"""

from growkern.ops.backend.launch import jit, tl
from growkern.ops.loss.rows.triton_math import against_mixture, expm1, tanh


@jit
def _load_logits(row_ptr, v, V, CAP: tl.constexpr, ACC: tl.constexpr):
    x = tl.load(row_ptr + v, mask=v < V, other=float("-inf")).to(ACC)
    if CAP != 0:
        x = tl.where(v < V, CAP * tanh(x / CAP, ACC), float("-inf"))
    return x


@jit
def _raise_max(m, x):
    """The new running maximum; 0 while every logit is -inf, so that nothing is inf - inf."""
    top = tl.maximum(m, tl.max(x, axis=0))
    return tl.where(top == float("-inf"), 0.0, top)


@jit
def _first_of(m, best, x, v, V):
    """Index of the first maximum so far, given the maximum m before this block."""
    top = tl.max(x, axis=0)
    return tl.where(top > m, tl.min(tl.where(x == top, v, V), axis=0), best)


@jit
def _student_pass(
    student_ptr, state_ptr, label, N, V,
    MATHS: tl.constexpr, PARTS: tl.constexpr, ACC: tl.constexpr, BLOCK_V: tl.constexpr,
):  # fmt: skip
    """Numbers 0 to 7."""
    INV_T: tl.constexpr = MATHS[0]
    CAP: tl.constexpr = MATHS[1]
    SMOOTHING: tl.constexpr = MATHS[4]
    m = tl.full((), float("-inf"), ACC)
    rest = tl.zeros((), ACC)
    d_t = tl.zeros((), ACC)
    moment = tl.zeros((), ACC)
    total = tl.zeros((), ACC)
    best = V
    for start in range(0, V, BLOCK_V):
        v = start + tl.arange(0, BLOCK_V)
        s = _load_logits(student_ptr, v, V, CAP, ACC)  # (BLOCK_V,)
        if PARTS:
            best = _first_of(m, best, s, v, V)
        m_new = _raise_max(m, s)
        e = tl.exp(s - m_new)
        rescale = tl.exp(m - m_new)
        rest = rest * rescale + tl.sum(tl.where(v == label, 0.0, e), axis=0)
        if INV_T != 1:
            rescale_t = tl.exp((m - m_new) * INV_T)
            d_t = d_t * rescale_t + tl.sum(tl.exp((s - m_new) * INV_T), axis=0)
        if PARTS:
            moment = moment * rescale + tl.sum(tl.where(e > 0, e * s, 0.0), axis=0)
        if SMOOTHING != 0:
            total += tl.sum(tl.where(v < V, s, 0.0), axis=0)
        m = m_new

    # a row without a label in these columns has none to lift out of the sum
    here = (label >= 0) & (label < V)
    z_y = _load_logits(student_ptr, tl.where(here, label, V), V, CAP, ACC)
    if INV_T == 1:
        d_t = rest + tl.exp(z_y - m)
    tl.store(state_ptr, m)
    tl.store(state_ptr + N, rest)
    tl.store(state_ptr + 2 * N, d_t)
    tl.store(state_ptr + 3 * N, z_y)
    tl.store(state_ptr + 4 * N, moment)
    tl.store(state_ptr + 5 * N, best.to(ACC))
    tl.store(state_ptr + 6 * N, total)
    tl.store(state_ptr + 7 * N, V.to(ACC))


@jit
def _teacher_pass(
    student_ptr, teacher_ptr, numbers_ptr, N, V,
    MATHS: tl.constexpr, PARTS: tl.constexpr, ACC: tl.constexpr, BLOCK_V: tl.constexpr,
):  # fmt: skip
    """The teacher's numbers 0 to 3; 4 and 5 are 0 until the second reading."""
    INV_T: tl.constexpr = MATHS[0]
    BETA: tl.constexpr = MATHS[3]
    m = tl.full((), float("-inf"), ACC)
    d = tl.zeros((), ACC)
    cross = tl.zeros((), ACC)
    best = V
    for start in range(0, V, BLOCK_V):
        v = start + tl.arange(0, BLOCK_V)
        u = _load_logits(teacher_ptr, v, V, MATHS[2], ACC)
        if PARTS:
            best = _first_of(m, best, u, v, V)
        m_new = _raise_max(m, u)
        w = tl.exp((u - m_new) * INV_T)
        rescale = tl.exp((m - m_new) * INV_T)
        d = d * rescale + tl.sum(w, axis=0)
        if BETA == 0:
            s = _load_logits(student_ptr, v, V, MATHS[1], ACC)
            # 0 * (-inf - z) is 0 here, not NaN: a token the teacher rules out costs nothing
            cross = cross * rescale + tl.sum(tl.where(w > 0, w * (u - s) * INV_T, 0.0), axis=0)
        m = m_new
    tl.store(numbers_ptr, m)
    tl.store(numbers_ptr + N, d)
    tl.store(numbers_ptr + 2 * N, cross)
    tl.store(numbers_ptr + 3 * N, best.to(ACC))
    tl.store(numbers_ptr + 4 * N, 0.0)
    tl.store(numbers_ptr + 5 * N, 0.0)


@jit
def _ratio(
    student_ptr, teacher_ptr, state_ptr, numbers_ptr, v, N, V,
    MATHS: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    """Of a block of columns at temperature T: q, p and log(q / p)."""
    INV_T: tl.constexpr = MATHS[0]
    s = _load_logits(student_ptr, v, V, MATHS[1], ACC)
    u = _load_logits(teacher_ptr, v, V, MATHS[2], ACC)
    m = tl.load(state_ptr)
    d_t = tl.load(state_ptr + 2 * N)
    m_u = tl.load(numbers_ptr)
    d_u = tl.load(numbers_ptr + N)
    q = tl.exp((s - m) * INV_T) / d_t
    p = tl.exp((u - m_u) * INV_T) / d_u
    return q, p, (s - u) * INV_T - ((m - m_u) * INV_T + tl.log(d_t / d_u))


@jit
def _second_reading(
    student_ptr, teacher_ptr, state_ptr, numbers_ptr, N, V,
    MATHS: tl.constexpr, ACC: tl.constexpr, BLOCK_V: tl.constexpr,
):  # fmt: skip
    """The teacher's numbers 4 and 5, centre and spread of (7)."""
    centre = tl.zeros((), ACC)
    spread = tl.zeros((), ACC)
    for start in range(0, V, BLOCK_V):
        v = start + tl.arange(0, BLOCK_V)
        q, p, r = _ratio(student_ptr, teacher_ptr, state_ptr, numbers_ptr, v, N, V, MATHS, ACC)
        log_qm, log_pm = against_mixture(r, MATHS[3], ACC)
        centre += tl.sum(tl.where(q > 0, q * log_qm, 0.0), axis=0)
        spread += tl.sum(tl.where(p > 0, p * log_pm, 0.0), axis=0)
    tl.store(numbers_ptr + 4 * N, centre)
    tl.store(numbers_ptr + 5 * N, spread)


@jit
def _pull(q, p, r, numbers_ptr, N, BETA: tl.constexpr, ACC: tl.constexpr):
    """(5), or (9): the divergence's gradient before 1 / T."""
    if BETA == 0:
        # q - p; where they are close as p * expm1(log q - log p). False for NaN: both are 0
        return tl.where(tl.abs(r) < 0.25, p * expm1(r, ACC), q - p)
    log_qm, _ = against_mixture(r, BETA, ACC)
    share: tl.constexpr = 1 if BETA == 1 else 1 - BETA
    return tl.where(q > 0, share * q * (log_qm - tl.load(numbers_ptr + 4 * N)), 0.0)


@jit
def _offsets(
    student_ptr, teacher_ptrs, state_ptr, strides, n, N, V,
    MATHS: tl.constexpr, ACC: tl.constexpr, BLOCK_V: tl.constexpr,
):  # fmt: skip
    """How far off each log(q / p) is: q - p sums up to 0, and to this if the rows' sums, good to
    1e-7, are a little wrong. Left alone that is 1e-5 of the gradient at 1 % drift."""
    offsets = ()
    for k in tl.static_range(len(teacher_ptrs)):
        offset = tl.zeros((), ACC)
        teacher_ptr = teacher_ptrs[k] + n * strides[2 + k]
        numbers_ptr = state_ptr + (8 + 6 * k) * N
        for start in range(0, V, BLOCK_V):
            v = start + tl.arange(0, BLOCK_V)
            q, p, r = _ratio(student_ptr, teacher_ptr, state_ptr, numbers_ptr, v, N, V, MATHS, ACC)
            pull = _pull(q, p, r, numbers_ptr, N, MATHS[3], ACC)
            offset += tl.sum(tl.where(v < V, pull, 0.0), axis=0)
        # a slice of the vocabulary has another sum
        whole = tl.load(state_ptr + 7 * N) == V
        offsets += (tl.where(whole, offset, 0.0),)  # type: ignore[assignment]
    return offsets


@jit
def _gradient_pass(
    student_ptr, teacher_ptrs, dstudent_ptr, drows_ptr, state_ptr, strides, n, label, kind, N, V,
    MATHS: tl.constexpr, ACC: tl.constexpr, BLOCK_V: tl.constexpr,
):  # fmt: skip
    """(4) to (6), (8), (9): write one row of the gradient, onto the student's row if need be."""
    CAP: tl.constexpr = MATHS[1]
    m = tl.load(state_ptr)
    rest = tl.load(state_ptr + N)
    e_y = tl.exp(tl.load(state_ptr + 3 * N) - m)
    d = rest + e_y
    dmlm = tl.where((kind & 1) != 0, tl.load(drows_ptr).to(ACC), 0.0)
    from_z_loss = dmlm * 2 * MATHS[5] * (tl.log(d) + m)
    smooth = dmlm * MATHS[4]
    at_y = (from_z_loss * e_y - dmlm * rest) / d + smooth
    # a narrower gradient has no such digits, and float64 has enough of them
    CORRECTED: tl.constexpr = MATHS[3] == 0 and dstudent_ptr.dtype.element_ty == tl.float32
    if CORRECTED:
        offsets = _offsets(
            student_ptr, teacher_ptrs, state_ptr, strides, n, N, V, MATHS, ACC, BLOCK_V
        )
    for start in range(0, V, BLOCK_V):
        v = start + tl.arange(0, BLOCK_V)
        s = _load_logits(student_ptr, v, V, CAP, ACC)  # (BLOCK_V,)
        g = tl.where(v == label, at_y, (dmlm + from_z_loss) * (tl.exp(s - m) / d))  # (4)
        if MATHS[4] != 0:
            g -= smooth / tl.load(state_ptr + 7 * N)  # (8)
        for k in tl.static_range(len(teacher_ptrs)):
            teacher_ptr = teacher_ptrs[k] + n * strides[2 + k]
            numbers_ptr = state_ptr + (8 + 6 * k) * N
            q, p, r = _ratio(student_ptr, teacher_ptr, state_ptr, numbers_ptr, v, N, V, MATHS, ACC)
            if CORRECTED:
                r -= offsets[k]
            dkl = tl.load(drows_ptr + (1 + k) * N).to(ACC) * MATHS[0]
            pull = dkl * _pull(q, p, r, numbers_ptr, N, MATHS[3], ACC)
            # not a factor of 0: what stands in a row without the term, NaN maybe, stays there
            g += tl.where((kind & 2) != 0, pull, 0.0)
        if CAP != 0:
            g *= 1 - (s / CAP) * (s / CAP)  # (6)
        # the gradient may be narrower than the logits it overwrites: all of this block is read
        # before any of it is written, and a write never reaches past the block just read
        tl.debug_barrier()
        tl.store(dstudent_ptr + v, g.to(dstudent_ptr.dtype.element_ty), mask=v < V)


@jit
def _zero_row(row_ptr, V, BLOCK_V: tl.constexpr):
    for start in range(0, V, BLOCK_V):
        v = start + tl.arange(0, BLOCK_V)
        tl.store(row_ptr + v, tl.zeros((BLOCK_V,), tl.float32), mask=v < V)


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
    MATHS: tl.constexpr,  # 1 / T, then as in `Maths`; caps of 0: none
    STEPS: tl.constexpr,  # SUMS, DIVERGE, GRAD of `Steps`, then PARTS
    ACC: tl.constexpr,
    BLOCK_V: tl.constexpr,
):
    K: tl.constexpr = len(teacher_ptrs)
    # int64: n * stride passes 2**31 at 65k rows x 32k vocabulary
    n = tl.program_id(0).to(tl.int64)
    student_ptr += n * strides[0]
    state_ptr += n
    kind = tl.load(kind_ptr + n)
    label = tl.where((kind & 1) != 0, tl.load(labels_ptr + n), -1)

    if STEPS[0]:
        if kind == 0:
            for j in tl.static_range(8 + 6 * K):
                tl.store(state_ptr + j * N, float("-inf") if j == 3 else 0.0)
        else:
            _student_pass(student_ptr, state_ptr, label, N, V, MATHS, STEPS[3], ACC, BLOCK_V)
            for k in tl.static_range(K):
                teacher_ptr = teacher_ptrs[k] + n * strides[2 + k]
                numbers_ptr = state_ptr + (8 + 6 * k) * N
                _teacher_pass(
                    student_ptr, teacher_ptr, numbers_ptr, N, V, MATHS, STEPS[3], ACC, BLOCK_V
                )
        # what follows reads the sums other threads of this program have just stored
        tl.debug_barrier()

    if STEPS[1]:
        if kind != 0:
            for k in tl.static_range(K):
                teacher_ptr = teacher_ptrs[k] + n * strides[2 + k]
                numbers_ptr = state_ptr + (8 + 6 * k) * N
                _second_reading(
                    student_ptr, teacher_ptr, state_ptr, numbers_ptr, N, V, MATHS, ACC, BLOCK_V
                )
        tl.debug_barrier()

    if STEPS[2]:
        dstudent_ptr += n * strides[1]
        if kind == 0:
            _zero_row(dstudent_ptr, V, BLOCK_V)
        else:
            _gradient_pass(
                student_ptr, teacher_ptrs, dstudent_ptr, drows_ptr + n, state_ptr, strides,
                n, label, kind, N, V, MATHS, ACC, BLOCK_V,
            )  # fmt: skip
