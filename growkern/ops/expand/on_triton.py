"""The Triton backend of `expand`: each program gathers one block of the result from the weight.

Formulas (1) to (4) are in `expand_op.py`. Shape letters used in this file: R, C rows and columns of
the weight; M, N those of the result.
"""

import torch
from torch import Tensor

from growkern.ops.backend import EXACT, acc_dtype, jit, next_power_of_2, tl
from growkern.ops.backend.launch import launch
from growkern.ops.expand.call import (
    COL_NOISE,
    COL_ROUTING,
    ROW_NOISE,
    ROW_ROUTING,
    ExpandCall,
    as_vector,
    has_contiguous_columns,
)
from growkern.ops.expand.hashes import seed_words
from growkern.ops.expand.noise_on_triton import noise_of, rounded, routed, with_noise

# kinds of noise, for kernels: these read no global numbers but constexpr
NOISY_ROWS, NOISY_COLS = tl.constexpr(ROW_NOISE), tl.constexpr(COL_NOISE)
ROUTED_ROWS, ROUTED_COLS = tl.constexpr(ROW_ROUTING), tl.constexpr(COL_ROUTING)
# positions in the tuples that kernels take: `sources`; `maps` and `scales`; `noise`; `strides`
WEIGHT, UPPER = map(tl.constexpr, range(2))
OF_ROWS, OF_COLS = map(tl.constexpr, range(2))
OF_AXIS, KEY, MULT = map(tl.constexpr, range(3))
WEIGHT_R, UPPER_R, SOURCE_C, OUT_M, OUT_N = map(tl.constexpr, range(5))
GATHER = "columns are gathered by index, one element at a time"


@jit
def _start(sources, strides, row, beyond, R):
    """Where (2) reads a row: pointers to the first of the columns below C, or of those beyond.

    Args:
        beyond: int32, -1 for columns from C on, else 0.
    """
    if sources[UPPER] is None:
        start = sources[WEIGHT] + row.to(tl.int64) * strides[WEIGHT_R]
    else:
        r = tl.where(row >= R, row - R, row).to(tl.int64)
        upper = sources[UPPER] + r * strides[UPPER_R]
        left = tl.where(row >= R, upper, sources[WEIGHT] + r * strides[WEIGHT_R]).to(tl.int64)
        # Bits choose between the two addresses of the row. Of 8 conditions and `tl.where` not all
        # fit into a thread's 7 predicate registers: that took 1.2 more instructions per element.
        start = (left ^ (beyond.to(tl.int64) & (left ^ upper.to(tl.int64)))).to(upper.dtype)
    return start


@jit
def _elements(source, cols, n_inside):
    """Load elements; those outside the result may be any."""
    if cols is None:  # noqa: SIM108
        x = tl.load(source, mask=n_inside, other=0.0)
    else:
        # outside the result, row and column 0 are read: a mask takes an instruction per element
        x = tl.load(source)
    return x


@jit
def _row_of(maps, m, M):
    """The source row of row m of the result, int32; row 0 from M on."""
    row = tl.where(m < M, m, 0)
    if maps[OF_ROWS] is not None:
        row = tl.load(maps[OF_ROWS] + m, mask=m < M, other=0).to(tl.int32)
    return row


@jit
def _whole_row(source_ptr, row, stride, C, WHOLE: tl.constexpr):
    """All C columns of a source row, which lie together: 16 bytes are loaded at a time."""
    c = tl.arange(0, WHOLE)
    return tl.load(source_ptr + row.to(tl.int64) * stride + c, mask=c < C, other=0)


@jit
def _two_rows(weight_ptr, row, beside, stride, C, col, WHOLE: tl.constexpr):
    """The elements at `col` of two rows of a 16-bit weight, in float32.

    One gather does for both: shared memory gives a thread 32 bits at a time.
    """
    bits_ptr = weight_ptr.to(tl.pointer_type(tl.uint16))
    low = _whole_row(bits_ptr, row, stride, C, WHOLE).to(tl.int32)
    high = _whole_row(bits_ptr, beside, stride, C, WHOLE).to(tl.int32)
    pair = tl.gather(low | (high << 16), col, 0)
    if weight_ptr.dtype.element_ty == tl.bfloat16:
        x = (pair << 16).to(tl.float32, bitcast=True)
        y = (pair & -65536).to(tl.float32, bitcast=True)
    else:
        x = (pair & 0xFFFF).to(tl.uint16).to(tl.float16, bitcast=True).to(tl.float32)
        y = ((pair >> 16) & 0xFFFF).to(tl.uint16).to(tl.float16, bitcast=True).to(tl.float32)
    return x, y


@jit
def _of_columns(
    n, N, maps, scales, noise,
    NOISE: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    """What all rows of a block share: source columns, their scales, and the numbers of the hash.

    Before the loop over rows: after a store the compiler would load them again.

    Returns:
        col int64, col_scale, key, mult, (factor, src, top), copies: (BLOCK_N,) or None.
    """
    inside = n < N
    col, col_scale, key, mult = n.to(tl.int64), None, None, None
    noise_of_col, copies = None, None
    if maps[OF_COLS] is not None:
        col = tl.load(maps[OF_COLS] + n, mask=inside, other=0)
    if scales[OF_COLS] is not None:
        col_scale = tl.load(scales[OF_COLS] + n, mask=inside, other=0.0).to(ACC)
    if NOISE == NOISY_ROWS or NOISE == ROUTED_ROWS:  # noqa: SIM109
        key = tl.load(noise[KEY] + n, mask=inside, other=0)
        mult = tl.load(noise[MULT] + n, mask=inside, other=0)
    if NOISE == NOISY_COLS:
        size = tl.load(noise[OF_AXIS] + n, mask=inside, other=0.0).to(ACC)
        noise_of_col = noise_of(size, col.to(tl.int32))
    if NOISE == ROUTED_COLS:
        copies = tl.load(noise[OF_AXIS] + n, mask=inside, other=0)
    return col, col_scale, key, mult, noise_of_col, copies


@jit
def _store_row(
    x, m, row, n, of_columns, scales, noise, out_ptr, strides, shape,
    NOISE: tl.constexpr, LARGER: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    """(1) in its order, so that every backend rounds alike, for a block of row m of the result."""
    m_inside = m < shape[2]
    col, col_scale, key, mult, noise_of_entry, copies = of_columns
    x = x.to(ACC)
    if scales[OF_ROWS] is not None:
        x = x * tl.load(scales[OF_ROWS] + m, mask=m_inside).to(ACC)
    if scales[OF_COLS] is not None:
        x = x * col_scale
    if NOISE == NOISY_ROWS or NOISE == ROUTED_ROWS:  # noqa: SIM109
        of_row = tl.load(noise[OF_AXIS] + m, mask=m_inside)
    if NOISE == NOISY_COLS or NOISE == ROUTED_COLS:  # noqa: SIM109
        key = tl.load(noise[KEY] + m, mask=m_inside)
        mult = tl.load(noise[MULT] + m, mask=m_inside)
    if NOISE == NOISY_ROWS:
        noise_of_entry = noise_of(of_row.to(ACC), row)
    if NOISE == NOISY_ROWS or NOISE == NOISY_COLS:  # noqa: SIM109
        factor, src, top = noise_of_entry
        x = with_noise(x, factor, (key + src * mult) & top, out_ptr, ACC)  # (3)
    if NOISE == ROUTED_ROWS:
        x = routed(x, key, mult, row, of_row, out_ptr, LARGER, ACC)
    if NOISE == ROUTED_COLS:
        x = routed(x, key, mult, col.to(tl.int32), copies, out_ptr, LARGER, ACC)
    # int64: m * stride passes 2**31 at 65k x 32k elements
    to = out_ptr + m.to(tl.int64) * strides[OUT_M] + n.to(tl.int64) * strides[OUT_N]
    tl.store(to, rounded(x, out_ptr), mask=(n < shape[3]) & m_inside)


@jit
def expand_block(
    block, sources, maps, scales, noise, out_ptr, strides, shape,
    NOISE: tl.constexpr, LARGER: tl.constexpr, ACC: tl.constexpr, WHOLE: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Compute block number `block` of the result. Blocks are numbered along its rows.

    The other arguments are those of `expand_kernel`.
    """
    R, C, M, N = shape
    n_blocks_n = tl.cdiv(N, BLOCK_N)
    m_first = block // n_blocks_n
    n = (block - m_first * n_blocks_n) * BLOCK_N + tl.arange(0, BLOCK_N)
    m_first *= BLOCK_M
    of_columns = _of_columns(n, N, maps, scales, noise, NOISE, ACC)
    col = of_columns[0]
    beyond = (C - 1 - col.to(tl.int32)) >> 31
    at = col * strides[SOURCE_C]
    if sources[UPPER] is not None:
        # the columns are contiguous; adding an int32 to an address takes one instruction
        at = col.to(tl.int32) - (beyond & C)
    PAIRED: tl.constexpr = WHOLE and sources[WEIGHT].dtype.element_ty.primitive_bitwidth == 16
    for k in tl.static_range(0, BLOCK_M, 2 if PAIRED else 1):
        m = m_first + k
        row = _row_of(maps, m, M)
        if PAIRED:
            beside = _row_of(maps, m + 1, M)
            x, y = _two_rows(
                sources[WEIGHT], row, beside, strides[WEIGHT_R], C, col.to(tl.int32), WHOLE
            )
            _store_row(
                y, m + 1, beside, n, of_columns, scales, noise, out_ptr, strides, shape,
                NOISE, LARGER, ACC,
            )  # fmt: skip
        elif WHOLE:
            whole = _whole_row(sources[WEIGHT], row, strides[WEIGHT_R], C, WHOLE)
            x = tl.gather(whole, col.to(tl.int32), 0)
        else:
            source = _start(sources, strides, row, beyond, R) + at
            x = _elements(source, maps[OF_COLS], n < N)  # (2), (BLOCK_N,)
        _store_row(
            x, m, row, n, of_columns, scales, noise, out_ptr, strides, shape, NOISE, LARGER, ACC
        )


@jit
def expand_kernel(
    sources,  # weight, upper: (R, C); upper may be None
    maps,  # rows (M,), cols (N,); None: identity
    scales,  # row_scale (M,), col_scale (N,); None: 1
    noise,  # size or copies on the axis of noise or routing; key and mult on the other
    out_ptr,  # (M, N)  out
    strides,  # r of weight, r of upper, c of both, m and n of out
    shape,  # R, C, M, N
    NOISE: tl.constexpr,  # `ExpandCall.noise_kind`; with NO_NOISE all three of `noise` are None
    LARGER: tl.constexpr,  # `ExpandCall.larger_share`
    ACC: tl.constexpr,
    WHOLE: tl.constexpr,  # columns of a row in shared memory, C or more; 0: none
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    expand_block(
        tl.program_id(0), sources, maps, scales, noise, out_ptr, strides, shape,
        NOISE, LARGER, ACC, WHOLE, BLOCK_M, BLOCK_N,
    )  # fmt: skip


# lines of a program of `lines_kernel`
LINES_AT_ONCE = 256


@jit
def _mix(x):
    """(1) of `hashes.py` on uint32."""
    x = (x ^ (x >> 16)) * 0x7FEB352D
    x = (x ^ (x >> 15)) * 0x846CA68B
    return x ^ (x >> 16)


@jit(do_not_specialize=("n", "n_copies", "offset", "seed_hi", "seed_lo"))
def lines_kernel(
    key_ptr,  # (n,) out: (2) of `hashes.py`
    mult_ptr,  # (n,) out
    packed_ptr,  # (n_copies,) out: `Routing.packed`; None without routing
    copies_ptr,  # (n_copies, 2) `Routing.copies`
    table_ptr,  # (programs, 3) int64, offset and seed words of each program; None: the arguments
    n,
    n_copies,
    offset,  # of the first line
    seed_hi,  # both as int32
    seed_lo,
    BLOCK_N: tl.constexpr,
):
    first = tl.program_id(0) * BLOCK_N
    at = first + tl.arange(0, BLOCK_N)
    if table_ptr is None:
        offset += first
    else:
        table = table_ptr + tl.program_id(0) * 3
        offset, seed_hi, seed_lo = tl.load(table), tl.load(table + 1), tl.load(table + 2)
    line = (offset + tl.arange(0, BLOCK_N)).to(tl.uint32)
    key = _mix(_mix(line ^ seed_hi.to(tl.uint32)) + seed_lo.to(tl.uint32))
    mult = _mix(key + 0x9E3779B9) | 1
    tl.store(key_ptr + at, key.to(tl.int32, bitcast=True), mask=at < n)
    tl.store(mult_ptr + at, mult.to(tl.int32, bitcast=True), mask=at < n)
    if packed_ptr is not None:
        number = tl.load(copies_ptr + 2 * at, mask=at < n_copies, other=0)
        count = tl.load(copies_ptr + 2 * at + 1, mask=at < n_copies, other=0)
        tl.store(packed_ptr + at, (number + (count << 16)).to(tl.int32), mask=at < n_copies)


def lines_of_call(call: ExpandCall) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """`Routing.packed`, and key and mult of every line, in one launch; None what is not needed.

    PyTorch would take 42 launches, which take longer than the kernel that reads their results.
    """
    if call.noise is None and call.routing is None:
        return None, None, None
    n, offset = call.lines
    copies = None if call.routing is None else call.routing.copies.detach().contiguous()
    n_copies = 0 if copies is None else len(copies)
    key = torch.empty(n, dtype=torch.int32, device=call.out.device)
    mult, packed = torch.empty_like(key), None if copies is None else key.new_empty(n_copies)
    launch(
        lines_kernel,
        -(-max(n, n_copies) // LINES_AT_ONCE),
        call.out,
        key,
        mult,
        packed,
        copies,
        None,
        n,
        n_copies,
        offset,
        *seed_words(call.seed),
        BLOCK_N=LINES_AT_ONCE,
        **EXACT,
    )
    return packed, key, mult


def block_of(columns: int, whole: int = 0) -> dict[str, int]:
    """The block for a result of so many columns.

    Its rows share what is loaded of its columns. Blocks are wide because gathered elements lie in
    pieces of 32 bytes: each block of a row fetches nearly all pieces of the source row again, or
    all of the row with `whole`, see `whole_of`.
    """
    size = max(512, min(4096 if whole else 2048, next_power_of_2(columns)))
    return {"BLOCK_M": 16, "BLOCK_N": size, "num_warps": max(4, min(8, size // 256))}


# columns of a source row in shared memory, where each takes 4 bytes. With twice as many a kernel
# spills, and another takes so many registers that one program fills a multiprocessor
MOST_WHOLE = 4096


def whole_of(call: ExpandCall) -> int:
    """WHOLE of the kernel: a row in shared memory serves gathers of columns from there.

    In memory, single elements of a row come in pieces of 32 bytes, and of 16 bits each. In shared
    memory a warp's 32 random elements take 3.5 cycles on average.
    """
    C, itemsize = call.weight.shape[1], call.weight.itemsize
    fits = C <= MOST_WHOLE and itemsize <= 4 and has_contiguous_columns(call.weight)
    return next_power_of_2(C) if fits and call.cols is not None and call.upper is None else 0


def expand_on_triton(call: ExpandCall) -> None:
    """Fill `call.out`, which is on a GPU, or on the CPU if Triton is interpreted."""
    call = call.with_alike_columns()
    M, N = call.out.shape
    acc, tl_acc = acc_dtype(call.wider)
    whole, (packed, key, mult) = whole_of(call), lines_of_call(call)
    choice = block_of(N, whole)
    choice["BLOCK_N"] = min(choice["BLOCK_N"], next_power_of_2(N))
    launch(
        expand_kernel,
        -(-M // choice["BLOCK_M"]) * -(-N // choice["BLOCK_N"]),
        call.out,
        (call.weight, call.upper),
        # int64 as given: all rows of a block share the load of an index
        tuple(as_vector(x, torch.int64) for x in (call.rows, call.cols)),
        tuple(as_vector(x, acc) for x in (call.row_scale, call.col_scale)),
        (as_vector(call.noise, acc) if packed is None else packed, key, mult),
        call.out,
        (
            call.weight.stride(0),
            0 if call.upper is None else call.upper.stride(0),
            call.weight.stride(1),
            *call.out.stride(),
        ),
        (*call.weight.shape, M, N),
        NOISE=call.noise_kind,
        LARGER=call.larger_share,
        ACC=tl_acc,
        WHOLE=whole,
        **choice,
        **EXACT,
    )
