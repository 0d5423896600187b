"""What the benchmarks of both losses share: time, peak extra memory and gradient error."""

import contextlib
import ctypes
import gc
import os
import statistics
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from bench.shared.peers import DEVICE, Peer, why_failed


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


class Provider(NamedTuple):
    """One way to compute a loss, in the table beside the others.

    Attributes:
        step: forward and backward. It must leave nothing behind, gradients included: the next
            one's would replace them.
        error: the gradient's relative error; None for what has no gradient.
        peer: the library it comes from, if not from here.
        ours: whether its failure ends the run: others' are theirs to mend, and no reason to lose
            the rest of the figures.
    """

    name: str
    step: Callable[[], None]
    error: Callable[[], float] | None = None
    peer: Peer | None = None
    ours: bool = False


def in_turns(providers: Sequence[Provider], repeats: int) -> list[dict[str, Any]]:
    """A row each: medians of wall and CPU seconds and of peak extra MiB, and the gradient error.

    Every turn asks each provider once, so that what else the machine does falls on all alike; the
    first turn warms up. What cannot be asked, or fails, has the reason in its row.
    """
    samples: dict[str, list[dict[str, float]]] = {p.name: [] for p in providers}
    why_not = {p.name: p.peer.why_not() if p.peer else "" for p in providers}

    def ask(provider: Provider, call: Callable[[], Any]) -> Any:
        try:
            return call()
        except Exception as error:
            if provider.ours:
                raise
            why_not[provider.name] = why_failed(error)

    for turn in range(repeats + 1):
        for provider in providers:
            if not why_not[provider.name]:
                sample = ask(provider, partial(_sample, provider.step))
                samples[provider.name] += [sample] if turn else []
    rows = []
    for provider in providers:
        row: dict[str, Any] = {"provider": provider.name}
        if not why_not[provider.name]:
            taken = samples[provider.name]
            row |= {key: statistics.median(x[key] for x in taken) for key in taken[0]}
            if provider.error is not None:
                row["gradient error"] = ask(provider, provider.error)
        if why_not[provider.name]:
            row = {"provider": provider.name, "why not": why_not[provider.name]}
        rows.append(row)
    return rows


def measure(step: Callable[[], None], repeats: int) -> dict[str, float]:
    """`in_turns` of one provider: its figures."""
    (row,) = in_turns([Provider("", step, ours=True)], repeats)
    del row["provider"]
    return row


def _sample(step: Callable[[], None]) -> dict[str, float]:
    """One call of the step: wall and CPU seconds, peak extra MiB."""
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
    wall, cpu = time.perf_counter() - start, time.process_time() - start_cpu
    if DEVICE == "cuda":
        extra = torch.cuda.max_memory_allocated() - before
    else:
        sampler.done.set()
        sampler.join()
        extra = sampler.peak - sampler.start_bytes
    return {"wall s": wall, "CPU s": cpu, "extra MiB": extra / 2**20}


def gradient_error(actual: Sequence[Tensor], truth: Sequence[Tensor]) -> float:
    """The worst relative Frobenius error among the gradients."""
    pairs = zip(actual, truth, strict=True)
    return max(((a.double() - t).norm() / t.norm()).item() for a, t in pairs)
