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
# with fewer rows than this, several blocks share a row: a vector is one row
LEAST_BLOCKS = 256

_POINTERS = (
    *("weight", "upper", "out", "first", "after", "cols", "row_scale", "col_scale"),
    *("noise", "copies", "line_key", "line_mult"),
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


class RowListsArgs(ctypes.Structure):
    """struct RowListsArgs of `csrc/cuda/row_lists.cu`."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("rows", "first", "after")),
        *((name, ctypes.c_int32) for name in "RM"),
    )


class Launch(NamedTuple):
    """A kernel and what it is launched with."""

    kernel: Kernel
    grid: Grid
    args: ctypes.Structure


class Launches(NamedTuple):
    """A launch, and one `before` it that lists rows: None without a map of rows.

    `tensors` are those whose addresses are in the arguments; they must outlive both.
    """

    kernel: Kernel
    grid: Grid
    args: ExpandRowsArgs
    tensors: tuple[Tensor | None, ...]
    before: Launch | None


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


def lists_by_source(rows_M: Tensor, R: int) -> tuple[Launch, Tensor, Tensor]:
    """The launch that lists the rows of the result by the row of the weight they read.

    Returns:
        launch: see `csrc/cuda/row_lists.cu`.
        first: (2 R,) int32. The list of those that read row r of the weight begins at 2 r, and that
            of those that read row r of `upper` alone at 2 r + 1. -1: the list is empty.
        after: (M,) int32, the row of the result after each one in its list. -1: it is the last one.
    """
    first = torch.full((2 * R,), -1, dtype=torch.int32, device=rows_M.device)
    after = torch.empty(len(rows_M), dtype=torch.int32, device=rows_M.device)
    args = RowListsArgs(*(x.data_ptr() for x in (rows_M, first, after)), R, len(rows_M))
    kernel = Kernel("row_lists", (("THREADS", THREADS),))
    return Launch(kernel, Grid(-(-len(rows_M) // THREADS), THREADS), args), first, after


def launches_of(call: ExpandCall, *, limit: int = 48 << 10) -> Launches:
    """The launch that carries out a call; tensors on "meta" give the same one without memory.

    `limit` is the bytes of shared memory that a block may have.
    """
    call = call.with_contiguous_columns()
    weight_RC, upper_RC, out_MN = call.weight, call.upper, call.out
    (R, C), (M, N), acc = weight_RC.shape, out_MN.shape, acc_torch_dtype(call.wider)
    before, first, after = None, None, None
    rows = None if call.rows is None else call.rows.contiguous()
    if rows is not None and M:
        before, first, after = lists_by_source(rows, R)
    tensors = (
        *(weight_RC, upper_RC, out_MN, first, after),
        as_vector(call.cols, torch.int32),
        *(as_vector(x, acc) for x in (call.row_scale, call.col_scale, call.noise)),
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
    return Launches(kernel, grid, args, (*tensors, rows), before)


def _on_gpu(call: ExpandCall) -> bool:
    return call.out.is_cuda


def _lines(call: ExpandCall) -> tuple[Tensor | None, ...]:
    """`Routing.packed`, and key and mult of every line."""
    if HAS_TRITON and _on_gpu(call):
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
    made = launches_of(call, limit=nvrtc.shared_limit(call.out.device))
    if made.before is not None:
        nvrtc.launch(*made.before, call.out.device)
    nvrtc.launch(made.kernel, made.grid, made.args, call.out.device)
    if call.weight.device != call.out.device:
        # the caller may drop or overwrite the weight, and PyTorch does not know that a kernel that
        # it did not launch is still reading the host's memory
        torch.cuda.current_stream(call.out.device).synchronize()
