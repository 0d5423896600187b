"""Checks `expand` on the device against float64, at sizes and layouts that break kernels.

The output and the memory around it are NaN before every call. After it all of the output must be
written, and all around it must still be NaN. The truth is the op's reference in float64. The tests
of the op compare it with plain indexing.

The piece "check_cuda" makes such checks of the kernel in CUDA C++. Without a GPU its source runs in
the emulator that the tests have. With one, all variants are first compiled, with one thread per
core: their compiler takes longer than the checks.
"""

import contextlib
import itertools
import os
import shutil
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from bench.shared.inputs import in_nan, make_case, truth_rows
from bench.shared.llama_growth import expand_calls
from bench.shared.recorder import Recorder, Skip, fill_new_memory
from growkern.ops.backend import acc_torch_dtype, nvrtc
from growkern.ops.expand import expand
from growkern.ops.expand.call import ExpandCall
from growkern.ops.expand.many import expand_many, launch_kind
from testbed import cuda_emulator

DTYPES = (torch.bfloat16, torch.float32, torch.float16, torch.float64)
# How many rows are compared with float64. All elements are tested for NaN.
SAMPLE_ROWS = 192
# how many elements are tested for NaN at a time
PART = 1 << 28
# how copies are told apart, with and without the layer above: arguments of `make_case`
KINDS: tuple[dict[str, Any], ...] = (
    {},
    {"upper": True},
    {"upper": True, "noise": "col"},
    {"noise": "row"},
    {"routing": "col", "scales": False},
    {"upper": True, "routing": "col"},
    {"routing": "row", "amplitude": 2.0},
)


def run(recorder: Recorder) -> None:
    if recorder.document["piece"] == "check_cuda":
        check_cuda(recorder)
        return
    for check in (_matrices, _past_int32, random_layouts, work_list, _whole_model):
        with recorder.attempt(check.__name__.strip("_")):
            check(recorder)


# ---------------------------------------------------------------------- truth


def worst_error(actual: Tensor, truth: Tensor) -> float:
    """Largest relative error of an element; NaN if any error is NaN."""
    floor = torch.finfo(actual.dtype).tiny
    error = (actual.double() - truth).abs() / truth.abs().clamp(min=floor)
    return float("nan") if error.isnan().any() else error.max().item()


def allowed(weight: Tensor, out: torch.dtype, parted: bool) -> float:
    """The allowed relative error: half a rounding step of the output dtype, and one rounding step
    of the arithmetic for each factor of equations (1) to (4). `parted`: a weight is split between
    copies, by noise or by routing with an amplitude other than 1.
    """
    eps = torch.finfo(acc_torch_dtype(weight)).eps
    if out == torch.bfloat16:
        # kernels round to float32 first
        eps = max(eps, torch.finfo(torch.float32).eps)
    # With noise the smaller of two replicas has the rounding error of the larger one besides its
    # own. For noise below 1/2 the larger one is at most 3 times the smaller one. So it is with
    # routing of amplitude 2.
    return (4 if parted else 1) * (torch.finfo(out).eps / 2 + 4 * eps)


# ---------------------------------------------------------------------- cases


def count_nan(x: Tensor) -> int:
    flat = x.reshape(-1) if x.is_contiguous() else x.t().reshape(-1)
    return sum(int(part.isnan().sum()) for part in flat.split(PART))


def check_case(
    recorder: Recorder,
    name: str,
    case: dict[str, Any],
    out: Tensor,
    backend: str = "triton",
    *,
    truth: dict[str, Any] | None = None,
) -> None:
    """Call `expand` and check its result.

    Args:
        out: where the result goes: memory from `in_nan`.
        truth: the case for computing the truth, if the tensors of `case` are not on the device.
    """
    with recorder.attempt(name):
        expand(**case, out=out, backend=backend)
        check_result(recorder, name, truth or case, out)


def check_result(recorder: Recorder, name: str, case: dict[str, Any], out: Tensor) -> None:
    """Check that `out` is right and completely written, and that nothing around it is."""
    base = out if out._base is None else out._base
    M = out.shape[0]
    rng = torch.Generator().manual_seed(M)
    sample = torch.randint(M, (min(M, SAMPLE_ROWS),), generator=rng)
    sample[:2] = torch.tensor([0, M - 1])[: len(sample)]
    at = sample.unique().to(out.device)
    error = worst_error(out[at], truth_rows(case, at))
    gaps = base.numel() - out.numel()
    if (unwritten := count_nan(base)) != gaps:
        recorder.fail(
            f"{name}: {unwritten} NaN after the call, but {gaps} elements lie outside of the output"
        )
    shape = "x".join(map(str, (*case["weight"].shape, *out.shape)))
    parted = any(case.get(name) is not None for name in ("row_noise", "col_noise"))
    parted |= "routing" in case and case["routing"].amplitude != 1
    recorder.check(name, error, allowed(case["weight"], out.dtype, parted), shape=shape)


def _matrices(recorder: Recorder) -> None:
    """Sizes of real models, every dtype and kind."""
    rng = torch.Generator(recorder.device).manual_seed(0)
    square = recorder.pick((4096, 4096, 8192, 8192), (9, 17, 20, 33))
    # an embedding: no map over its rows
    embedding = recorder.pick((262_144, 2048, 262_144, 3072), (9, 16, 9, 24))
    _every_kind(recorder, square, recorder.pick(DTYPES, DTYPES[:2]), KINDS, rng)
    for dtype in recorder.pick(DTYPES[:2], DTYPES[:1]):
        case = make_case(embedding, dtype, rng) | {"rows": None}
        out = in_nan(embedding[2:], dtype, rng, "dense")
        check_case(recorder, f"embedding, {dtype}", case, out)


def _every_kind(
    recorder: Recorder,
    size: tuple[int, int, int, int],
    dtypes: Sequence[torch.dtype],
    kinds: Sequence[dict[str, Any]],
    rng: torch.Generator,
    backend: str = "triton",
) -> None:
    for dtype, kind in itertools.product(dtypes, kinds):
        case, out = make_case(size, dtype, rng, **kind), in_nan(size[2:], dtype, rng, "dense")
        words = [str(dtype), *(f"{key} {value}" for key, value in kind.items())]
        check_case(recorder, ", ".join(words).replace("torch.", ""), case, out, backend)


def _past_int32_out(
    recorder: Recorder, rng: torch.Generator, backend: str = "triton"
) -> tuple[int, int]:
    """More than 2**31 elements in the output, whose shape it returns."""
    small, large = recorder.pick(((32_768, 16_384), (65_560, 32_808)), ((9, 17), (20, 33)))
    case = make_case((*small, *large), torch.bfloat16, rng)
    check_case(recorder, "2**31 out", case, in_nan(large, torch.bfloat16, rng, "dense"), backend)
    return large


def _past_int32(recorder: Recorder) -> None:
    """More than 2**31 elements in the output, then in the weight."""
    rng = torch.Generator(recorder.device).manual_seed(1)
    large = _past_int32_out(recorder, rng)
    wide = recorder.pick((30_000, 30_008), (9, 17))
    case = make_case((*wide, *wide), torch.bfloat16, rng, scales=False)
    apart = (2 * wide[0], 2 * wide[1])
    out = in_nan(apart, torch.bfloat16, rng, "dense")[::2, 1::2]
    check_case(recorder, "2**31 between first and last of out", case, out)
    del case, out
    rows = recorder.pick(4096, 12)
    case = make_case((*large, rows, large[1]), torch.bfloat16, rng) | {"cols": None}
    out = in_nan((rows, large[1]), torch.bfloat16, rng, "dense")
    check_case(recorder, "2**31 in", case, out)


def random_layouts(
    recorder: Recorder, backend: str = "triton", *, trials: int | None = None
) -> None:
    """Uneven sizes, all dtypes in and out, gaps and transposes of inputs and output."""
    rng = torch.Generator(recorder.device).manual_seed(2)
    high = recorder.pick(1500, 30)
    for trial in range(trials or recorder.pick(60, 3)):
        R, C, M, N, pick = torch.randint(1, high, (5,), generator=rng, device=rng.device).tolist()
        dtype, out_dtype = DTYPES[pick % 4], DTYPES[pick // 4 % 4]
        if out_dtype == torch.float16 != dtype:
            # Values below float16's normal range lose digits, which has nothing to do with layouts.
            out_dtype = torch.float32
        case = make_case((R, C, M, N), dtype, rng, **KINDS[pick // 16 % len(KINDS)])
        layout = ("strided", "padded", "turned")[trial % 3]
        for name in (name for name in ("weight", "upper") if name in case):
            place = in_nan((R, C), dtype, rng, layout)
            case[name] = place.copy_(case[name])
        out = in_nan((M, N), out_dtype, rng, ("padded", "turned", "strided")[trial // 3 % 3])
        name = f"layout {trial}: {layout}, {dtype} to {out_dtype}".replace("torch.", "")
        check_case(recorder, name, case, out, backend)


def work_list(recorder: Recorder) -> None:
    """A work list of all kinds of tensors in few launches, with more than 2**31 elements in all."""
    rng = torch.Generator(recorder.device).manual_seed(4)
    sizes = recorder.pick(
        [(2048, 4096, 4096, 8192), (1, 4096, 1, 8192), (30_522, 768, 30_522, 1024), (5, 7, 9, 11)],
        [(9, 16, 20, 32), (1, 9, 1, 17)],
    )
    cases, calls = [], []
    for number in range(recorder.pick(28, 7)):
        size, dtype = sizes[number % len(sizes)], DTYPES[number // 3 % 2]
        kind = KINDS[number % len(KINDS)]
        case = make_case(size, dtype, rng, **kind)
        # the routing of rows counts copies by their map
        whole = size[0] == size[2] and "upper" not in kind and kind.get("routing") != "row"
        cases.append(case | {"rows": None} if whole else case)
        layout = ("dense", "strided", "padded")[number // 2 % 3]
        calls.append(ExpandCall(in_nan(size[2:], dtype, rng, layout), **cases[-1]))
    huge = recorder.pick((32_768, 16_384, 65_560, 32_808), (9, 17, 20, 33))
    cases.append(make_case(huge, torch.bfloat16, rng))
    calls.append(ExpandCall(in_nan(huge[2:], torch.bfloat16, rng, "dense"), **cases[-1]))
    launches, kinds = expand_many(calls), len({launch_kind(call) for call in calls})
    if launches != kinds:
        recorder.fail(f"work list: {launches} launches for {kinds} kinds of tensors")
    for number, (case, call) in enumerate(zip(cases, calls, strict=True)):
        check_result(recorder, f"work list, tensor {number}", case, call.out)


def _whole_model(recorder: Recorder) -> None:
    """Every call that grows a Llama of 1B to 3B. One row per method, with its worst tensor."""
    for method in ("fpi", "aki"):
        rng = torch.Generator(recorder.device).manual_seed(3)
        worst, where, count, elements = 0.0, "", 0, 0
        for call in expand_calls(recorder.pick("1B to 3B", "toy"), method):
            case = call.arguments(torch.bfloat16, rng)
            shape = call.shape
            out = in_nan(shape, torch.bfloat16, rng, "dense")
            expand(**case, out=out, backend="triton")
            at = torch.randint(shape[0], (8,), generator=rng, device=rng.device)
            error = worst_error(out[at], truth_rows(case, at))
            error = float("nan") if count_nan(out) else error
            count, elements = count + 1, elements + out.numel()
            if not error <= worst:
                worst, where = error, call.name
        facts = {"shape": f"{count} tensors, {elements:.3g} elements", "worst": where}
        bound = allowed(torch.empty(0, dtype=torch.bfloat16), torch.bfloat16, parted=True)
        recorder.check(f"Llama 1B to 3B, {method}", worst, bound, **facts)


# shared memory of a block on sm_90, in bytes
LIMIT = 227 << 10


class _Noted(Exception):
    """Raised by a launch that was only noted."""


def check_cuda(recorder: Recorder) -> None:
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
    for check in (_matrices_cuda, _host, _layouts):
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
        mock.patch("growkern.ops.expand.expand_op.choose_backend", lambda requested, *_: requested),
    ):
        yield


def _matrices_cuda(recorder: Recorder, backend: str) -> None:
    """Sizes of real models: rows that are multiples of 16 bytes, and rows that are not."""
    rng = torch.Generator(recorder.device).manual_seed(0)
    sizes = recorder.pick(
        [(4096, 4096, 8192, 8192), (4095, 4098, 8191, 8190), (30_522, 768, 30_522, 1024)],
        [(9, 16, 20, 32)],
    )
    dtypes, kinds = recorder.pick((DTYPES[:3], KINDS), (DTYPES[:1], KINDS[2:5:2]))
    for size in sizes:
        _every_kind(recorder, size, dtypes, kinds, rng, backend)
    _past_int32_out(recorder, rng, backend)


def _layouts(recorder: Recorder, backend: str) -> None:
    # the emulator compiles a kernel for the dtypes of each trial, most of the time of a dry run
    random_layouts(recorder, backend, trials=recorder.pick(60, 2))


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
