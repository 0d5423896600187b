"""Lists the CUDA kernels that real sizes launch, so that they can be compiled without a GPU.

The ops plan the launches themselves, from tensors that have a size but no memory.

Shape letters used in this file: V vocabulary, K teachers; R, C rows and columns of a weight.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from growkern.ops.backend.nvrtc import Grid, Kernel
from growkern.ops.expand import on_cuda as expand_on_cuda
from growkern.ops.expand.call import ExpandCall, Routing
from growkern.ops.loss.rows import on_cuda as rows_on_cuda
from growkern.ops.loss.rows.state import Maths, Rows, Steps, n_numbers

FP32, BF16, FP16 = torch.float32, torch.bfloat16, torch.float16
# Bytes of shared memory that a block may have, from CUDA's programming guide.
SHARED_LIMITS = {"sm_80": 163 << 10, "sm_90": 227 << 10, "sm_100": 227 << 10, "sm_120": 99 << 10}
ALIKE = "all threads read the same index, source and scale of an output row"
HALVED = "16 bytes of float32 become 8 bytes to store; a warp still fills whole lines"
RAGGED = "rows are not aligned to 16 bytes; 16-byte pieces are used where possible"


class CudaCase(NamedTuple):
    """One launch of a CUDA kernel.

    Attributes:
        name: as it stands in the table.
        kernel: source and macros.
        grid: blocks, threads and shared memory.
        registers: the most a thread may use; with more, too few threads fit on a multiprocessor.
        element_bytes: size of an element that it stores.
        traffic: least bytes per element that must cross the device's memory.
        narrow: why loads are narrower than 16 bytes; empty if they must not be.
        narrow_stores: the same for stores.
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
    made = expand_on_cuda.plan(call, limit=limit)
    narrow = ALIKE if dict(made.kernel.macros)["ALIGNED"] else RAGGED
    name, size = f"CUDA expand {name}", dtype.itemsize
    stores = narrow if narrow == RAGGED else ""
    return CudaCase(name, made.kernel, made.grid, registers, size, 1.25 * size, narrow, stores)


def cuda_cases(arch: str) -> list[CudaCase]:
    """The launches to compile for an architecture, such as "sm_90"."""
    limit = SHARED_LIMITS[arch]
    # A multiprocessor has 65536 registers. It should run 4 blocks of 256 threads, 3 with noise.
    cases = [
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
    if arch == "sm_80":  # it has no thread-block clusters
        return cases
    # with two blocks on a multiprocessor a thread may use 128 registers
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
