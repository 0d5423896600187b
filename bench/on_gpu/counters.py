"""Reads with Nsight Compute which share of the memory bandwidth each kernel reaches."""

import csv
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from statistics import median
from typing import Any

from bench.on_gpu.sanitize import cuda_tool
from bench.shared.recorder import Recorder, Skip
from bench.shared.results import ROOT

MEASURED = ("bench_expand", "bench_kl_mlm_loss", "headline")
KERNELS = "regex:kl_mlm|expand"
BANDWIDTH = "dram__throughput.avg.pct_of_peak_sustained_elapsed"
NANOSECONDS = "gpu__time_duration.sum"
# of each piece: a launch that is counted runs several times, with its memory restored between
LAUNCHES = 60
# the driver lets only administrators read the counters
FORBIDDEN = "ERR_NVGPUCTRPERM"


def run(recorder: Recorder) -> None:
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
