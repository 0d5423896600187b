"""Launch choices every kernel shares: accumulator dtype and block sizes. Imports without Triton."""

from types import SimpleNamespace
from typing import Any, NamedTuple

import torch

try:
    import triton
    import triton.language as tl
except ImportError:  # no Triton on this platform: the other backends answer
    triton = None
    tl = SimpleNamespace(constexpr=None)  # the annotations of kernel arguments name it

HAS_TRITON = triton is not None
if HAS_TRITON:
    jit = triton.jit
else:

    def jit(fn: Any) -> Any:
        """Stands in for ``triton.jit``, so that a module with kernels imports without Triton."""
        return fn


class AotCase(NamedTuple):
    """One way to launch a kernel. ``aot_cases()`` of a kernel module lists those that matter.

    `signature` has the type of every run-time argument ("*bf16", "i32", "fp32", or a tuple of
    such, where None and 1 stand for themselves); `constexprs` the value of every other one (the
    constants in capitals, strides that are 1, pointers that are None). Pointers and integers are
    multiples of 16, as the launcher finds them, unless they are in `unaligned`. Loads of the hot
    code are 16 bytes wide, or `narrow` says why they cannot be. `traffic` is how many bytes of an
    element of the block cross the device's memory at the least (None: all that are asked for).
    """

    name: str
    kernel: Any
    signature: dict[str, Any]
    constexprs: dict[str, Any]
    unaligned: tuple[str, ...] = ()
    num_warps: int = 4
    maxnreg: int | None = None
    narrow: str = ""
    traffic: float | None = None


def acc_torch_dtype(x: torch.Tensor) -> torch.dtype:
    """The dtype sums are kept in: float64 for float64 inputs, else float32."""
    return torch.float64 if x.dtype == torch.float64 else torch.float32


def acc_dtype(x: torch.Tensor) -> tuple[torch.dtype, Any]:
    """`acc_torch_dtype` and its Triton twin (so that gradcheck reaches the kernels)."""
    if x.dtype == torch.float64:
        return torch.float64, tl.float64
    return torch.float32, tl.float32


def next_power_of_2(n: int) -> int:
    return 1 << max(0, n - 1).bit_length()
