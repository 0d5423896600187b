"""Runs pieces under tools that come with CUDA.

- "sanitize": compute-sanitizer over the checks at toy sizes. Its four tools find accesses out of
  bounds, races, memory that is read before it is written, and barriers that not all threads reach.
- "counters": Nsight Compute tells which share of the memory bandwidth each kernel reaches.
"""

import csv
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from statistics import median
from typing import Any

from bench.shared import results
from bench.shared.recorder import Recorder, Skip
from bench.shared.results import ROOT

TOOLS = ("memcheck", "racecheck", "initcheck", "synccheck")
CHECKS = ("check_expand", "check_loss", "check_cuda")
# exit code of a tool that has found an error
FOUND = 86


def cuda_tool(name: str) -> str:
    """The path of a tool that comes with CUDA."""
    homes = [os.environ[key] for key in ("CUDA_HOME", "CUDA_PATH") if os.environ.get(key)]
    places = [*(f"{home}/bin" for home in homes), os.environ.get("PATH", ""), "/usr/local/cuda/bin"]
    tool = shutil.which(name, path=os.pathsep.join(places))
    if tool is None:
        raise Skip(f"{name} is neither under CUDA_HOME nor on the PATH")
    return tool


def sanitize(recorder: Recorder) -> None:
    sanitizer = cuda_tool("compute-sanitizer")
    # PyTorch's allocator hands out parts of large blocks. Accesses next to a tensor would lie
    # inside the block, and memcheck would miss them.
    env = {**os.environ, "PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
    for tool in TOOLS:
        for check in CHECKS:
            with tempfile.TemporaryDirectory() as scratch:
                document = Path(scratch) / "document.json"
                command = [sanitizer, "--tool", tool, "--error-exitcode", str(FOUND)]
                command += [sys.executable, "-m", "bench.gpu", "--here", check]
                command += ["--toy", "--document", str(document)]
                code = subprocess.run(command, cwd=ROOT, env=env).returncode
                status = results.read(document).get("status", "no result")
            recorder.add({"tool": tool, "check": check, "exit code": code, "status": status})
            if code == FOUND:
                recorder.fail(f"{tool} found an error in {check}: see the log")
            elif code or status != "ok":
                recorder.fail(f"{check} under {tool}: exit code {code}, {status}")


MEASURED = ("bench_expand", "bench_kl_mlm_loss", "headline")
KERNELS = "regex:kl_mlm|expand"
BANDWIDTH = "dram__throughput.avg.pct_of_peak_sustained_elapsed"
NANOSECONDS = "gpu__time_duration.sum"
# of each piece: a launch that is counted runs several times, with its memory restored between
LAUNCHES = 60
# the driver lets only administrators read the counters
FORBIDDEN = "ERR_NVGPUCTRPERM"


def count(recorder: Recorder) -> None:
    tool = cuda_tool("ncu")
    for piece in MEASURED:
        with tempfile.TemporaryDirectory() as scratch:
            log = Path(scratch) / "log.csv"
            command = [tool, "--csv", "--page", "raw", "--print-units", "base"]
            command += ["--target-processes", "all", "--log-file", str(log)]
            command += ["-k", KERNELS, "-c", str(LAUNCHES), "--metrics"]
            command += [f"{BANDWIDTH},{NANOSECONDS}", sys.executable, "-m", "bench.gpu"]
            command += ["--here", piece, *(["--toy"] if recorder.toy else [])]
            command += ["--document", str(Path(scratch) / "document.json")]
            code = subprocess.run(command, cwd=ROOT).returncode
            text = log.read_text() if log.is_file() else ""
        if FORBIDDEN in text:
            raise Skip(f"ncu may not read the counters of this GPU: {FORBIDDEN}")
        kernels = list(shares(text))
        for row in kernels:
            recorder.add({"piece": piece, **row})
        if code or not kernels:
            recorder.fail(f"ncu over {piece}: exit code {code}, {len(kernels)} kernels")


def shares(text: str) -> Iterator[dict[str, Any]]:
    """A row per kernel of a log of ncu: launches, and medians of its time and its bandwidth."""
    lines = csv.reader(line for line in text.splitlines() if line.startswith('"'))
    head = next(lines, [])
    next(lines, None)  # the units
    by_kernel: dict[str, list[dict[str, str]]] = {}
    for line in lines:
        launch = dict(zip(head, line, strict=True))
        by_kernel.setdefault(launch["Kernel Name"], []).append(launch)
    for kernel, launches in by_kernel.items():
        percent, nanoseconds = (
            median(float(launch[name].replace(",", "")) for launch in launches)
            for name in (BANDWIDTH, NANOSECONDS)
        )
        yield {
            "kernel": kernel,
            "launches": len(launches),
            "us": round(nanoseconds / 1e3, 2),
            "of bandwidth": round(percent / 100, 3),
        }


def run(recorder: Recorder) -> None:
    {"sanitize": sanitize, "counters": count}[recorder.document["piece"]](recorder)
