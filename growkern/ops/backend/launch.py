"""Launch choices every kernel shares: accumulator dtype and block sizes. Imports without Triton."""

import contextlib
import functools
import json
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch

try:
    import triton
    import triton.language as tl
except ImportError:  # no Triton on this platform: the other backends answer
    triton = None
    tl = SimpleNamespace(constexpr=int)  # kernel modules name it outside of kernels

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
    code are 16 bytes wide, or `narrow` says why they cannot be; `narrow_stores` the same of stores.
    `traffic` is how many bytes of an element of the block cross the device's memory at the least
    (None: all that are asked for).
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
    narrow_stores: str = ""


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


# ------------------------------------------------- what was measured to be faster

TUNED_FILE = Path(__file__).with_name("_tuned.json")
_forced: dict[str, dict[str, int]] = {}
_asked: set[str] = set()


@functools.cache
def _tuned() -> dict[str, dict[str, int]]:
    return json.loads(TUNED_FILE.read_text(encoding="utf-8"))["choices"]


@functools.cache
def _arch(device: torch.device) -> str:
    if torch.version.hip:
        return torch.cuda.get_device_properties(device).gcnArchName.partition(":")[0]
    major, minor = torch.cuda.get_device_capability(device)
    return f"sm_{major}{minor}"


def tuned_key(kernel: str, x: torch.Tensor, size: int) -> str:
    """Names a row of `_tuned.json`: kernel, architecture, dtype, power of 2 that holds `size`."""
    dtype = str(x.dtype).removeprefix("torch.")
    return f"{kernel} {_arch(x.device)} {dtype} {next_power_of_2(size)}"


def launch_choice(kernel: str, x: torch.Tensor, size: int, **default: int) -> dict[str, int]:
    """Block sizes and warps: the defaults, or what `bench.tune` found faster for such a tensor.

    `x` has the dtype and the device that count, `size` is the length of the axis in blocks.
    """
    _asked.add(kernel)
    tuned = _tuned().get(tuned_key(kernel, x, size), {}) if x.is_cuda else {}
    return default | tuned | _forced.get(kernel, {})


@contextlib.contextmanager
def forced_choice(kernel: str, **choice: int) -> Iterator[None]:
    """Inside: launches of `kernel` take this choice; for the sweep that fills `_tuned.json`.

    raises: LookupError when no launch inside asked `launch_choice`: nothing was swept.
    """
    _forced[kernel] = choice
    _asked.discard(kernel)
    try:
        yield
        if kernel not in _asked:
            raise LookupError(f"no launch of {kernel} asks launch_choice")
    finally:
        del _forced[kernel]
