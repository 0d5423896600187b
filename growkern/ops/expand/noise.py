"""The noise of `expand`: a hash of positions, so that every backend and shard draws the same.

All arithmetic is on uint32 and wraps around. The noise lies on one axis of the result. ``src`` is
the source index on that axis, and ``line`` is the position on the other axis:

    stir(x): x ^= x >> 16; x *= 0x7feb352d; x ^= x >> 15; x *= 0x846ca68b                    (1)
    mix(x) = y ^ (y >> 16), y = stir(x)
    key  = mix(mix(line ^ seed_hi) + seed_lo)        mult = mix(key + 0x9e3779b9) | 1        (2)
    xi   = float32(int32(stir(key + src * mult))) * 2**-31,  in [-1, 1]                      (3)

(2) depends on the line only. It is computed in this file, once per line. Kernels compute (3) for
every element, which takes two multiplications of (1) and one of (3). (3) does without the last step
of mix: rounding to float32 removes nearly all that it would change. Kernels in Triton and CUDA
multiply the size of the noise by 2**-31 instead of xi, which gives the same bits.

Philox-4x32-10 would need about 50 integer operations per element. In the time that a gather in
bfloat16 waits for memory, a GPU can do about 8. The constants of (1) come from the two-round hash
`lowbias32`, which was found by a search for low bias.

The same hash is in three places: `hash_noise` for PyTorch, `hash_noise_triton` for Triton, and
csrc/hash_noise.h for C++ on CPUs and GPUs.
"""

import torch
from torch import Tensor

from growkern.ops.backend.launch import jit, tl
from growkern.ops.expand.call import ExpandCall


def _int32(x: int) -> int:
    """The signed number with the bits of the unsigned x: torch computes in int32, which wraps."""
    x &= 0xFFFFFFFF
    return x - (1 << 32) if x >= 1 << 31 else x


MIX_A = _int32(0x7FEB352D)
MIX_B = _int32(0x846CA68B)
GOLDEN = _int32(0x9E3779B9)


def _stir(x: Tensor) -> Tensor:
    """(1) on int32 bit patterns. A shift of int32 is arithmetic: the mask makes it logical."""
    x = x ^ ((x >> 16) & 0xFFFF)
    x = x * MIX_A
    x = x ^ ((x >> 15) & 0x1FFFF)
    return x * MIX_B


def _mix(x: Tensor) -> Tensor:
    x = _stir(x)
    return x ^ ((x >> 16) & 0xFFFF)


def seed_words(seed: int) -> tuple[int, int]:
    """seed_hi and seed_lo of (2), as int32."""
    return _int32(seed >> 32), _int32(seed)


def keys_of_lines(
    line: Tensor, seed_hi: int | Tensor, seed_lo: int | Tensor
) -> tuple[Tensor, Tensor]:
    """(2): key and mult of lines.

    Args:
        line: (n,) int32 bit patterns.
        seed_hi, seed_lo: one seed for all lines, or (n,) int32 with a seed for each.

    Returns:
        key and mult, both (n,) int32 bit patterns.
    """
    key = _mix(_mix(line ^ seed_hi) + seed_lo)
    return key, _mix(key + GOLDEN) | 1


def line_keys(n_lines: int, offset: int, seed: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """(2) for the lines offset, offset + 1, ...: (key, mult), both (n_lines,) int32 bits."""
    line = torch.arange(offset, offset + n_lines, device=device).to(torch.int32)
    return keys_of_lines(line, *seed_words(seed))


def keys_of_call(call: ExpandCall) -> tuple[Tensor | None, Tensor | None]:
    """(2) for every line of a call: key and mult; both None without noise or routing."""
    if call.noise is None and call.routing is None:
        return None, None
    return line_keys(*call.lines, call.seed, call.out.device)


def hash_noise(key: Tensor, mult: Tensor, src: Tensor) -> Tensor:
    """(3): float32 in [-1, 1], of the shape the three int32 tensors broadcast to."""
    return _stir(key + src * mult).float() * 2.0**-31


def noise_of_columns(x_MN: Tensor, size_N: Tensor, src_N: Tensor, offset: int, seed: int) -> Tensor:
    """The noise on the columns of a matrix.

    Args:
        x_MN: the matrix; only its shape, dtype and device are used.
        size_N: relative size of the noise on each column.
        src_N: source index of each column.
        offset: position of the first row.
        seed: of the noise.

    Returns:
        (M, N) in the dtype of `x_MN`.
    """
    key_M, mult_M = line_keys(x_MN.shape[0], offset, seed, x_MN.device)
    xi_MN = hash_noise(key_M[:, None], mult_M[:, None], src_N.to(torch.int32))
    return size_N.to(x_MN.dtype) * xi_MN


def with_noise(x: Tensor, noise: Tensor | None, out_dtype: torch.dtype) -> Tensor:
    """x (1 + noise) by (4) of `op.py`, without the last rounding to `out_dtype`.

    Returns:
        a tensor in the dtype of `x`.
    """
    if noise is None:
        return x
    larger = (x * (1 + noise.abs())).to(out_dtype).to(x.dtype)
    return torch.where(noise < 0, x + x - larger, larger)


@jit
def hash_noise_triton(key, mult, src):
    """(3) without the factor 2**-31: int32 bit patterns that broadcast -> float32."""
    x = (key + src * mult).to(tl.uint32, bitcast=True)
    x = x ^ (x >> 16)
    x = x * 0x7FEB352D
    x = x ^ (x >> 15)
    x = x * 0x846CA68B
    return x.to(tl.int32, bitcast=True).to(tl.float32)


@jit
def noise_unit_triton(size):
    """A size of noise times the factor 2**-31 of (3). A power of 2 rounds nothing."""
    return size * 4.656612873077393e-10
