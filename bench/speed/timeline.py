"""Shows where the time of one step of the linear loss goes: kernels, gaps between them, the host.

The shape is that of the headline. "device ms" leaves out what the host does: the device waits until
everything is queued. "queue ms" is how long the host takes for that.
"""

import time
from collections import defaultdict
from collections.abc import Callable, Mapping
from functools import partial
from statistics import median
from typing import Any
from unittest import mock

import torch
from torch.profiler import ProfilerActivity, profile

from bench.shared import results
from bench.shared.harness import interleaved_ms, now
from bench.shared.loss_measure import growkern, make_inputs, run_step
from bench.shared.recorder import Recorder
from bench.speed.linear_kl_mlm_loss import SHAPES, gemms_alone, growkern_labels
from growkern.ops.loss.linear import gemm

# the device waits so many cycles, some 20 ms, while the host queues a step
LEAD = 40_000_000
ON_HOST = ("Synchronize", "Memcpy", "cudaMalloc", "cudaFree")


def run(recorder: Recorder) -> None:
    shape = recorder.pick(SHAPES["cuda"][3], (6, 40, 8, 8))
    student, teacher, labels = make_inputs(*shape, torch.bfloat16)
    given = (student, teacher, labels)
    ways = {
        "GEMMs alone": partial(gemms_alone, *given, 0.5),
        "growkern": partial(run_step, growkern, *given, 0.5),
        "GEMMs alone, labels alone": partial(gemms_alone, *given, 0.0),
        "labels alone": partial(run_step, growkern_labels, *given, 0.0),
    }
    with recorder.attempt("steps"):
        _times(recorder, ways, recorder.pick(5, 1))
    for name in ("growkern", "labels alone"):
        with recorder.attempt(f"kernels of {name}"):
            _kernels(recorder, name, ways[name])
    with recorder.attempt("chunks"):
        for rows in recorder.pick((256, 512, 1024, 2048, 4096), (2,)):
            whole = -(-shape[0] // rows) * rows
            with mock.patch.object(gemm, "held_rows", lambda *_, sizes=(rows, whole): sizes):
                some = {f"{rows} rows a chunk": ways["growkern"]}
                _times(recorder, some, recorder.pick(3, 1))
    if recorder.device == "cuda":
        with recorder.attempt("streams"):
            _times(recorder, _halves(student, teacher, labels), 5)
    with recorder.attempt("products"):
        _products(recorder, student, recorder.pick((256, 768, 2048, 8192), (4,)))


def _halves(student: Any, teacher: Any, labels: Any) -> Mapping[str, Callable[[], Any]]:
    """Two steps of half the rows, one after the other and side by side on two streams."""
    half = len(labels) // 2
    parts = []
    for rows in (slice(0, half), slice(half, None)):
        own = [x.detach().requires_grad_() for x in (student[0][rows], *student[1:])]
        parts.append((own, [teacher[0][rows], *teacher[1:]], labels[rows]))

    def run_on(streams: list[torch.cuda.Stream]) -> None:
        main = torch.cuda.current_stream()
        for (own, other, targets), stream in zip(parts, streams, strict=True):
            stream.wait_stream(main)
            with torch.cuda.stream(stream):
                run_step(growkern, own, other, targets, 0.5)
        for stream in streams:
            main.wait_stream(stream)

    first, second = torch.cuda.Stream(), torch.cuda.Stream()
    return {
        "two halves, one stream": partial(run_on, [first, first]),
        "two halves, two streams": partial(run_on, [first, second]),
    }


def _times(recorder: Recorder, ways: Mapping[str, Callable[[], Any]], repeats: int) -> None:
    """Queueing, device and wall time of steps, which take turns."""
    on_gpu = recorder.device == "cuda"
    samples: dict[str, list[dict[str, float]]] = defaultdict(list)
    for turn in range(repeats + 1):
        for name, call in ways.items():
            start = now()
            call()
            sample = {"wall ms": 1e3 * (now() - start)}
            if on_gpu:
                begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
                torch.cuda._sleep(LEAD)
                begin.record()
                start = time.perf_counter()
                call()
                sample["queue ms"] = 1e3 * (time.perf_counter() - start)
                end.record()
                end.synchronize()
                sample["device ms"] = begin.elapsed_time(end)
            if turn:
                samples[name].append(sample)
    for name, taken in samples.items():
        medians = {key: median(x[key] for x in taken) for key in taken[0]}
        clock = results.clocks().get("clocks.sm") if on_gpu else None
        recorder.add({"step": name, **medians, "clock": clock})


def _kernels(recorder: Recorder, name: str, call: Callable[[], Any]) -> None:
    """Each kernel's calls and time, the gaps between them, and host calls that may wait."""
    activities = [ProfilerActivity.CPU]
    if recorder.device == "cuda":
        activities.append(ProfilerActivity.CUDA)
    call()
    with profile(activities=activities) as seen:
        call()
        now()
    kernels: dict[str, list[float]] = defaultdict(list)
    on_host: dict[str, list[float]] = defaultdict(list)
    spans = []
    for event in seen.events():
        start, end = event.time_range.start, event.time_range.end
        if event.device_type == torch.autograd.DeviceType.CUDA:
            kernels[event.name].append((end - start) / 1e3)
            spans.append((start, end))
        elif any(word in event.name for word in ON_HOST):
            on_host[event.name].append((end - start) / 1e3)
    for what, events in (("kernel", kernels), ("host", on_host)):
        for label, times in sorted(events.items(), key=lambda item: -sum(item[1]))[:14]:
            row = {"of": name, what: label[:90], "calls": len(times), "ms": sum(times)}
            recorder.add(row | {"longest ms": max(times)})
    spans.sort()
    gaps, last = [], spans[0][0] if spans else 0.0
    for start, end in spans:
        if start > last:
            gaps.append((start - last) / 1e3)
        last = max(last, end)
    whole = (last - spans[0][0]) / 1e3 if spans else 0.0
    longest = sorted(gaps, reverse=True)[:5]
    recorder.add({"of": name, "whole ms": whole, "gaps ms": sum(gaps), "longest gaps ms": longest})


def _products(recorder: Recorder, student: Any, sizes: tuple[int, ...]) -> None:
    """TFLOP/s of the logits of so many rows, in bfloat16 and in float32."""
    hidden, weight = (x.detach() for x in student[:2])
    for rows in sizes:
        some = hidden[:rows]
        calls = {"bfloat16": lambda: some @ weight.t()}  # noqa: B023
        if recorder.device == "cuda":
            wide = torch.float32
            calls["float32"] = lambda: torch.mm(some, weight.t(), out_dtype=wide)  # noqa: B023
        for name, ms in interleaved_ms(calls, recorder.pick(5, 1)).items():
            rate = 2 * rows * weight.numel() / ms / 1e9
            recorder.add({"product": name, "rows": rows, "ms": ms, "TFLOP/s": rate})
