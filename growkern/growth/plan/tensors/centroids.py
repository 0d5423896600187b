"""Reads the rows of a router from a file that `growkern.centroids` wrote.

The option is the file's path. A plan adds the checksum to it, `FILE@xxh3:CHECKSUM`. So a record
names the rows, and another file is refused.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import safetensors
from torch import Tensor

from growkern.errors import GrowthError
from growkern.files import regular_size
from growkern.growth.options import ROUTERS, GrowthOptions
from growkern.growth.plan.blueprint import RANDOM, Blueprint, Task
from growkern.growth.plan.tensors.baselines import is_router
from growkern.growth.space.upcycling import taken_together
from growkern.publish.manifest import checksum

MARK = "@xxh3:"


def with_checksum(options: GrowthOptions) -> GrowthOptions:
    """The options, whose file of rows has its checksum."""
    if options.router in ROUTERS or MARK in options.router:
        return options
    found = _checksum(Path(options.router))
    return replace(options, router=f"{options.router}{MARK}{found}")


def centroids_of(plan: Blueprint, task: Task) -> Tensor | None:
    """The rows that a router gets, (copies of the FFN, hidden size); None: they are random."""
    is_new = task.source_layer is None
    if plan.options.router in ROUTERS or is_new or not is_router(plan, task):
        return None
    layer = str(task.source_layer).rpartition(".")[2]
    return plan.cache.get(("centroids", layer), lambda: _read(plan, layer))


def check_centroids(plan: Blueprint) -> None:
    """Refuse a file that is another one than when it was planned, or whose rows do not fit."""
    if plan.options.router in ROUTERS:
        return
    name, _, known = plan.options.router.partition(MARK)
    if (found := _checksum(Path(name))) != known:
        raise GrowthError(
            f"router={name!r}: the file has changed: its checksum is {found}, not {known}. Put "
            "back the one that the growth began with"
        )
    for task in plan.tasks:
        if task.source == RANDOM:
            centroids_of(plan, task)


def _checksum(file: Path) -> str:
    try:
        regular_size(file)
        return checksum(file)
    except (GrowthError, OSError) as error:
        why = str(error).removeprefix(f"{file}: ")
        raise GrowthError(
            f"router={str(file)!r}: {why}: give a file of growkern.centroids, or one of "
            f"{', '.join(ROUTERS)}"
        ) from error


def _read(plan: Blueprint, layer: str) -> Tensor:
    """The rows of a source layer in float64."""
    file, key = plan.options.router.partition(MARK)[0], f"layers.{layer}"
    try:
        with safetensors.safe_open(file, "pt") as opened:
            rows = opened.get_tensor(key)
    except (OSError, safetensors.SafetensorError) as error:
        raise GrowthError(f"router={file!r}: cannot read {key!r}: {error}") from error
    (space,) = plan.small.family.mixtures
    copies = plan.large.size(str(space.size)) // taken_together(plan.small, plan.options)
    wanted = (copies, plan.small.size("stream"))
    if rows.shape != wanted or not rows.isfinite().all():
        raise GrowthError(
            f"router={file!r}: {key} is {rows.dtype} {list(rows.shape)}: it must be {list(wanted)} "
            "and finite, one row for each copy of the FFN: call growkern.centroids with this model "
            f"and experts={copies}"
        )
    return rows.double()
