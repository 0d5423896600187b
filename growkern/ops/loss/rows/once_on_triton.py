"""Rows of the linear loss that are read once: programs share a row and hold it in registers.

The kernel of `rows/triton_kernel.py` reads the logits of a row twice: for its sums, and for its
gradient. Here each program loads a part of the columns, stores its sums, waits for the other parts
of the row, adds up all sums, and writes its columns of the gradient. 10 bytes of a logit cross the
memory instead of 18, and 6 instead of 10 without a teacher.

No GPU has run it yet, so it is off. `GROWKERN_ROWS_ONCE=1` turns it on for calls that
`may_read_once` allows. Programs that wait for each other must all run at once. The launch is
therefore cooperative: a device starts all programs together or refuses. After a refusal the other
kernel runs.

Equations are numbered in `kl_mlm_loss.py`. Shape letters used in this file: N rows, V vocabulary,
K teachers (0 or 1), S parts of a row.
"""

import os

import torch
from torch import Tensor

from growkern.ops.backend import jit, next_power_of_2, tl
from growkern.ops.backend.launch import launch
from growkern.ops.loss.rows.state import Rows, Steps
from growkern.ops.loss.rows.triton_blocks import base_of, exp_of, exponentials, weighted
from growkern.ops.loss.rows.triton_sums import (
    BEST,
    COLUMNS,
    DROWS,
    DSTUDENT,
    INV_T,
    KL_ROW,
    LABEL_LOGIT,
    MAXIMUM,
    MLM_ROW,
    MOMENT,
    REST,
    STUDENT,
    SUM_T,
    SUM_Z,
    T_BEST,
    T_CENTRE,
    T_CROSS,
    T_MAXIMUM,
    T_SPREAD,
    T_SUM_T,
    TEACHERS,
    pull_of,
    teacher_sums,
)

VARIABLE = "GROWKERN_ROWS_ONCE"
# columns of a part: 32 logits of each head in the registers of a thread
PART = 8192
# with fewer columns today's kernel finds a row in the cache when it reads it again
LEAST_COLUMNS = 16384
# by the number of teachers: registers of a thread, and programs that then fit on a multiprocessor
REGISTERS, PROGRAMS = (80, 128), (3, 2)
# of an H100 and H200: on others threads have too few registers, and values go through memory
CAPABILITY = (9, 0)
# devices that have refused a cooperative launch
REFUSED: set[torch.device] = set()

# PHASE: all of it, or one half of it, for an interpreter that runs one program after another
BOTH, SUM_ONLY, GRAD_ONLY = map(tl.constexpr, range(3))
# sums of a part: student's maximum, rest, sum at the temperature, label's logit; teacher's maximum,
# sum, and cross term
PART_SUMS = tl.constexpr(8)


@jit
def _load(row_ptr, v, V):
    return tl.load(row_ptr + v, mask=v < V, other=float("-inf")).to(tl.float32)


@jit
def _store_part(sums_ptr, s, u, v, label, T_INV: tl.constexpr, S: tl.constexpr):
    """Store the sums of a part of a row, relative to the largest logit of the part."""
    top = tl.max(s, axis=0)
    e, e_t = exponentials(s - base_of(top), T_INV)
    tl.store(sums_ptr, top)
    tl.store(sums_ptr + S, tl.sum(tl.where(v == label, 0.0, e), axis=0))
    tl.store(sums_ptr + 2 * S, tl.sum(e_t, axis=0))
    tl.store(sums_ptr + 3 * S, tl.max(tl.where(v == label, s, float("-inf")), axis=0))
    if u is not None:
        top_u = tl.max(u, axis=0)
        w = exp_of(u - base_of(top_u), T_INV)
        tl.store(sums_ptr + 4 * S, top_u)
        tl.store(sums_ptr + 5 * S, tl.sum(w, axis=0))
        tl.store(sums_ptr + 6 * S, tl.sum(weighted(w, u - s), axis=0))


@jit
def _wait(done_ptr, S: tl.constexpr):
    """Return when all S programs of a row have come here; what they stored before is then seen."""
    # all threads have stored; then one adds 1, and waits for the others
    tl.debug_barrier()
    tl.atomic_add(done_ptr, 1, sem="release", scope="gpu")
    seen = tl.atomic_add(done_ptr, 0, sem="acquire", scope="gpu")
    while seen < S:
        seen = tl.atomic_add(done_ptr, 0, sem="acquire", scope="gpu")
    tl.debug_barrier()


@jit
def _of_parts(sums_ptr, at: tl.constexpr, S: tl.constexpr):
    """A number of all parts, (S,). Other programs wrote it: not from this one's own cache."""
    return tl.load(sums_ptr + at * S + tl.arange(0, S), cache_modifier=".cg")


@jit
def _student_of(sums_ptr, T_INV: tl.constexpr, S: tl.constexpr):
    """`StudentSums` of a row from those of its parts: m, rest, d_t and the label's logit."""
    tops = _of_parts(sums_ptr, 0, S)
    m = base_of(tl.max(tops, axis=0))
    # a part without a finite logit adds 0
    near, near_t = exponentials(tops - m, T_INV)
    rest = tl.sum(_of_parts(sums_ptr, 1, S) * near, axis=0)
    z_y = tl.max(_of_parts(sums_ptr, 3, S), axis=0)
    if T_INV == 1:
        d_t = rest + tl.exp(z_y - m)
    else:
        d_t = tl.sum(_of_parts(sums_ptr, 2, S) * near_t, axis=0)
    return m, rest, d_t, z_y


@jit
def _teacher_of(sums_ptr, T_INV: tl.constexpr, S: tl.constexpr):
    """`TeacherSums` of a row from those of its parts: m_u, d_u and the cross term."""
    tops = _of_parts(sums_ptr, 4, S)
    m_u = base_of(tl.max(tops, axis=0))
    near = exp_of(tops - m_u, T_INV)
    d_u = tl.sum(_of_parts(sums_ptr, 5, S) * near, axis=0)
    return m_u, d_u, tl.sum(_of_parts(sums_ptr, 6, S) * near, axis=0) * T_INV


@jit
def _store_state(state_ptr, N, V, student, teacher):
    """The state of a row. Other numbers are as without the options that want them."""
    K: tl.constexpr = 0 if teacher is None else 1
    m, rest, d_t, z_y = student
    tl.store(state_ptr + N * MAXIMUM, m)
    tl.store(state_ptr + N * REST, rest)
    tl.store(state_ptr + N * SUM_T, d_t)
    tl.store(state_ptr + N * LABEL_LOGIT, z_y)
    tl.store(state_ptr + N * MOMENT, 0.0)
    tl.store(state_ptr + N * SUM_Z, 0.0)
    columns = tl.full((), V, tl.float32)
    tl.store(state_ptr + N * BEST, columns)
    tl.store(state_ptr + N * COLUMNS, columns)
    if K:
        m_u, d_u, cross = teacher
        to_ptr = teacher_sums(state_ptr, 1, N)
        tl.store(to_ptr + N * T_MAXIMUM, m_u)
        tl.store(to_ptr + N * T_SUM_T, d_u)
        tl.store(to_ptr + N * T_CROSS, cross)
        tl.store(to_ptr + N * T_BEST, columns)
        tl.store(to_ptr + N * T_CENTRE, 0.0)
        tl.store(to_ptr + N * T_SPREAD, 0.0)


@jit
def _gradient(s, u, v, label, kind, drows_ptr, drows_w, student, teacher, MATHS: tl.constexpr):
    """(4) and (5) of a part of a row, from logits in registers."""
    T_INV: tl.constexpr = MATHS[INV_T]
    m, rest, d_t, z_y = student
    d = rest + tl.exp(z_y - m)
    dmlm = tl.where((kind & MLM_ROW) != 0, tl.load(drows_ptr), 0.0)
    e, e_t = exponentials(s - m, T_INV)
    g = tl.where(v == label, -dmlm * rest / d, dmlm / d * e)
    if u is not None:
        m_u, d_u, _ = teacher
        shift = (m - m_u) * T_INV + tl.log(d_t / d_u)
        p, r = exp_of(u - m_u, T_INV) * (1 / d_u), (s - u) * T_INV - shift
        dkl = tl.load(drows_ptr + drows_w) * T_INV
        pull = dkl * pull_of(e_t * (1 / d_t), p, r, 0.0, MATHS, tl.float32)
        g += tl.where(((kind & KL_ROW) != 0) & (dkl != 0), pull, 0.0)
    return g


@jit
def rows_once_kernel(
    logit_ptrs,  # 1 + K times (N, V), the student's first
    labels_ptr,  # (N,)
    kind_ptr,  # (N,)
    drows_ptr,  # (1 + K, N), rows side by side
    shared,  # (N, PART_SUMS, S) memory for sums, and (N,) int32: 0
    state_ptr,  # (numbers, N)  out
    grad_ptr,  # (N, V)  out, possibly over the logits
    strides,  # as of `kl_mlm_rows_kernel`
    N,
    V,
    MATHS: tl.constexpr,
    S: tl.constexpr,
    BLOCK_V: tl.constexpr,
    PHASE: tl.constexpr,
):
    T_INV: tl.constexpr = MATHS[INV_T]
    K: tl.constexpr = len(logit_ptrs) - 1
    part, at_once = tl.program_id(0) % S, tl.num_programs(0) // S
    v = part * BLOCK_V + tl.arange(0, BLOCK_V)
    # S programs take a row, and the same S programs take the row `at_once` further on
    for row in range(tl.program_id(0) // S, N, at_once):
        n = tl.zeros((), tl.int64) + row
        kind, sums_ptr = tl.load(kind_ptr + n), shared[0] + n * (PART_SUMS * S)
        label = tl.where((kind & MLM_ROW) != 0, tl.load(labels_ptr + n), -1)
        s = _load(logit_ptrs[0] + n * strides[STUDENT], v, V)
        u, teacher = None, None
        if K:
            u = _load(logit_ptrs[1] + n * strides[TEACHERS], v, V)
        if PHASE != GRAD_ONLY:
            _store_part(sums_ptr + part, s, u, v, label, T_INV, S)
        if PHASE == BOTH:
            _wait(shared[1] + n, S)
        if PHASE != SUM_ONLY:
            student = _student_of(sums_ptr, T_INV, S)
            if K:
                teacher = _teacher_of(sums_ptr, T_INV, S)
            g = _gradient(
                s, u, v, label, kind, drows_ptr + n, strides[DROWS], student, teacher, MATHS
            )
            if part == 0:
                _store_state(state_ptr + n, N, V, student, teacher)
            # a row without a term may hold NaN
            g = tl.where(kind == 0, 0.0, g).to(grad_ptr.dtype.element_ty)
            tl.store(grad_ptr + n * strides[DSTUDENT] + v, g, mask=v < V)


def may_read_once(rows: Rows, steps: Steps, dstudent_NV: Tensor | None) -> bool:
    """Whether the kernel can do this: plain KL and labels, from float32 logits."""
    return (
        steps == Steps(sums=True, grad=True)
        and rows.maths.is_plain()
        and not (rows.parts or any(bias is not None for bias in rows.biases))
        and len(rows.teachers_NV) <= 1
        and rows.student_NV.dtype == torch.float32
        and dstudent_NV is not None
        and dstudent_NV.itemsize == 2
        # columns are read without a mask for each, 16 bytes at a time
        and rows.vocab >= LEAST_COLUMNS
        and rows.vocab % 16 == 0
        and not torch.version.hip
        and rows.student_NV.device not in REFUSED
    )


def read_rows_once(rows: Rows, state_SN: Tensor, drows_WN: Tensor, dstudent_NV: Tensor) -> bool:
    """Fill the state and the gradient; False if the device cannot or refuses. Then nothing has run.

    Arguments as `rows_on_triton` launches its kernel with them.
    """
    student_NV, device = rows.student_NV, rows.student_NV.device
    N, K, S = len(student_NV), len(rows.teachers_NV), next_power_of_2(-(-rows.vocab // PART))
    at_once = min(N, _programs(device, K) // S)
    if not at_once:
        return False
    sums = student_NV.new_empty(N, PART_SUMS.value, S)
    shared = (sums, torch.zeros(N, dtype=torch.int32, device=device))
    strides = tuple(x.stride(0) for x in (student_NV, dstudent_NV, drows_WN, *rows.teachers_NV))
    interpreted = os.environ.get("TRITON_INTERPRET") == "1"
    try:
        for phase in (SUM_ONLY, GRAD_ONLY) if interpreted else (BOTH,):
            launch(
                rows_once_kernel, S * at_once, student_NV, (student_NV, *rows.teachers_NV),
                rows.labels_N, rows.kind_N, drows_WN, shared, state_SN, dstudent_NV, strides, N,
                rows.vocab,
                MATHS=rows.maths.of_kernels(), S=S, BLOCK_V=PART, PHASE=phase.value, num_warps=8,
                maxnreg=REGISTERS[K], launch_cooperative_grid=True,
            )  # fmt: skip
    except RuntimeError as error:
        if not any(words in str(error) for words in ("cooperative", "not supported")):
            raise
        REFUSED.add(device)
        return False
    return True


def _programs(device: torch.device, K: int) -> int:
    """Programs that fit on a device; on a CPU that stands for one, as many as on an H100."""
    if device.type == "cpu":
        return PROGRAMS[K] * 132
    # others may not know cooperative launches
    if device.type != "cuda" or torch.cuda.get_device_capability(device) != CAPABILITY:
        return 0
    return PROGRAMS[K] * torch.cuda.get_device_properties(device).multi_processor_count
