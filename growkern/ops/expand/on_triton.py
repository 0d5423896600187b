"""`expand` in Triton: a block of rows and columns per program, gathered straight from the weight.

Formulas (1) to (4) of `expand.py`; R, C rows and columns of the weight, M, N those of the output.
"""

from torch import Tensor

from growkern.ops.backend.launch import AotCase, acc_dtype, jit, launch_choice, next_power_of_2, tl
from growkern.ops.expand.call import COL_NOISE, NO_NOISE, ROW_NOISE
from growkern.ops.expand.noise import hash_noise_triton, line_keys, noise_unit_triton

# columns first: their indices and scales are loaded once and serve all rows of a block
BLOCK_M = 8
GATHER = "columns are gathered by index, an element at a time"
# kinds of noise


@jit
def _source(sources, strides, row, col, inside, R, C, ACC: tl.constexpr):
    """(2) for one row and a block of columns; anything outside."""
    if sources[1] is None:
        at = sources[0] + row * strides[0] + col * strides[1]
    else:
        r = tl.where(row >= R, row - R, row)
        c = tl.where(col >= C, col - C, col)
        in_weight = (row < R) & (col < C)
        at = tl.where(
            in_weight,
            sources[0] + r * strides[0] + c * strides[1],
            sources[1] + r * strides[2] + c * strides[3],
        )
    return tl.load(at, mask=inside, other=0.0).to(ACC)


@jit
def _with_noise(x, noise, like, ACC: tl.constexpr):
    """(4) but for its last rounding."""
    larger = _rounded(x * (1 + tl.abs(noise)), like).to(ACC)
    return tl.where(noise < 0, x + x - larger, larger)


@jit
def _rounded(x, like):
    """x in the dtype `like` points to."""
    if like.dtype.element_ty == tl.bfloat16:
        # by way of float32, as PyTorch does it: the interpreter cannot go there from float64
        x = x.to(tl.float32)
    return x.to(like.dtype.element_ty)


@jit
def expand_block(
    block, sources, maps, scales, noise, out_ptr, strides, shape,
    NOISE: tl.constexpr, ACC: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """One block of the result, counted along its rows; the arguments of `_expand_kernel`."""
    R, C, M, N = shape
    n_blocks_n = tl.cdiv(N, BLOCK_N)
    # int64: m * stride passes 2**31 at 65k x 32k elements
    n = (block % n_blocks_n).to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)
    m_first = (block // n_blocks_n).to(tl.int64) * BLOCK_M
    n_inside = n < N
    col = n
    if maps[1] is not None:
        col = tl.load(maps[1] + n, mask=n_inside, other=0)  # (BLOCK_N,)
    # once for all rows: behind a store the compiler would have to load them again
    if scales[1] is not None:
        col_scale = tl.load(scales[1] + n, mask=n_inside, other=0.0).to(ACC)
    if NOISE == 1:
        key = tl.load(noise[1] + n, mask=n_inside, other=0)
        mult = tl.load(noise[2] + n, mask=n_inside, other=0)
    if NOISE == 2:
        size = noise_unit_triton(tl.load(noise[0] + n, mask=n_inside, other=0.0).to(ACC))

    for k in tl.static_range(BLOCK_M):
        m = m_first + k
        m_inside = m < M
        row = m
        if maps[0] is not None:
            row = tl.load(maps[0] + m, mask=m_inside, other=0)
        inside = n_inside & m_inside
        x = _source(sources, strides, row, col, inside, R, C, ACC)  # (BLOCK_N,)
        # the order of (1), so that every backend rounds alike
        if scales[0] is not None:
            x = x * tl.load(scales[0] + m, mask=m_inside, other=0.0).to(ACC)
        if scales[1] is not None:
            x = x * col_scale
        if NOISE == 1:  # (3)
            size = noise_unit_triton(tl.load(noise[0] + m, mask=m_inside, other=0.0).to(ACC))
            xi = hash_noise_triton(key, mult, row.to(tl.int32))
            x = _with_noise(x, size * xi, out_ptr, ACC)
        if NOISE == 2:
            key = tl.load(noise[1] + m, mask=m_inside, other=0)
            mult = tl.load(noise[2] + m, mask=m_inside, other=0)
            xi = hash_noise_triton(key, mult, col.to(tl.int32))
            x = _with_noise(x, size * xi, out_ptr, ACC)
        to = out_ptr + m * strides[4] + n * strides[5]
        tl.store(to, _rounded(x, out_ptr), mask=inside)


@jit
def _expand_kernel(
    sources,  # weight, upper: (R, C); upper may be None
    maps,  # rows (M,), cols (N,); None: identity
    scales,  # row_scale (M,), col_scale (N,); None: 1
    noise,  # size on the axis that is read; key and mult on the other; all None with NO_NOISE
    out_ptr,  # (M, N)  out
    strides,  # r and c of weight, r and c of upper, m and n of out
    shape,  # R, C, M, N
    NOISE: tl.constexpr,
    ACC: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    expand_block(
        tl.program_id(0), sources, maps, scales, noise, out_ptr, strides, shape,
        NOISE, ACC, BLOCK_M, BLOCK_N,
    )  # fmt: skip


def columns_of_block(out_bytes: int) -> int:
    """Columns of a block: 16 bytes of the output for each of 128 threads, twice for 8-byte ones."""
    return max(512, 2048 // out_bytes)


def expand_triton(
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
) -> None:
    """Fills out_MN."""
    M, N = out_MN.shape
    acc, tl_acc = acc_dtype(weight_RC)
    noise: tuple[Tensor | None, ...] = (None, None, None)
    kind = NO_NOISE
    if col_noise_N is not None:
        kind, keys = COL_NOISE, line_keys(M, row_offset, seed, out_MN.device)
        noise = (col_noise_N.to(acc).contiguous(), *keys)
    elif row_noise_M is not None:
        kind, keys = ROW_NOISE, line_keys(N, col_offset, seed, out_MN.device)
        noise = (row_noise_M.to(acc).contiguous(), *keys)
    scales = (row_scale_M, col_scale_N)
    # the index vectors as they are: int64 in the public interface, eight rows share each load
    block_n = columns_of_block(out_MN.element_size())
    choice = launch_choice("expand", out_MN, N, BLOCK_M=BLOCK_M, BLOCK_N=block_n, num_warps=4)
    choice["BLOCK_N"] = min(choice["BLOCK_N"], next_power_of_2(N))
    _expand_kernel[(-(-M // choice["BLOCK_M"]) * -(-N // choice["BLOCK_N"]),)](
        (weight_RC, upper_RC),
        tuple(None if x is None else x.contiguous() for x in (rows_M, cols_N)),
        tuple(None if x is None else x.to(acc).contiguous() for x in scales),
        noise,
        out_MN,
        (
            *weight_RC.stride(),
            *((0, 0) if upper_RC is None else upper_RC.stride()),
            *out_MN.stride(),
        ),
        (*weight_RC.shape, M, N),
        NOISE=kind,
        ACC=tl_acc,
        **choice,
        # a fused 1 + noise * xi would differ from the other backends in the last bit
        enable_fp_fusion=False,
    )


def aot_cases() -> list[AotCase]:
    """FPI, AKI with noise, and rows alone, as the growth of a large model launches them."""
    cases = []
    for dtype, acc in (("bf16", "fp32"), ("fp32", "fp32"), ("fp64", "fp64")):
        x, index, factor = f"*{dtype}", "*i64", f"*{acc}"
        fpi = {
            "sources": (x, None),
            "maps": (index, index),
            "scales": (None, factor),
            "noise": (None, None, None),
            "out_ptr": x,
            "strides": ("i32", 1, "i32", 1, "i32", 1),
            "shape": ("i32",) * 4,
        }
        aki = {"sources": (x, x), "scales": (factor, factor)}
        rows = {"maps": (index, None), "scales": (factor, None)}
        size = {"bf16": 2, "fp32": 4, "fp64": 8}[dtype]
        constants = {"ACC": getattr(tl, acc.replace("fp", "float"))}
        constants |= {"BLOCK_M": BLOCK_M, "BLOCK_N": columns_of_block(size)}
        noisy = {"noise": (factor, "*i32", "*i32")}
        ways = (
            ("FPI", fpi, NO_NOISE),
            ("FPI, noise", fpi | noisy, COL_NOISE),
            ("AKI, noise", fpi | aki | noisy, COL_NOISE),
            ("rows", fpi | rows, NO_NOISE),
        )
        # float64 is for tests
        for name, signature, noise in ways[: 1 if dtype == "fp64" else None]:
            case = AotCase(f"expand {name} {dtype}", _expand_kernel, signature, {})
            case = case._replace(constexprs=constants | {"NOISE": noise})
            # twice as wide: four elements written for each one read
            cases.append(
                case._replace(narrow="" if name == "rows" else GATHER, traffic=1.25 * size)
            )
    return cases
