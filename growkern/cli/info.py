"""Collects facts about this machine: versions, devices, and which backends run and why."""

import platform
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
from rich.table import Table
from rich.text import Text

from growkern import package
from growkern.growth.plan.pieces import usable_cores
from growkern.ops.backend.choose import Backend, describe_backends

PACKAGES = ("torch", "transformers", "accelerate", "safetensors", "triton")


@dataclass(frozen=True)
class Info:
    """Facts about one machine."""

    versions: dict[str, str]
    devices: list[str]
    backends: list[Backend]

    def to_dict(self) -> dict[str, Any]:
        """The facts as JSON values."""
        return {**asdict(self), "backends": [b._asdict() for b in self.backends]}

    def table(self) -> Table:
        """The facts as a rich table."""
        table = Table(show_header=False, box=None, pad_edge=False)
        for name, version in self.versions.items():
            table.add_row(name, version)
        for device in self.devices:
            table.add_row("device", device)
        for backend in self.backends:
            state = ("live", "green") if backend.live else ("not live", "yellow")
            why = Text.assemble(state, f": {backend.reason}")
            table.add_row(f"backend {backend.name}", why)
        return table


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def _own_version() -> str:
    """The version that runs; for a source tree that is not installed, also its folder."""
    if _version("growkern") is not None:
        return package.version()
    return f"{package.version()}, not installed: runs from {Path(package.__file__).parent}"


def _processor() -> str:
    try:
        with open("/proc/cpuinfo") as lines:
            names = [
                line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")
            ]
    except OSError:
        names = []
    return names[0] if names else platform.machine()


def collect() -> Info:
    """Collect the facts about this machine. Needs no GPU."""
    versions = {"python": platform.python_version(), "growkern": _own_version()}
    versions |= {name: _version(name) or "not installed" for name in PACKAGES}
    devices = [f"{_processor()}, {usable_cores()} cores, {torch.get_num_threads()} threads in use"]
    devices += [
        f"cuda:{i} {torch.cuda.get_device_name(i)}, "
        f"{torch.cuda.get_device_properties(i).total_memory / 2**30:.0f} GiB"
        for i in range(torch.cuda.device_count())
    ]
    return Info(versions, devices, describe_backends())
