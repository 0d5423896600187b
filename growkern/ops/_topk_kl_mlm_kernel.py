"""The rows of the top-k loss in Triton: k tokens taken out, a dense pass, the k put back.

Equations are numbered in `topk_kl_mlm_loss.py`. The k logits go into registers and -inf into their
places, so that the dense pass sums the tail alone: k and V never meet in one block, and Q is no
difference. The gradient of the k tokens is written last, over what the dense pass left there.

Shape letters used in this file: N rows, V vocabulary, k entries of the teacher per row.
"""

from collections.abc import Sequence

from torch import Tensor

from growkern.ops._kl_mlm_kernel import _first_of, _zero_row
from growkern.ops._kl_mlm_launch import MAX_BLOCK_V, MAX_REGISTERS
from growkern.ops._kl_mlm_options import KL_ROW
from growkern.ops._launch import acc_torch_dtype, jit, launch_choice, next_power_of_2, tl
from growkern.ops._special import expm1, tanh
from growkern.ops._topk_kl_mlm_teacher import teacher_masses


@jit
def _difference(q, p, log_ratio, ACC: tl.constexpr):
    """q - p; where they are close as p * expm1(log q - log p). False for NaN: both are 0."""
    return tl.where(tl.abs(log_ratio) < 0.25, p * expm1(log_ratio, ACC), q - p)


@jit
def _capped(x, CAP: tl.constexpr, ACC: tl.constexpr):
    """-inf stays: it marks the places of the k tokens."""
    if CAP != 0:
        x = tl.where(x == float("-inf"), x, CAP * tanh(x / CAP, ACC))
    return x


@jit
def _load_tail(row_ptr, v, V, CAP: tl.constexpr, ACC: tl.constexpr):
    x = tl.load(row_ptr + v, mask=v < V, other=float("-inf")).to(ACC)
    return _capped(x, CAP, ACC)


@jit
def _tail_pass(
    student_ptr, label, V,
    MATHS: tl.constexpr, PARTS: tl.constexpr, ACC: tl.constexpr, BLOCK_V: tl.constexpr,
):  # fmt: skip
    """Sums over the tail: maximum, exp beside the label, exp at T, exp * z, top token."""
    INV_T: tl.constexpr = MATHS[0]
    m = tl.full((), float("-inf"), ACC)
    rest = tl.zeros((), ACC)
    tail_t = tl.zeros((), ACC)
    moment = tl.zeros((), ACC)
    best = V
    for start in range(0, V, BLOCK_V):
        v = start + tl.arange(0, BLOCK_V)
        s = _load_tail(student_ptr, v, V, MATHS[1], ACC)  # (BLOCK_V,)
        if PARTS:
            best = _first_of(m, best, s, v, V)
        m_new = tl.maximum(m, tl.max(s, axis=0))
        # while all tokens so far are among the k there is no maximum: -inf - -inf is none either
        base = tl.where(m_new == float("-inf"), 0.0, m_new)
        rescale = tl.exp(m - base)
        e = tl.exp(s - base)
        rest = rest * rescale + tl.sum(tl.where(v == label, 0.0, e), axis=0)
        rescale_t = tl.exp((m - base) * INV_T)
        tail_t = tail_t * rescale_t + tl.sum(tl.exp((s - base) * INV_T), axis=0)
        if PARTS:
            moment = moment * rescale + tl.sum(tl.where(e > 0, e * s, 0.0), axis=0)
        m = m_new
    return m, rest, tail_t, moment, best


@jit
def _tail_gradient(
    student_ptr, dstudent_ptr, label, m, top, dmlm_d, on_label, on_tail, V,
    MATHS: tl.constexpr, ACC: tl.constexpr, BLOCK_V: tl.constexpr,
):  # fmt: skip
    """(4) and (5) off the k tokens: write one row, onto the logits' own row if need be."""
    INV_T: tl.constexpr = MATHS[0]
    CAP: tl.constexpr = MATHS[1]
    base = tl.where(m == float("-inf"), 0.0, m)
    for start in range(0, V, BLOCK_V):
        v = start + tl.arange(0, BLOCK_V)
        s = _load_tail(student_ptr, v, V, CAP, ACC)  # (BLOCK_V,)
        g = tl.where(v == label, on_label, dmlm_d * tl.exp(s - top))  # (4)
        g += on_tail * tl.exp((s - base) * INV_T)  # (5)
        if CAP != 0:
            g *= 1 - (s / CAP) * (s / CAP)
        # the gradient may be narrower than the logits it overwrites: all of this block is read
        # before any of it is written, and a write never reaches past the block just read
        tl.debug_barrier()
        tl.store(dstudent_ptr + v, g.to(dstudent_ptr.dtype.element_ty), mask=v < V)


@jit
def _take_out(student_ptr, label, ids, is_k, V, CAP: tl.constexpr, ACC: tl.constexpr):
    """The label's logit and the k tokens', (BLOCK_K,), which leave -inf in their places."""
    z_y = _load_tail(student_ptr, label, V, CAP, ACC)
    s_k = tl.load(student_ptr + ids, mask=is_k, other=float("-inf")).to(ACC)
    # all threads have read before any writes, and the dense pass reads what all have written
    tl.debug_barrier()
    tl.store(student_ptr + ids, tl.full(ids.shape, float("-inf"), tl.float32), mask=is_k)
    tl.debug_barrier()
    return z_y, _capped(s_k, CAP, ACC)


@jit
def _whole_sums(tail, s_k, z_y, is_label, INV_T: tl.constexpr):
    """Tail and k tokens together: maximum, sums of exp, log q_T of the k and of the tail. (1)"""
    m, rest, tail_t, _, _ = tail
    top = tl.maximum(m, tl.max(s_k, axis=0))
    # the mass beside the label is summed on its own: 1 - q[y] would lose it when q[y] is near 1
    rest = rest * tl.exp(m - top) + tl.sum(tl.where(is_label, 0.0, tl.exp(s_k - top)), axis=0)
    d = rest + tl.exp(z_y - top)
    x_k = (s_k - top) * INV_T
    x_m = (m - top) * INV_T
    log_d = tl.log(tail_t * tl.exp(x_m) + tl.sum(tl.exp(x_k), axis=0))
    return top, rest, d, x_k - log_d, tl.log(tail_t) + x_m - log_d


@jit
def _store_rows(
    rows_ptr, tail, sums, s_k, z_y, ids, log_p, log_tail, kind, N, V,
    PARTS: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    m, _, _, moment, best = tail
    top, _, d, log_q, log_rest = sums
    in_kl = (kind & 2) != 0
    p = tl.exp(log_p)
    p_tail = tl.exp(log_tail)
    # 0 * inf is 0 here, not NaN: what the teacher rules out costs nothing
    kl = tl.sum(tl.where(p > 0, p * (log_p - log_q), 0.0), axis=0)
    kl += tl.where(p_tail > 0, p_tail * (log_tail - log_rest), 0.0)  # (3)
    entropy = tl.zeros((), ACC)
    agree = tl.zeros((), ACC)
    if PARTS:
        e_k = tl.exp(s_k - top)
        moment = moment * tl.exp(m - top) + tl.sum(tl.where(e_k > 0, e_k * s_k, 0.0), axis=0)
        entropy = tl.log(d) + top - moment / d
        max_k = tl.max(s_k, axis=0)
        best_k = tl.min(tl.where(s_k == max_k, ids, V), axis=0)
        best = tl.where(max_k > m, best_k, tl.where(max_k < m, best, tl.minimum(best, best_k)))
        best_p = tl.min(tl.where(log_p == tl.max(log_p, axis=0), ids, V), axis=0)
        agree = tl.where((best == best_p) & in_kl, 1.0, 0.0)
    tl.store(rows_ptr, tl.where((kind & 1) != 0, tl.log(d) + top - z_y, 0.0))
    tl.store(rows_ptr + N, tl.where(in_kl, kl, 0.0))
    tl.store(rows_ptr + 2 * N, entropy)
    tl.store(rows_ptr + 3 * N, agree)


@jit
def _gradient(
    student_ptr, dstudent_ptr, drows_ptr, tail, sums, s_k, ids, masks, teacher, label_kind, N, V,
    MATHS: tl.constexpr, BLOCK_V: tl.constexpr,
):  # fmt: skip
    """(4) and (5) for one row: the tail first, then the k tokens over what it left there."""
    CAP: tl.constexpr = MATHS[1]
    ACC: tl.constexpr = s_k.dtype
    is_k, is_label = masks
    log_p, log_tail = teacher
    label, kind = label_kind
    m, _, tail_t, _, _ = tail
    top, rest, d, log_q, log_rest = sums
    dmlm = tl.where((kind & 1) != 0, tl.load(drows_ptr).to(ACC), 0.0)
    dkl = tl.where((kind & 2) != 0, tl.load(drows_ptr + N).to(ACC), 0.0) * MATHS[0]
    on_tail = _difference(tl.exp(log_rest), tl.exp(log_tail), log_rest - log_tail, ACC)
    on_tail = tl.where(tail_t > 0, dkl * on_tail / tail_t, 0.0)
    on_label = -dmlm * rest / d
    _tail_gradient(
        student_ptr, dstudent_ptr, label, m, top, dmlm / d, on_label, on_tail, V,
        MATHS, ACC, BLOCK_V,
    )  # fmt: skip
    g = tl.where(is_label, on_label, dmlm / d * tl.exp(s_k - top))
    g += dkl * _difference(tl.exp(log_q), tl.exp(log_p), log_q - log_p, ACC)
    if CAP != 0:
        g *= 1 - (s_k / CAP) * (s_k / CAP)
    tl.debug_barrier()
    tl.store(dstudent_ptr + ids, g.to(dstudent_ptr.dtype.element_ty), mask=is_k)


@jit
def _topk_rows_kernel(
    student_ptr,  # (N, V)  its k tokens are overwritten
    teacher_ptrs,  # ids (N, k), log p (N, k), log P (N,)
    labels_ptr,  # (N,)
    kind_ptr,  # (N,)
    drows_ptr,  # (2, N)
    rows_ptr,  # (4, N)  out: mlm, kl, entropy, top-1
    dstudent_ptr,  # (N, V)  out with GRAD
    strides,  # rows of student, dstudent
    N,
    V,
    k,
    MATHS: tl.constexpr,  # 1 / T, softcap; 0: no cap
    STEPS: tl.constexpr,  # GRAD, PARTS: what to compute
    BLOCKS: tl.constexpr,  # BLOCK_V, BLOCK_K
):
    BLOCK_V: tl.constexpr = BLOCKS[0]
    ACC: tl.constexpr = teacher_ptrs[1].dtype.element_ty
    # int64: n * stride passes 2**31 at 65k rows x 32k vocabulary
    n = tl.program_id(0).to(tl.int64)
    student_ptr += n * strides[0]
    dstudent_ptr += n * strides[1]
    rows_ptr += n
    kind = tl.load(kind_ptr + n)
    if kind == 0:
        for row in tl.static_range(4):
            tl.store(rows_ptr + row * N, 0.0)
        if STEPS[0]:
            _zero_row(dstudent_ptr, V, BLOCK_V)
    else:
        label = tl.where((kind & 1) != 0, tl.load(labels_ptr + n), 0)
        tl.device_assert((label >= 0) & (label < V), "label outside the vocabulary")
        j = tl.arange(0, BLOCKS[1])
        ids = tl.load(teacher_ptrs[0] + n * k + j, mask=j < k, other=0)
        # an id outside is asserted elsewhere: here it must only not reach other memory
        is_k = (j < k) & (ids >= 0) & (ids < V)
        log_p = tl.load(teacher_ptrs[1] + n * k + j, mask=is_k, other=float("-inf"))
        log_tail = tl.load(teacher_ptrs[2] + n)
        is_label = is_k & (ids == label)

        z_y, s_k = _take_out(student_ptr, label, ids, is_k, V, MATHS[1], ACC)
        tail = _tail_pass(student_ptr, label, V, MATHS, STEPS[1], ACC, BLOCK_V)
        sums = _whole_sums(tail, s_k, z_y, is_label, MATHS[0])
        _store_rows(rows_ptr, tail, sums, s_k, z_y, ids, log_p, log_tail, kind, N, V, STEPS[1], ACC)
        if STEPS[0]:
            _gradient(
                student_ptr, dstudent_ptr, drows_ptr + n, tail, sums, s_k, ids, (is_k, is_label),
                (log_p, log_tail), (label, kind), N, V, MATHS, BLOCK_V,
            )  # fmt: skip


def topk_rows_on_triton(
    student_NV: Tensor,
    topk: Sequence[Tensor],
    labels_N: Tensor,
    kind_N: Tensor,
    vocab: int,
    maths: Sequence[float],
    parts: bool,
    rows_SN: Tensor,
    drows_SN: Tensor,
    dstudent_NV: Tensor | None,
) -> None:
    """Fill `rows_SN` (mlm, kl, entropy, top-1) and, given a place for it, the gradient.

    Overwrites the logits; `dstudent_NV` may be the same memory.
    """
    N = student_NV.shape[0]
    temperature, cap, drop_tail = maths
    acc = acc_torch_dtype(student_NV)
    kl_N = (kind_N & KL_ROW) > 0
    ids_Nk, log_p_Nk, log_tail_N = teacher_masses(topk, kl_N, vocab, drop_tail != 0, acc)
    k = ids_Nk.shape[1]
    grad_NV = student_NV if dstudent_NV is None else dstudent_NV
    choice = launch_choice(
        "topk_kl_mlm_rows", student_NV, vocab, BLOCK_V=MAX_BLOCK_V, num_warps=8,
        maxnreg=MAX_REGISTERS,
    )  # fmt: skip
    block = min(choice.pop("BLOCK_V"), next_power_of_2(vocab))
    _topk_rows_kernel[(N,)](
        student_NV,
        (ids_Nk, log_p_Nk, log_tail_N),
        labels_N,
        kind_N,
        drows_SN.contiguous(),
        rows_SN,
        grad_NV,
        (student_NV.stride(0), grad_NV.stride(0)),
        N,
        vocab,
        k,
        MATHS=(1 / temperature, cap),
        STEPS=(dstudent_NV is not None, parts),
        BLOCKS=(block, next_power_of_2(k)),
        **choice,
    )
