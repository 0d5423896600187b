"""The rows of the KL + MLM loss by the compiled library: lays the arguments out for it.

Shape letters used in this file: N rows, V vocabulary, K teachers, S numbers of a row.
"""

import ctypes

import torch
from torch import Tensor

from growkern.ops.backend import native
from growkern.ops.loss.rows.options import Rows
from growkern.ops.loss.rows.state import Steps

# dtypes of the logits, and of the gradients that are made of them
GRADIENTS = {
    torch.float32: (torch.float32, torch.bfloat16),
    torch.float64: (torch.float32, torch.float64),
}

_POINTERS = ("student", "teachers", "teacher_strides", "labels", "kind", "drows", "state")
_SIZES = ("student_stride", "dstudent_stride", "N", "V", "K")
_FACTORS = ("inv_t", "smoothing", "z_loss")
_NUMBERS = ("type", "grad_type", "sums", "parts", "threads", "isa")


class _Args(ctypes.Structure):
    """struct KlMlmArgs of csrc/cpu/kl_mlm.h."""

    _fields_ = (
        [(name, ctypes.c_void_p) for name in (*_POINTERS, "dstudent")]
        + [(name, ctypes.c_int64) for name in _SIZES]
        + [(name, ctypes.c_double) for name in _FACTORS]
        + [(name, ctypes.c_int32) for name in _NUMBERS]
    )


def library_takes(rows: Rows, state_SN: Tensor, steps: Steps, dstudent_NV: Tensor | None) -> bool:
    """Whether the library has code for these rows: not for capped logits, nor for `diverge`."""
    logits, maths = (rows.student_NV, *rows.teachers_NV), rows.maths
    dtype, grads = rows.student_NV.dtype, GRADIENTS.get(rows.student_NV.dtype, ())
    return (
        native.loaded() is not None
        and not (maths.softcap or maths.teacher_softcap or maths.beta or steps.diverge)
        and (dstudent_NV is None or (dstudent_NV.dtype in grads and dstudent_NV.stride(1) == 1))
        and all(x.dtype == dtype and x.stride(1) == 1 for x in logits)
        and state_SN.dtype == dtype
        and state_SN.is_contiguous()
    )


def rows_in_library(
    rows: Rows,
    state_SN: Tensor,
    steps: Steps,
    drows_SN: Tensor | None,
    dstudent_NV: Tensor | None,
    isa: int | None = None,
) -> None:
    """`rows_on_cpu` for what `library_takes`; `isa` is for tests, a number of ISA_NAMES."""
    lib = native.loaded()
    assert lib is not None
    student_NV, teachers_NV, labels_N, kind_N, V, maths, parts = rows
    K = len(teachers_NV)
    # named, so that the memory outlives the call
    labels_N, kind_N = labels_N.long().contiguous(), kind_N.int().contiguous()
    if drows_SN is not None:
        drows_SN = drows_SN[: 1 + K].to(state_SN.dtype).contiguous()
    teachers = (ctypes.c_void_p * K)(*(x.data_ptr() for x in teachers_NV))
    strides = (ctypes.c_int64 * K)(*(x.stride(0) for x in teachers_NV))
    grad_NV = state_SN if dstudent_NV is None else dstudent_NV
    args = _Args(
        student_NV.data_ptr(),
        ctypes.addressof(teachers),
        ctypes.addressof(strides),
        *(labels_N.data_ptr(), kind_N.data_ptr()),
        None if drows_SN is None or dstudent_NV is None else drows_SN.data_ptr(),
        *(state_SN.data_ptr(), grad_NV.data_ptr()),
        *(student_NV.stride(0), grad_NV.stride(0), len(student_NV), V, K),
        *(1 / maths.temperature, maths.label_smoothing, maths.z_loss),
        *(native.TYPES[student_NV.dtype], native.TYPES[grad_NV.dtype]),
        *(steps.sums, parts, torch.get_num_threads()),
        lib.growkern_best_isa() if isa is None else isa,
    )
    if lib.growkern_kl_mlm(ctypes.byref(args)):
        raise RuntimeError("kl_mlm: ISA")
