"""Collects facts about this machine: versions, devices, and which backends run and why."""

import os
import platform
from dataclasses import asdict, dataclass
from importlib import metadata
from typing import Any

import torch
from rich.table import Table

from growkern.ops.backend.choose import Backend, describe_backends

PACKAGES = ("growkern", "torch", "transformers", "accelerate", "safetensors", "triton")


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
            state = "[green]live[/green]" if backend.live else "[yellow]not live[/yellow]"
            table.add_row(f"backend {backend.name}", f"{state}: {backend.reason}")
        return table


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "not installed"


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
    versions = {"python": platform.python_version()} | {name: _version(name) for name in PACKAGES}
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    devices = [f"{_processor()}, {cores} cores, {torch.get_num_threads()} threads in use"]
    devices += [
        f"cuda:{i} {torch.cuda.get_device_name(i)}, "
        f"{torch.cuda.get_device_properties(i).total_memory / 2**30:.0f} GiB"
        for i in range(torch.cuda.device_count())
    ]
    return Info(versions, devices, describe_backends())
