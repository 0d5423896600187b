"""The application with every command: importing a module registers its commands.

`growkern info` is here.
"""

import platform
from importlib import metadata
from pathlib import Path
from typing import Any

from growkern import package
from growkern.cli import growing, measuring, records, training
from growkern.cli.app import AsJson, app, print_json
from growkern.errors import counted, print_table

__all__ = ["app", "collect", "growing", "measuring", "records", "training"]

# the groups and the order of the help, as in docs/commands.md
GROUPS = {
    "Growing": ("plan", "grow", "verify", "family"),
    "Training": ("train", "export", "cache-teacher"),
    "Measuring": ("eval", "plot"),
    "This machine": ("info",),
}
GROUP_OF = {name: group for group, names in GROUPS.items() for name in names}
PACKAGES = ("torch", "transformers", "accelerate", "safetensors", "triton")


@app.command()
def info(as_json: AsJson = False) -> None:
    """Show versions, devices, and which backends run on this machine and why."""
    from rich.table import Table
    from rich.text import Text

    facts = collect()
    if as_json:
        print_json(facts)
        return
    table = Table(show_header=False, box=None, pad_edge=False)
    for name, version in facts["versions"].items():
        table.add_row(name, version)
    for device in facts["devices"]:
        table.add_row("device", device)
    for backend in facts["backends"]:
        state = ("live", "green") if backend["live"] else ("not live", "yellow")
        table.add_row(f"backend {backend['name']}", Text.assemble(state, f": {backend['reason']}"))
    print_table(table)


def collect() -> dict[str, Any]:
    """The versions, devices and backends of this machine. Needs no GPU."""
    import torch

    from growkern.growth.plan import usable_cores
    from growkern.ops.backend import describe_backends

    own = package.version()
    if _version("growkern") is None:
        # a source tree
        own += f", not installed: runs from {Path(package.__file__).parent}"
    versions = {"python": platform.python_version(), "growkern": own}
    versions |= {name: _version(name) or "not installed" for name in PACKAGES}
    cores, threads = counted(usable_cores(), "core"), counted(torch.get_num_threads(), "thread")
    devices = [f"{_processor()}, {cores}, {threads} in use"]
    devices += [
        f"cuda:{i} {torch.cuda.get_device_name(i)}, "
        f"{torch.cuda.get_device_properties(i).total_memory / 2**30:.0f} GiB"
        for i in range(torch.cuda.device_count())
    ]
    backends = [backend._asdict() for backend in describe_backends()]
    return {"versions": versions, "devices": devices, "backends": backends}


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def _processor() -> str:
    try:
        with open("/proc/cpuinfo") as lines:
            return next(x.split(":", 1)[1].strip() for x in lines if x.startswith("model name"))
    except (OSError, StopIteration):
        return platform.machine()


def _name(command: Any) -> str:
    return command.name or command.callback.__name__.replace("_", "-")


app.registered_commands.sort(key=lambda command: list(GROUP_OF).index(_name(command)))
for _command in app.registered_commands:
    _command.rich_help_panel = GROUP_OF[_name(_command)]
