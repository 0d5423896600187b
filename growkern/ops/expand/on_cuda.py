"""The CUDA C++ backend of `expand`: plans the launch of csrc/cuda/expand_rows.cu.

Each row of the weight is read once. The weight may be on the GPU or in pinned memory of the host.
The speed of this backend has not been measured yet.

Shape letters used in this file: R, C rows and columns of the weight; M, N those of the result.
"""

import ctypes
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from growkern.errors import GrowthError
from growkern.ops.backend import HAS_TRITON, TYPES, Grid, Kernel, acc_torch_dtype, nvrtc
from growkern.ops.expand.call import ExpandCall, as_vector
from growkern.ops.expand.hashes import keys_of_call
from growkern.ops.expand.on_triton import lines_of_call

THREADS = 256
SOURCE = "expand_rows.cu"
ROW_LISTS = Kernel("row_lists", SOURCE, (("THREADS", THREADS),))

_POINTERS = ["weight", "upper", "out", "rows", "first", "after", "cols", "row_scale", "col_scale"]
_POINTERS += ["noise", "copies", "line_key", "line_mult"]
_STRIDES = ("weight_stride", "upper_stride", "out_stride_m", "out_stride_n")


class ExpandRowsArgs(ctypes.Structure):
    """struct ExpandRowsArgs of `csrc/cuda/expand_rows.cu`."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in _POINTERS),
        *((name, ctypes.c_int64) for name in _STRIDES),
        *((name, ctypes.c_int32) for name in ("R", "C", "M", "N", "staged")),
    )


class Launches(NamedTuple):
    """The launches of a call: with a map of rows, `ROW_LISTS` comes before the kernel.

    `tensors` are those whose addresses are in the arguments; they must outlive the launches.
    """

    steps: list[tuple[Kernel, Grid]]
    args: ExpandRowsArgs
    tensors: tuple[Tensor | None, ...]


def expand_kernel(call: ExpandCall, aligned: bool) -> Kernel:
    """The kernel for a call; `aligned`: every row begins and ends at a multiple of 16 bytes."""
    dtype, out_dtype = call.weight.dtype, call.out.dtype
    # nothing is computed where every number of the result is one of the weight, or 0
    is_exact = call.noise is None and not call.is_scaled and call.larger_share == 1
    acc = dtype if is_exact and dtype == out_dtype else acc_torch_dtype(call.wider)
    macros: dict[str, str | int] = {
        "IN": TYPES[dtype],
        "OUT": TYPES[out_dtype],
        "ACC": TYPES[acc],
        "UPPER": int(call.upper is not None),
        "NOISE": call.noise_kind,
        "SHARE": f"{call.larger_share.hex()}f",
        "SCALED": int(call.is_scaled),
        "THREADS": THREADS,
        "ALIGNED": int(aligned),
    }
    return Kernel("expand_rows", SOURCE, tuple(macros.items()), ("--fmad=false",))


def launches_of(call: ExpandCall, *, limit: int = 48 << 10) -> Launches:
    """The launches that carry out a call; tensors on "meta" give the same ones without memory.

    `limit` is the bytes of shared memory that a block may have.
    """
    call = call.with_contiguous_columns()
    weight_RC, upper_RC, out_MN = call.weight, call.upper, call.out
    (R, C), (M, N), acc = weight_RC.shape, out_MN.shape, acc_torch_dtype(call.wider)
    rows, first, after = as_vector(call.rows, torch.int64), None, None
    steps = []
    if rows is not None:
        first = torch.full((2 * R,), -1, dtype=torch.int32, device=rows.device)
        after = torch.empty(M, dtype=torch.int32, device=rows.device)
        steps.append((ROW_LISTS, Grid(-(-M // THREADS), THREADS)))
    tensors = (
        *(weight_RC, upper_RC, out_MN, rows, first, after),
        as_vector(call.cols, torch.int32),
        *(as_vector(x, acc) for x in (call.row_scale, call.col_scale, call.noise)),
        *_lines(call),
    )
    # rows begin up to 14 bytes past a multiple of 16
    row_bytes = (C + 15) // 8 * 8 * weight_RC.element_size() * (1 if upper_RC is None else 2)
    staged = row_bytes <= limit
    args = ExpandRowsArgs(
        *(None if x is None else x.data_ptr() for x in tensors),
        weight_RC.stride(0),
        0 if upper_RC is None else upper_RC.stride(0),
        *out_MN.stride(),
        *(R, C, M, N, staged),
    )
    grid = Grid(R, THREADS, row_bytes if staged else 0)
    steps.append((expand_kernel(call, _aligned(call, tensors)), grid))
    return Launches(steps, args, tensors)


def _on_gpu(call: ExpandCall) -> bool:
    return call.out.is_cuda


def _lines(call: ExpandCall) -> tuple[Tensor | None, ...]:
    """`Routing.packed`, and key and mult of every line."""
    if HAS_TRITON and _on_gpu(call):
        return lines_of_call(call)
    return None if call.routing is None else call.routing.packed, *keys_of_call(call)


def _aligned(call: ExpandCall, tensors: Sequence[Tensor | None]) -> bool:
    """Whether every row of weight, upper and result, and every vector, is in 16-byte pieces."""
    matrices = [x for x in (call.weight, call.upper, call.out) if x is not None]
    sizes = [n * x.element_size() for x in matrices for n in (x.stride(0), x.shape[1])]
    is_aligned = call.out.stride(1) == 1 and not any(n % 16 for n in sizes)
    # vectors: eight float32 are read at once
    return is_aligned and not any(x.data_ptr() % 32 for x in tensors if x is not None)


def expand_on_cuda(call: ExpandCall) -> None:
    """Fill `call.out`, which is on a GPU. The weight may be in pinned memory of the host.

    With a weight on the host this returns when the kernel has ended.
    """
    if missing := nvrtc.why_not():
        raise GrowthError(f"backend='cuda' cannot run here: {missing}")
    made = launches_of(call, limit=nvrtc.shared_limit(call.out.device))
    for kernel, grid in made.steps:
        nvrtc.launch(kernel, grid, made.args, call.out.device)
    if call.weight.device != call.out.device:
        # the caller may drop or overwrite the weight, and PyTorch does not know that a kernel that
        # it did not launch is still reading the host's memory
        torch.cuda.current_stream(call.out.device).synchronize()
