"""Matrix products of the linear loss, the sums of its gradients, and the size of a chunk.

Factors may be narrower than the sums, and no wide copy of a head is made. On a CPU with AVX-512 the
compiled library multiplies such factors (`csrc/cpu/gemm.h`). Elsewhere a head is converted a few
rows at a time.

Equations are numbered in `linear_kl_mlm_loss.py`. Shape letters used in this file: C rows of one
chunk, H width, V vocabulary; M, K and N, rows, depth and columns of any product.
"""

import ctypes
import functools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from growkern.ops.backend import acc_torch_dtype, native
from growkern.ops.loss.linear.heads import (
    LEAST_HELD,
    Head,
    HeadSettings,
    Sizes,
    first_axis,
    held_rows,
    held_rows_on_cpu,
    rows_of_chunk,
    slices,
)
from growkern.ops.loss.rows.vocab_parallel import add_up

# bytes of a head that are converted at a time. On a CPU this costs 10 % of the GEMM if the piece
# stays in cache, 60 % through memory. A GPU needs pieces large enough to fill it
TILE_BYTES, GPU_TILE_BYTES = 4 << 20, 256 << 20

# GEMM FLOPs per byte of memory traffic, from data sheets (H100 class: 60 TFLOP/s in float32, 400 of
# TF32 and 800 of 16 bits beside 4 TB/s). For a CPU: 100 GFLOP/s in float64 beside 6 GB/s of
# read-modify-write on two cores, and more in narrower dtypes
BALANCE = {("cuda", 4): 15, ("cuda", 2): 200, ("cuda", 8): 8, ("cpu", 2): 28, ("cpu", 4): 24}
CPU_BALANCE, TF32_BALANCE = 16, 100

# float32 products of the compiled library take 0.5 to 0.6 of MKL's time on a Zen 4. Errors of sums
# over so many rows or columns are 0.85 to 1 of MKL's, and over 32000 columns 1.04
MOST_DEPTH = 8192

# chunks of fewer rows than this waste the GEMMs: it is better to cut the vocabulary
LEAST_ROWS = 32

# of errors that say nothing about a product: neither the device nor cuBLAS got memory
NO_MEMORY = ("out of memory", "STATUS_ALLOC_FAILED", "STATUS_NOT_INITIALIZED")

AVX512, AVX512_BF16 = (native.ISA_NAMES.index(f"AVX-512{rest}") for rest in ("", " with bfloat16"))

# ------------------------------------------------------------------------- sizes


def gemm_dtype(x: Tensor) -> torch.dtype:
    """The dtype to which dlogits are rounded for dX and dW.

    It is the dtype of the inputs, or wider on a device without a GEMM for it.
    """
    if x.device.type == "cpu":
        has_gemm = x.dtype == torch.bfloat16 and has_bfloat16()
    else:
        has_gemm = x.element_size() > 2 or multiplies_wide(x.device, x.dtype)
    return x.dtype if has_gemm else acc_torch_dtype(x)


@functools.cache
def multiplies_wide(device: torch.device, factor: torch.dtype) -> bool:
    """Whether PyTorch multiplies 16-bit factors into float32 on this device: mm(out_dtype=).

    Some versions for ROCm raise. The factors are then converted, and a product takes the time of a
    float32 one.
    """
    return _works(torch.mm, device, factor)


@functools.cache
def adds_wide(device: torch.device, factor: torch.dtype) -> bool:
    """Whether PyTorch adds such products to float32 sums: addmm(out_dtype=).

    PyTorch 2.9 wants sums of the factors' dtype.
    """

    def add(a: Tensor, b: Tensor, **options: Any) -> None:
        torch.addmm(options["out"], a, b, **options)

    return _works(add, device, factor)


def _works(product: Callable[..., Any], device: torch.device, factor: torch.dtype) -> bool:
    """Try a product with a float32 result. It is small, and its result is not read."""
    x, out = (torch.zeros(16, 16, dtype=t, device=device) for t in (factor, torch.float32))
    try:
        product(x, x, out_dtype=out.dtype, out=out)
    except (RuntimeError, TypeError) as error:
        if any(words in str(error) for words in NO_MEMORY):
            raise
        return False
    return True


def chunk_size(
    rows: int, head_widths: Sequence[int], x: Tensor, element: int, sizes: Sizes
) -> tuple[int, int]:
    """Rows per chunk and columns per tile (0: all).

    A chunk has as many rows as `chunk_bytes` holds, or enough to make accumulating dW cheap. A
    chunk of C rows takes C V (6 H + 2 sum H_k) FLOPs and reads and writes dW, 8 V H bytes. The
    second takes under a tenth of the time of the first from C = 80 H balance / (6 H + 2 sum H_k)
    on. `element` is the size of a logit in bytes.
    """
    H, *others = head_widths
    kind = x.device.type, gemm_dtype(x).itemsize
    tf32 = kind[0] != "cpu" and torch.get_float32_matmul_precision() != "highest"
    balance = TF32_BALANCE if tf32 and kind[1] == 4 else BALANCE.get(kind, CPU_BALANCE)
    size = rows_of_chunk(H, others, balance)
    tile = sizes.vocab_tile or sizes.columns
    held = sizes.chunk_bytes // (element * len(head_widths))  # logits of each head
    if held and (sizes.vocab_tile or held >= min(rows, LEAST_ROWS) * tile):
        size = max(1, held // tile)
    elif held:
        size = min(size, max(LEAST_ROWS, math.isqrt(held)))
        tile = max(1, held // min(size, rows))
    n_chunks = -(-max(rows, 1) // size)
    return max(1, -(-rows // n_chunks)), tile if tile < sizes.columns else 0


def row_counts(
    heads: Sequence[Head],
    R: int,
    settings: HeadSettings,
    grads: Sequence[Tensor | None],
    columns: int,
    *,
    on_cpu: bool,
) -> tuple[int, int, int]:
    """Rows per chunk, columns per tile, and rows whose dz is held for one product (0: none).

    A row of logits has `columns` in memory.
    """
    x_NH, sizes, widths = heads[0].hidden, settings.sizes, [h.hidden.shape[1] for h in heads]
    logit, number = settings.dtype.itemsize, x_NH.element_size()
    C, size = chunk_size(R, widths, x_NH, logit, sizes)
    whole, wants_dw = max(sizes.vocab, 1), grads[1] is not None
    wanted = wants_dw if on_cpu else number <= 4 and any(grad is not None for grad in grads)
    if not wanted or size or sizes.chunk_bytes or gemm_dtype(x_NH) != x_NH.dtype:
        return C, size or whole, 0
    if on_cpu and len(heads) == 1 and logit == number and R <= LEAST_HELD:
        # the gradient of all rows takes the place of their logits
        return max(R, 1), whole, 0
    # rows of chunks whose logits take less than dW
    fitting = (widths[0] * number - 1) // (len(heads) * logit)
    if on_cpu:
        chunk, held = held_rows_on_cpu(R, fitting, number, whole)
        return chunk if held else C, whole, held
    C, held = held_rows(R, widths, number, columns)
    return max(C, 1), whole, held or (R if fitting >= C and wants_dw else 0)


# ---------------------------------------------------------------------- products


def project(
    x_CH: Tensor, weight_VH: Tensor, bias_V: Tensor | None, z_CV: Tensor, wide: bool = False
) -> None:
    """Write (1) to `z_CV`, computed in its dtype.

    For float64 logits of float32 heads the compiled library adds up float32 products, a few at a
    time and then exactly: 0.6 of the time of float64 products. `wide` asks for those.
    """
    if _in_library(weight_VH, z_CV):
        gemm_on_cpu(x_CH, weight_VH.t(), z_CV, wide_products=wide)
    elif _multiplies(x_CH, z_CV):
        torch.mm(x_CH, weight_VH.t(), **_out_dtype(x_CH, z_CV), out=z_CV)
    else:
        x_CH = x_CH.to(z_CV.dtype)
        for tile, weight in _tiles(weight_VH, z_CV.dtype):
            torch.mm(x_CH, weight.t(), out=z_CV[:, tile])
    if bias_V is not None:
        z_CV.add_(bias_V)


def add_dx(dz_CV: Tensor, weight_VH: Tensor, dx_CH: Tensor) -> None:
    """Add dX of (2) to `dx_CH`."""
    if dz_CV.dtype == weight_VH.dtype or _in_library(weight_VH, dx_CH):
        _add_product(dz_CV, weight_VH, dx_CH)
    else:
        for tile, rows in _tiles(weight_VH, dx_CH.dtype):
            dx_CH.addmm_(dz_CV[:, tile], rows)


def add_dw(dz_CV: Tensor, x_CH: Tensor, dw_VH: Tensor, *, fresh: bool) -> None:
    """Add dW of (2) to `dw_VH`; if `fresh`, write it over whatever is there."""
    x_CH = x_CH if _in_library(x_CH, dw_VH) else x_CH.to(dz_CV.dtype)
    _add_product(dz_CV.t(), x_CH, dw_VH, fresh=fresh)


def _add_product(a_MK: Tensor, b_KN: Tensor, out_MN: Tensor, *, fresh: bool = False) -> None:
    """Add ``a @ b`` to `out_MN`, or write it; for PyTorch the factors have one dtype."""
    if (b_KN.dtype != out_MN.dtype or len(b_KN) <= MOST_DEPTH) and _in_library(b_KN, out_MN):
        gemm_on_cpu(a_MK, b_KN, out_MN, add=not fresh)
        return
    wide = _out_dtype(a_MK, out_MN)
    if not wide or adds_wide(out_MN.device, a_MK.dtype):
        beta = 0 if fresh else 1  # 0: even a NaN in `out_MN` is not read
        torch.addmm(out_MN, a_MK, b_KN, beta=beta, **wide, out=out_MN)
    elif fresh:
        torch.mm(a_MK, b_KN, **wide, out=out_MN)
    else:
        size = max(1, GPU_TILE_BYTES // (out_MN.shape[1] * out_MN.element_size()))
        for rows, some in zip(a_MK.split(size), out_MN.split(size), strict=True):
            some.add_(torch.mm(rows, b_KN, **wide))


def _in_library(factor: Tensor, total: Tensor) -> bool:
    """Whether the library multiplies here."""
    return total.is_cpu and multiplies(factor.dtype, total.dtype)


def _multiplies(factor: Tensor, total: Tensor) -> bool:
    """Whether PyTorch has this product without a conversion of the factors."""
    if factor.dtype == total.dtype:
        return True
    is_wide = factor.element_size() == 2 and total.dtype == torch.float32
    return is_wide and multiplies_wide(total.device, factor.dtype)


def _out_dtype(factor: Tensor, total: Tensor) -> dict[str, Any]:
    return {} if factor.dtype == total.dtype else {"out_dtype": total.dtype}


def _tiles(weight_VH: Tensor, dtype: torch.dtype) -> Iterator[tuple[slice, Tensor]]:
    """The head in `dtype`: whole if it already is in it, else a few rows at a time."""
    V, H = weight_VH.shape
    if weight_VH.dtype == dtype:
        yield slice(0, V), weight_VH
        return
    held = TILE_BYTES if weight_VH.is_cpu else GPU_TILE_BYTES
    size = max(1, min(V, held // (H * dtype.itemsize)))
    buffer = weight_VH.new_empty(size, H, dtype=dtype)
    for tile in slices(0, V, size):
        yield tile, buffer[: tile.stop - tile.start].copy_(weight_VH[tile])


# -------------------------------------------------------------------------- sums


def _in_dtype(x: Tensor, dtype: torch.dtype) -> Tensor:
    """`x` itself if it is of that dtype, else fresh memory of its shape."""
    if x.dtype == dtype:
        return x
    fresh = torch.empty_like(x, dtype=dtype)
    native.advise_huge_pages(fresh)
    return fresh


class GradientSums:
    """Sums dX, dW and db of (2) over chunks; db in float32 or wider, dW in `dw_dtype`.

    Chunks bring columns 0 .. vocab - 1 of dW and db; the other columns are 0. With `rounds_dx` they
    bring all columns, and one product makes their dX in its own dtype: in place, if `rows` is a
    slice.
    """

    rounds_dx = False
    rows: Tensor | slice  # of the chunks whose dX is being added up

    def __init__(self, grads: Sequence[Tensor | None], vocab: int, dw_dtype: torch.dtype) -> None:
        self.grads, self.first_chunk = grads, True
        self.dx, dw, db = grads
        self.wanted = any(grad is not None for grad in grads)
        self.dw = dw if dw is None else _in_dtype(dw, dw_dtype)
        self.db = db if db is None else _in_dtype(db, acc_torch_dtype(db))
        # the first chunk writes the rest: clearing 94 MiB would take as long as adding a chunk
        for total in (self.dw, self.db):
            if total is not None and len(total) > vocab:
                total[vocab:].zero_()
        self.dx_CH: Tensor | None = None

    def add(self, dz_CV: Tensor, x_CH: Tensor, weight_VH: Tensor, columns: slice) -> None:
        acc = acc_torch_dtype(x_CH)
        if self.dx is not None and self.rounds_dx:
            whole, dtype = isinstance(self.rows, slice), self.dx.dtype
            self.dx_CH = self.dx[self.rows] if whole else torch.empty_like(x_CH, dtype=dtype)
            _add_product(dz_CV, first_axis(weight_VH, columns), self.dx_CH, fresh=True)
        elif self.dx is not None:
            if self.dx_CH is None:
                self.dx_CH = x_CH.new_zeros(x_CH.shape, dtype=acc)
            add_dx(dz_CV, first_axis(weight_VH, columns), self.dx_CH)
        if self.dw is not None:
            add_dw(dz_CV, x_CH, first_axis(self.dw, columns), fresh=self.first_chunk)
        if self.db is not None:
            db = dz_CV.sum(0, dtype=acc)
            self.db[columns] = db if self.first_chunk else db.add_(self.db[columns])

    def store_rows(self, group: str, unscale: Tensor | None) -> None:
        """Store dX of `rows` whose tiles have all been added, summed over the ranks of `group`."""
        self.first_chunk = False
        if self.dx is None or self.dx_CH is None:
            return
        if group:
            add_up(self.dx_CH, group)
        if unscale is not None:
            self.dx_CH *= unscale
        if isinstance(self.rows, Tensor):
            self.dx.index_copy_(0, self.rows, self.dx_CH.to(self.dx.dtype))
        elif not self.rounds_dx:
            self.dx[self.rows] = self.dx_CH
        self.dx_CH = None

    def store(self, unscale: Tensor | None) -> None:
        """Round the sums to the memory of the gradients of a head."""
        for total, grad in zip((self.dw, self.db), self.grads[1:], strict=True):
            if total is None or grad is None:
                continue
            if unscale is not None:
                total *= unscale
            if total is not grad:
                grad.copy_(total)


# -------------------------------------------------------------- compiled library

_SIZES = ("m", "n", "k", "a_m", "a_k", "b_k", "b_n", "c_m")
_NUMBERS = ("a_type", "b_type", "c_type", "product", "threads", "isa")


class GemmArgs(ctypes.Structure):
    """struct GemmArgs of `csrc/cpu/gemm.h`."""

    _fields_ = (
        [(name, ctypes.c_void_p) for name in "abc"]
        + [(name, ctypes.c_int64) for name in _SIZES]
        + [(name, ctypes.c_int32) for name in _NUMBERS]
        + [("add", ctypes.c_bool)]
    )


def has_bfloat16() -> bool:
    """Whether the processor multiplies bfloat16, at twice the rate of float32."""
    return AVX512_BF16 in native.available_isas()


def multiplies(factor: torch.dtype, total: torch.dtype) -> bool:
    """Whether the library multiplies such factors into sums of the dtype `total`."""
    narrow = factor in (torch.float16, torch.bfloat16, torch.float32)
    return narrow and total in (torch.float32, torch.float64) and AVX512 in native.available_isas()


def gemm_on_cpu(
    a_MK: Tensor,
    b_KN: Tensor,
    out_MN: Tensor,
    *,
    add: bool = False,
    wide_products: bool = True,
) -> None:
    """Write ``a @ b`` to `out_MN`, or add it; for dtypes that `multiplies` names.

    Two bfloat16 tensors are multiplied by the processor's own instructions if it has them. All
    other products are computed in the dtype of `out_MN`, except that two float32 tensors are
    multiplied in float32 without `wide_products`: `FloatsInDoubles` of `csrc/cpu/gemm_tile.h`.

    Raises:
        MemoryError: there is no memory for the packed factors.
    """
    lib = native.loaded()
    assert lib is not None
    a_MK, b_KN = (x if 1 in x.stride() else x.contiguous() for x in (a_MK, b_KN))
    dtypes, product = (a_MK.dtype, b_KN.dtype, out_MN.dtype), out_MN.dtype
    if dtypes == (torch.bfloat16, torch.bfloat16, torch.float32) and has_bfloat16():
        product = torch.bfloat16
    elif dtypes == (torch.float32, torch.float32, torch.float64) and not wide_products:
        product = torch.float32
    (m, n), (a_m, a_k), (b_k, b_n) = out_MN.shape, a_MK.stride(), b_KN.stride()
    args = GemmArgs(
        a=a_MK.data_ptr(),
        b=b_KN.data_ptr(),
        c=out_MN.data_ptr(),
        **{"m": m, "n": n, "k": a_MK.shape[1], "c_m": out_MN.stride(0)},
        **{"a_m": a_m, "a_k": a_k, "b_k": b_k, "b_n": b_n},
        a_type=native.TYPES[a_MK.dtype],
        b_type=native.TYPES[b_KN.dtype],
        c_type=native.TYPES[out_MN.dtype],
        product=native.TYPES[product],
        add=add,
        threads=torch.get_num_threads(),
        isa=lib.growkern_best_isa(),
    )
    status = lib.growkern_gemm(ctypes.byref(args))
    if status == 1:
        raise MemoryError("no memory for the packed factors of a matrix product")
    if status:
        raise RuntimeError("this processor has no instructions for such a matrix product")
