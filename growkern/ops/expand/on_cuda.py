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
from growkern.ops.backend import nvrtc
from growkern.ops.backend.launch import HAS_TRITON
from growkern.ops.backend.native import acc_torch_dtype
from growkern.ops.backend.nvrtc import TYPES, Grid, Kernel
from growkern.ops.expand.call import ExpandCall, as_vector
from growkern.ops.expand.hashes import keys_of_call, noise_of_entries
from growkern.ops.expand.on_triton import lines_of_call

THREADS = 256
# with fewer rows than this, several blocks share a row: a vector is one row
LEAST_BLOCKS = 256

_POINTERS = (
    *("weight", "upper", "out", "first", "target", "rows", "cols", "row_scale", "col_scale"),
    *("noise_factor", "noise_source", "copies", "line_key", "line_mult"),
)
_STRIDES = ("weight_stride", "upper_stride", "out_stride_m", "out_stride_n")
_NUMBERS = ("R", "C", "M", "N", "blocks_per_row")
_FLAGS = ("staged", "reads_upper_beside")


class ExpandRowsArgs(ctypes.Structure):
    """struct ExpandRowsArgs of `csrc/cuda/expand_rows.cu`."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in _POINTERS),
        *((name, ctypes.c_int64) for name in _STRIDES),
        *((name, ctypes.c_int32) for name in _NUMBERS),
        *((name, ctypes.c_bool) for name in _FLAGS),
    )


class Plan(NamedTuple):
    """One launch. `tensors` are those whose addresses are in `args`; they must outlive it."""

    kernel: Kernel
    grid: Grid
    args: ExpandRowsArgs
    tensors: tuple[Tensor | None, ...]


def expand_kernel(call: ExpandCall, aligned: bool) -> Kernel:
    """The kernel for a call; `aligned`: every row begins and ends at a multiple of 16 bytes."""
    macros: dict[str, str | int] = {
        "IN": TYPES[call.weight.dtype],
        "OUT": TYPES[call.out.dtype],
        "ACC": TYPES[acc_torch_dtype(call.wider)],
        "UPPER": int(call.upper is not None),
        "NOISE": call.noise_kind,
        "SHARE": f"{call.larger_share.hex()}f",
        "SCALED": int(call.is_scaled),
        "THREADS": THREADS,
        "ALIGNED": int(aligned),
    }
    return Kernel("expand_rows", tuple(macros.items()), ("--fmad=false",))


def by_source(rows_M: Tensor | None, R: int, M: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Group the rows of the result by the row of the weight they read.

    Nothing waits for a GPU.

    Returns:
        first: (2 R + 1,) int32. The group that reads row r of the weight is
            target[first[2 r] : first[2 r + 1]]. The one that reads row r of `upper` alone is
            target[first[2 r + 1] : first[2 r + 2]].
        target: (M,) int32, rows of the result.
    """
    groups = torch.arange(2 * R + 1, device=device)
    if rows_M is None:
        # row r reads row r of the weight, in group 2 r
        return ((groups + 1) // 2).int(), torch.arange(M, device=device, dtype=torch.int32)
    keys_M = 2 * (rows_M % R) + (rows_M >= R)
    sorted_M, target_M = keys_M.sort(stable=True)
    return torch.searchsorted(sorted_M, groups).int(), target_M.int()


def plan(call: ExpandCall, *, limit: int = 48 << 10) -> Plan:
    """The launch that carries out a call; tensors on "meta" give the same one without memory.

    `limit` is the bytes of shared memory that a block may have.
    """
    call = call.with_contiguous_columns()
    weight_RC, upper_RC, out_MN = call.weight, call.upper, call.out
    (R, C), (M, N), acc = weight_RC.shape, out_MN.shape, acc_torch_dtype(call.wider)
    tensors = (
        *(weight_RC, upper_RC, out_MN),
        *by_source(call.rows, R, M, out_MN.device),
        *(as_vector(x, torch.int32) for x in (call.rows, call.cols)),
        *(as_vector(x, acc) for x in (call.row_scale, call.col_scale)),
        *noise_of_entries(call, acc),
        *_lines(call),
    )
    row_bytes = -(-C // 8) * 8 * weight_RC.element_size() * (1 if upper_RC is None else 2)
    staged = row_bytes <= limit
    width = 16 // out_MN.element_size() * THREADS
    blocks_per_row = max(1, min(-(-N // width), LEAST_BLOCKS // max(R, 1)))
    args = ExpandRowsArgs(
        *(None if x is None else x.data_ptr() for x in tensors),
        weight_RC.stride(0),
        0 if upper_RC is None else upper_RC.stride(0),
        *out_MN.stride(),
        *(R, C, M, N, blocks_per_row, staged),
        # an upper bound: looking into the map would stop the GPU's stream
        upper_RC is not None and call.cols is not None,
    )
    kernel = expand_kernel(call, _aligned(tensors, args))
    grid = Grid(R * blocks_per_row, THREADS, row_bytes if staged else 0)
    return Plan(kernel, grid, args, tensors)


def _lines(call: ExpandCall) -> tuple[Tensor | None, ...]:
    """`Routing.packed`, and key and mult of every line."""
    if HAS_TRITON and call.out.is_cuda:
        return lines_of_call(call)
    return None if call.routing is None else call.routing.packed, *keys_of_call(call)


def _aligned(tensors: Sequence[Tensor | None], args: ExpandRowsArgs) -> bool:
    """Whether every row of weight, upper and result, and every vector, is in 16-byte pieces."""
    weight_RC, _, out_MN, *_ = tensors
    assert weight_RC is not None and out_MN is not None
    pieces = (args.weight_stride, args.upper_stride, args.C)
    strides = [n * weight_RC.element_size() for n in pieces]
    strides += [n * out_MN.element_size() for n in (args.out_stride_m, args.N)]
    addresses = (x.data_ptr() for x in tensors if x is not None)
    # vectors: eight float32 are read at once
    is_aligned = not any(n % 16 for n in strides) and not any(n % 32 for n in addresses)
    return args.out_stride_n == 1 and is_aligned


def expand_on_cuda(call: ExpandCall) -> None:
    """Fill `call.out`, which is on a GPU. The weight may be in pinned memory of the host.

    With a weight on the host this returns when the kernel has ended.
    """
    if missing := nvrtc.why_not():
        raise GrowthError(f"backend='cuda' cannot run here: {missing}")
    made = plan(call, limit=nvrtc.shared_limit(call.out.device))
    nvrtc.launch(made.kernel, made.grid, made.args, call.out.device)
    if call.weight.device != call.out.device:
        # the caller may drop or overwrite the weight, and PyTorch does not know that a kernel that
        # it did not launch is still reading the host's memory
        torch.cuda.current_stream(call.out.device).synchronize()
