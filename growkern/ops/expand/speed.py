"""Measures how fast this CPU expands, for estimates.

It calls the kernel without the registered op: that needs the compiler of PyTorch, which takes 1 s
to import.
"""

import statistics
import timeit
from collections.abc import Callable

import torch

from growkern.ops.backend import native
from growkern.ops.expand.call import ExpandCall
from growkern.ops.expand.on_cpu import expand_on_cpu

# rows and columns of the probe: at half this size it fits into the CPU's caches, and estimates
# for one growth ranged from 0.09 to 1.9 s
PROBE_SIZE = 2048
# how often the probe runs
PROBES = 4


def cpu_bytes_per_second(dtype: torch.dtype) -> float:
    """Bytes of output per second of `expand` on this CPU, for doubling both axes.

    The median over some runs, for a weight and a result of this dtype.
    """
    weight = torch.ones(PROBE_SIZE, PROBE_SIZE, dtype=dtype)
    index = torch.arange(2 * PROBE_SIZE) % PROBE_SIZE
    scale = torch.full((2 * PROBE_SIZE,), 0.5)
    out = torch.empty(2 * PROBE_SIZE, 2 * PROBE_SIZE, dtype=dtype)
    call = ExpandCall(out, weight, rows=index, cols=index, col_scale=scale)
    kernel: Callable[[ExpandCall], None] = expand_on_cpu
    if native.loaded() is None:
        from growkern.ops.expand.expand_op import KERNELS

        kernel = KERNELS["reference"]
    # the first run also reserves the memory
    times = timeit.repeat(lambda: kernel(call), number=1, repeat=PROBES)[1:]
    return out.nbytes / statistics.median(times)
