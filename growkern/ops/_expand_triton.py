"""`expand` in Triton: a block of rows and columns per program, gathered straight from the weight.

Formulas (1) to (3) of `expand.py`; R, C rows and columns of the weight, M, N those of the output.
"""

from torch import Tensor

from growkern.ops._hash_noise import hash_noise_triton, line_keys
from growkern.ops._launch import AotCase, acc_dtype, jit, next_power_of_2, tl

# columns first: their indices and scales are loaded once and serve all rows of a block
BLOCK_N = 512
BLOCK_M = 8
# kinds of noise
NO_NOISE, ROW_NOISE, COL_NOISE = 0, 1, 2


@jit
def _expand_kernel(
    weight_ptr,  # (R, C)
    upper_ptr,  # (R, C), or None
    out_ptr,  # (M, N)  out
    rows_ptr,  # (M,) int64, or None: identity
    cols_ptr,  # (N,) int64, or None: identity
    row_scale_ptr,  # (M,), or None: 1
    col_scale_ptr,  # (N,), or None: 1
    noise_ptr,  # (M,) with ROW_NOISE, (N,) with COL_NOISE
    key_ptr,  # (N,) int32 with ROW_NOISE, (M,) with COL_NOISE
    mult_ptr,  # like key
    stride_weight_r,
    stride_weight_c,
    stride_upper_r,
    stride_upper_c,
    stride_out_m,
    stride_out_n,
    R,
    C,
    M,
    N,
    NOISE: tl.constexpr,
    ACC: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    n_blocks_n = tl.cdiv(N, BLOCK_N)
    # int64: m * stride passes 2**31 at 65k x 32k elements
    n = (tl.program_id(0) % n_blocks_n).to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)
    m_first = (tl.program_id(0) // n_blocks_n).to(tl.int64) * BLOCK_M
    n_inside = n < N

    col = n
    if cols_ptr is not None:
        col = tl.load(cols_ptr + n, mask=n_inside, other=0)  # (BLOCK_N,)
    col_passes = col >= C
    c = tl.where(col_passes, col - C, col)

    for k in tl.static_range(BLOCK_M):
        m = m_first + k
        inside = n_inside & (m < M)
        row = m
        if rows_ptr is not None:
            row = tl.load(rows_ptr + m, mask=m < M, other=0)
        row_passes = row >= R
        r = tl.where(row_passes, row - R, row)

        from_weight = inside
        if upper_ptr is not None:
            from_weight = inside & (col < C) & (row < R)
        at = weight_ptr + r * stride_weight_r + c * stride_weight_c
        x = tl.load(at, mask=from_weight, other=0.0).to(ACC)  # (BLOCK_N,)
        if upper_ptr is not None:
            from_upper = inside & (col_passes | row_passes)
            at = upper_ptr + r * stride_upper_r + c * stride_upper_c
            x = tl.where(from_upper, tl.load(at, mask=from_upper, other=0.0).to(ACC), x)

        # the order of (1), so that every backend rounds alike
        if row_scale_ptr is not None:
            x = x * tl.load(row_scale_ptr + m, mask=m < M, other=0.0).to(ACC)
        if col_scale_ptr is not None:
            x = x * tl.load(col_scale_ptr + n, mask=n_inside, other=0.0).to(ACC)
        if NOISE == 2:
            key = tl.load(key_ptr + m, mask=m < M, other=0)
            mult = tl.load(mult_ptr + m, mask=m < M, other=0)
            noise = tl.load(noise_ptr + n, mask=n_inside, other=0.0).to(ACC)
            x = x * (1 + noise * hash_noise_triton(key, mult, col.to(tl.int32)))
        if NOISE == 1:
            key = tl.load(key_ptr + n, mask=n_inside, other=0)
            mult = tl.load(mult_ptr + n, mask=n_inside, other=0)
            noise = tl.load(noise_ptr + m, mask=m < M, other=0.0).to(ACC)
            x = x * (1 + noise * hash_noise_triton(key, mult, row.to(tl.int32)))
        if out_ptr.dtype.element_ty == tl.bfloat16:
            # by way of float32, as PyTorch does it: the interpreter cannot go there from float64
            x = x.to(tl.float32)
        to = out_ptr + m * stride_out_m + n * stride_out_n
        tl.store(to, x.to(out_ptr.dtype.element_ty), mask=inside)


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
    noise, kind, key, mult = None, NO_NOISE, None, None
    if col_noise_N is not None:
        noise, kind = col_noise_N.to(acc).contiguous(), COL_NOISE
        key, mult = line_keys(M, row_offset, seed, out_MN.device)
    elif row_noise_M is not None:
        noise, kind = row_noise_M.to(acc).contiguous(), ROW_NOISE
        key, mult = line_keys(N, col_offset, seed, out_MN.device)
    vectors = [None if x is None else x.contiguous() for x in (rows_M, cols_N)]
    scales = (row_scale_M, col_scale_N)
    vectors += [None if x is None else x.to(acc).contiguous() for x in scales]
    block_n = min(BLOCK_N, next_power_of_2(N))
    _expand_kernel[(-(-M // BLOCK_M) * -(-N // block_n),)](
        weight_RC,
        upper_RC,
        out_MN,
        *vectors,
        *(noise, key, mult),
        *weight_RC.stride(),
        *((0, 0) if upper_RC is None else upper_RC.stride()),
        *out_MN.stride(),
        *weight_RC.shape,
        *(M, N),
        NOISE=kind,
        ACC=tl_acc,
        BLOCK_M=BLOCK_M,
        BLOCK_N=block_n,
        # a fused 1 + noise * xi would differ from the other backends in the last bit
        enable_fp_fusion=False,
    )


def aot_cases() -> list[AotCase]:
    """FPI and AKI with noise, as the growth of a large model launches them."""
    pointers = ["weight", "upper", "out", "rows", "cols", "row_scale", "col_scale", "noise"]
    pointers += ["key", "mult"]
    strides = ("stride_weight_r", "stride_upper_r", "stride_out_m")
    cases = []
    for dtype, acc in (("bf16", "fp32"), ("fp32", "fp32"), ("fp64", "fp64")):
        types = [dtype] * 3 + ["i64"] * 2 + [acc] * 3 + ["i32"] * 2
        full = {f"{k}_ptr": f"*{t}" for k, t in zip(pointers, types, strict=True)}
        full |= dict.fromkeys((*strides, *"RCMN"), "i32")
        constants = dict.fromkeys(("stride_weight_c", "stride_upper_c", "stride_out_n"), 1)
        constants |= {"ACC": getattr(tl, acc.replace("fp", "float"))}
        constants |= {"BLOCK_M": BLOCK_M, "BLOCK_N": BLOCK_N}
        absent = dict.fromkeys(("upper_ptr", "row_scale_ptr", "noise_ptr", "key_ptr", "mult_ptr"))
        fpi = {k: t for k, t in full.items() if k not in absent}
        fpi_constants = {**constants, **absent, "NOISE": NO_NOISE}
        cases.append(AotCase(f"expand FPI {dtype}", _expand_kernel, fpi, fpi_constants))
        aki = {**constants, "NOISE": COL_NOISE}
        cases.append(AotCase(f"expand AKI + noise {dtype}", _expand_kernel, full, aki))
    return cases
