"""Checks `expand` in CUDA C++ against its reference, with the same checks as the Triton kernel.

Without a GPU its source runs in the emulator that the tests have. With one, all variants are first
compiled, with one thread per core: their compiler takes longer than the checks.
"""

import contextlib
import os
import shutil
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch

from bench.launches import cuda_emulator
from bench.on_gpu import check_expand
from bench.on_gpu.check_expand import check_case, named
from bench.shared.inputs import in_nan, make_case
from bench.shared.recorder import Recorder, Skip, fill_new_memory
from growkern.ops.backend import nvrtc

# shared memory of a block on sm_90, in bytes
LIMIT = 227 << 10


class _Noted(Exception):
    """Raised by a launch that was only noted."""


def run(recorder: Recorder) -> None:
    fill_new_memory()
    with _kernels(recorder):
        kernels = planned(recorder)
        if recorder.device == "cuda":
            arch = "sm_{}{}".format(*torch.cuda.get_device_capability())
            with ThreadPoolExecutor(os.cpu_count()) as pool:
                pool.map(lambda kernel: nvrtc.cached_cubin(kernel, arch), kernels)
        recorder.add({"case": "kernels", "number": len(kernels)})
        _checks(recorder)


def _checks(recorder: Any) -> None:
    for check in (_matrices, _host, _layouts):
        with recorder.attempt(check.__name__.strip("_")):
            check(recorder, "cuda")


def planned(recorder: Recorder) -> list[nvrtc.Kernel]:
    """The kernels that the checks launch. Every launch is noted, and ends its case."""
    kernels: dict[nvrtc.Kernel, None] = {}

    def note(kernel: nvrtc.Kernel, *rest: Any, **options: Any) -> None:
        kernels[kernel] = None
        raise _Noted

    nothing = SimpleNamespace(
        **{name: lambda *given, **facts: None for name in ("add", "check", "fail")},
        attempt=lambda case: contextlib.suppress(Exception),
        **{name: getattr(recorder, name) for name in ("device", "pick", "toy")},
    )
    with mock.patch.object(nvrtc, "launch", note):
        _checks(nothing)
    return list(kernels)


@contextlib.contextmanager
def _kernels(recorder: Recorder) -> Iterator[None]:
    """Use the kernels of this device, or emulate them."""
    if recorder.device == "cuda":
        if missing := nvrtc.why_not():
            raise Skip(missing)
        yield
        return
    if shutil.which(os.environ.get("CXX", "g++")) is None:
        raise Skip("needs a GPU, or a C++ compiler to emulate one")
    here = {"why_not": lambda: "", "shared_limit": lambda device: LIMIT}
    with (
        mock.patch.multiple(nvrtc, launch=cuda_emulator.emulate, **here),
        mock.patch("growkern.ops.expand.op.choose_backend", lambda requested, *_: requested),
    ):
        yield


def _matrices(recorder: Recorder, backend: str) -> None:
    """Sizes of real models: rows that are multiples of 16 bytes, and rows that are not."""
    rng = torch.Generator(recorder.device).manual_seed(0)
    sizes = recorder.pick(
        [(4096, 4096, 8192, 8192), (4095, 4098, 8191, 8190), (30_522, 768, 30_522, 1024)],
        [(9, 16, 20, 32)],
    )
    dtypes = recorder.pick(check_expand.DTYPES[:3], check_expand.DTYPES[:1])
    kinds = recorder.pick(check_expand.KINDS, check_expand.KINDS[2:5:2])
    for size in sizes:
        for dtype in dtypes:
            for kind in kinds:
                case = make_case(size, dtype, rng, **kind)
                out = in_nan(size[2:], dtype, rng, "dense")
                check_case(recorder, named(dtype, kind), case, out, backend)
    small, large = recorder.pick(((32_768, 16_384), (65_560, 32_808)), ((9, 17), (20, 33)))
    case = make_case((*small, *large), torch.bfloat16, rng)
    out = in_nan(large, torch.bfloat16, rng, "dense")
    check_case(recorder, "2**31 out", case, out, backend)


def _layouts(recorder: Recorder, backend: str) -> None:
    # the emulator compiles a kernel for the dtypes of each trial, most of the time of a dry run
    check_expand.random_layouts(recorder, backend, trials=recorder.pick(60, 2))


def _host(recorder: Recorder, backend: str) -> None:
    """A weight in the host's pinned memory, read over the bus, must give the same result."""
    if recorder.device == "cpu":
        return
    rng = torch.Generator(recorder.device).manual_seed(1)
    case = make_case((4096, 4096, 8192, 8192), torch.bfloat16, rng, upper=True, noise="col")
    case |= {name: case[name].cpu().pin_memory() for name in ("weight", "upper")}
    out = in_nan((8192, 8192), torch.bfloat16, rng, "dense")
    there = {name: case[name].cuda() for name in ("weight", "upper")}
    check_case(recorder, "weight on the host", case, out, backend, truth=case | there)
