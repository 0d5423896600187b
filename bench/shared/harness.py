"""What every benchmark shares: interleaved timing, errors, tables and JSON."""

import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch._dynamo
from rich.console import Console
from rich.table import Table

from bench.shared import results
from bench.shared.results import ROOT, cell, machine

__all__ = [
    "Rows",
    "compiled",
    "interleaved_ms",
    "machine",
    "relative_error",
    "require_green",
    "show_and_save",
]

# written before every timed call on a GPU: empties a cache of 60 MB and, 0.2 ms long, lets the
# CPU queue the call meanwhile, so that small calls are not timed by their launches
FLUSH_BYTES = 1 << 30
# what takes every row as soon as it is there, in place of a file at the end; set by `bench.gpu`
collector: Callable[[dict[str, Any]], None] | None = None
# of `torch.compile`; a dry run takes one that compiles nothing
compiler = "inductor"


class Rows(list[dict[str, Any]]):
    """Rows of a benchmark, handed on as they come: what is measured survives what comes after."""

    def append(self, row: dict[str, Any]) -> None:
        super().append(row)
        if collector is not None:
            collector(row)


def require_green(op: str) -> None:
    """A fast wrong answer is not fast: the op's tests run first, and stop the benchmark if red."""
    command = [sys.executable, "-m", "pytest", "-q", "-x", f"tests/ops/test_{op}.py"]
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    if subprocess.run(command, cwd=ROOT, env=env).returncode:
        sys.exit(f"tests/ops/test_{op}.py fails: no figures from a wrong op")


def compiled(call: Callable[..., Any], shapes: int = 8) -> Callable[..., Any]:
    """`torch.compile` of a call that meets so many shapes; none of them may be left uncompiled."""
    # a cache that is full after eight dtypes and shapes would leave the rest uncompiled
    torch._dynamo.reset()
    torch._dynamo.config.recompile_limit = max(8, shapes)
    return torch.compile(call, backend=compiler)


def interleaved_ms(calls: dict[str, Callable[[], Any]], repeats: int) -> dict[str, float]:
    """Median milliseconds of each call, after one to warm up.

    They take turns, so that whatever else the machine does slows all of them alike. On a GPU it
    is the time between two events on the device, from a cold cache.
    """
    timed = _device_ms if torch.cuda.is_available() else _wall_ms
    times: dict[str, list[Callable[[], float]]] = {name: [] for name in calls}
    for turn in range(repeats + 1):
        for name, call in calls.items():
            elapsed = timed(call)
            if turn:
                times[name].append(elapsed)
    return {name: statistics.median(read() for read in reads) for name, reads in times.items()}


def _wall_ms(call: Callable[[], Any]) -> Callable[[], float]:
    start = time.perf_counter()
    result = call()
    elapsed = 1e3 * (time.perf_counter() - start)
    # freeing a fresh result is its owner's cost, not the op's
    del result
    return lambda: elapsed


def _device_ms(call: Callable[[], Any]) -> Callable[[], float]:
    """Queues the call between two events; the time is read later, when all of them have run."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.empty(FLUSH_BYTES, dtype=torch.int8, device="cuda").zero_()
    start.record()
    call()
    end.record()

    def read() -> float:
        end.synchronize()
        return start.elapsed_time(end)

    return read


def relative_error(actual: torch.Tensor, truth: torch.Tensor) -> float:
    """Largest difference from float64, as a share of the largest true value."""
    return ((actual.double() - truth).abs().max() / truth.abs().max()).item()


def show(rows: list[dict[str, Any]], console: Console) -> None:
    """Rows with different keys share one table; what a row does not have is "-"."""
    table = Table(*dict.fromkeys(key for row in rows for key in row))
    for row in rows:
        table.add_row(*(cell(row.get(column.header)) for column in table.columns))
    console.print(table)


def show_and_save(op: str, facts: dict[str, Any], rows: list[dict[str, Any]]) -> Path | None:
    """Prints the rows as a table and keeps them in bench/results/[<gpu>/]<op>.json."""
    console = Console(width=None if sys.stdout.isatty() else 140)
    console.print("  ".join(f"{key} {value}" for key, value in facts.items()))
    show(rows, console)
    if collector is not None:
        for row in [] if isinstance(rows, Rows) else rows:
            collector(row)
        return None
    path = results.RESULTS / results.slug(facts) / f"{op}.json"
    kept = results.keep(path, {"op": op, "status": "ok", "machine": facts, "rows": rows})
    if kept != path:
        console.print(f"{path} is better documented than this run: see {kept.name}")
    return kept


if __name__ == "__main__":
    from bench.report import main

    sys.exit(main(sys.argv[1:]))
