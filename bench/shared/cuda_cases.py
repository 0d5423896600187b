"""Lists the CUDA kernels that real sizes launch, so that they can be compiled without a GPU.

`expand` plans the launches itself, from tensors that have a size but no memory.

Shape letters used in this file: R, C rows and columns of a weight; N of the result.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from growkern.ops.backend import Grid, Kernel
from growkern.ops.expand import Routing
from growkern.ops.expand.call import ExpandCall
from growkern.ops.expand.on_cuda import launches_of

FP32, BF16 = torch.float32, torch.bfloat16
# Bytes of shared memory that a block may have, from CUDA's programming guide.
SHARED_LIMITS = {"sm_80": 163 << 10, "sm_90": 227 << 10, "sm_100": 227 << 10, "sm_120": 99 << 10}
ALIKE = "all threads read the same index, source and scale of an output row"
RAGGED = "rows are not aligned to 16 bytes; 16-byte pieces are used where possible"


class CudaCase(NamedTuple):
    """One launch of a CUDA kernel.

    Attributes:
        grid: blocks, threads and shared memory.
        registers: the most a thread may use; with more, too few threads fit on a multiprocessor.
        traffic: least bytes per element that must cross the device's memory.
        narrow: why loads are narrower than 16 bytes; empty if they must not be.
    """

    name: str
    kernel: Kernel
    grid: Grid
    registers: int
    element_bytes: int
    traffic: float
    narrow: str = ""
    narrow_stores: str = ""


def _shape(*sizes: int, dtype: torch.dtype = torch.int64) -> Tensor:
    return torch.empty(sizes, dtype=dtype, device="meta")


def _expand_case(
    name: str, limit: int, registers: int, dtype: torch.dtype, upper: bool, how: str, N: int
) -> CudaCase:
    """A weight with half the rows and columns of the result; both axes are gathered.

    `how` is "noise" or "routing", on the columns, "routing, scaled" or "" for none.
    """
    R, C = N // 2, N // 2
    weight, vector = _shape(R, C, dtype=dtype), _shape(N, dtype=FP32)
    call = ExpandCall(
        _shape(N, N, dtype=dtype),
        weight,
        upper=weight if upper else None,
        rows=_shape(N),
        cols=_shape(N),
        row_scale=None if how == "routing" else vector,
        col_scale=None if how.startswith("routing") else vector,
        col_noise=vector if how == "noise" else None,
        routing=Routing(1, _shape(N, 2)) if how.startswith("routing") else None,
    )
    kernel, grid = launches_of(call, limit=limit).steps[-1]
    narrow = ALIKE if dict(kernel.macros)["ALIGNED"] else RAGGED
    name, size = f"CUDA expand {name}", dtype.itemsize
    stores = narrow if narrow == RAGGED else ""
    return CudaCase(name, kernel, grid, registers, size, 1.25 * size, narrow, stores)


def cuda_cases(arch: str) -> list[CudaCase]:
    """The launches to compile for an architecture, such as "sm_90"."""
    limit = SHARED_LIMITS[arch]
    # A multiprocessor has 65536 registers. It should run 4 blocks of 256 threads, 3 with noise.
    return [
        _expand_case("FPI bf16", limit, 64, BF16, False, "", 8192),
        _expand_case("FPI, noise bf16", limit, 80, BF16, False, "noise", 8192),
        _expand_case("FPI, routing bf16", limit, 80, BF16, False, "routing", 8192),
        _expand_case("FPI, routing, scaled bf16", limit, 80, BF16, False, "routing, scaled", 8192),
        _expand_case("AKI, noise bf16", limit, 80, BF16, True, "noise", 8192),
        _expand_case("AKI, routing bf16", limit, 80, BF16, True, "routing", 8192),
        _expand_case("AKI, routing, scaled bf16", limit, 80, BF16, True, "routing, scaled", 8192),
        _expand_case("FPI fp32", limit, 64, FP32, False, "", 8192),
        _expand_case("AKI, noise bf16, ragged", limit, 80, BF16, True, "noise", 8190),
    ]
