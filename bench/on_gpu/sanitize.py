"""Runs compute-sanitizer over the checks at toy sizes.

Its four tools find accesses out of bounds, races, memory that is read before it is written, and
barriers that not all threads reach.
"""

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

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


def run(recorder: Recorder) -> None:
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
