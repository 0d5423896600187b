"""Hashes for `expand`: they sign its noise, and they choose the copy that gets an element.

A hash depends on positions only, so every backend and every shard draws the same. All arithmetic is
on uint32 and wraps around. Noise or routing lies on one axis of the result. ``src`` is the source
index on that axis, and ``line`` is the position on the other axis:

    mix(x): x ^= x >> 16; x *= 0x7feb352d; x ^= x >> 15; x *= 0x846ca68b; x ^= x >> 16       (1)
    key  = mix(mix(line ^ seed_hi) + seed_lo)        mult = mix(key + 0x9e3779b9) | 1        (2)
    h    = key + src * mult

Key and mult depend on the line only. They are computed once per line: for GPUs by `on_triton.py`,
else in this file. Kernels compute h and (3) to (5) for every element. The constants of (1) come
from the two-round hash `lowbias32`, which was found by a search for low bias.

Noise of an element, with the size s of its entry on the noisy axis:

    noise = s  if the top bit of h is 0,  else -s                                            (3)

All noise of an entry has one size. The signs make copies differ. A size that varies along a column
would only scale a copy's gradient more, which Adam cancels. As mult is odd, src + 2**31 has
the opposite top bit in h. A kernel thus takes src + 2**31 for a negative size.

Signed routing gives every element to one of the copies of its source. A source index has C copies
on the routed axis, numbers 0 .. C-1. For each line and source index the hash picks two copies p and
q, which differ if C > 1:

    p = floor(h C / 2**32),     q = (p + 1 + floor(mult (C-1) / 2**32)) mod C                (4)

With amplitude a and the scaled element x, rounded to the output dtype, the copies get

    copy p:  larger = rn((1 + a)/2 x)        copy q:  x - larger       others:  0            (5)

Copies add up to x bit for bit in every dtype, for any C: x - larger is exact because
x/2 <= larger <= 2x for 0 <= a <= 3 (Sterbenz's lemma). With a = 1, copy p has x itself, and
nothing is multiplied or rounded. For a > 1, an x above 2/(1 + a) times the dtype's largest number
overflows. An entry that is its source's only copy gets x.

Lines are independent of each other. On one line the signs and the choices of two source indices are
independent too, because h is a strongly universal hash (multiply-shift, Dietzfelbinger 1996). That
is all that separating copies needs: the gradients that two copies get are sums over lines. To mix h
again would take at least five more operations per element.

(3) to (5) are in four places: for PyTorch in this file, for Triton in `noise_on_triton.py`, for
CPUs in csrc/cpu (expand_noise.h, expand_routing.h, expand_stream.h), for GPUs in
csrc/cuda/expand_rows.cu.
Both kinds of C++ have h and (4) from csrc/line_hash.h.
"""

import torch
from torch import Tensor

from growkern.ops.expand.call import COL_NOISE, ExpandCall

# -------------------------------------------------------------------- lines


def _int32(x: int) -> int:
    """The signed number with the bits of the unsigned x: torch computes in int32, which wraps."""
    x &= 0xFFFFFFFF
    return x - (1 << 32) if x >= 1 << 31 else x


MIX_A, MIX_B, GOLDEN = map(_int32, (0x7FEB352D, 0x846CA68B, 0x9E3779B9))


def _mix(x: Tensor) -> Tensor:
    """(1) on int32 bit patterns. A shift of int32 is arithmetic: the mask makes it logical."""
    x = (x ^ ((x >> 16) & 0xFFFF)) * MIX_A
    x = (x ^ ((x >> 15) & 0x1FFFF)) * MIX_B
    return x ^ ((x >> 16) & 0xFFFF)


def seed_words(seed: int) -> tuple[int, int]:
    """seed_hi and seed_lo of (2), as int32."""
    return _int32(seed >> 32), _int32(seed)


def line_keys(n_lines: int, offset: int, seed: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """(2) for the lines offset, offset + 1, ...: (key, mult), both (n_lines,) int32 bits."""
    line = torch.arange(offset, offset + n_lines, device=device).to(torch.int32)
    seed_hi, seed_lo = seed_words(seed)
    key = _mix(_mix(line ^ seed_hi) + seed_lo)
    return key, _mix(key + GOLDEN) | 1


def keys_of_call(call: ExpandCall) -> tuple[Tensor | None, Tensor | None]:
    """(2) for every line of a call: key and mult; both None without noise or routing."""
    if call.noise is None and call.routing is None:
        return None, None
    return line_keys(*call.lines, call.seed, call.out.device)


# -------------------------------------------------------------------- noise


def signed(size: Tensor, key: Tensor, mult: Tensor, src: Tensor) -> Tensor:
    """(3): the noise, from float sizes and int32 bit patterns that all broadcast."""
    return torch.where(key + src * mult < 0, -size, size)


def noise_of_columns(x_MN: Tensor, size_N: Tensor, src_N: Tensor, offset: int, seed: int) -> Tensor:
    """The noise of these relative sizes on the columns of a matrix, (M, N) in its dtype."""
    key_M, mult_M = line_keys(x_MN.shape[0], offset, seed, x_MN.device)
    size_N = size_N.to(x_MN.dtype)
    return signed(size_N, key_M[:, None], mult_M[:, None], src_N.to(torch.int32))


def noise_of_entries(call: ExpandCall, acc: torch.dtype) -> tuple[Tensor | None, Tensor | None]:
    """What (3) and (4) need of every entry of the noisy axis; both None without noise.

    Returns:
        factor: 1 + |size| in `acc`, or -1 where the size is 0 and no sign counts.
        source: int32 bit patterns, the source index. A negative size adds 2**31.
    """
    if call.noise is None:
        return None, None
    size = call.noise.detach().to(acc)
    index = call.cols if call.noise_kind == COL_NOISE else call.rows
    src = torch.arange(len(size), device=size.device) if index is None else index
    factor = torch.where(size == 0, -1, 1 + size.abs())
    return factor.contiguous(), src.int() ^ torch.where(size < 0, _int32(1 << 31), 0).int()


def with_noise(x: Tensor, noise: Tensor, out_dtype: torch.dtype) -> Tensor:
    """x (1 + noise) by (4) of `expand_op.py`, without the last rounding to `out_dtype`."""
    larger = (x * (1 + noise.abs())).to(out_dtype).to(x.dtype)
    rest = larger - x
    return torch.where(noise < 0, x - rest, x + rest)


# ------------------------------------------------------------------ routing


def chosen(key: Tensor, mult: Tensor, src: Tensor, copies: Tensor) -> tuple[Tensor, Tensor]:
    """(4): whether an element belongs to copy p, and whether it belongs to copy q.

    The first is true, and the second false, for the only copy of a source.

    Args:
        key, mult, src: int32 bit patterns that broadcast.
        copies: (n, 2) int64 of the elements on the last axis.
    """
    low = 0xFFFFFFFF
    number, count = copies.unbind(-1)
    p = (((key + src * mult).long() & low) * count) >> 32
    q = (p + 1 + (((mult.long() & low) * (count - 1)) >> 32)) % count
    return p == number, (q == number) & (count > 1)


def chosen_of_call(call: ExpandCall, shape: torch.Size) -> tuple[Tensor, Tensor]:
    """`chosen` for every element of a call with routing: two bool tensors of the result's shape."""
    assert call.routing is not None
    dim, copies, _ = call.routing
    key, mult = line_keys(shape[1 - dim], call.offsets[1 - dim], call.seed, copies.device)
    index = (call.rows, call.cols)[dim]
    src = torch.arange(len(copies), device=key.device) if index is None else index
    both = chosen(key[:, None], mult[:, None], src.to(torch.int32), copies)
    return both if dim == 1 else (both[0].T, both[1].T)


def routed(x_MN: Tensor, call: ExpandCall) -> Tensor:
    """(5) in the dtype of x. The result holds numbers of the output dtype."""
    assert call.routing is not None
    x, amplitude = x_MN.to(call.out.dtype).to(x_MN.dtype), call.routing.amplitude
    in_p, in_q = chosen_of_call(call, x.shape)
    if amplitude == 1:
        return torch.where(in_p, x, 0.0)
    larger = (x * call.routing.larger_share).to(call.out.dtype).to(x.dtype)
    share = torch.where(in_p, larger, torch.where(in_q, x - larger, 0.0))
    return torch.where(_is_only(call), x, share)


def routed_gradient(dx_MN: Tensor, call: ExpandCall) -> Tensor:
    """The gradient of `routed`: every element times its share of the source's weight."""
    assert call.routing is not None
    in_p, in_q = chosen_of_call(call, dx_MN.shape)
    larger = call.routing.larger_share
    share = larger * in_p.to(dx_MN.dtype) + (1 - larger) * in_q.to(dx_MN.dtype)
    return torch.where(_is_only(call), dx_MN, dx_MN * share)


def _is_only(call: ExpandCall) -> Tensor:
    """Which entries of the routed axis are only copies; broadcasts to the result's shape."""
    assert call.routing is not None
    is_only = call.routing.copies[:, 1] == 1
    return is_only if call.routing.dim == 1 else is_only[:, None]
