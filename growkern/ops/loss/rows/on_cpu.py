"""The rows of the KL + MLM loss on a CPU: passes tensors to the compiled library.

The mathematics is in `csrc/cpu/kl_mlm_body.cpp`.

Shape letters used in this file: N rows, V vocabulary, K teachers, S numbers of a row.
"""

import ctypes

import torch
from torch import Tensor

from growkern.ops.backend import acc_torch_dtype, native
from growkern.ops.loss.rows.options import Maths
from growkern.ops.loss.rows.state import Rows, Steps, clear

_POINTERS = (
    *("student", "teachers", "teacher_strides", "teacher_types", "labels", "kind", "drows"),
    *("tail", "state", "dstudent", "scratch"),
)
_SIZES = ("student_stride", "dstudent_stride", "N", "V", "K")
# struct Maths of `csrc/maths.h`
_FACTORS = ("inv_t", *Maths._fields[1:])
_NUMBERS = ("type", "student_type", "grad_type", "narrow", "threads", "isa")
_FLAGS = (*Steps._fields, "parts")


class KlMlmArgs(ctypes.Structure):
    """struct KlMlmArgs of `csrc/cpu/kl_mlm.h`."""

    _fields_ = (
        [(name, ctypes.c_double) for name in _FACTORS]
        + [(name, ctypes.c_void_p) for name in _POINTERS]
        + [(name, ctypes.c_int64) for name in _SIZES]
        + [(name, ctypes.c_int32) for name in _NUMBERS]
        + [(name, ctypes.c_bool) for name in _FLAGS]
    )


def rows_on_cpu(
    rows: Rows,
    state_SN: Tensor,
    steps: Steps,
    drows_SN: Tensor | None = None,
    dstudent_NV: Tensor | None = None,
    isa: int | None = None,
) -> None:
    """Fill `state_SN` and, given the gradient of the terms, `dstudent_NV`, as `steps` says.

    Args:
        rows: logits of any float dtype. Rows of kind 0 and columns from `vocab` on are not read.
        state_SN: (S, N), contiguous, float32 or float64. All is computed in its dtype,
            except what `is_narrow` allows.
        steps: what to do.
        drows_SN: gradient of the MLM term and of each teacher's, at least (1 + K, N).
        dstudent_NV: gradient of the student's logits, out. It may be the memory of the logits.
        isa: index into `native.ISA_NAMES`, for tests. Default: the best of this processor.
    """
    if steps.sums:
        clear(state_SN)
    if drows_SN is not None:
        W = 1 + len(rows.teachers_NV)
        drows_SN = drows_SN if len(drows_SN) == W else drows_SN[:W]
        drows_SN = drows_SN.to(state_SN.dtype).contiguous()
    _run(rows, steps, state_SN.dtype, isa, dstudent_NV, state=state_SN, drows=drows_SN)


def tail_gradient_on_cpu(
    rows: Rows, tail_5N: Tensor, dstudent_NV: Tensor, isa: int | None = None
) -> None:
    """Write the gradient of a top-k loss outside the teachers' tokens; 0 in rows of kind 0.

    Args:
        rows: the student's logits, float32 or float64 and capped already.
        tail_5N: `TailFactors` of `topk/buckets.py`, in the dtype of the logits.
        dstudent_NV: the gradient, out. It may be the memory of the logits. The caller overwrites
            it at the teachers' tokens.
        isa: as in `rows_on_cpu`.
    """
    tail_5N = tail_5N.contiguous()
    _run(rows, Steps(grad=True), tail_5N.dtype, isa, dstudent_NV, tail=tail_5N)


def _run(
    rows: Rows,
    steps: Steps,
    dtype: torch.dtype,
    isa: int | None,
    dstudent_NV: Tensor | None,
    **inputs: Tensor | None,
) -> None:
    """Call the library. `dtype` is that of its sums; `inputs` are other tensors of KlMlmArgs."""
    N, V = len(rows.student_NV), rows.vocab
    if N and V:
        # local names keep memory alive until the call returns
        student_NV, *teachers_NV = (_readable(x) for x in (rows.student_NV, *rows.teachers_NV))
        threads, scratch = torch.get_num_threads(), None
        types = {x.dtype for x in (student_NV, *teachers_NV)}
        grad_NV = student_NV if dstudent_NV is None else dstudent_NV
        narrow = -1
        if "tail" not in inputs and is_narrow(rows.maths, grad_NV.dtype):
            narrow = native.TYPES[torch.float64 if torch.float64 in types else torch.float32]
        elif types != {dtype} or rows.maths.is_capped():
            scratch = student_NV.new_empty(threads, 1 + len(teachers_NV), V, dtype=dtype)
        tensors = {
            **{"student": student_NV, "dstudent": grad_NV, "scratch": scratch},
            **{"labels": rows.labels_N.long().contiguous(), "kind": rows.kind_N.int().contiguous()},
            **inputs,
        }
        args = KlMlmArgs(
            **{name: x.data_ptr() for name, x in tensors.items() if x is not None},
            **{"student_stride": student_NV.stride(0), "dstudent_stride": grad_NV.stride(0)},
            **{"N": N, "V": V, "K": len(teachers_NV)},
            **dict(zip(_FACTORS, rows.maths.of_kernels(), strict=True)),
            **{"type": native.TYPES[dtype], "student_type": native.TYPES[student_NV.dtype]},
            **{"grad_type": native.TYPES[grad_NV.dtype], "parts": rows.parts, "narrow": narrow},
            threads=threads,
            **steps._asdict(),
        )
        _call(args, teachers_NV, isa)
    # after the call: in place, these columns may be logits until then
    if dstudent_NV is not None and dstudent_NV.shape[1] > V:
        dstudent_NV[:, V:] = 0


def is_narrow(maths: Maths, wanted: torch.dtype) -> bool:
    """Whether float32 with float64 sums is enough, see `csrc/cpu/kl_mlm_narrow.h`.

    Args:
        maths: of the rows. Capped logits and other divergences are computed in the sums' dtype.
        wanted: dtype of the gradient; of the student's logits if there is none.
    """
    return maths.is_forward() and not maths.is_capped() and wanted != torch.float64


def _readable(x_NV: Tensor) -> Tensor:
    """The logits in a dtype and layout that the library reads."""
    x_NV = x_NV if x_NV.dtype in native.TYPES else x_NV.to(acc_torch_dtype(x_NV))
    return x_NV if x_NV.stride(1) == 1 else x_NV.contiguous()


def _call(args: KlMlmArgs, teachers_NV: list[Tensor], isa: int | None) -> None:
    """Add the teachers and the instruction set to the arguments, and run the kernel."""
    lib, K = native.loaded(), len(teachers_NV)
    assert lib is not None
    # local names here too
    teachers = (ctypes.c_void_p * K)(*(x.data_ptr() for x in teachers_NV))
    strides = (ctypes.c_int64 * K)(*(x.stride(0) for x in teachers_NV))
    types = (ctypes.c_int32 * K)(*(native.TYPES[x.dtype] for x in teachers_NV))
    args.teachers = ctypes.addressof(teachers)
    args.teacher_strides = ctypes.addressof(strides)
    args.teacher_types = ctypes.addressof(types)
    args.isa = lib.growkern_best_isa() if isa is None else isa
    if lib.growkern_kl_mlm(ctypes.byref(args)):
        raise RuntimeError("the processor or the library lacks this instruction set")
