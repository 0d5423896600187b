"""A stand-in for a GPU: Triton compiles for it but runs nothing.

The tensors are on the CPU. They have the alignment that a GPU's would have.
"""

import contextlib
import functools
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import torch
from triton.runtime import driver

from bench.launches.sources import TARGETS
from growkern.ops.backend import choose
from growkern.ops.loss.linear import gemm, heads, linear_op
from growkern.ops.loss.linear.heads import check_logits_dtype


class Launch(NamedTuple):
    """One launch that Triton would have made.

    Attributes:
        source: the specialised source, `triton.compiler.ASTSource`.
        metadata: of the compiled kernel, such as num_warps and shared.
    """

    kernel: Any
    source: Any
    metadata: Any


@functools.cache
def _has_launchers_in_c() -> bool:
    """Whether this Triton compiles a launcher in C for each signature, and can link it here."""
    from triton.backends.nvidia import driver as nvidia

    # from 3.7 on all kernels share one launcher
    if not hasattr(nvidia, "make_launcher"):
        return False
    from triton.backends.nvidia.driver import library_dirs

    try:
        library_dirs()
    except (AssertionError, OSError):
        return False  # there is no libcuda
    return True


def count_launchers() -> int:
    """The number of launchers in Triton's cache."""
    return len(list(Path(os.environ["TRITON_CACHE_DIR"]).glob("*/__triton_launcher*.so")))


class _Utils:
    """The part of a driver that loads machine code; here nothing is loaded."""

    def load_binary(self, name: str, code: bytes, shared: int, device: int) -> tuple[int, ...]:
        registers, spills, most_threads = 64, 0, 1024
        return 1, 1, registers, spills, most_threads

    def unload_module(self, module: int) -> None:
        pass

    def get_device_properties(self, device: int) -> dict[str, int]:
        sizes = {"max_shared_mem": 227 << 10, "max_num_regs": 65_536, "warpSize": 32}
        return sizes | {"multiprocessor_count": 132, "sm_clock_rate": 1, "mem_clock_rate": 1}


class _Driver:
    """What Triton asks of the active driver."""

    def __init__(self, arch: str, launches: list[Launch]) -> None:
        self.arch, self.utils = arch, _Utils()

        class Launcher:
            def __init__(self, source: Any, metadata: Any) -> None:
                self.launch = Launch(getattr(source, "fn", None), source, metadata)
                if arch.startswith("sm_") and _has_launchers_in_c():
                    from triton.backends.nvidia.driver import CudaLauncher

                    # its machine code stays in the cache
                    CudaLauncher(source, metadata)

            def __call__(self, *arguments: Any, **rest: Any) -> None:
                launches.append(self.launch)

        self.launcher_cls = Launcher

    def get_current_device(self) -> int:
        # Triton keeps what it compiled per device
        return list(TARGETS).index(self.arch)

    def get_current_stream(self, device: int | None = None) -> int:
        return 0

    def get_current_target(self) -> Any:
        return TARGETS[self.arch]


def _logits_dtype(asked: torch.dtype | None, x: torch.Tensor, has_teacher: bool) -> torch.dtype:
    """As on a GPU, where float32 heads with a teacher have float32 logits, too."""
    return check_logits_dtype(asked, x, has_teacher=False)


def _gemm_dtype(x: torch.Tensor) -> torch.dtype:
    """As on a GPU, which multiplies 16-bit factors into float32 sums. A CPU may not."""
    return x.dtype


def _multiply_nothing(*factors: Any, **options: Any) -> None:
    pass


@contextlib.contextmanager
def absent_gpu(arch: str = "sm_90") -> Iterator[list[Launch]]:
    """Let the public ops launch Triton kernels on CPU tensors, as on a GPU of that architecture.

    Results are whatever was in memory, and PyTorch does not multiply by heads.
    """
    launches: list[Launch] = []
    patches = [
        mock.patch.object(choose, "_interpreted", lambda: True),
        mock.patch.object(linear_op, "may_ask", lambda device: False),
        mock.patch.object(heads, "check_logits_dtype", _logits_dtype),
        *(mock.patch.object(module, "gemm_dtype", _gemm_dtype) for module in (gemm, linear_op)),
        mock.patch.object(linear_op, "project", _multiply_nothing),
        mock.patch.object(gemm, "add_dx", _multiply_nothing),
        mock.patch.object(gemm, "add_dw", _multiply_nothing),
        mock.patch("torch.version.hip", "7.0" if arch.startswith("gfx") else None),
    ]
    with contextlib.ExitStack() as stack:
        for patch in patches:
            stack.enter_context(patch)
        driver.set_active(_Driver(arch, launches))
        stack.callback(driver.set_active, None)
        yield launches
