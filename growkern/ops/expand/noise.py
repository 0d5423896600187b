"""The noise of `expand`: a hash, so that every backend and every sharding draws the same numbers.

All arithmetic is on uint32 and wraps around. ``line`` is the position on the axis that is not
read, ``src`` the source index on the axis that is:

    stir(x): x ^= x >> 16; x *= 0x7feb352d; x ^= x >> 15; x *= 0x846ca68b                    (1)
    mix(x) = y ^ (y >> 16), y = stir(x)
    key  = mix(mix(line ^ seed_hi) + seed_lo)        mult = mix(key + 0x9e3779b9) | 1        (2)
    xi   = float32(int32(stir(key + src * mult))) * 2**-31,  in [-1, 1]                      (3)

(2) depends on the line only and is computed here once per line, which leaves the kernels two
multiplications of (1) and one of (3) per element; (3) rounds away what the last step of mix would
change. Kernels multiply the size of the noise by 2**-31 instead. Philox-4x32-10 would need
about 50 integer operations per element, where a memory-bound gather in bfloat16 leaves about 8 on
a device with 100 times more integer operations than bytes per second.
The constants of (1) are those of the two-round hash `lowbias32`, found by search for low bias.
"""

import torch
from torch import Tensor

from growkern.ops.backend.launch import jit, tl


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


def line_keys(n_lines: int, offset: int, seed: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """(2) for the lines offset, offset + 1, ...: (key, mult), both (n_lines,) int32 bits."""
    line = torch.arange(offset, offset + n_lines, device=device).to(torch.int32)
    return keys_of_lines(line, *seed_words(seed))


def seed_words(seed: int) -> tuple[int, int]:
    """seed_hi and seed_lo of (2), as int32."""
    return _int32(seed >> 32), _int32(seed)


def keys_of_lines(
    line: Tensor, seed_hi: int | Tensor, seed_lo: int | Tensor
) -> tuple[Tensor, Tensor]:
    """(2): key and mult of int32 lines, each of its own seed or all of one."""
    key = _mix(_mix(line ^ seed_hi) + seed_lo)
    return key, _mix(key + GOLDEN) | 1


def hash_noise(key: Tensor, mult: Tensor, src: Tensor) -> Tensor:
    """(3): float32 in [-1, 1], of the shape the three int32 tensors broadcast to."""
    return _stir(key + src * mult).float() * 2.0**-31


def noise_of_columns(x_MN: Tensor, size_N: Tensor, src_N: Tensor, offset: int, seed: int) -> Tensor:
    """Noise of these sizes on the columns of x_MN, in its dtype; its lines start at `offset`."""
    key_M, mult_M = line_keys(x_MN.shape[0], offset, seed, x_MN.device)
    xi_MN = hash_noise(key_M[:, None], mult_M[:, None], src_N.to(torch.int32))
    return size_N.to(x_MN.dtype) * xi_MN


def with_noise(x: Tensor, noise: Tensor | None, out_dtype: torch.dtype) -> Tensor:
    """x (1 + noise), the larger of two opposites rounded to `out_dtype`: (4) of `expand`.

    In the dtype of x; but for the last rounding of the smaller one.
    """
    if noise is None:
        return x
    larger = (x * (1 + noise.abs())).to(out_dtype).to(x.dtype)
    return torch.where(noise < 0, x + x - larger, larger)


@jit
def hash_noise_triton(key, mult, src):
    """(3) in a kernel but for its last factor: int32 bit patterns that broadcast -> float32."""
    x = (key + src * mult).to(tl.uint32, bitcast=True)
    x = x ^ (x >> 16)
    x = x * 0x7FEB352D
    x = x ^ (x >> 15)
    x = x * 0x846CA68B
    return x.to(tl.int32, bitcast=True).to(tl.float32)


@jit
def noise_unit_triton(size):
    """A size of noise with the last factor of (3), which it takes exactly."""
    return size * 4.656612873077393e-10
