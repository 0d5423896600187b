"""Blocks of logits and elementary functions, for the Triton kernels of the losses.

Kernels read whole blocks of columns without a mask: 16 bytes at a time, wherever rows begin at
multiples of 16 bytes. The columns behind the last whole block follow, with a mask.

Shape letters used in this file: V vocabulary.
"""

from growkern.ops.backend.launch import jit, tl

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
    tail = 1 + r / 5 * (1 + r / 6 * (1 + r / 7 * (1 + r / 8)))
    return tl.where(tl.abs(r) < 0.25, r * (1 + r / 2 * (1 + r / 3 * (1 + r / 4 * tail))), far)


@jit
def log1p(x, ACC: tl.constexpr):
    """log(1 + x) = 2 atanh(x / (2 + x)), good to 3e-10 below 0.25."""
    far = tl.log(1 + x)
    if tl.float64 == ACC:
        return far
    y = x / (2 + x)
    y2 = y * y
    near = 2 * y * (1 + y2 * (1.0 / 3 + y2 * (1.0 / 5 + y2 * (1.0 / 7 + y2 / 9))))
    return tl.where(tl.abs(x) < 0.25, near, far)


@jit
def against_mixture(r, BETA: tl.constexpr, ACC: tl.constexpr):
    """log(q / m) and log(p / m) of (7), given r = log(q / p)."""
    if BETA == 1:
        return r, tl.zeros_like(r)
    # of the larger of q and p, so that nothing overflows; exact where both are close
    gap = expm1(-tl.abs(r), ACC)
    above = -log1p(tl.where(r < 0, gap * (1 - BETA), gap * BETA), ACC)
    return tl.where(r < 0, above + r, above), tl.where(r < 0, above, above - r)


@jit
def pull_of(q, p, r, centre, BETA: tl.constexpr, ACC: tl.constexpr):
    """(5), or (8) with the divergence's factor, without 1 / T, given r = log(q / p)."""
    if BETA == 0:
        # q - p; where they are close as p * expm1(log q - log p). False for NaN: both are 0
        return tl.where(tl.abs(r) < 0.25, p * expm1(r, ACC), q - p)
    log_qm, _ = against_mixture(r, BETA, ACC)
    share: tl.constexpr = 1 if BETA == 1 else 1 - BETA
    return tl.where(q > 0, share * q * (log_qm - centre), 0.0)


@jit
def exponentials(x, T_INV: tl.constexpr):
    """exp(x) and exp(x / T). At T = 2, the usual temperature, the first is a square."""
    e_t = tl.exp(x * T_INV)
    if T_INV == 1:
        e = e_t
    elif T_INV == 0.5:
        e = e_t * e_t
    else:
        e = tl.exp(x)
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
        x = CAP * tanh(x / CAP, ACC)
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


@jit
def raise_max(m, x):
    """The new running maximum; 0 while all logits are -inf, so that inf - inf does not occur."""
    top = tl.maximum(m, tl.max(x, axis=0))
    return tl.where(top == float("-inf"), 0.0, top)


@jit
def first_of(m, best, x, v, V):
    """Column of the first maximum so far, given the maximum m before this block."""
    top = tl.max(x, axis=0)
    return tl.where(top > m, tl.min(tl.where(x == top, v, V), axis=0), best)


@jit
def zero_row(row_ptr, V, BLOCK_V: tl.constexpr):
    zeros = tl.zeros((BLOCK_V,), tl.float32)
    whole = V // BLOCK_V * BLOCK_V
    for start in range(0, whole, BLOCK_V):
        store_gradient(row_ptr, start + tl.arange(0, BLOCK_V), V, zeros, False)
    if whole < V:
        store_gradient(row_ptr, whole + tl.arange(0, BLOCK_V), V, zeros, True)
