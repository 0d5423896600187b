"""The GEMMs of the linear loss: narrow factors, wide sums, and no wide copy of a head.

Equations are numbered in `linear_kl_mlm_loss.py`. Shape letters used in this file: C rows of one
chunk, H width, V vocabulary.
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from growkern.ops.backend.launch import acc_torch_dtype
from growkern.ops.loss.linear.gemm_compiled import gemm_cpu, has_bfloat16, multiplies

# of the head, upcast at a time. In a CPU's cache it costs 10 % of the GEMM, through memory 60 %; a
# GPU needs tiles that fill it
TILE_BYTES, GPU_TILE_BYTES = 4 << 20, 256 << 20


def gemm_dtype(x: Tensor) -> torch.dtype:
    """What dlogits are rounded to for dX and dW: the inputs' own dtype, if it has a GEMM here."""
    if x.device.type == "cpu" and (x.dtype != torch.bfloat16 or not has_bfloat16()):
        return acc_torch_dtype(x)
    return x.dtype


def project(x_CH: Tensor, weight_VH: Tensor, bias_V: Tensor, z_CV: Tensor) -> None:
    """(1) into `z_CV`, accumulated and left in its dtype."""
    if x_CH.is_cuda and x_CH.element_size() == 2 and z_CV.dtype == torch.float32:
        torch.mm(x_CH, weight_VH.t(), out_dtype=z_CV.dtype, out=z_CV)
    elif _in_library(weight_VH, z_CV):
        gemm_cpu(x_CH, weight_VH.t(), z_CV)
    else:
        x_CH = x_CH.to(z_CV.dtype)
        for tile, weight in _tiles(weight_VH, z_CV.dtype):
            torch.mm(x_CH, weight.t(), out=z_CV[:, tile])
    if bias_V.numel():
        z_CV.add_(bias_V)


def add_dx(dz_CV: Tensor, weight_VH: Tensor, dx_CH: Tensor) -> None:
    """dX of (2), added to `dx_CH`."""
    if not dx_CH.is_cpu:
        torch.addmm(dx_CH, dz_CV, weight_VH, **_out_dtype(dz_CV, dx_CH), out=dx_CH)
    elif _in_library(weight_VH, dx_CH):
        gemm_cpu(dz_CV, weight_VH, dx_CH, add=True)
    else:
        for tile, rows in _tiles(weight_VH, dx_CH.dtype):
            dx_CH.addmm_(dz_CV[:, tile], rows)


def add_dw(dz_CV: Tensor, x_CH: Tensor, dw_VH: Tensor, *, fresh: bool) -> None:
    """dW of (2), added to `dw_VH`, or written over it if `fresh`."""
    if _in_library(x_CH, dw_VH):
        gemm_cpu(dz_CV.t(), x_CH, dw_VH, add=not fresh)
        return
    x_CH = x_CH.to(dw_VH.dtype) if dw_VH.is_cpu else x_CH
    beta = 0 if fresh else 1  # 0: not even a NaN of `dw_VH` is read
    torch.addmm(dw_VH, dz_CV.t(), x_CH, beta=beta, **_out_dtype(dz_CV, dw_VH), out=dw_VH)


def _in_library(factor: Tensor, total: Tensor) -> bool:
    return total.is_cpu and multiplies(factor.dtype, total.dtype)


def _out_dtype(factor: Tensor, total: Tensor) -> dict[str, Any]:
    return {} if factor.dtype == total.dtype else {"out_dtype": total.dtype}


def _tiles(weight_VH: Tensor, dtype: torch.dtype) -> Iterator[tuple[slice, Tensor]]:
    """The head in `dtype`, a few rows at a time unless it already is."""
    V, H = weight_VH.shape
    if weight_VH.dtype == dtype:
        yield slice(0, V), weight_VH
        return
    held = TILE_BYTES if weight_VH.is_cpu else GPU_TILE_BYTES
    size = min(V, max(1, held // (H * dtype.itemsize)))
    buffer = weight_VH.new_empty(size, H, dtype=dtype)
    for start in range(0, V, size):
        tile = slice(start, min(V, start + size))
        yield tile, buffer[: tile.stop - start].copy_(weight_VH[tile])
