"""`expand` in CUDA C++: lays the arguments out for csrc/cuda/expand_rows.cu. Not measured yet.

A row of the weight is read once, also where the weight lies in pinned memory of the host and the
result on a GPU.

Shape letters used in this file: R, C rows and columns of the weight; M, N those of the output.
"""

import ctypes
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from growkern.errors import GrowthError
from growkern.ops.backend.launch import acc_torch_dtype
from growkern.ops.backend.nvrtc import Grid, Kernel, aligned, launch, shared_limit, why_not
from growkern.ops.expand.noise import line_keys

TYPES = {
    torch.float32: "float",
    torch.bfloat16: "bf16",
    torch.float16: "f16",
    torch.float64: "double",
}
THREADS = 256
# a weight of few rows is shared by this many blocks: a vector is one row
LEAST_BLOCKS = 256

_POINTERS = (
    *("weight", "upper", "out", "first", "target", "rows", "cols", "row_scale", "col_scale"),
    *("noise", "line_key", "line_mult"),
)
_STRIDES = ("weight_stride", "upper_stride", "out_stride_m", "out_stride_n")
_NUMBERS = ("R", "C", "M", "N", "blocks_per_row", "staged", "reads_upper_beside")


class ExpandRowsArgs(ctypes.Structure):
    """struct ExpandRowsArgs."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in _POINTERS),
        *((name, ctypes.c_int64) for name in _STRIDES),
        *((name, ctypes.c_int32) for name in _NUMBERS),
    )


class Plan(NamedTuple):
    """One launch; `tensors` are those whose addresses are in `args`."""

    kernel: Kernel
    grid: Grid
    args: ExpandRowsArgs
    tensors: tuple[Tensor | None, ...]


def expand_kernel(
    dtype: torch.dtype, out_dtype: torch.dtype, upper: bool, noise: int, aligned: int = 0
) -> Kernel:
    acc = "double" if dtype == torch.float64 else "float"
    macros: dict[str, str | int] = {
        "IN": TYPES[dtype],
        "OUT": TYPES[out_dtype],
        "ACC": acc,
        "UPPER": int(upper),
    }
    macros |= {"NOISE": noise, "THREADS": THREADS, "ALIGNED": aligned}
    return Kernel("expand_rows", tuple(macros.items()), ("--fmad=false",))


def by_source(rows_M: Tensor | None, R: int, M: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Where each weight row's output rows begin, (R + 1,), in a list of output rows, (M,).

    Output rows of one weight row are in the order of their virtual rows. Nothing is asked of a GPU.
    """
    if rows_M is None:
        target_M = torch.arange(M, device=device, dtype=torch.int32)
        return torch.arange(R + 1, device=device, dtype=torch.int32), target_M
    keys_M = 2 * (rows_M % R) + (rows_M >= R)
    sorted_M, target_M = keys_M.sort(stable=True)
    starts = 2 * torch.arange(R + 1, device=device)
    return torch.searchsorted(sorted_M, starts).int(), target_M.int()


def _vector(x: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    return None if x is None else x.detach().to(dtype).contiguous()


def plan(
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
    *,
    limit: int = 48 << 10,
) -> Plan:
    """What `expand_cuda` launches where a block may have `limit` bytes of shared memory."""
    (R, C), (M, N), acc, device = (
        weight_RC.shape,
        out_MN.shape,
        acc_torch_dtype(weight_RC),
        out_MN.device,
    )
    # the weight is the small side: a copy costs a fraction of writing the result
    weight_RC = weight_RC if weight_RC.stride(1) == 1 else weight_RC.contiguous()
    if upper_RC is not None and upper_RC.stride(1) != 1:
        upper_RC = upper_RC.contiguous()
    kind, noise = 0, None
    keys: tuple[Tensor | None, Tensor | None] = (None, None)
    if col_noise_N is not None:
        kind, noise, keys = 2, col_noise_N, line_keys(M, row_offset, seed, device)
    elif row_noise_M is not None:
        kind, noise, keys = 1, row_noise_M, line_keys(N, col_offset, seed, device)
    tensors = (
        *(weight_RC, upper_RC, out_MN),
        *by_source(rows_M, R, M, device),
        *(_vector(x, torch.int32) for x in (rows_M, cols_N)),
        *(_vector(x, acc) for x in (row_scale_M, col_scale_N, noise)),
        *keys,
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
        # whether any does is not asked of a GPU: a map of columns there may
        upper_RC is not None and cols_N is not None,
    )
    kernel = expand_kernel(
        weight_RC.dtype, out_MN.dtype, upper_RC is not None, kind, _aligned(tensors, args)
    )
    grid = Grid(R * blocks_per_row, THREADS, row_bytes if staged else 0)
    return Plan(kernel, grid, args, tensors)


def _aligned(tensors: Sequence[Tensor | None], args: ExpandRowsArgs) -> int:
    """Whether every row of weight, upper and output is of 16-byte pieces, and so every vector."""
    weight_RC, _, out_MN, *_ = tensors
    assert weight_RC is not None and out_MN is not None
    pieces = (args.weight_stride, args.upper_stride, args.C)
    strides = [n * weight_RC.element_size() for n in pieces]
    strides += [n * out_MN.element_size() for n in (args.out_stride_m, args.N)]
    addresses = (x.data_ptr() for x in tensors if x is not None)
    # eight of float32 are read as one
    return int(args.out_stride_n == 1) and aligned(*strides) and aligned(*addresses, to=32)


def expand_cuda(out_MN: Tensor, weight_RC: Tensor, *arguments) -> None:
    """Fills out_MN."""
    missing = why_not()
    if missing:
        raise GrowthError(f"backend='cuda' cannot run here: {missing}")
    made = plan(out_MN, weight_RC, *arguments, limit=shared_limit(out_MN.device))
    launch(made.kernel, made.grid, made.args, out_MN.device)
