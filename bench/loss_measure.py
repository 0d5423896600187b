"""What the benchmarks of both losses share: time, peak extra memory and gradient error."""

import contextlib
import ctypes
import gc
import os
import statistics
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from torch import Tensor

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


class _PeakResident(threading.Thread):
    """Highest resident set while the block runs, sampled every 2 ms."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.done = threading.Event()

    @staticmethod
    def resident() -> int:
        pages = int(Path("/proc/self/statm").read_text().split()[1])
        return pages * os.sysconf("SC_PAGESIZE")

    def run(self) -> None:
        self.peak = self.start_bytes = self.resident()
        while not self.done.wait(0.002):
            self.peak = max(self.peak, self.resident())


def _return_free_memory() -> None:
    """Hand what earlier steps freed back to the system, or it would hide this step's peak."""
    # only glibc keeps it and has the calls; without the first (M_MMAP_THRESHOLD), tensors of up to
    # 32 MiB come to lie among others in the heap, whose holes count or not as chance has it
    with contextlib.suppress(OSError, AttributeError):
        libc = ctypes.CDLL("libc.so.6")
        libc.mallopt(-3, 1 << 20)
        libc.malloc_trim(0)


def measure(step: Callable[[], None], repeats: int) -> dict[str, float]:
    """Medians over `repeats` after one warm-up: wall and CPU seconds, peak extra MiB.

    `step` must leave nothing behind, gradients included: the next one's would replace them.
    """
    step()
    wall, cpu, extra = [], [], []
    for _ in range(repeats):
        gc.collect()
        _return_free_memory()
        if DEVICE == "cuda":
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
        else:
            sampler = _PeakResident()
            sampler.start()
        start, start_cpu = time.perf_counter(), time.process_time()
        step()
        if DEVICE == "cuda":
            torch.cuda.synchronize()
        wall.append(time.perf_counter() - start)
        cpu.append(time.process_time() - start_cpu)
        if DEVICE == "cuda":
            extra.append(torch.cuda.max_memory_allocated() - before)
        else:
            sampler.done.set()
            sampler.join()
            extra.append(sampler.peak - sampler.start_bytes)
    return {
        "wall s": statistics.median(wall),
        "CPU s": statistics.median(cpu),
        "extra MiB": statistics.median(extra) / 2**20,
    }


def gradient_error(actual: Sequence[Tensor], truth: Sequence[Tensor]) -> float:
    """The worst relative Frobenius error among the gradients."""
    pairs = zip(actual, truth, strict=True)
    return max(((a.double() - t).norm() / t.norm()).item() for a, t in pairs)
