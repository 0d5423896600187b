"""Shared by all kernel launches: Triton where it is installed, and the dtype of sums."""

from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

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

    def jit(fn: Any = None, **options: Any) -> Any:
        """Stand in for ``triton.jit``, so that a module with kernels imports without Triton."""
        return jit if fn is None else fn


# Options of the compiler for the bits of other backends: a fused x * factor - x would differ in the
# last one. Hashes wrap around on purpose, which TRITON_DEBUG=1 would turn into a trap.
EXACT = {"enable_fp_fusion": False, "sanitize_overflow": False}


def launch(kernel: Any, programs: int, like: Tensor, *args: Any, **constants: Any) -> None:
    """Run a Triton kernel on the device of a tensor. All launches go through here.

    Triton itself launches on the current device, even if all tensors are on another one. Constants
    are those of the kernel, and options of the compiler such as num_warps.
    """
    if torch.version.hip or like.device.type not in ("cuda", "cpu"):
        # an option of Triton for NVIDIA alone; other compilers refuse it
        constants.pop("maxnreg", None)
    # a negative index changes nothing: interpreted kernels take tensors on the CPU
    with torch.cuda.device(like.device.index if like.device.type == "cuda" else -1):
        kernel[(programs,)](*args, **constants)


def acc_dtype(x: torch.Tensor) -> tuple[torch.dtype, Any]:
    """`growkern.ops.backend.native.acc_torch_dtype`, and the same dtype in Triton."""
    if x.dtype == torch.float64:
        return torch.float64, tl.float64
    return torch.float32, tl.float32


def next_power_of_2(n: int) -> int:
    """The smallest power of 2 that is `n` or more; 1 for n < 1."""
    return 1 << max(0, n - 1).bit_length()
