"""Functions Triton has not, with their digits near 0: all of them are compiled in float32 too.

A GPU's exp is good to 4e-7 only. In float64 the plain formula is near enough.
"""

from growkern.ops.backend.launch import jit, tl


@jit
def tanh(x, ACC: tl.constexpr):
    """tanh, exact to 2e-10 below 0.25."""
    e = tl.exp(-2 * tl.abs(x))
    far = tl.where(x < 0, -1.0, 1.0) * (1 - e) / (1 + e)
    if tl.float64 == ACC:
        return far
    # near 0 the line above loses the digits of 1 - e
    y = x * x
    near = 62.0 / 2835 + y * (-1382.0 / 155925)
    near = x * (1 + y * (-1.0 / 3 + y * (2.0 / 15 + y * (-17.0 / 315 + y * near))))
    return tl.where(y < 0.0625, near, far)


@jit
def expm1(r, ACC: tl.constexpr):
    """exp(r) - 1, exact to 4e-11 below 0.25."""
    far = tl.exp(r) - 1
    if tl.float64 == ACC:
        return far
    tail = 1 + r / 5 * (1 + r / 6 * (1 + r / 7 * (1 + r / 8)))
    return tl.where(tl.abs(r) < 0.25, r * (1 + r / 2 * (1 + r / 3 * (1 + r / 4 * tail))), far)


@jit
def log1p(x, ACC: tl.constexpr):
    """log(1 + x), as 2 atanh(x / (2 + x)) exact to 3e-10 below 0.25."""
    far = tl.log(1 + x)
    if tl.float64 == ACC:
        return far
    y = x / (2 + x)
    y2 = y * y
    near = 2 * y * (1 + y2 * (1.0 / 3 + y2 * (1.0 / 5 + y2 * (1.0 / 7 + y2 / 9))))
    return tl.where(tl.abs(x) < 0.25, near, far)


@jit
def against_mixture(r, BETA: tl.constexpr, ACC: tl.constexpr):
    """log(q / m) and log(p / m) of (7) of `kl_mlm_loss.py`, given r = log(q / p)."""
    if BETA == 1:
        return r, tl.zeros_like(r)
    # of the larger of q and p, so that nothing overflows; exact where both are close
    gap = expm1(-tl.abs(r), ACC)
    above = -log1p(tl.where(r < 0, gap * (1 - BETA), gap * BETA), ACC)
    return tl.where(r < 0, above + r, above), tl.where(r < 0, above, above - r)
