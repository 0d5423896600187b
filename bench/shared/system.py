"""Memory, files and child processes, for the benchmarks that grow checkpoints on disk."""

import contextlib
import json
import mmap
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

import growkern
from bench.shared.results import ROOT, machine


def status_mb(field: str) -> float:
    """Read one memory figure of this process.

    Args:
        field: a line of /proc/self/status, such as "VmRSS" (memory now) or "VmHWM" (its peak).

    Returns:
        The figure in MB (10^6 bytes).
    """
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(field)) * 1024 / 1e6


def reset_peak() -> None:
    """Set this process's peak memory (VmHWM) back to the memory it uses now."""
    Path("/proc/self/clear_refs").write_text("5")


@contextlib.contextmanager
def metered() -> Iterator[dict[str, float]]:
    """Measure the block: seconds and peaks of memory, which are there after it."""
    before, figures = status_mb("VmHWM"), dict[str, float]()
    reset_peak()
    base, start, used = status_mb("VmRSS"), time.perf_counter(), time.process_time()
    yield figures
    peak = status_mb("VmHWM")
    figures |= {
        "seconds": time.perf_counter() - start,
        "processor s": time.process_time() - used,
        "base MB": base,
        "peak over base MB": peak - base,
        "process peak MB": max(before, peak),
    }


def facts(memory_limit: str) -> dict[str, Any]:
    """The machine, and what growth on disk depends on."""
    return machine() | {"growkern": growkern.__version__, "memory_limit": memory_limit}


def warm_up(source: str | Path, model_class: Any, **how: Any) -> None:
    """Load all that a growth imports, so that it counts neither as time nor as memory of it."""
    import transformers

    import growkern.growth.grow

    growkern.plan(source, **how).to_dict()
    with torch.device("meta"):
        model_class(transformers.AutoConfig.from_pretrained(source))


def run_child(module: str, *arguments: Any) -> dict[str, float]:
    """Run `python -m module --child ARGUMENTS` and read the JSON on its last line."""
    command = [sys.executable, "-m", module, "--child", *map(str, arguments)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"exit code {done.returncode}\n{done.stderr[-3000:]}")
    return json.loads(done.stdout.splitlines()[-1])


def bytes_of(directory: Path) -> int:
    """Total size of the files in a directory."""
    return sum(file.stat().st_size for file in directory.iterdir())


def sync_files(directory: Path) -> None:
    """Wait until every file of a directory is on disk."""
    for file in directory.iterdir():
        descriptor = os.open(file, os.O_RDONLY)
        os.fsync(descriptor)
        os.close(descriptor)


def evict(directory: Path) -> None:
    """Drop the files of a directory from the page cache."""
    sync_files(directory)
    for file in directory.iterdir():
        descriptor = os.open(file, os.O_RDONLY)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(descriptor)


def settle(size: int) -> None:
    """Give every run the same start: an idle disk, and free memory for `size` bytes of files.

    Memory that a virtual machine reports as free may still have to be found by its host. That took
    up to ten times as long as writing to it. Touching the memory first keeps it out of the timings.
    """
    os.sync()
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | getattr(mmap, "MAP_POPULATE", 0)
    mmap.mmap(-1, size, flags=flags).close()
