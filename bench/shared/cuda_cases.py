"""What the CUDA kernels are compiled to for real sizes, to be compiled without a GPU.

The launches are planned as the ops plan them, on tensors that have sizes and no memory.

Shape letters used in this file: V vocabulary, K teachers; R, C rows and columns of a weight.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from growkern.ops.backend.nvrtc import Grid, Kernel
from growkern.ops.expand import on_cuda as expand_on_cuda
from growkern.ops.expand.call import ExpandCall
from growkern.ops.loss.rows import on_cuda as rows_on_cuda
from growkern.ops.loss.rows.options import Maths, Rows
from growkern.ops.loss.rows.state import Steps, n_numbers

FP32, BF16, FP16 = torch.float32, torch.bfloat16, torch.float16
# bytes of shared memory that a block may have, of CUDA's programming guide
SHARED_LIMITS = {"sm_80": 163 << 10, "sm_90": 227 << 10, "sm_100": 227 << 10, "sm_120": 99 << 10}
ALIKE = "place, source and scale of an output row, which all threads read alike"
HALVED = "four sums in float32 are 16 bytes read and 8 stored; a warp still fills whole lines"
RAGGED = "rows begin and end anywhere: pieces of 16 bytes where their place allows it"


class CudaCase(NamedTuple):
    """One way in which a CUDA kernel is launched.

    `registers` is the most that leaves a multiprocessor as many threads as the kernel needs;
    `element_bytes` are those of an element it stores, `traffic` the bytes that cross the device's
    memory for one at the least. Loads are 16 bytes wide, or `narrow` says why they cannot be;
    `narrow_stores` the same of stores.
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


def _rows_case(
    name: str,
    limit: int,
    registers: int,
    V: int,
    dtype: torch.dtype,
    grad: torch.dtype,
    K: int = 1,
    cap: float = 0.0,
    parts: bool = False,
) -> CudaCase:
    logits = [_shape(8, V, dtype=dtype) for _ in range(1 + K)]
    rows = Rows(logits[0], logits[1:], _shape(8), _shape(8), V, Maths(2.0, cap, cap), parts)
    state_SN, drows_SN = (_shape(n, 8, dtype=FP32) for n in (n_numbers(K), 1 + K))
    out = _shape(8, V, dtype=grad)
    made = rows_on_cuda.plan(rows, state_SN, Steps(sums=True, grad=True), drows_SN, out, limit)
    traffic = (1 + K) * dtype.itemsize + grad.itemsize
    ragged = "" if dict(made.kernel.macros)["ALIGNED"] else RAGGED
    name = f"CUDA kl_mlm rows {name}"
    stores = ragged or (HALVED if grad.itemsize == 2 else "")
    return CudaCase(name, made.kernel, made.grid, registers, grad.itemsize, traffic, ragged, stores)


def _expand_case(
    name: str, limit: int, registers: int, dtype: torch.dtype, upper: bool, noise: bool, N: int
) -> CudaCase:
    """A weight of half as many rows and columns as the result has, both axes gathered."""
    R, C = N // 2, N // 2
    weight, vector = _shape(R, C, dtype=dtype), _shape(N, dtype=FP32)
    call = ExpandCall(
        _shape(N, N, dtype=dtype),
        weight,
        upper=weight if upper else None,
        rows=_shape(N),
        cols=_shape(N),
        row_scale=vector,
        col_scale=vector,
        col_noise=vector if noise else None,
    )
    made = expand_on_cuda.plan(call, limit=limit)
    narrow = ALIKE if dtype == FP32 else ""
    narrow = narrow if dict(made.kernel.macros)["ALIGNED"] else RAGGED
    name, size = f"CUDA expand {name}", dtype.itemsize
    stores = narrow if narrow == RAGGED else ""
    return CudaCase(name, made.kernel, made.grid, registers, size, 1.25 * size, narrow, stores)


def cuda_cases(arch: str) -> list[CudaCase]:
    """The launches that matter on an architecture."""
    limit = SHARED_LIMITS[arch]
    # four blocks of 256 threads on a multiprocessor of 65536 registers, three with noise
    cases = [
        _expand_case("FPI bf16", limit, 64, BF16, False, False, 8192),
        _expand_case("FPI, noise bf16", limit, 80, BF16, False, True, 8192),
        _expand_case("AKI, noise bf16", limit, 80, BF16, True, True, 8192),
        _expand_case("FPI fp32", limit, 64, FP32, False, False, 8192),
        _expand_case("AKI, noise bf16, ragged", limit, 80, BF16, True, True, 8190),
    ]
    if arch == "sm_80":  # has no clusters
        return cases
    # two blocks leave 128 to each thread
    cases += [
        _rows_case("linear, bf16 gradient", limit, 64, 128_256, FP32, BF16),
        _rows_case("linear, fp32 gradient", limit, 64, 128_256, FP32, FP32),
        _rows_case("linear, no teacher", limit, 64, 128_256, FP32, BF16, 0),
        _rows_case("bf16", limit, 64, 128_256, BF16, BF16),
        _rows_case("two teachers, capped, parts", limit, 128, 32_000, BF16, BF16, 2, 30.0, True),
        _rows_case("four teachers, fp16", limit, 128, 32_000, FP16, FP16, 4),
        _rows_case("bf16, V 30522", limit, 64, 30_522, BF16, BF16),
    ]
    return cases
