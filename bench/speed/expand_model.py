"""Measures `expand` on a whole model: all tensors of a 1B Llama grown to 3B.

    python -m bench.speed.expand_model

The calls come from a growth plan. The weights are random. Rows of the table:

- "growkern" does what `grow` does: with Triton one work list for all tensors, otherwise tensor by
  tensor. It writes to memory that exists. Building the list is part of the time.
- "eager" is indexing, then one product per scale and one for the noise.
- The limit is a copy of as many bytes: every used source element read once, every target element
  written once.

"wall" is the time a caller waits. "device" leaves out the CPU's launches, by replaying a CUDA
graph.
"""

import statistics
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch

from bench.shared import llama_growth, peers
from bench.shared.harness import (
    benchmark_parser,
    captured,
    compiled,
    interleaved_ms,
    largest_error,
    measure_all,
    options_of,
    relative_error,
    turns_ms,
)
from growkern.ops.expand.call import ExpandCall
from growkern.ops.expand.many import work_on
from growkern.ops.expand.op import expand, expand_reference

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
# by device: a growth that fits and ends in a minute
SIZES = {"cpu": "100M to 200M", "cuda": "1B to 3B"}
DTYPE = torch.bfloat16
METHODS = ("fpi", "aki")
# backend of `expand`; None: the library chooses
BACKEND: str | None = None
# how many tensors are compared with float64
SAMPLE = 10


def wall_ms(call: Callable[[], Any], repeats: int) -> float:
    """Median time from the call until the device has finished, ms."""
    return statistics.median(turns_ms({"call": call}, repeats, wall=True)["call"])


def device_ms(call: Callable[[], Any], repeats: int) -> float | None:
    """Median time of the device alone, ms, by replaying a CUDA graph. None on a CPU."""
    if DEVICE == "cpu":
        return None
    graph, _ = captured(call)
    return interleaved_ms({"replay": graph.replay}, repeats)["replay"]


def eager(call: Callable[..., torch.Tensor], case: dict[str, Any]) -> torch.Tensor:
    """Call `expand_reference`, plain or compiled. Of `out` it uses only the dtype."""
    return call(ExpandCall(case["weight"], **case))


class Model:
    """The tensors of a growth, memory for each result, and the ways to fill it."""

    def __init__(self, method: str) -> None:
        rng = torch.Generator(DEVICE).manual_seed(0)
        calls = llama_growth.expand_calls(SIZES[DEVICE], method)
        self.cases = [call.arguments(DTYPE, rng) for call in calls]
        self.outs = [torch.empty(call.shape, dtype=DTYPE, device=DEVICE) for call in calls]
        self.moved = sum(call.bytes_moved(DTYPE.itemsize) for call in calls)
        self.launches: int | None = None

    def work_list(self) -> None:
        work = work_on(torch.device(DEVICE), BACKEND)
        for case, out in zip(self.cases, self.outs, strict=True):
            work.expand(**case, out=out)
        work.run()
        self.launches = getattr(work, "launches", None)

    def one_by_one(self) -> None:
        for case, out in zip(self.cases, self.outs, strict=True):
            expand(**case, out=out, backend=BACKEND)

    def plain(self, call: Callable[..., torch.Tensor] = expand_reference) -> None:
        """Compute fresh results, as indexing does, and free each at once."""
        for case in self.cases:
            eager(call, case)

    def error(self, results: Sequence[torch.Tensor]) -> float:
        """Largest error of the last tensors against float64: last layer, norm and head."""
        pairs = zip(self.cases[-len(results) :], results, strict=True)
        return largest_error(
            relative_error(x, eager(expand_reference, _in_float64(case))) for case, x in pairs
        )


def measure(method: str, repeats: int) -> Iterator[dict[str, Any]]:
    """One row for every way to grow the model, beside a copy of as many bytes."""
    model = Model(method)
    there, back = (torch.empty(model.moved // 2, dtype=torch.int8, device=DEVICE) for _ in "ab")
    there.random_(-128, 127)
    limit = wall_ms(lambda: back.copy_(there), repeats)
    fused = compiled(expand_reference, shapes=64)

    def written(call: Callable[[], None], graph: bool) -> dict[str, Any]:
        for out in model.outs:
            out.fill_(float("nan"))
        model.launches = None
        call()
        error = model.error(model.outs[-SAMPLE:])
        return timed(call, graph) | {"launches": model.launches, "error": error}

    def fresh(call: Callable[..., torch.Tensor]) -> dict[str, Any]:
        error = model.error([eager(call, case) for case in model.cases[-SAMPLE:]])
        return timed(partial(model.plain, call), True) | {"error": error}

    def timed(call: Callable[[], None], graph: bool) -> dict[str, Any]:
        wall = wall_ms(call, repeats)
        device = device_ms(call, repeats) if graph else None
        shares = {"of limit": limit / wall, "of limit, device": device and limit / device}
        return {"wall ms": wall, "device ms": device, **shares}

    # A CUDA graph cannot hold a work list, which is made on the CPU and copied.
    ways = {
        "growkern": partial(written, model.work_list, False),
        "growkern, tensor by tensor": partial(written, model.one_by_one, True),
        "eager": partial(fresh, expand_reference),
        "torch.compile": partial(fresh, fused),
    }
    for name, figures in ways.items():
        row = {"growth": SIZES[DEVICE], "method": method, "provider": name}
        row |= {"tensors": len(model.cases), "GB moved": model.moved / 1e9, "limit ms": limit}
        try:
            yield row | figures()
        except Exception as error:
            if name != "torch.compile":
                raise
            # If the compiler is missing or fails, the other rows are still worth having.
            yield row | {"why not": peers.why_failed(error)}


def _in_float64(case: dict[str, Any]) -> dict[str, Any]:
    return case | {name: case[name].double() for name in ("weight", "upper") if name in case}


def main() -> None:
    args = options_of(benchmark_parser(__doc__, repeats=3), "tests/ops/expand/test_expand.py")
    measure_all(
        "expand_model", (row for method in METHODS for row in measure(method, args.repeats))
    )


if __name__ == "__main__":
    main()
