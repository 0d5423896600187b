"""Widen a matrix: gather rows and columns by index, scale them, and make the copies differ.

    out[i, j] = S[rows[i], cols[j]] * row_scale[i] * col_scale[j] * (1 + noise)              (1)
    S[r, c]   = W[r, c]                   if r < R and c < C
              = upper[r mod R, c mod C]   otherwise (r < 2 R, c < 2 C)                       (2)
    noise     = col_noise[j] * sign(seed; offsets[0] + i, cols[j])                           (3)
             or row_noise[i] * sign(seed; offsets[1] + j, rows[i])
    x (1 + noise) = rn(x + rest)  where noise >= 0                                           (4)
                  = rn(x - rest)  where noise < 0,      rest = rn(x (1 + |noise|)) - x

(1) is function-preserving initialisation, FPI, Eq. 5-15 of bert2BERT (Chen et al., ACL 2022,
arXiv:2110.07143). (2) with `upper`, the same tensor one layer up, is its advanced knowledge
initialisation, AKI, Eq. 16.

sign is 1 or -1, by the hash (3) of `hashes.py`. On one line, all copies of a source index have one
sign. Noise that sums to zero over the copies, weighted with their scales, therefore leaves the
function as it is. The sign depends on positions in the whole matrix, so a shard has the bits of the
same slice of the whole.

Products are rounded to float32 (float64 if weight or result is float64) in the order of (1). The
result is rounded once more, rn, to the output dtype. From float64 to 16 bits rn goes through
float32, as PyTorch's own conversion does; products with scales and noise stay in float64 until
then. Let x be the product without noise. With (4), two copies of opposite noise add up to exactly 2
x wherever that dtype can represent 2 x and |noise| <= 1: rest is then exact (Sterbenz's lemma), and
so are both sums. Noise costs no digits, in bfloat16 either. A call with noise turns infinities of S
into NaN, also where the noise has size 0, because rest is then inf - inf.

Routing takes the place of (3) and (4). A hash gives every element to one of the copies, and their
sum is x for any number of copies and any dtype: (5) of `hashes.py`.

Reading order: the public function `expand` at the end of this file packs its arguments into one
record, checks it (`call.py`) and calls the registered op. The op picks a backend, and every backend
takes the record: the reference in this file; `on_cpu.py` with `csrc/cpu/expand_body.cpp`;
`on_triton.py` with `noise_on_triton.py`; or `on_cuda.py` with `csrc/cuda/expand_rows.cu`.
`hashes.py` draws the noise and computes routing. On a GPU `on_triton.py` makes the hashes of both
backends. That is at most 6 files for one call. To carry out many calls, `many.py` collects them
and launches them together.

Shape letters used in this file: R, C rows and columns of the weight; M, N those of the result.
"""

from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import Tensor, library

from growkern.ops.backend import (
    BACKENDS,
    NAMESPACE,
    Rules,
    acc_torch_dtype,
    advise_huge_pages,
    apply,
    choose_backend,
)
from growkern.ops.expand.call import (
    ExpandCall,
    Routing,
    check_expand,
    check_no_overlap,
    check_ranges,
)
from growkern.ops.expand.hashes import noise_of_columns, routed, routed_gradient, with_noise
from growkern.ops.expand.on_cpu import expand_on_cpu
from growkern.ops.expand.on_cuda import expand_on_cuda
from growkern.ops.expand.on_triton import expand_on_triton

# ---------------------------------------------------------------- reference

# elements of the result that the reference computes at a time: its temporaries take up to 14 times
# their memory
REFERENCE_ELEMENTS = 1 << 18


def _index(index: Tensor | None, n: int, device: torch.device) -> Tensor:
    """An index that is None stands for 0, 1, ..., n - 1."""
    return torch.arange(n, device=device) if index is None else index


def _gathered(x_RC: Tensor, call: ExpandCall) -> Tensor:
    for dim, index in enumerate((call.rows, call.cols)):
        if index is not None:
            x_RC = x_RC.index_select(dim, index % x_RC.shape[dim])
    return x_RC


def _scaled(x_MN: Tensor, call: ExpandCall) -> tuple[Tensor, Tensor | None]:
    """x_MN with the scales of (1), in its order, and the noise (3); both in the dtype of x_MN."""
    noise_MN = None
    (M, N), device = x_MN.shape, x_MN.device
    if call.row_scale is not None:
        x_MN = x_MN * call.row_scale.to(x_MN.dtype)[:, None]
    if call.col_scale is not None:
        x_MN = x_MN * call.col_scale.to(x_MN.dtype)
    if call.col_noise is not None:
        cols_N = _index(call.cols, N, device)
        noise_MN = noise_of_columns(x_MN, call.col_noise, cols_N, call.offsets[0], call.seed)
    if call.row_noise is not None:
        rows_M = _index(call.rows, M, device)
        noise_MN = noise_of_columns(x_MN.T, call.row_noise, rows_M, call.offsets[1], call.seed).T
    return x_MN, noise_MN


def expand_reference(call: ExpandCall) -> Tensor:
    """Plain PyTorch definition of the op, differentiable: a new (M, N) in the dtype of `out`."""
    weight_RC, upper_RC = call.weight, call.upper
    R, C = weight_RC.shape
    x_MN = _gathered(weight_RC, call)
    if upper_RC is not None:
        rows_M, cols_N = (_index(call.rows, R, x_MN.device), _index(call.cols, C, x_MN.device))
        x_MN = torch.where((rows_M >= R)[:, None] | (cols_N >= C), _gathered(upper_RC, call), x_MN)
    x_MN, noise_MN = _scaled(x_MN.to(acc_torch_dtype(call.wider)), call)
    if call.routing is not None:
        x_MN = routed(x_MN, call)
    elif noise_MN is not None:
        x_MN = with_noise(x_MN, noise_MN, call.out.dtype)
    # a copy: without maps and factors, x_MN is still the weight itself
    return x_MN.to(call.out.dtype, memory_format=torch.contiguous_format, copy=True)


# ----------------------------------------------------------------------- op


def _fill_by_reference(call: ExpandCall) -> None:
    M, N = call.out.shape
    n_rows = max(1, REFERENCE_ELEMENTS // N)
    for start in range(0, M, n_rows):
        block = call.rows_of_result(start, min(start + n_rows, M))
        block.out.copy_(expand_reference(block))


KERNELS = dict(
    reference=_fill_by_reference, cpu=expand_on_cpu, triton=expand_on_triton, cuda=expand_on_cuda
)


def _run(call: ExpandCall, backend: str) -> None:
    """Fill `call.out`, whatever its strides."""
    check_ranges(call)
    check_no_overlap(call)
    if call.out.numel():
        KERNELS[choose_backend(backend, call.out.device, BACKENDS)](call)


# `ExpandCall.inputs` in PyTorch's schema language
_INPUTS = (
    "Tensor weight, Tensor? upper, Tensor? rows, Tensor? cols, "
    "Tensor? row_scale, Tensor? col_scale, Tensor? row_noise, Tensor? col_noise, "
    "Tensor? copies, int routed_dim, float amplitude, "
    "SymInt seed, SymInt row_offset, SymInt col_offset"
)


def _empty_result(inputs: Sequence[Any], dtype: torch.dtype) -> Tensor:
    weight, _, rows, cols, *_ = inputs
    R, C = weight.shape
    M, N = (R if rows is None else rows.shape[0]), (C if cols is None else cols.shape[0])
    return cast(Tensor, weight.new_empty((M, N), dtype=dtype))


@library.custom_op(
    f"{NAMESPACE}::expand",
    mutates_args=(),
    schema=f"({_INPUTS}, ScalarType out_dtype, str backend) -> Tensor",
)
def expand_op(*inputs_dtype_backend: Any) -> Tensor:
    *inputs, out_dtype, backend = inputs_dtype_backend
    out_MN = _empty_result(inputs, out_dtype)
    advise_huge_pages(out_MN)
    _run(ExpandCall.of_inputs(out_MN, inputs), backend)
    return out_MN


@expand_op.register_fake
def _(*inputs_dtype_backend):
    *inputs, out_dtype, _ = inputs_dtype_backend
    return _empty_result(inputs, out_dtype)


@library.custom_op(
    f"{NAMESPACE}::expand_out",
    mutates_args=("out",),
    schema=f"(Tensor(a!) out, {_INPUTS}, str backend) -> ()",
)
def expand_out_op(*call_backend: Any) -> None:
    out, *inputs, backend = call_backend
    _run(ExpandCall.of_inputs(out, inputs), backend)


@expand_out_op.register_fake
def _(*call_backend):
    return None


# ----------------------------------------------------------------- autograd


def folded(x: Tensor, dim: int, index: Tensor, n: int) -> Tensor:
    """Sum the slices of a matrix that have the same index: the adjoint of `index_select`.

    Args:
        x: (m, k), or (k, m) with `dim` 1.
        index: (m,) int64 in [0, n).

    Returns:
        (n, k) or (k, n). The same bits every time, on a GPU too.
    """
    if x.device.type == "cpu":
        shape = (n, x.shape[1]) if dim == 0 else (x.shape[0], n)
        return x.new_zeros(shape).index_add(dim, index, x)
    # on a GPU index_add sums in any order, by atomic additions; index_put sorts first
    x = x.movedim(dim, 0)
    return x.new_zeros(n, x.shape[1]).index_put((index,), x, accumulate=True).movedim(0, dim)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    *given, ctx.out_dtype, ctx.backend = inputs
    call = ExpandCall.of_inputs(output, given)
    ctx.shape, ctx.dtype = call.weight.shape, call.weight.dtype
    ctx.acc = acc_torch_dtype(call.wider)
    ctx.has_upper = call.upper is not None
    # (1) is linear in S: backward does not read weight and upper, so they are not kept alive
    tensors = [x if isinstance(x, Tensor) else None for x in given[2:]]
    ctx.save_for_backward(*tensors)
    ctx.save_for_forward(*tensors)
    ctx.others = [None if isinstance(x, Tensor) else x for x in given[2:]]


def _inputs(ctx: Any, weight: Tensor, upper: Tensor | None = None) -> list[Any]:
    """The inputs of the op, with others for weight and upper."""
    pairs = zip(ctx.saved_tensors, ctx.others, strict=True)
    return [weight, upper, *(other if x is None else x for x, other in pairs)]


def _backward(ctx: Any, dout_MN: Tensor) -> tuple[Tensor | None, ...]:
    # (1) on the gradient instead of S; weight and out are not read
    inputs = _inputs(ctx, dout_MN)
    call = ExpandCall.of_inputs(dout_MN, inputs)
    (R, C), (M, N) = ctx.shape, dout_MN.shape
    x, noise_MN = _scaled(dout_MN.to(ctx.acc), call)
    x = x if noise_MN is None else x * (1 + noise_MN)
    x = x if call.routing is None else routed_gradient(x, call)
    # with `upper` the first quarter belongs to the weight, the rest to `upper`
    times = 2 if ctx.has_upper else 1
    if ctx.has_upper or call.cols is not None:
        x = folded(x, 1, _index(call.cols, N, x.device), times * C)
    if ctx.has_upper or call.rows is not None:
        x = folded(x, 0, _index(call.rows, M, x.device), times * R)
    dupper_RC = (x[:R, C:] + x[R:, :C] + x[R:, C:]).to(ctx.dtype) if ctx.has_upper else None
    # those after weight and upper have none
    return (x[:R, :C] if ctx.has_upper else x).to(ctx.dtype), dupper_RC, *[None] * len(inputs)


def _jvp(ctx: Any, *tangents: Tensor | None) -> Tensor:
    # (1) is linear in S: the tangent of the result is (1) of the tangents
    like = next(x for x in tangents[:2] if x is not None)
    zeros = [like.new_zeros(ctx.shape) if x is None else x for x in tangents[:2]]
    inputs = _inputs(ctx, zeros[0], zeros[1] if ctx.has_upper else None)
    return cast(Tensor, apply(EXPAND, *inputs, ctx.out_dtype, ctx.backend))


def _vmap(size: int, dims: Sequence[int | None], *arguments: Any) -> Tensor:
    # one call of the kernel for each element of the batch
    calls = [
        [x if dim is None else x.select(dim, i) for x, dim in zip(arguments, dims, strict=True)]
        for i in range(size)
    ]
    return torch.stack([apply(EXPAND, *each) for each in calls])


EXPAND = Rules(expand_op, _backward, _setup_context, _jvp, _vmap)
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
    routing: Routing | None = None,
    seed: int = 0,
    offsets: tuple[int, int] = (0, 0),
    out: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    backend: str | None = None,
) -> Tensor:
    """Widen a weight: ``out[i, j] = row_scale[i] * col_scale[j] * weight[rows[i], cols[j]]``.

    After Eq. 5-16 of bert2BERT (arXiv:2110.07143). Differentiable with respect to `weight` and
    `upper`.

    Args:
        weight: (R, C) or (R,); float32, bfloat16, float16 or float64; any strides. With
            backend="cuda" it may be in pinned memory of the host while `out` is on a GPU. Its
            columns must then be contiguous, and the call waits for the GPU.
        rows: (M,) int64, the source row of every row of the result. None: each row once.
        cols: (N,) int64, the same for columns. Not for a 1-D weight.
        row_scale, col_scale: (M,) and (N,) float. None: 1. No `col_scale` for a 1-D weight.
        upper: like `weight`, the same tensor of the next layer. An element whose row index is
            R or more, or whose column index is C or more, reads it at the remainders.
        row_noise: (M,) float, relative size n of the noise on each row, for a matrix whose rows
            are the axis that is read: a hash multiplies each element by 1 + n or 1 - n.
            `col_noise`: (N,), the same for columns. At most one.
        routing: the copies on one axis, and the amplitude, if a hash shall give every element to
            one of the copies. Not together with noise. The scales then belong to the source's
            entry as a whole, not to one copy.
        seed: of noise or routing, in [0, 2**63).
        offsets: position of the result's first row and column in the whole matrix, if it is a
            shard. With noise or routing on an axis that is sharded, pass that axis' slice of the
            map instead of None, because the source index selects the noise.
        out: (M, N) or (M,), where to write; any strides; must not share memory with the inputs.
        out_dtype: dtype of the result. None: the dtype of `out`, or else of `weight`.
        backend: "reference", "cpu", "triton" or "cuda" (not measured yet). None: by the device.

    Returns:
        (M, N), or (M,) for a 1-D weight; `out` if it was given.

    Raises:
        GrowthError: shapes, dtypes or devices that do not fit together; an index out of range
            (on the CPU; on a GPU such an index is undefined behaviour); a backend that cannot
            run here.
    """
    # without out= the op allocates the result
    call = ExpandCall(
        cast(Tensor, out), weight, upper, rows, cols,
        row_scale, col_scale, row_noise, col_noise, routing, seed, offsets,
    )  # fmt: skip
    return expand_call(call, out_dtype, backend)


def expand_call(call: ExpandCall, out_dtype: torch.dtype | None, backend: str | None) -> Tensor:
    """`expand` for arguments that are packed already. Its `out` may be None."""
    check_expand(call, out_dtype, reads_host=backend == "cuda")
    matrices = call.as_matrices()
    if call.out is not None:
        expand_out_op(matrices.out, *matrices.inputs, backend or "")
        return call.out
    result = apply(EXPAND, *matrices.inputs, out_dtype or call.weight.dtype, backend or "")
    return result[0] if call.weight.ndim == 1 else result
