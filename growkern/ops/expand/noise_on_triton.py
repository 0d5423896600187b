"""Noise and routing of an element: (4) of `expand_op.py`, and (3) and (5) of `hashes.py`."""

from growkern.ops.backend import jit, tl

TOP_BIT = tl.constexpr(-(1 << 31))


@jit
def _share_of_copy(key, mult, src, copies, x, larger, LARGER: tl.constexpr):
    """(5) of `hashes.py` for elements that broadcast, where `larger` is the larger share of x.

    Args:
        key, mult, src, copies: int32 bit patterns; copies as in `Routing.packed`.
        x, larger: in the accumulator's dtype.
        LARGER: `Routing.larger_share`.
    """
    number = copies & 0xFFFF
    count = (copies >> 16).to(tl.uint32, bitcast=True)
    factor = mult.to(tl.uint32, bitcast=True)
    h = (key + src * mult).to(tl.uint32, bitcast=True)
    p = tl.umulhi(h, count).to(tl.int32, bitcast=True)
    if LARGER == 1.0:
        return tl.where(p == number, x, 0.0)
    step = tl.umulhi(factor, count - 1).to(tl.int32, bitcast=True)
    q = p + 1 + step
    total = copies >> 16
    q = tl.where(q >= total, q - total, q)
    share = tl.where(p == number, larger, tl.where(q == number, x - larger, 0.0))
    return tl.where(total == 1, x, share)


@jit
def noise_of(size, src):
    """What (3) of `hashes.py` needs of an entry of the noisy axis, beside its line.

    Returns:
        1 + |size|; the int32 source index, plus 2**31 if `size` is negative; and the bits of the
        hash that decide, int32: the top bit, or none if `size` is 0.
    """
    sign = size.to(tl.float32).to(tl.int32, bitcast=True) & TOP_BIT
    return 1 + tl.abs(size), src ^ sign, tl.where(size == 0, 0, TOP_BIT)


@jit
def with_noise(x, factor, sign, like, ACC: tl.constexpr):
    """(4) without its last rounding.

    Args:
        x: in the accumulator's dtype.
        factor: 1 + |noise|.
        sign: int32, the top bit if the noise is negative, else 0.
    """
    rest = rounded(x * factor, like).to(ACC) - x
    if ACC.primitive_bitwidth == 64:
        bits = rest.to(tl.int64, bitcast=True) ^ (sign.to(tl.int64) << 32)
    else:
        bits = rest.to(tl.int32, bitcast=True) ^ sign
    return x + bits.to(ACC, bitcast=True)


@jit
def routed(x, key, mult, src, copies, like, LARGER: tl.constexpr, ACC: tl.constexpr):
    """(5) of `hashes.py`."""
    x = rounded(x, like).to(ACC)
    larger = x
    if LARGER != 1.0:
        larger = rounded(x * LARGER, like).to(ACC)
    return _share_of_copy(key, mult, src, copies, x, larger, LARGER)


@jit
def rounded(x, like):
    """x in the dtype `like` points to."""
    if like.dtype.element_ty.primitive_bitwidth == 16:
        # float64 too: the rounding of `expand_op.py`
        x = x.to(tl.float32)
    return x.to(like.dtype.element_ty)
