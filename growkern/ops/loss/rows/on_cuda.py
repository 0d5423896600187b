"""The rows of the KL + MLM loss in CUDA C++: launches `csrc/cuda/kl_mlm_rows.cu`.

Between the sums and the gradient the row stays in the shared memory of a thread-block cluster, so
that both need one reading of the logits. Clusters need sm_90 or later. Not measured yet.

Shape letters used in this file: N rows, V vocabulary, K teachers, S numbers of a row.
"""

import ctypes
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from growkern.errors import GrowthError
from growkern.ops.backend.nvrtc import (
    TYPES,
    Grid,
    Kernel,
    aligned,
    launch,
    shared_limit,
    why_not,
)
from growkern.ops.loss.rows.options import Maths
from growkern.ops.loss.rows.state import Rows, Steps

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
THREADS = 256
MAX_TEACHERS = 4
CLUSTERS = (1, 2, 4, 8, 16)
# numbers in the array `sums` of struct Partial: those of the student, and those of each teacher
STUDENT_PARTIAL_SUMS, TEACHER_PARTIAL_SUMS = 4, 2
# struct Maths of `csrc/maths.h`, after 1 / temperature
_FACTORS = Maths._fields[1:]
# shared memory that the device reserves in every block
RESERVED_BYTES = 1024


class RowsArgs(ctypes.Structure):
    """struct RowsArgs of `csrc/cuda/kl_mlm_state.h`."""

    _fields_ = (
        *((name, ctypes.c_float) for name in ("inv_t", *_FACTORS)),
        ("student", ctypes.c_void_p),
        ("teacher", ctypes.c_void_p * MAX_TEACHERS),
        ("student_bias", ctypes.c_void_p),
        ("teacher_bias", ctypes.c_void_p * MAX_TEACHERS),
        *((name, ctypes.c_void_p) for name in ("labels", "kind", "drows", "state", "dstudent")),
        ("student_stride", ctypes.c_int64),
        ("dstudent_stride", ctypes.c_int64),
        ("teacher_stride", ctypes.c_int64 * MAX_TEACHERS),
        ("N", ctypes.c_int64),
        *((name, ctypes.c_int32) for name in ("V", "span")),
        *((name, ctypes.c_bool) for name in ("sums", "grad")),
    )


class Plan(NamedTuple):
    """One launch; `tensors` are those with their addresses in `args`."""

    kernel: Kernel
    grid: Grid
    args: RowsArgs
    tensors: tuple[Tensor, ...]


def _span(V: int, cluster: int) -> int:
    """Columns of a block: a multiple of 8, so a multiple of 16 bytes in every type."""
    return -(-V // (8 * cluster)) * 8


def shared_bytes(V: int, cluster: int, sizes: Sequence[int]) -> int:
    """Shared memory of a block of the cluster: its columns of every tensor, and struct Scratch."""
    return _span(V, cluster) * sum(sizes) + scratch_bytes(len(sizes) - 1)


def scratch_bytes(K: int) -> int:
    """The size of struct Scratch of `csrc/cuda/kl_mlm_state.h`. The kernel asserts it."""
    sums = STUDENT_PARTIAL_SUMS + TEACHER_PARTIAL_SUMS * K
    # struct Partial: maximum and best column of every model, the label's logit, the sums
    partial = 2 * (1 + K) + 1 + sums
    return 4 * (THREADS // 32 * sums + 2 * partial)


def cluster_size(V: int, sizes: Sequence[int], limit: int) -> int:
    """The number of blocks that share a row, for tensors of `sizes` bytes a column.

    The smallest number with which two blocks fit on a multiprocessor: one computes while the other
    waits for memory. If there is none, the smallest number that fits at all, or 0.
    """
    for room in ((limit - RESERVED_BYTES) // 2, limit):
        for cluster in CLUSTERS:
            if shared_bytes(V, cluster, sizes) <= room:
                return cluster
    return 0


def refusal(
    student_NV: Tensor, teachers_NV: Sequence[Tensor], vocab: int, beta: float, limit: int
) -> str:
    """Why the kernel cannot process these rows; empty if it can.

    `limit` is the shared memory of a block in bytes.
    """
    if beta != 0:
        return "has the forward divergence only"
    if len({x.dtype for x in teachers_NV}) > 1:
        return "takes teachers of one dtype"
    if any(x.dtype not in DTYPES for x in (student_NV, *teachers_NV)):
        return "takes float32, bfloat16 and float16 logits"
    sizes = [x.element_size() for x in (student_NV, *teachers_NV)]
    if len(teachers_NV) > MAX_TEACHERS or not cluster_size(vocab, sizes, limit):
        return (
            f"has no room for {vocab} columns of {len(teachers_NV)} teachers in "
            f"{CLUSTERS[-1]} blocks of {limit} bytes"
        )
    return ""


def rows_kernel(macros: dict[str, str | int]) -> Kernel:
    # numbers below 1e-38 become 0: keeping them costs three instructions per exp
    return Kernel("kl_mlm_rows", tuple(macros.items()), ("--ftz=true",))


def _place(x_NV: Tensor) -> tuple[int, int]:
    """Address of the first row and distance between rows, in bytes."""
    return x_NV.data_ptr(), x_NV.stride(0) * x_NV.element_size()


def _biases(rows: Rows) -> list[Tensor | None]:
    """The biases of student and teachers, those that are there in one dtype."""
    dtypes = {x.dtype for x in rows.biases if x is not None}
    dtype = dtypes.pop() if len(dtypes) == 1 else torch.float32
    biases = rows.biases or [None] * (1 + len(rows.teachers_NV))
    return [x if x is None else x.to(dtype).contiguous() for x in biases]


def plan(
    rows: Rows,
    state_SN: Tensor,
    steps: Steps,
    drows_SN: Tensor | None,
    dstudent_NV: Tensor | None,
    limit: int,
) -> Plan:
    """The launch of `rows_on_cuda` where a block may have `limit` bytes of shared memory."""
    _, _, labels_N, kind_N, vocab, maths, parts, _ = rows
    # the Triton kernel takes any integer type, this one does not
    labels_N, kind_N = labels_N.long().contiguous(), kind_N.int().contiguous()
    student_NV, *teachers_NV = (
        x if x.stride(-1) == 1 else x.contiguous() for x in (rows.student_NV, *rows.teachers_NV)
    )
    sizes = [x.element_size() for x in (student_NV, *teachers_NV)]
    cluster, N = cluster_size(vocab, sizes, limit), student_NV.shape[0]
    room = shared_bytes(vocab, cluster, sizes)
    grad_NV = student_NV if dstudent_NV is None else dstudent_NV
    drows_SN = state_SN if drows_SN is None else drows_SN.contiguous()
    biases = _biases(rows)
    given = [x for x in biases if x is not None]
    own, *theirs = [None if x is None else x.data_ptr() for x in biases]
    tensors = (student_NV, *teachers_NV, grad_NV)
    macros: dict[str, str | int] = {
        "TEACHERS": len(teachers_NV),
        "STUDENT": TYPES[student_NV.dtype],
        "TEACHER": TYPES[teachers_NV[0].dtype if teachers_NV else student_NV.dtype],
        "GRAD": TYPES[grad_NV.dtype],
        "CLUSTER": cluster,
        "THREADS": THREADS,
        "SCRATCH_BYTES": scratch_bytes(len(teachers_NV)),
        "CAPPED": int(maths.is_capped),
        "BIASED": int(bool(given)),
        "BIAS": TYPES[given[0].dtype if given else torch.float32],
        "PARTS": int(parts),
        # blocks begin at multiples of 8 columns, which are 16 bytes of the narrowest type
        "ALIGNED": int(aligned(2 * vocab, *(n for x in tensors for n in _place(x)))),
    }
    args = RowsArgs(
        student=student_NV.data_ptr(),
        teacher=(ctypes.c_void_p * MAX_TEACHERS)(*(x.data_ptr() for x in teachers_NV)),
        student_bias=own,
        teacher_bias=(ctypes.c_void_p * MAX_TEACHERS)(*theirs),
        labels=labels_N.data_ptr(),
        kind=kind_N.data_ptr(),
        drows=drows_SN.data_ptr(),
        state=state_SN.data_ptr(),
        dstudent=grad_NV.data_ptr(),
        student_stride=student_NV.stride(0),
        dstudent_stride=grad_NV.stride(0),
        teacher_stride=(ctypes.c_int64 * MAX_TEACHERS)(*(x.stride(0) for x in teachers_NV)),
        **{"N": N, "V": vocab, "span": _span(vocab, cluster)},
        sums=steps.sums,
        grad=steps.grad,
        inv_t=1 / maths.temperature,
        **{name: getattr(maths, name) for name in _FACTORS},
    )
    tensors += (labels_N, kind_N, drows_SN, state_SN, *given)
    return Plan(rows_kernel(macros), Grid(N * cluster, THREADS, room, cluster), args, tensors)


def rows_on_cuda(
    rows: Rows,
    state_SN: Tensor,
    steps: Steps,
    drows_SN: Tensor | None = None,
    dstudent_NV: Tensor | None = None,
) -> None:
    """Fill `state_SN` and, given the gradient of the terms, `dstudent_NV`, as `steps` says.

    Arguments as in `rows_on_cpu`.

    Raises:
        GrowthError: the kernel cannot process these rows, see `refusal`.
    """
    device = rows.student_NV.device
    found = why_not() or _too_old(device)
    limit = 0 if found else shared_limit(device)
    found = found or refusal(rows.student_NV, rows.teachers_NV, rows.vocab, rows.maths.beta, limit)
    if found:
        raise GrowthError(f"backend='cuda' {found}: use backend='triton', which has no such limit")
    if dstudent_NV is not None and dstudent_NV.shape[1] > rows.vocab:
        dstudent_NV[:, rows.vocab :] = 0
    if rows.student_NV.shape[0] and rows.vocab:
        made = plan(rows, state_SN, steps, drows_SN, dstudent_NV, limit)
        launch(made.kernel, made.grid, made.args, device)


def _too_old(device: torch.device) -> str:
    major, minor = torch.cuda.get_device_capability(device)
    return "" if major >= 9 else f"needs thread-block clusters, sm_90: this is sm_{major}{minor}"
