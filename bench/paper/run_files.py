"""The run file of each job, in the folder of all jobs."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

from bench.paper.jobs import Job
from bench.paper.systems import run_of
from growkern.files import write_whole
from growkern.train.run.file import load_run


def run_file(name: str, folder: Path) -> Path:
    """The run file of the job with this name in the folder of all jobs."""
    return folder / f"{name.replace('/', '-')}.toml"


def write_run_file(job: Job, folder: Path) -> Path:
    """Write the run file of a job into the folder of all jobs."""
    file = run_file(job.name, folder)
    text = to_toml(run_of(job))
    # whole or not at all: a later call refuses a file that differs
    write_whole(file, lambda partial: partial.write_text(text))
    return file


def has_changed(job: Job, folder: Path) -> bool:
    """Whether the folder has a run file of a job with this name and other settings."""
    file = run_file(job.name, folder)
    return file.is_file() and load_run(file) != run_of(job)


def to_toml(run: Any) -> str:
    """The settings of a run as a run file. Fields that are None are left out."""
    lines = []
    for section in dataclasses.fields(run):
        table = getattr(run, section.name)
        if table is None:
            continue
        if isinstance(table, tuple):
            for one in table:
                lines += [f"[[{section.name}]]", *_toml_lines(one), ""]
        else:
            lines += [f"[{section.name}]", *_toml_lines(table), ""]
    return "\n".join(lines)


def _toml_lines(table: Any) -> list[str]:
    """The keys and values of a dataclass or a dict, without those that are None."""
    if dataclasses.is_dataclass(table):
        table = {x.name: getattr(table, x.name) for x in dataclasses.fields(table)}
    return [f"{name} = {_toml_value(x)}" for name, x in table.items() if x is not None]


def _toml_value(item: Any) -> str:
    if isinstance(item, dict):
        return "{ " + ", ".join(f"{name} = {_toml_value(x)}" for name, x in item.items()) + " }"
    # JSON strings, numbers, booleans and lists of them are valid TOML, except for DEL
    return json.dumps(item, ensure_ascii=False).replace("\x7f", "\\u007f")
