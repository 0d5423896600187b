"""python -m bench.bench_expand_model: all tensors of a Llama of 1B grown to 3B, one after another.

The calls are those of the growth plan, into memory that exists; weights are random. The limit is
a copy of as many bytes: each source element that is used read once, each target element written
once. "wall" is what a caller waits, "device" the same without the CPU's launches (replays of a CUDA
graph). Eager is indexing, then a product per scale and for the noise.
"""

import argparse
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch

from bench import llama_growth
from bench.report import interleaved_ms, machine, relative_error, require_green, show_and_save
from growkern.ops.expand import expand, expand_reference

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
# by device: what fits there and ends in a minute
SIZES = {"cpu": "100M to 200M", "cuda": "1B to 3B"}
DTYPE = torch.bfloat16


def wall_ms(call: Callable[[], Any], repeats: int) -> float:
    """Median milliseconds from the call until the device is done."""
    wait = torch.cuda.synchronize if DEVICE == "cuda" else lambda: None
    times = []
    for turn in range(repeats + 1):
        wait()
        start = time.perf_counter()
        call()
        wait()
        if turn:
            times.append(1e3 * (time.perf_counter() - start))
    return statistics.median(times)


def device_ms(call: Callable[[], Any], repeats: int) -> float | None:
    """Without the CPU's part: replays of a graph. None on a CPU, which has no such part."""
    if DEVICE == "cpu":
        return None
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    return interleaved_ms({"replay": graph.replay}, repeats)["replay"]


def eager(case: dict[str, Any]) -> torch.Tensor:
    """The definition as plain PyTorch, in the order of the op."""
    order = ("weight", "upper", "rows", "cols", "row_scale", "col_scale", "row_noise", "col_noise")
    return expand_reference(*(case.get(name) for name in order), case.get("seed", 0))


def measure(method: str, repeats: int) -> list[dict[str, Any]]:
    rng = torch.Generator(DEVICE).manual_seed(0)
    calls = llama_growth.expand_calls(SIZES[DEVICE], method)
    cases = [call.arguments(DTYPE, rng) for call in calls]
    outs = [torch.empty(call.shape, dtype=DTYPE, device=DEVICE) for call in calls]
    moved = sum(call.bytes_moved(DTYPE.itemsize) for call in calls)
    there, back = (torch.empty(moved // 2, dtype=torch.int8, device=DEVICE) for _ in range(2))
    there.random_(-128, 127)

    def ours() -> None:
        for case, out in zip(cases, outs, strict=True):
            expand(**case, out=out)

    def plain() -> None:
        for case in cases:
            eager(case)

    ours()
    # the last layer and what comes after it
    worst = max(
        relative_error(out, eager(_in_float64(case)))
        for case, out in list(zip(cases, outs, strict=True))[-10:]
    )
    limit = wall_ms(lambda: back.copy_(there), repeats)
    rows = []
    for name, call in (("growkern", ours), ("eager", plain)):
        wall = wall_ms(call, repeats)
        device = device_ms(call, repeats)
        rows.append(
            {
                "growth": SIZES[DEVICE],
                "method": method,
                "provider": name,
                "tensors": len(cases),
                "GB moved": moved / 1e9,
                "wall ms": wall,
                "device ms": device,
                "limit ms": limit,
                "of limit": limit / wall,
                "of limit, device": device and limit / device,
                "error": worst if name == "growkern" else None,
            }
        )
    return rows


def _in_float64(case: dict[str, Any]) -> dict[str, Any]:
    return case | {name: case[name].double() for name in ("weight", "upper") if name in case}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--no-test", action="store_true", help="the tests have just been run")
    args = parser.parse_args()
    if not args.no_test:
        require_green("expand")
    facts = machine()
    rows = [row for method in ("fpi", "aki") for row in measure(method, args.repeats)]
    show_and_save("expand_model", facts, rows)


if __name__ == "__main__":
    main()
