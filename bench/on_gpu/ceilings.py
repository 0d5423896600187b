"""Measures the machine's own limits, such as its memory bandwidth, with PyTorch alone.

No kernel can be faster. All data are random: a bfloat16 product of zeros was 13 % faster than one
of random numbers.
"""

from collections.abc import Callable
from typing import Any

import torch

from bench.shared.harness import captured, interleaved_ms, now
from bench.shared.recorder import Recorder
from growkern.ops.expand.op import expand


def run(recorder: Recorder) -> None:
    device = recorder.device
    repeats = recorder.pick(15, 2)
    _bandwidth(recorder, device, repeats)
    _gemms(recorder, device, repeats)
    _host(recorder, device, repeats)
    _launches(recorder, device)


def _add(recorder: Recorder, ceiling: str, size: str, unit: str, value: float) -> None:
    recorder.add({"ceiling": ceiling, "size": size, "unit": unit, "value": value})


def _bandwidth(recorder: Recorder, device: str, repeats: int) -> None:
    """Bytes read plus bytes written. The last size fits in the cache, to show its rate."""
    for size in recorder.pick((4 << 30, 256 << 20, 16 << 20), (1 << 20,)):
        source = torch.randint(-128, 127, (size,), dtype=torch.int8, device=device)
        target = torch.empty_like(source)
        calls = {"copy": lambda: target.copy_(source), "write": target.zero_}  # noqa: B023
        ms = interleaved_ms(calls, repeats)
        for name, touched in (("copy", 2 * size), ("write", size)):
            _add(recorder, name, f"{size >> 20} MiB", "TB/s", touched / ms[name] / 1e9)


def _gemms(recorder: Recorder, device: str, repeats: int) -> None:
    # a square one, and the two heads of the linear loss: (rows, vocabulary, width)
    shapes = recorder.pick(
        [(8192, 8192, 8192), (8192, 128_256, 4096), (9830, 30522, 768)], [(64,) * 3]
    )
    for dtype in (torch.bfloat16, torch.float32):
        for M, N, K in shapes:
            a = torch.randn(M, K, device=device).to(dtype)
            b = torch.randn(N, K, device=device).to(dtype)
            calls: dict[str, Callable[[], Any]] = {str(dtype): lambda: a @ b.t()}  # noqa: B023
            if dtype == torch.bfloat16 and device == "cuda":
                # as the linear loss does: logits in float32
                wide = torch.float32
                calls["bfloat16 to float32"] = lambda: torch.mm(a, b.t(), out_dtype=wide)  # noqa: B023
            for name, ms in interleaved_ms(calls, repeats).items():
                name = f"GEMM {name.removeprefix('torch.')}"
                _add(recorder, name, f"{M}x{N}x{K}", "TFLOP/s", 2 * M * N * K / ms / 1e9)


def _host(recorder: Recorder, device: str, repeats: int) -> None:
    """Copies to and from the host's memory, pinned and pageable, and inside it."""
    size = recorder.pick(1 << 30, 1 << 20)
    on_device = torch.randint(-128, 127, (size,), dtype=torch.int8, device=device)
    for pinned in (True, False) if device == "cuda" else (False,):
        host = torch.randint(-128, 127, (size,), dtype=torch.int8)
        host = host.pin_memory() if pinned else host
        calls = {
            "host to device": lambda: on_device.copy_(host, non_blocking=True),  # noqa: B023
            "device to host": lambda: host.copy_(on_device, non_blocking=True),  # noqa: B023
        }
        for name, ms in interleaved_ms(calls, min(repeats, 5)).items():
            name = f"{name}, {'pinned' if pinned else 'pageable'}"
            _add(recorder, name, f"{size >> 20} MiB", "GB/s", size / ms / 1e6)
    source, target = torch.ones(size, dtype=torch.int8), torch.zeros(size, dtype=torch.int8)
    seconds = min(_wall(lambda: target.copy_(source), 1) for _ in range(3))
    _add(recorder, "copy within the host", f"{size >> 20} MiB", "GB/s", 2 * size / seconds / 1e9)


def _wall(call: Callable[[], Any], calls: int) -> float:
    """Seconds per call, including the work of the device."""
    start = now()
    for _ in range(calls):
        call()
    return (now() - start) / calls


def _launches(recorder: Recorder, device: str) -> None:
    """Microseconds per call on a tiny tensor: the fixed cost of each launch."""
    x, index = torch.randn(8, 16, device=device), torch.arange(8, device=device)
    out = torch.empty_like(x)

    def ours() -> Any:
        return expand(x, rows=index, out=out, backend="triton")

    calls = recorder.pick(2000, 2)
    for name, call in (("torch add", lambda: torch.add(x, x, out=out)), ("expand", ours)):
        _wall(call, calls // 2)
        _add(recorder, f"launch, {name}", "8x16", "us", 1e6 * _wall(call, calls))
        if device == "cuda":
            graph, _ = captured(lambda: [call() for _ in range(100)])  # noqa: B023
            value = 1e6 * _wall(graph.replay, 100) / 100
            _add(recorder, f"in a CUDA graph, {name}", "8x16", "us", value)
