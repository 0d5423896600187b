"""Matrix products of the compiled library, whose factors may be narrower than the sums.

`csrc/cpu/gemm.h` has the code. Shape letters: M, K and N, rows, depth and columns of a product.
"""

import ctypes

import torch
from torch import Tensor

from growkern.ops.backend import native

AVX512, AVX512_BF16 = (native.ISA_NAMES.index(f"AVX-512{rest}") for rest in ("", " with bfloat16"))

_SIZES = ("m", "n", "k", "a_m", "a_k", "b_k", "b_n", "c_m")
_NUMBERS = ("a_type", "b_type", "c_type", "product", "threads", "isa")


class GemmArgs(ctypes.Structure):
    """struct GemmArgs of `csrc/cpu/gemm.h`."""

    _fields_ = (
        [(name, ctypes.c_void_p) for name in "abc"]
        + [(name, ctypes.c_int64) for name in _SIZES]
        + [(name, ctypes.c_int32) for name in _NUMBERS]
        + [("add", ctypes.c_bool)]
    )


def has_bfloat16() -> bool:
    """Whether the processor multiplies bfloat16, at twice the rate of float32."""
    return AVX512_BF16 in native.available_isas()


def multiplies(factor: torch.dtype, total: torch.dtype) -> bool:
    """Whether the library multiplies such factors into sums of the dtype `total`."""
    narrow = factor in (torch.float16, torch.bfloat16, torch.float32)
    wide = total in (torch.float32, torch.float64)
    return narrow and wide and AVX512 in native.available_isas()


def gemm_on_cpu(
    a_MK: Tensor,
    b_KN: Tensor,
    out_MN: Tensor,
    *,
    add: bool = False,
    wide_products: bool = True,
) -> None:
    """Write ``a @ b`` to `out_MN`, or add it; for dtypes that `multiplies` names.

    Two bfloat16 tensors are multiplied by the processor's own instructions if it has them. All
    other products are computed in the dtype of `out_MN`, except that two float32 tensors are
    multiplied in float32 without `wide_products`: `FloatsInDoubles` of `csrc/cpu/gemm_tile.h`.

    Raises:
        MemoryError: there is no memory for the packed factors.
    """
    lib = native.loaded()
    assert lib is not None
    a_MK, b_KN = (x if 1 in x.stride() else x.contiguous() for x in (a_MK, b_KN))
    dtypes, product = (a_MK.dtype, b_KN.dtype, out_MN.dtype), out_MN.dtype
    if dtypes == (torch.bfloat16, torch.bfloat16, torch.float32) and has_bfloat16():
        product = torch.bfloat16
    elif dtypes == (torch.float32, torch.float32, torch.float64) and not wide_products:
        product = torch.float32
    (m, n), (a_m, a_k), (b_k, b_n) = out_MN.shape, a_MK.stride(), b_KN.stride()
    args = GemmArgs(
        a=a_MK.data_ptr(),
        b=b_KN.data_ptr(),
        c=out_MN.data_ptr(),
        **{"m": m, "n": n, "k": a_MK.shape[1], "c_m": out_MN.stride(0)},
        **{"a_m": a_m, "a_k": a_k, "b_k": b_k, "b_n": b_n},
        a_type=native.TYPES[a_MK.dtype],
        b_type=native.TYPES[b_KN.dtype],
        c_type=native.TYPES[out_MN.dtype],
        product=native.TYPES[product],
        add=add,
        threads=torch.get_num_threads(),
        isa=lib.growkern_best_isa(),
    )
    status = lib.growkern_gemm(ctypes.byref(args))
    if status == 1:
        raise MemoryError("no memory for the packed factors of a matrix product")
    if status:
        raise RuntimeError("this processor has no instructions for such a matrix product")
