"""The CPU backend of `expand`: passes a call to the compiled library (csrc/cpu/expand.h)."""

import ctypes

import torch
from torch import Tensor

from growkern.ops.backend import acc_torch_dtype, native
from growkern.ops.expand.call import ROW_NOISE, ExpandCall, as_vector
from growkern.ops.expand.hashes import keys_of_call, noise_of_entries

# below this many output elements a second thread costs more than it saves
PARALLEL_ELEMENTS = 1 << 16

_POINTERS = ["weight", "upper", "out", "rows", "cols", "row_scale", "col_scale"]
_POINTERS += ["row_factor", "col_factor", "noise_source", "row_copies", "col_copies"]
_POINTERS += ["line_key", "line_mult"]
_SIZES = ("R", "C", "M", "N", "weight_stride", "upper_stride", "out_stride_m", "out_stride_n")
_NUMBERS = ("in_type", "out_type", "threads", "isa")


class ExpandArgs(ctypes.Structure):
    """struct ExpandArgs of `csrc/cpu/expand.h`."""

    _fields_ = (
        [(name, ctypes.c_void_p) for name in _POINTERS]
        + [(name, ctypes.c_int64) for name in _SIZES]
        + [(name, ctypes.c_int32) for name in _NUMBERS]
        + [("larger_share", ctypes.c_float)]
    )


def expand_on_cpu(call: ExpandCall, isa: int | None = None) -> None:
    """Fill `call.out`; for tests with the instruction set `isa` of `native.ISA_NAMES`."""
    lib = native.loaded()
    assert lib is not None
    call = call.with_contiguous_columns()
    acc = acc_torch_dtype(call.wider)
    # a list, so that the memory outlives the call into the library
    tensors = [call.weight, call.upper, call.out]
    tensors += [as_vector(x, torch.int64) for x in (call.rows, call.cols)]
    tensors += [as_vector(x, acc) for x in (call.row_scale, call.col_scale)]
    factor, source = noise_of_entries(call, acc)
    tensors += [factor, None] if call.noise_kind == ROW_NOISE else [None, factor]
    copies: list[Tensor | None] = [None, None]
    if call.routing is not None:
        copies[call.routing.dim] = call.routing.packed
    tensors += [source, *copies, *keys_of_call(call)]
    args = ExpandArgs(
        *(None if x is None else x.data_ptr() for x in tensors),
        *call.weight.shape,
        *call.out.shape,
        call.weight.stride(0),
        0 if call.upper is None else call.upper.stride(0),
        *call.out.stride(),
        native.TYPES[call.weight.dtype],
        native.TYPES[call.out.dtype],
        torch.get_num_threads() if call.out.numel() >= PARALLEL_ELEMENTS else 1,
        lib.growkern_best_isa() if isa is None else isa,
        call.larger_share,
    )
    status = lib.growkern_expand(ctypes.byref(args))
    if status == 1:
        raise MemoryError("expand: out of memory")
    if status:
        raise RuntimeError(f"expand: this processor has no {native.ISA_NAMES[args.isa]}")
