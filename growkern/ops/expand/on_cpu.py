"""`expand` by the compiled library (csrc/cpu/expand.h): lays the arguments out for it."""

import ctypes

import torch
from torch import Tensor

from growkern.ops.backend import native
from growkern.ops.backend.launch import acc_torch_dtype
from growkern.ops.expand.noise import line_keys

# below this many output elements a second thread costs more than it saves
PARALLEL_ELEMENTS = 1 << 16

_POINTERS = ["weight", "upper", "out", "rows", "cols", "row_scale", "col_scale"]
_POINTERS += ["row_noise", "col_noise", "line_key", "line_mult"]
_SIZES = ("R", "C", "M", "N", "weight_stride", "upper_stride", "out_stride_m", "out_stride_n")
_NUMBERS = ("in_type", "out_type", "threads", "isa")


class _Args(ctypes.Structure):
    """struct ExpandArgs."""

    _fields_ = (
        [(name, ctypes.c_void_p) for name in _POINTERS]
        + [(name, ctypes.c_int64) for name in _SIZES]
        + [(name, ctypes.c_int32) for name in _NUMBERS]
    )


def _vector(x: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    return None if x is None else x.detach().to(dtype).contiguous()


def _columns_contiguous(x: Tensor) -> Tensor:
    # the weight is the small side: a copy costs a fraction of writing the result
    return x if x.stride(1) == 1 else x.contiguous()


def expand_cpu(
    out_MN: Tensor,
    weight_RC: Tensor,
    upper_RC: Tensor | None,
    rows_M: Tensor | None,
    cols_N: Tensor | None,
    row_scale_M: Tensor | None,
    col_scale_N: Tensor | None,
    row_noise_M: Tensor | None,
    col_noise_N: Tensor | None,
    seed: int,
    row_offset: int,
    col_offset: int,
    isa: int | None = None,
) -> None:
    """Fills out_MN. `isa` (a number of `_native.ISA_NAMES`) is for tests: None takes the best."""
    lib = native.loaded()
    assert lib is not None
    M, N = out_MN.shape
    acc = acc_torch_dtype(weight_RC)
    weight_RC = _columns_contiguous(weight_RC)
    upper_RC = None if upper_RC is None else _columns_contiguous(upper_RC)
    keys: tuple[Tensor | None, Tensor | None] = (None, None)
    if col_noise_N is not None:
        keys = line_keys(M, row_offset, seed, out_MN.device)
    elif row_noise_M is not None:
        keys = line_keys(N, col_offset, seed, out_MN.device)
    factors = (row_scale_M, col_scale_N, row_noise_M, col_noise_N)
    # named, so that the memory outlives the call
    tensors = [weight_RC, upper_RC, out_MN, _vector(rows_M, torch.int64)]
    tensors += [_vector(cols_N, torch.int64), *(_vector(x, acc) for x in factors), *keys]
    threads = torch.get_num_threads() if M * N >= PARALLEL_ELEMENTS else 1
    args = _Args(
        *(None if x is None else x.data_ptr() for x in tensors),
        *weight_RC.shape,
        *(M, N),
        weight_RC.stride(0),
        0 if upper_RC is None else upper_RC.stride(0),
        *out_MN.stride(),
        native.TYPES[weight_RC.dtype],
        native.TYPES[out_MN.dtype],
        threads,
        lib.growkern_best_isa() if isa is None else isa,
    )
    status = lib.growkern_expand(ctypes.byref(args))
    if status:
        raise MemoryError("expand: out of memory") if status == 1 else RuntimeError("expand: ISA")
