"""Blocks of logits and elementary functions, for the Triton kernels of the losses.

Kernels read whole blocks of columns without a mask: 16 bytes at a time, wherever rows begin at
multiples of 16 bytes. The columns behind the last whole block follow, with a mask.

Shape letters used in this file: V vocabulary.
"""

from growkern.ops.backend import jit, tl

# --------------------------------------------------------- elementary functions
#
# Triton lacks these, and a GPU's exp is only good to 4e-7. They keep their digits near 0 in
# float32; in float64 the plain formula is accurate enough.


@jit
def tanh(x, ACC: tl.constexpr):
    """tanh(x), good to 2e-10 below 0.25."""
    e = tl.exp(-2 * tl.abs(x))
    far = tl.where(x < 0, -1.0, 1.0) * (1 - e) / (1 + e)
    if tl.float64 == ACC:
        return far
    # near 0 the formula above loses the digits of 1 - e
    y = x * x
    near = 62.0 / 2835 + y * (-1382.0 / 155925)
    near = x * (1 + y * (-1.0 / 3 + y * (2.0 / 15 + y * (-17.0 / 315 + y * near))))
    return tl.where(y < 0.0625, near, far)


@jit
def expm1(r, ACC: tl.constexpr):
    """exp(r) - 1, good to 4e-11 below 0.25."""
    far = tl.exp(r) - 1
    if tl.float64 == ACC:
        return far
    # a division by a constant is compiled to a whole division
    tail = 1.0 / 120 + r * (1.0 / 720 + r * (1.0 / 5040 + r * (1.0 / 40320)))
    near = r * (1 + r * (0.5 + r * (1.0 / 6 + r * (1.0 / 24 + r * tail))))
    return tl.where(tl.abs(r) < 0.25, near, far)


@jit
def log1p(x, ACC: tl.constexpr):
    """log(1 + x) = 2 atanh(x / (2 + x)), good to 3e-10 below 0.25."""
    far = tl.log(1 + x)
    if tl.float64 == ACC:
        return far
    y = x / (2 + x)
    y2 = y * y
    near = 2 * y * (1 + y2 * (1.0 / 3 + y2 * (1.0 / 5 + y2 * (1.0 / 7 + y2 * (1.0 / 9)))))
    return tl.where(tl.abs(x) < 0.25, near, far)


@jit
def ratio(s, u, numbers, T_INV: tl.constexpr):
    """p and log(q / p) at temperature T; `numbers` are the teacher's (m_u, 1 / d_u, shift)."""
    m_u, inv_d_u, shift = numbers
    return exp_of(u - m_u, T_INV) * inv_d_u, (s - u) * T_INV - shift


@jit
def exp_of(x, T_INV: tl.constexpr):
    """exp(x / T) in fewer instructions than exp, whose rounding of the product it shares."""
    return tl.exp2(x * (T_INV * 1.4426950408889634))


@jit
def exponentials(x, T_INV: tl.constexpr, FAST: tl.constexpr = True):
    """exp(x) and exp(x / T). At T = 2, the usual temperature, the first is a square."""
    e_t = exp_of(x, T_INV) if FAST else tl.exp(x * T_INV)
    if T_INV == 1:
        e = e_t
    elif T_INV == 0.5:
        e = e_t * e_t
    else:
        e = exp_of(x, 1) if FAST else tl.exp(x)
    return e, e_t


# ------------------------------------------------------------------------ blocks


@jit
def load_logits(
    row_ptr, bias_ptr, v, V, MASKED: tl.constexpr, CAP: tl.constexpr, ACC: tl.constexpr
):
    """Capped logits with their bias, if there is one. With MASKED, -inf from column V on."""
    if MASKED:
        x = tl.load(row_ptr + v, mask=v < V, other=float("-inf")).to(ACC)
    else:
        x = tl.load(row_ptr + v).to(ACC)
    if bias_ptr is not None:
        if MASKED:
            x += tl.load(bias_ptr + v, mask=v < V, other=0.0).to(ACC)
        else:
            x += tl.load(bias_ptr + v).to(ACC)
    if CAP != 0:
        x = CAP * tanh(x * (1.0 / CAP), ACC)
        if MASKED:
            x = tl.where(v < V, x, float("-inf"))
    return x


@jit
def store_gradient(dstudent_ptr, v, V, g, MASKED: tl.constexpr):
    """Write a block of the gradient. It may overwrite the logits and be narrower than they are.

    All of the block is read before any of it is written, and no write reaches past the block.
    """
    tl.debug_barrier()
    if dstudent_ptr.dtype.element_ty.primitive_bitwidth == 16:
        # float64 too: Triton's interpreter has no such conversion
        g = g.to(tl.float32)
    g = g.to(dstudent_ptr.dtype.element_ty)
    if MASKED:
        tl.store(dstudent_ptr + v, g, mask=v < V)
    else:
        tl.store(dstudent_ptr + v, g)


# ------------------------------------------------------------------------- lanes
#
# A lane is what one thread reads of a row. Running numbers are kept per lane, and added up over
# the lanes at the end. So the loops over blocks hold no barrier and no exchange between threads.


@jit
def in_lanes(x, LANES: tl.constexpr):
    """A block of columns (BLOCK_V,) as (R, L, E): R reads of E neighbours by each of L lanes.

    `LANES` is (L, E). These are the columns that a thread has anyway, so nothing moves.
    """
    R: tl.constexpr = x.shape[0] // (LANES[0] * LANES[1])
    return tl.reshape(x, (R, LANES[0], LANES[1]))


@jit
def lane_sum(x):
    return tl.sum(tl.sum(x, axis=2), axis=0)


@jit
def lane_max(x):
    return tl.max(tl.max(x, axis=2), axis=0)


@jit
def base_of(m):
    """What exponents are relative to; 0 where all logits are -inf, as inf - inf is NaN."""
    return tl.where(m == float("-inf"), 0.0, m)


@jit
def weighted(w, x):
    """w x, where 0 * inf counts as 0, not NaN: a token of probability 0 costs nothing.

    The choice is made before the product, so that product and sum are one instruction.
    """
    return w * tl.where(w > 0, x, 0.0)


@jit
def first_of(m, best, x, v, V):
    """Column of the first maximum of a lane so far, given its maximum m before this block."""
    top = lane_max(x)
    here = tl.where(x == top[None, :, None], v, V)
    return tl.where(top > m, tl.min(tl.min(here, axis=2), axis=0), best)


@jit
def merge_lanes(m, best, V):
    """The maximum of a row, its first column, and the base of each lane relative to the row's."""
    top = tl.max(m, axis=0)
    return base_of(top), tl.min(tl.where(m == top, best, V), axis=0), m - base_of(top)


@jit
def zero_row(row_ptr, V, BLOCK_V: tl.constexpr):
    zeros = tl.zeros((BLOCK_V,), tl.float32)
    whole = V // BLOCK_V * BLOCK_V
    for start in range(0, whole, BLOCK_V):
        store_gradient(row_ptr, start + tl.arange(0, BLOCK_V), V, zeros, False)
    if whole < V:
        store_gradient(row_ptr, whole + tl.arange(0, BLOCK_V), V, zeros, True)
