"""The GEMM of the compiled library (csrc/cpu/gemm.h), for factors narrower than the sum.

Shape letters used in this file: M, K and N, rows, depth and columns.
"""

import ctypes

import torch
from torch import Tensor

from growkern.ops.backend import native

AVX512, AVX512_BF16 = (native.ISA_NAMES.index(f"AVX-512{rest}") for rest in ("", " with bfloat16"))

_SIZES = ("m", "n", "k", "a_m", "a_k", "b_k", "b_n", "c_m")
_NUMBERS = ("a_type", "b_type", "product", "add", "threads", "isa")


class _Args(ctypes.Structure):
    """struct GemmArgs."""

    _fields_ = (
        [(name, ctypes.c_void_p) for name in "abc"]
        + [(name, ctypes.c_int64) for name in _SIZES]
        + [(name, ctypes.c_int32) for name in _NUMBERS]
    )


def has_bfloat16() -> bool:
    """Whether the processor multiplies bfloat16, at twice the rate of float32."""
    return AVX512_BF16 in native.available_isas()


def multiplies(factor: torch.dtype, total: torch.dtype) -> bool:
    """Whether the library has products of such factors, summed in the wider dtype `total`.

    Of equal dtypes it has none: there PyTorch's BLAS is as fast.
    """
    narrow = factor in (torch.float16, torch.bfloat16, torch.float32) and factor != total
    wide = total in (torch.float32, torch.float64)
    return narrow and wide and AVX512 in native.available_isas()


def gemm_cpu(a_MK: Tensor, b_KN: Tensor, out_MN: Tensor, *, add: bool = False) -> None:
    """``a @ b`` over `out_MN`, or added to it; for dtypes that `multiplies` names.

    Products of two bfloat16 tensors are the processor's own where it has them, all others are taken
    in the dtype of `out_MN`.
    """
    lib = native.loaded()
    assert lib is not None
    a_MK, b_KN = (x if 1 in x.stride() else x.contiguous() for x in (a_MK, b_KN))
    own = has_bfloat16() and a_MK.dtype == b_KN.dtype == torch.bfloat16
    own = own and out_MN.dtype == torch.float32
    args = _Args(
        *(x.data_ptr() for x in (a_MK, b_KN, out_MN)),
        *(*out_MN.shape, a_MK.shape[1]),
        *(*a_MK.stride(), *b_KN.stride(), out_MN.stride(0)),
        *(native.TYPES[x.dtype] for x in (a_MK, b_KN)),
        native.TYPES[torch.bfloat16 if own else out_MN.dtype],
        add,
        torch.get_num_threads(),
        lib.growkern_best_isa(),
    )
    status = lib.growkern_gemm(ctypes.byref(args))
    if status:
        raise MemoryError("gemm: out of memory") if status == 1 else RuntimeError("gemm: ISA")
