"""The first piece of `bench.gpu`: versions of all that figures depend on, and the GPU's clocks."""

import importlib.metadata
import shutil
import subprocess

from bench.shared.recorder import Recorder
from bench.shared.results import clocks

TOOLS = ("nvcc", "gcc", "ptxas", "ncu", "compute-sanitizer")


def run(recorder: Recorder) -> None:
    recorder.add({"what": "clocks", **clocks()})
    for name in TOOLS:
        recorder.add({"what": name, "version": _version_of(name)})
    installed = {x.name: x.version for x in importlib.metadata.distributions()}
    recorder.add({"what": "packages", **dict(sorted(installed.items()))})


def _version_of(tool: str) -> str | None:
    """What a tool prints about its version; None if it is not here."""
    if shutil.which(tool) is None:
        return None
    done = subprocess.run([tool, "--version"], capture_output=True, text=True, timeout=10)
    return done.stdout.strip()[:500]
