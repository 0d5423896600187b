"""Widen a matrix: gather rows and columns by index, scale them, and break their symmetry.

    out[i, j] = S[rows[i], cols[j]] * row_scale[i] * col_scale[j] * (1 + noise)              (1)
    S[r, c]   = W[r, c]                   if r < R and c < C
              = upper[r mod R, c mod C]   otherwise (r < 2 R, c < 2 C)                       (2)
    noise     = col_noise[j] * xi(seed; row_offset + i, cols[j])                             (3)
             or row_noise[i] * xi(seed; col_offset + j, rows[i])
    x (1 + noise) = rn(x (1 + noise))           where noise >= 0                             (4)
                  = rn(2 x - rn(x (1 - noise))) where noise < 0

(1) is function-preserving initialisation, FPI, Eq. 5-15 of bert2BERT (Chen et al., ACL 2022,
arXiv:2110.07143); (2) with `upper` the same tensor one layer up is its advanced knowledge
initialisation, AKI, Eq. 16. xi is the hash of `noise.py`. In (3) all replicas of one source
index on one line share xi, so that noise that sums to zero over the replicas (weighted with their
scales) leaves the function as it is; and xi knows nothing of shards, so that the shards of a
matrix are bit for bit the slices of the whole.

Products are rounded to float32 (float64 for a float64 weight) in the order of (1), and the result
once more, rn, to the output dtype. With (4), x being the product without noise, two replicas whose
noise is opposite add up to 2 x exactly, by Sterbenz's lemma, where 2 x is a number of that dtype:
noise costs no digits in bfloat16.

Shape letters used in this file: R, C rows and columns of the weight; M, N those of the output.
"""

from typing import Any

import torch
from torch import Tensor, library

from growkern.ops.backend.choose import choose_backend
from growkern.ops.backend.launch import acc_torch_dtype
from growkern.ops.backend.native import advise_huge_pages
from growkern.ops.expand.checks import check_expand, check_no_overlap, check_range
from growkern.ops.expand.noise import noise_of_columns, with_noise
from growkern.ops.expand.on_cpu import expand_cpu
from growkern.ops.expand.on_cuda import expand_cuda
from growkern.ops.expand.on_triton import expand_triton

# ---------------------------------------------------------------- reference


def _scaled(
    x_MN: Tensor,
    rows_M: Tensor,
    cols_N: Tensor,
    row_scale_M: Tensor | None,
    col_scale_N: Tensor | None,
    row_noise_M: Tensor | None,
    col_noise_N: Tensor | None,
    seed: int,
    row_offset: int,
    col_offset: int,
) -> tuple[Tensor, Tensor | None]:
    """x_MN with the scales of (1), in its order and in its own dtype, and (3)."""
    noise_MN = None
    if row_scale_M is not None:
        x_MN = x_MN * row_scale_M.to(x_MN.dtype)[:, None]
    if col_scale_N is not None:
        x_MN = x_MN * col_scale_N.to(x_MN.dtype)
    if col_noise_N is not None:
        noise_MN = noise_of_columns(x_MN, col_noise_N, cols_N, row_offset, seed)
    if row_noise_M is not None:
        noise_MN = noise_of_columns(x_MN.T, row_noise_M, rows_M, col_offset, seed).T
    return x_MN, noise_MN


def _gathered(x_RC: Tensor, rows_M: Tensor | None, cols_N: Tensor | None) -> Tensor:
    if rows_M is not None:
        x_RC = x_RC.index_select(0, rows_M % x_RC.shape[0])
    if cols_N is not None:
        x_RC = x_RC.index_select(1, cols_N % x_RC.shape[1])
    return x_RC


def _explicit(index: Tensor | None, n: int, device: torch.device) -> Tensor:
    return torch.arange(n, device=device) if index is None else index


def expand_reference(
    weight_RC: Tensor,
    upper_RC: Tensor | None,
    rows_M: Tensor | None,
    cols_N: Tensor | None,
    row_scale_M: Tensor | None = None,
    col_scale_N: Tensor | None = None,
    row_noise_M: Tensor | None = None,
    col_noise_N: Tensor | None = None,
    seed: int = 0,
    row_offset: int = 0,
    col_offset: int = 0,
    out_dtype: torch.dtype | None = None,
) -> Tensor:
    """Plain PyTorch definition of the op: (M, N) in `out_dtype` (default: the weight's)."""
    R, C = weight_RC.shape
    x_MN = _gathered(weight_RC, rows_M, cols_N)
    rows_all_M = _explicit(rows_M, R, weight_RC.device)
    cols_all_N = _explicit(cols_N, C, weight_RC.device)
    if upper_RC is not None:
        in_upper_MN = (rows_all_M >= R)[:, None] | (cols_all_N >= C)
        x_MN = torch.where(in_upper_MN, _gathered(upper_RC, rows_M, cols_N), x_MN)
    factors = (row_scale_M, col_scale_N, row_noise_M, col_noise_N, seed, row_offset, col_offset)
    x_MN, noise_MN = _scaled(x_MN.to(acc_torch_dtype(weight_RC)), rows_all_M, cols_all_N, *factors)
    out_dtype = out_dtype or weight_RC.dtype
    x_MN = with_noise(x_MN, noise_MN, out_dtype)
    # contiguous: with both axes identity nothing above has copied
    return x_MN.to(out_dtype, memory_format=torch.contiguous_format, copy=True)


# ----------------------------------------------------------------------- op


def _out_shape(weight_RC: Tensor, rows_M: Tensor | None, cols_N: Tensor | None) -> tuple[int, int]:
    R, C = weight_RC.shape
    return (R if rows_M is None else rows_M.shape[0], C if cols_N is None else cols_N.shape[0])


def _reference_into(out_MN: Tensor, *args: Any) -> None:
    out_MN.copy_(expand_reference(*(*args, out_MN.dtype)))


KERNELS = dict(reference=_reference_into, cpu=expand_cpu, triton=expand_triton, cuda=expand_cuda)


def _run(
    out_MN: Tensor,
    weight_RC: Tensor,
    upper_RC: Tensor | None,
    maps: tuple[Tensor | None, Tensor | None],
    factors: tuple[Any, ...],
    backend: str,
) -> None:
    """Fills out_MN, whatever its strides."""
    for name, index, n in zip(("rows", "cols"), maps, weight_RC.shape, strict=True):
        check_range(name, index, n, upper_RC is not None)
    check_no_overlap(out_MN, weight_RC, upper_RC)
    if not out_MN.numel():
        return
    KERNELS[choose_backend(backend, out_MN.device)](out_MN, weight_RC, upper_RC, *maps, *factors)


@library.custom_op("growkern::expand", mutates_args=())
def expand_op(
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
    out_dtype: torch.dtype,
    backend: str,
) -> Tensor:
    out_MN = weight_RC.new_empty(_out_shape(weight_RC, rows_M, cols_N), dtype=out_dtype)
    advise_huge_pages(out_MN)
    factors = (row_scale_M, col_scale_N, row_noise_M, col_noise_N, seed, row_offset, col_offset)
    _run(out_MN, weight_RC, upper_RC, (rows_M, cols_N), factors, backend)
    return out_MN


@expand_op.register_fake
def _(weight_RC, upper_RC, rows_M, cols_N, *factors_dtype_backend):
    shape, out_dtype = _out_shape(weight_RC, rows_M, cols_N), factors_dtype_backend[-2]
    return weight_RC.new_empty(shape, dtype=out_dtype)


@library.custom_op("growkern::expand_out", mutates_args=("out_MN",))
def expand_out_op(
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
    backend: str,
) -> None:
    factors = (row_scale_M, col_scale_N, row_noise_M, col_noise_N, seed, row_offset, col_offset)
    _run(out_MN, weight_RC, upper_RC, (rows_M, cols_N), factors, backend)


@expand_out_op.register_fake
def _(*args):
    return None


# ----------------------------------------------------------------- autograd


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    weight_RC, upper_RC, *tensors = inputs[:8]
    ctx.save_for_backward(*tensors)
    ctx.shape, ctx.dtype, ctx.acc = weight_RC.shape, weight_RC.dtype, acc_torch_dtype(weight_RC)
    ctx.has_upper, ctx.noise_key = upper_RC is not None, inputs[8:11]


def _backward(ctx: Any, dout_MN: Tensor) -> tuple[Tensor | None, ...]:
    rows_M, cols_N, *factors = ctx.saved_tensors
    R, C = ctx.shape
    x_MN = dout_MN.to(ctx.acc)
    rows_all_M = _explicit(rows_M, R, x_MN.device)
    cols_all_N = _explicit(cols_N, C, x_MN.device)
    x, noise_MN = _scaled(x_MN, rows_all_M, cols_all_N, *factors, *ctx.noise_key)
    x = x if noise_MN is None else x * (1 + noise_MN)
    times = 2 if ctx.has_upper else 1  # the first quarter is then the weight's, the rest upper's
    if ctx.has_upper or cols_N is not None:
        x = folded(x, 1, cols_all_N, times * C)
    if ctx.has_upper or rows_M is not None:
        x = folded(x, 0, rows_all_M, times * R)
    dweight_RC = x[:R, :C].to(ctx.dtype)
    rest_RC = x[:R, C:] + x[R:, :C] + x[R:, C:] if ctx.has_upper else None
    return dweight_RC, None if rest_RC is None else rest_RC.to(ctx.dtype), *[None] * 11


expand_op.register_autograd(_backward, setup_context=_setup_context)


# ------------------------------------------------------------------- public


def expand(
    weight: Tensor,
    *,
    rows: Tensor | None = None,
    cols: Tensor | None = None,
    row_scale: Tensor | None = None,
    col_scale: Tensor | None = None,
    upper: Tensor | None = None,
    row_noise: Tensor | None = None,
    col_noise: Tensor | None = None,
    seed: int = 0,
    row_offset: int = 0,
    col_offset: int = 0,
    out: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    backend: str | None = None,
) -> Tensor:
    """Widen a weight: ``out[i, j] = row_scale[i] * col_scale[j] * weight[rows[i], cols[j]]``.

    The formulas are (1) to (3) at the top of this file; Eq. 5-16 of bert2BERT
    (arXiv:2110.07143). Differentiable with respect to `weight` and `upper`.

    Args:
        weight: (R, C) or (R,); float32, bfloat16, float16 or float64; any strides. With
            backend="cuda" it may lie in pinned memory of the host and `out` on a GPU.
        rows: (M,) int64, the source row of every row of the result. None: each row once.
        cols: (N,) int64, the same for columns. Not for a 1-D weight.
        row_scale, col_scale: (M,) and (N,) float. None: 1. No `col_scale` for a 1-D weight.
        upper: like `weight`, the same tensor of the next layer. An element whose row index is
            R or more, or whose column index is C or more, reads it at the remainders.
        row_noise: (M,) float, relative size of the noise on each row, for a matrix whose rows
            are the axis that is read. `col_noise`: (N,), the same for columns. At most one.
        seed: of the noise, in [0, 2**63).
        row_offset: position of the result's first row in the whole matrix, if it is a shard.
        col_offset: the same for columns. With noise on an axis that is sharded, pass that axis'
            slice of the map, not None: the noise is keyed by the source index.
        out: (M, N) or (M,), where to write; any strides; must not share memory with the inputs.
        out_dtype: dtype of the result. None: that of `out`, else of `weight`.
        backend: "reference", "cpu", "triton" or "cuda" (not measured yet). None: by the device.

    Returns:
        (M, N), or (M,) for a 1-D weight; `out` if it was given.

    Raises:
        GrowthError: shapes, dtypes or devices that do not fit together; an index out of range
            (on the CPU; undefined on a GPU); a backend that cannot run here.
    """
    check_expand(
        weight,
        upper,
        {"rows": rows, "cols": cols},
        {"row_scale": row_scale, "row_noise": row_noise},
        {"col_scale": col_scale, "col_noise": col_noise},
        seed,
        out,
        out_dtype,
        reads_host=backend == "cuda",
    )
    if is_vector := weight.ndim == 1:
        # a vector is a matrix of one row: its elements lie along the contiguous axis
        weight, upper = weight[None], None if upper is None else upper[None]
        rows, cols, row_scale, col_scale = None, rows, None, row_scale
    factors = (row_scale, col_scale, row_noise, col_noise)
    arguments = (weight, upper, rows, cols, *factors, seed, row_offset, col_offset)
    if out is not None:
        expand_out_op(out[None] if is_vector else out, *arguments, backend or "")
        return out
    result = expand_op(*arguments, out_dtype or weight.dtype, backend or "")
    return result[0] if is_vector else result


def folded(x: Tensor, dim: int, index: Tensor, n: int) -> Tensor:
    """Sums the slices of a matrix that share an index: the adjoint of index_select along `dim`."""
    if x.device.type == "cpu":
        shape = (n, x.shape[1]) if dim == 0 else (x.shape[0], n)
        return x.new_zeros(shape).index_add(dim, index, x)
    # index_add is atomic on a GPU, index_put sorts: the same sum every time
    x = x.movedim(dim, 0)
    return x.new_zeros(n, x.shape[1]).index_put((index,), x, accumulate=True).movedim(0, dim)
