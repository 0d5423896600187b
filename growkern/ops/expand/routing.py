"""Signed routing of `expand`: a hash gives every element to one of the copies of its source.

A source index has C copies on the routed axis, numbers 0 .. C-1. ``src`` is the index, and key and
mult belong to the line that the element lies on, (2) of `noise.py`. For each line and source index
the hash picks two copies p and q, which differ if C > 1:

    h = key + src mult          on uint32
    p = floor(h C / 2**32),     q = (p + 1 + floor(mult (C-1) / 2**32)) mod C              (1)

With amplitude a and the scaled element x, rounded to the output dtype, the copies get

    copy p:  larger = rn((1 + a)/2 x)        copy q:  x - larger       others:  0         (2)

Copies add up to x bit for bit in every dtype, for any C: x - larger is exact because
x/2 <= larger <= 2x for 0 <= a <= 3 (Sterbenz's lemma). With a = 1, copy p has x itself, and
nothing is multiplied or rounded. For a > 1, an x above 2/(1 + a) times the dtype's largest number
overflows. An entry that is its source's only copy gets x.

Different lines choose independently of each other. On one line the choices for two source indices
are independent too, because h is a strongly universal hash (multiply-shift, Dietzfelbinger 1996).
That is all that separating copies needs: the gradients that two copies get are sums over lines.
A full hash as in (3) of `noise.py` would take five more operations.

The same formulas are in three places: `chosen` for PyTorch, `routed_triton` for Triton, and
csrc/routing.h for C++ on CPUs and GPUs.
"""

import torch
from torch import Tensor

from growkern.ops.backend.launch import jit, tl
from growkern.ops.expand.call import ExpandCall
from growkern.ops.expand.noise import line_keys


def chosen(key: Tensor, mult: Tensor, src: Tensor, copies: Tensor) -> tuple[Tensor, Tensor]:
    """(1): whether an element belongs to copy p, and whether it belongs to copy q.

    Args:
        key, mult, src: int32 bit patterns that broadcast.
        copies: (n, 2) int64 of the elements on the last axis.

    Returns:
        Two bool tensors. The first is true, and the second false, for the only copy of a source.
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
    """(2) in the dtype of x. The result holds numbers of the output dtype."""
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


@jit
def routed_triton(key, mult, src, copies, x, larger, LARGER: tl.constexpr):
    """(2) for elements that broadcast, where `larger` is the larger share of x.

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
