"""The rows of the KL + MLM loss in Triton: online sums first, the gradient in a second read.

Equations are numbered in `kl_mlm_loss.py`. Shape letters used in this file: N rows, V vocabulary,
K teachers, S statistics per row in the order of `row_layout`.
"""

from torch import Tensor

from growkern.ops._kl_mlm_options import Rows
from growkern.ops._launch import acc_dtype, jit, next_power_of_2, tl

# 16 elements per thread of 8 warps: enough loads in flight, and two blocks fit a multiprocessor
MAX_BLOCK_V = 4096
# left to itself ptxas aims at 80 registers on sm_80 and spills
MAX_REGISTERS = 128


@jit
def _tanh(x, ACC: tl.constexpr):
    e = tl.exp(-2 * tl.abs(x))
    far = tl.where(x < 0, -1.0, 1.0) * (1 - e) / (1 + e)
    if tl.float64 == ACC:
        return far
    # near 0 the line above loses the digits of 1 - e; the series is exact to 2e-10 below 0.25
    y = x * x
    near = 62.0 / 2835 + y * (-1382.0 / 155925)
    near = x * (1 + y * (-1.0 / 3 + y * (2.0 / 15 + y * (-17.0 / 315 + y * near))))
    return tl.where(y < 0.0625, near, far)


@jit
def _load_logits(row_ptr, v, V, CAP: tl.constexpr, ACC: tl.constexpr):
    x = tl.load(row_ptr + v, mask=v < V, other=float("-inf")).to(ACC)
    if CAP != 0:
        x = tl.where(v < V, CAP * _tanh(x / CAP, ACC), float("-inf"))
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
    student_ptr, rows_ptr, label, kind, N, V,
    K: tl.constexpr, MATHS: tl.constexpr, PARTS: tl.constexpr,
    ACC: tl.constexpr, BLOCK_V: tl.constexpr,
):  # fmt: skip
    """Sums of (1): store mlm, entropy and the student's state; return maximum, sum_T, top token."""
    INV_T: tl.constexpr = MATHS[0]
    CAP: tl.constexpr = MATHS[1]
    m = tl.full((), float("-inf"), ACC)
    rest = tl.zeros((), ACC)  # sum exp(z - m) beside the label
    d_t = tl.zeros((), ACC)
    moment = tl.zeros((), ACC)  # sum exp(z - m) * z
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
        m = m_new

    z_y = _load_logits(student_ptr, label, V, CAP, ACC)
    d = rest + tl.exp(z_y - m)
    if INV_T == 1:
        d_t = d
    tl.store(rows_ptr, tl.where((kind & 1) != 0, tl.log(d) + m - z_y, 0.0))  # (1)
    if PARTS:
        tl.store(rows_ptr + (1 + K) * N, tl.log(d) + m - moment / d)
    else:
        tl.store(rows_ptr + (1 + K) * N, 0.0)
    state_ptr = rows_ptr + (2 + 2 * K) * N
    tl.store(state_ptr, m)
    tl.store(state_ptr + N, d)
    tl.store(state_ptr + 2 * N, rest)
    tl.store(state_ptr + 3 * N, d_t)
    return m, d_t, best


@jit
def _teacher_pass(
    student_ptr, teacher_ptr, V,
    MATHS: tl.constexpr, PARTS: tl.constexpr, ACC: tl.constexpr, BLOCK_V: tl.constexpr,
):  # fmt: skip
    """Sums of (2): the teacher's maximum, its sum_T, the cross term before division, top token."""
    INV_T: tl.constexpr = MATHS[0]
    m = tl.full((), float("-inf"), ACC)
    d = tl.zeros((), ACC)
    cross = tl.zeros((), ACC)  # sum exp((u - m) / T) * (u - z) / T
    best = V
    for start in range(0, V, BLOCK_V):
        v = start + tl.arange(0, BLOCK_V)
        s = _load_logits(student_ptr, v, V, MATHS[1], ACC)
        u = _load_logits(teacher_ptr, v, V, MATHS[2], ACC)
        if PARTS:
            best = _first_of(m, best, u, v, V)
        m_new = _raise_max(m, u)
        w = tl.exp((u - m_new) * INV_T)
        rescale = tl.exp((m - m_new) * INV_T)
        d = d * rescale + tl.sum(w, axis=0)
        # 0 * (-inf - z) is 0 here, not NaN: a token the teacher rules out costs nothing
        cross = cross * rescale + tl.sum(tl.where(w > 0, w * (u - s) * INV_T, 0.0), axis=0)
        m = m_new
    return m, d, cross, best


@jit
def _difference(q, p, log_ratio, ACC: tl.constexpr):
    """q - p of (5); where they are close as p * expm1(log q - log p), exact to 4e-11 below 0.25."""
    if tl.float64 == ACC:
        return q - p
    r = log_ratio
    tail = 1 + r / 5 * (1 + r / 6 * (1 + r / 7 * (1 + r / 8)))
    near = p * r * (1 + r / 2 * (1 + r / 3 * (1 + r / 4 * tail)))
    # False for NaN: both sides rule the token out
    return tl.where(tl.abs(r) < 0.25, near, q - p)


@jit
def _gradient_pass(
    student_ptr, teacher_ptrs, dstudent_ptr, drows_ptr, rows_ptr, strides, n, label, kind, N, V,
    MATHS: tl.constexpr, ACC: tl.constexpr, BLOCK_V: tl.constexpr,
):  # fmt: skip
    """(4) to (6): write one row of the gradient, onto the student's own row if need be."""
    K: tl.constexpr = len(teacher_ptrs)
    INV_T: tl.constexpr = MATHS[0]
    CAP: tl.constexpr = MATHS[1]
    state_ptr = rows_ptr + (2 + 2 * K) * N
    m = tl.load(state_ptr)
    d = tl.load(state_ptr + N)
    rest = tl.load(state_ptr + 2 * N)
    d_t = tl.load(state_ptr + 3 * N)
    dmlm = tl.where((kind & 1) != 0, tl.load(drows_ptr).to(ACC), 0.0)
    for start in range(0, V, BLOCK_V):
        v = start + tl.arange(0, BLOCK_V)
        s = _load_logits(student_ptr, v, V, CAP, ACC)  # (BLOCK_V,)
        g = dmlm * tl.where(v == label, -rest / d, tl.exp(s - m) / d)  # (4)
        if K > 0:
            q = tl.exp((s - m) * INV_T) / d_t
        for k in tl.static_range(K):
            u = _load_logits(teacher_ptrs[k] + n * strides[2 + k], v, V, MATHS[2], ACC)
            m_u = tl.load(state_ptr + (4 + 2 * k) * N)
            d_u = tl.load(state_ptr + (5 + 2 * k) * N)
            dkl = tl.where((kind & 2) != 0, tl.load(drows_ptr + (1 + k) * N).to(ACC), 0.0)
            log_ratio = (s - u) * INV_T - ((m - m_u) * INV_T + tl.log(d_t / d_u))
            p = tl.exp((u - m_u) * INV_T) / d_u
            g += dkl * INV_T * _difference(q, p, log_ratio, ACC)  # (5)
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
def _kl_mlm_rows_kernel(
    student_ptr,  # (N, V)
    teacher_ptrs,  # K times (N, V)
    labels_ptr,  # (N,)
    kind_ptr,  # (N,)
    drows_ptr,  # (1 + K, N)
    rows_ptr,  # (S, N)  out with SUMS
    dstudent_ptr,  # (N, V)  out with GRAD
    strides,  # rows of student, dstudent, teachers
    N,
    V,
    MATHS: tl.constexpr,  # 1 / T, softcap, teacher_softcap; 0: no cap
    STEPS: tl.constexpr,  # SUMS, GRAD, PARTS: what to compute
    ACC: tl.constexpr,
    BLOCK_V: tl.constexpr,
):
    K: tl.constexpr = len(teacher_ptrs)
    SUMS: tl.constexpr = STEPS[0]
    GRAD: tl.constexpr = STEPS[1]
    PARTS: tl.constexpr = STEPS[2]
    # int64: n * stride passes 2**31 at 65k rows x 32k vocabulary
    n = tl.program_id(0).to(tl.int64)
    student_ptr += n * strides[0]
    rows_ptr += n
    kind = tl.load(kind_ptr + n)
    label = tl.where((kind & 1) != 0, tl.load(labels_ptr + n), 0)
    tl.device_assert((label >= 0) & (label < V), "label outside the vocabulary")

    if SUMS:
        if kind == 0:
            for j in tl.static_range(6 + 4 * K):
                tl.store(rows_ptr + j * N, 0.0)
        else:
            m, d_t, best = _student_pass(
                student_ptr, rows_ptr, label, kind, N, V, K, MATHS, PARTS, ACC, BLOCK_V
            )
            for k in tl.static_range(K):
                teacher_ptr = teacher_ptrs[k] + n * strides[2 + k]
                m_u, d_u, cross, best_u = _teacher_pass(
                    student_ptr, teacher_ptr, V, MATHS, PARTS, ACC, BLOCK_V
                )
                kl = cross / d_u + ((m - m_u) * MATHS[0] + tl.log(d_t / d_u))  # (2)
                agree = tl.where(best == best_u, 1.0, 0.0) if PARTS else 0.0
                in_kl = (kind & 2) != 0
                tl.store(rows_ptr + (1 + k) * N, tl.where(in_kl, kl, 0.0))
                tl.store(rows_ptr + (2 + K + k) * N, tl.where(in_kl, agree, 0.0))
                tl.store(rows_ptr + (6 + 2 * K + 2 * k) * N, m_u)
                tl.store(rows_ptr + (7 + 2 * K + 2 * k) * N, d_u)
        # the gradient below reads the sums other threads of this program have just stored
        tl.debug_barrier()

    if GRAD:
        dstudent_ptr += n * strides[1]
        if kind == 0:
            _zero_row(dstudent_ptr, V, BLOCK_V)
        else:
            _gradient_pass(
                student_ptr, teacher_ptrs, dstudent_ptr, drows_ptr + n, rows_ptr, strides,
                n, label, kind, N, V, MATHS, ACC, BLOCK_V,
            )  # fmt: skip


def rows_on_triton(
    rows: Rows,
    rows_SN: Tensor,
    drows_SN: Tensor | None = None,
    dstudent_NV: Tensor | None = None,
    have_rows: bool = False,
) -> None:
    """Fill `rows_SN` (unless it is filled) and, given the rows' gradient, `dstudent_NV`."""
    _, _, labels_N, kind_N, vocab, maths, parts = rows
    student_NV, *teachers_NV = (
        x if x.stride(-1) == 1 else x.contiguous() for x in (rows.student_NV, *rows.teachers_NV)
    )
    N = student_NV.shape[0]
    if N == 0:
        return
    grad_NV = student_NV if dstudent_NV is None else dstudent_NV
    drows_SN = rows_SN if drows_SN is None else drows_SN.contiguous()
    if dstudent_NV is not None and dstudent_NV.shape[1] > vocab:
        dstudent_NV[:, vocab:] = 0
    _kl_mlm_rows_kernel[(N,)](
        student_NV,
        tuple(teachers_NV),
        labels_N,
        kind_N,
        drows_SN,
        rows_SN,
        grad_NV,
        tuple(x.stride(0) for x in (student_NV, grad_NV, *teachers_NV)),
        N,
        vocab,
        MATHS=(1 / maths.temperature, maths.softcap, maths.teacher_softcap),
        STEPS=(not have_rows, dstudent_NV is not None, parts),
        ACC=acc_dtype(student_NV)[1],
        BLOCK_V=min(MAX_BLOCK_V, next_power_of_2(vocab)),
        num_warps=8,
        maxnreg=MAX_REGISTERS,
    )
