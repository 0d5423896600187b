"""The row kernel in Triton: the sums of a row, and the gradient in another reading of the logits.

`rows/on_triton.py` launches it. Equations are numbered in `kl_mlm_loss.py`.

Shape letters used in this file: N rows, V vocabulary, K teachers, S numbers of a row.
"""

from growkern.ops.backend import jit, tl
from growkern.ops.loss.rows.triton_blocks import (
    ratio,
    store_gradient,
    zero_row,
)
from growkern.ops.loss.rows.triton_sums import (
    DIVERGE,
    DROWS,
    DSTUDENT,
    GRAD,
    INV_T,
    KL_ROW,
    LABEL_LOGIT,
    MLM_ROW,
    STUDENT,
    STUDENT_SUMS,
    SUMS,
    T_CENTRE,
    TEACHER_SUMS,
    TEACHERS,
    before_cap,
    corrected,
    label_factors,
    logits_of,
    pull_of,
    row_numbers,
    second_reading,
    smoothed,
    softmax_parts,
    store_sums,
    teacher_sums,
)

# ---------------------------------------------------------------------- gradient


@jit
def _write_block(
    rows, biases, dstudent_ptr, numbers, factors, pulls, label, v, V,
    MASKED: tl.constexpr, MATHS: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    """Write a block of the gradient.

    `factors` are those of exp(z - m), the number at the label, and the number that is subtracted
    everywhere. `pulls` has for each teacher whether the row has the term, its factor and centre.
    """
    s = logits_of(rows, biases, 0, v, V, MASKED, MATHS, ACC)  # (BLOCK_V,)
    m, inv_d_t = numbers[0]
    per_e, at_y, everywhere = factors
    e, e_t = softmax_parts(s - m, MATHS)
    g = smoothed(tl.where(v == label, at_y, per_e * e), everywhere, MATHS)  # (4), (9)
    for k in tl.static_range(1, len(rows)):
        u = logits_of(rows, biases, k, v, V, MASKED, MATHS, ACC)
        p, r = ratio(s, u, numbers[k], MATHS[INV_T])
        has_kl, dkl, centre = pulls[k - 1]
        pull = dkl * pull_of(e_t * inv_d_t, p, r, centre, MATHS, ACC)
        # not a factor of 0: a row without the KL term may hold NaN
        g += tl.where(has_kl, pull, 0.0)
    store_gradient(dstudent_ptr, v, V, before_cap(g, s, MATHS), MASKED)


@jit
def _write_gradient(
    rows, biases, dstudent_ptr, drows_ptr, drows_w, state_ptr, label, kind, N, V,
    MATHS: tl.constexpr, ACC: tl.constexpr, BLOCK_V: tl.constexpr, LANES: tl.constexpr,
):  # fmt: skip
    """Write one row of the gradient, (4) to (6), (8) and (9), possibly over the student's row.

    `drows_w` is the stride between terms.
    """
    K: tl.constexpr = len(rows) - 1
    numbers = row_numbers(state_ptr, N, K, MATHS)
    factors = label_factors(drows_ptr, state_ptr, kind, N, MATHS, ACC)
    numbers = corrected(
        numbers, rows, biases, dstudent_ptr, state_ptr, N, V, MATHS, ACC, BLOCK_V, LANES
    )
    pulls = ()
    for k in tl.static_range(1, K + 1):
        dkl = tl.load(drows_ptr + k * drows_w).to(ACC) * MATHS[INV_T]
        centre = tl.load(teacher_sums(state_ptr, k, N) + N * T_CENTRE)
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
    drows_ptr,  # (1 + K, N), rows side by side
    state_ptr,  # (S, N)  in and out
    dstudent_ptr,  # (N, V)  out with GRAD
    strides,  # rows of student and dstudent, terms of drows, rows of teachers
    V,
    MATHS: tl.constexpr,  # numbers of the formulas, see the names above
    STEPS: tl.constexpr,  # what to do, see the names above
    ACC: tl.constexpr,
    BLOCK_V: tl.constexpr,
    LANES: tl.constexpr,  # threads, and neighbours that each reads at once: see `in_lanes`
):
    K: tl.constexpr = len(logit_ptrs) - 1
    N = tl.num_programs(0)
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
            store_sums(rows, biases, state_ptr, label, N, V, MATHS, STEPS, ACC, BLOCK_V, LANES)
        # the next steps read sums that other threads of this program have just stored
        tl.debug_barrier()

    if STEPS[DIVERGE]:
        if kind != 0:
            second_reading(rows, biases, state_ptr, N, V, MATHS, ACC, BLOCK_V, LANES)
        tl.debug_barrier()

    if STEPS[GRAD]:
        dstudent_ptr += n * strides[DSTUDENT]
        if kind == 0:
            zero_row(dstudent_ptr, V, BLOCK_V)
        else:
            _write_gradient(
                rows, biases, dstudent_ptr, drows_ptr + n, strides[DROWS], state_ptr, label, kind,
                N, V, MATHS, ACC, BLOCK_V, LANES,
            )  # fmt: skip
