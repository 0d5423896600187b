"""What every benchmark shares: interleaved timing, the machine line, tables and JSON."""

import json
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "bench" / "results"


def require_green(op: str) -> None:
    """A fast wrong answer is not fast: the op's tests run first, and stop the benchmark if red."""
    command = [sys.executable, "-m", "pytest", "-q", "-x", f"tests/ops/test_{op}.py"]
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    if subprocess.run(command, cwd=ROOT, env=env).returncode:
        sys.exit(f"tests/ops/test_{op}.py fails: no figures from a wrong op")


def _synchronise() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def interleaved_ms(calls: dict[str, Callable[[], Any]], repeats: int) -> dict[str, float]:
    """Median milliseconds of each call, after one to warm up.

    They take turns, so that whatever else the machine does slows all of them alike.
    """
    times: dict[str, list[float]] = {name: [] for name in calls}
    for turn in range(repeats + 1):
        for name, call in calls.items():
            _synchronise()
            start = time.perf_counter()
            result = call()
            _synchronise()
            elapsed = time.perf_counter() - start
            # freeing a fresh result is its owner's cost, not the op's
            del result
            if turn:
                times[name].append(1e3 * elapsed)
    return {name: statistics.median(ms) for name, ms in times.items()}


def relative_error(actual: torch.Tensor, truth: torch.Tensor) -> float:
    """Largest difference from float64, as a share of the largest true value."""
    return ((actual.double() - truth).abs().max() / truth.abs().max()).item()


def _cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    names = (line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.machine())


def _commit() -> str:
    command = ["git", "describe", "--always", "--dirty"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    return done.stdout.strip() or "unknown"


def machine() -> dict[str, Any]:
    """Where and with what the figures were taken."""
    facts = {
        "cpu": _cpu_name(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "load_before": round(os.getloadavg()[0], 2),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "commit": _commit(),
    }
    if torch.cuda.is_available():
        facts["gpu"] = torch.cuda.get_device_name()
    return facts


def _cell(x: Any) -> str:
    if x is None:
        return "-"
    return f"{x:.3g}" if isinstance(x, float) else str(x)


def show_and_save(op: str, facts: dict[str, Any], rows: list[dict[str, Any]]) -> Path:
    """Prints the rows as a table and writes them to bench/results/<op>.json."""
    console = Console(width=None if sys.stdout.isatty() else 140)
    console.print("  ".join(f"{key} {value}" for key, value in facts.items()))
    table = Table(*rows[0])
    for row in rows:
        table.add_row(*(_cell(x) for x in row.values()))
    console.print(table)
    RESULTS.mkdir(parents=True, exist_ok=True)
    path = RESULTS / f"{op}.json"
    path.write_text(json.dumps({"op": op, "machine": facts, "rows": rows}, indent=1) + "\n")
    return path
