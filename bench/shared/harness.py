"""Common parts of every benchmark: command-line options, fair timing, errors, tables, saving."""

import argparse
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch._dynamo
from rich.console import Console
from rich.table import Table

from bench.shared import results
from bench.shared.results import ROOT, cell, machine as machine

# Zeroed before every timed call on a GPU. This empties its cache (60 MB).
FLUSH_BYTES = 1 << 30
# Then the device waits while the CPU queues the call, but at most so many seconds. Without this a
# call of several small kernels took 0.7 ms on an H100, most of it on the CPU.
MOST_LEAD, CYCLES_PER_SECOND = 0.05, 2e9
# Called with every row as soon as it is measured, instead of saving a file at the end.
# `bench.gpu` sets it.
collector: Callable[[dict[str, Any]], None] | None = None
# Called with the rows of a measurement in turns, whenever one is new, or better than before.
# `bench.gpu` sets it, so that a measurement that is cut short leaves rows, too.
observer: Callable[[list[dict[str, Any]]], None] | None = None
# The backend of `torch.compile`. A dry run sets one that compiles nothing.
compiler = "inductor"


def parser_of(description: str | None) -> argparse.ArgumentParser:
    """A parser whose --help shows the module's docstring as it is written."""
    return argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )


def benchmark_parser(
    description: str | None, *, repeats: int | None, threads: bool = False
) -> argparse.ArgumentParser:
    """The options that all benchmarks have."""
    parser = parser_of(description)
    if threads:
        words = "threads of PyTorch"
        parser.add_argument("--threads", type=int, default=torch.get_num_threads(), help=words)
    if repeats is not None:
        words = "timed runs of each case; medians are reported (default: %(default)s)"
        parser.add_argument("--repeats", type=int, default=repeats, help=words)
    parser.add_argument(
        "--no-test", action="store_true", help="skip the tests that normally run first"
    )
    return parser


def options_of(parser: argparse.ArgumentParser, tests: str) -> argparse.Namespace:
    """The options of a benchmark, after its tests: the speed of wrong code means nothing.

    `tests` is the path of a test file. Children of a benchmark skip it, as with --no-test.
    """
    args = parser.parse_args()
    torch.set_num_threads(getattr(args, "threads", torch.get_num_threads()))
    if not args.no_test and not getattr(args, "child", None):
        command = [sys.executable, "-m", "pytest", "-q", "-x", tests]
        env = {**os.environ, "OMP_NUM_THREADS": "1"}
        if subprocess.run(command, cwd=ROOT, env=env).returncode:
            sys.exit(f"{tests} fails. The benchmark does not run on wrong code.")
    return args


def compiled(call: Callable[..., Any], shapes: int = 8) -> Callable[..., Any]:
    """`torch.compile` of a function that will see up to `shapes` different shapes."""
    # After 8 dtypes and shapes the cache is full, and PyTorch runs all others uncompiled.
    torch._dynamo.reset()
    torch._dynamo.config.recompile_limit = max(8, shapes)
    return torch.compile(call, backend=compiler)


def interleaved_ms(calls: dict[str, Callable[[], Any]], repeats: int) -> dict[str, float]:
    """The medians of `turns_ms`: name -> milliseconds."""
    return {name: statistics.median(times) for name, times in turns_ms(calls, repeats).items()}


def turns_ms(
    calls: dict[str, Callable[[], Any]], repeats: int, *, wall: bool = False
) -> dict[str, list[float]]:
    """Time several calls fairly.

    The calls take turns, so that other load on the machine slows all of them alike. On a GPU the
    time is measured on the device, between two events, starting from an empty cache.

    Args:
        repeats: timed calls of each, after one to warm up.
        wall: on a GPU, count from the call until the device has finished.
    """
    on_device = torch.cuda.is_available() and not wall
    times: dict[str, list[Callable[[], float]]] = {name: [] for name in calls}
    leads = dict.fromkeys(calls, 0.0)
    for turn in range(repeats + 1):
        for name, call in calls.items():
            if on_device:
                elapsed, leads[name] = _device_ms(call, leads[name])
            else:
                elapsed = _wall_ms(call)
            if turn:
                times[name].append(elapsed)
    return {name: [read() for read in reads] for name, reads in times.items()}


def now() -> float:
    """The time in seconds, after the device has finished its work."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter()


def _wall_ms(call: Callable[[], Any]) -> Callable[[], float]:
    start = now()
    result = call()
    elapsed = 1e3 * (now() - start)
    # Freeing the result takes time that belongs to the caller, not to the op.
    del result
    return lambda: elapsed


def _device_ms(call: Callable[[], Any], lead: float) -> tuple[Callable[[], float], float]:
    """Queue a call between two events, `lead` seconds before the device may begin.

    Returns:
        A function that waits for the events and reads the time, and the lead for the next turn:
        twice what it took to queue the call.
    """
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.empty(FLUSH_BYTES, dtype=torch.int8, device="cuda").zero_()
    torch.cuda._sleep(int(lead * CYCLES_PER_SECOND))
    start.record()
    began = time.perf_counter()
    call()
    queued = time.perf_counter() - began
    end.record()

    def read() -> float:
        end.synchronize()
        return start.elapsed_time(end)

    return read, min(2 * queued, MOST_LEAD)


def captured(call: Callable[[], Any]) -> tuple[torch.cuda.CUDAGraph, Any]:
    """A call in a CUDA graph, after one that warms up, and what the captured call returned."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        call()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = call()
    return graph, result


def relative_error(actual: torch.Tensor, truth: torch.Tensor) -> float:
    """Largest difference from the float64 truth, as a share of its largest value."""
    return ((actual.double() - truth).abs().max() / truth.abs().max()).item()


def largest_error(errors: Iterable[float]) -> float:
    """The largest of some errors. NaN if one of them is NaN: `max` would pass over it."""
    return torch.tensor(list(errors), dtype=torch.float64).max().item()


def name_of(dtype: torch.dtype) -> str:
    """A dtype as rows name it, such as "bfloat16"."""
    return str(dtype).removeprefix("torch.")


def show(rows: list[dict[str, Any]], console: Console) -> None:
    """Print rows as one table. A row without a column's value shows "-" there."""
    table = Table(*dict.fromkeys(key for row in rows for key in row))
    for row in rows:
        table.add_row(*(cell(row.get(column.header)) for column in table.columns))
    console.print(table)


def measure_all(
    op: str, rows: Iterable[dict[str, Any]], facts: dict[str, Any] | None = None
) -> None:
    """Print the rows as a table and save them as bench/results/[<gpu>/]<op>.json.

    Args:
        rows: measured one by one. If there is a `collector`, it gets each at once, so that a crash
            loses none, and nothing is saved.
        facts: the machine, before anything was measured.
    """
    facts, made = facts or machine(), list[dict[str, Any]]()
    for row in rows:
        made.append(row)
        if collector is not None:
            collector(row)
    console = Console(width=None if sys.stdout.isatty() else 140)
    console.print("  ".join(f"{key} {value}" for key, value in facts.items()))
    show(made, console)
    if collector is not None:
        return
    path = results.RESULTS / results.slug(facts) / f"{op}.json"
    kept = results.keep(path, {"op": op, "status": "ok", "machine": facts, "rows": made})
    if kept != path:
        console.print(f"{path} is better documented than this run: see {kept.name}")
    console.print(str(kept))
