"""What every kernel launch needs: Triton where it is installed, and the dtype sums are kept in."""

from types import SimpleNamespace
from typing import Any

import torch

try:
    import triton
    import triton.language as tl
except ImportError:  # no Triton on this platform: the other backends answer
    triton = None
    tl = SimpleNamespace(constexpr=int)  # kernel modules name it outside of kernels too

HAS_TRITON = triton is not None
if HAS_TRITON:
    jit = triton.jit
else:

    def jit(fn: Any) -> Any:
        """Stands in for ``triton.jit``, so that a module with kernels imports without Triton."""
        return fn


def acc_torch_dtype(x: torch.Tensor) -> torch.dtype:
    """The dtype that products and sums of `x` are kept in: float64 for float64, else float32."""
    return torch.float64 if x.dtype == torch.float64 else torch.float32


def acc_dtype(x: torch.Tensor) -> tuple[torch.dtype, Any]:
    """`acc_torch_dtype(x)`, and the same dtype in Triton."""
    if x.dtype == torch.float64:
        return torch.float64, tl.float64
    return torch.float32, tl.float32


def next_power_of_2(n: int) -> int:
    """The smallest power of 2 that is `n` or more; 1 for n < 1."""
    return 1 << max(0, n - 1).bit_length()
