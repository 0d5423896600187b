"""Builds the target's tensors from the source's, each by its kind.

A tensor can be built whole or in parts, with the same bits. Growth onto disk and into sharded
models depend on that. `kind_of` alone tells tensors apart.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor

from growkern.growth.plan.axes import asleep
from growkern.growth.plan.blueprint import COMPUTED, RANDOM, Blueprint, Part, Task
from growkern.growth.plan.tensors.gather import Computed, Constant, Gather, Patch, Stored
from growkern.growth.plan.tensors.norm import InsertedNorm, Norm
from growkern.growth.plan.tensors.random_tensors import (
    Baseline,
    Drop,
    Fresh,
    Noise,
    Random,
    Sleep,
    Split,
)
from growkern.growth.stored import Read
from growkern.ops import expand as ops


def kind_of(plan: Blueprint, task: Task) -> Gather | Baseline:
    """The kind of a tensor, with its task."""
    usual = _usual(plan, task)
    return Baseline(usual) if plan.options.is_baseline else usual


def _usual(plan: Blueprint, task: Task) -> Gather:
    is_norm = task.tensor.norm is not None
    if task.source == "zero" or (task.identity == "zero" and not is_norm):
        return Constant(plan, task, _patches(plan, task))
    if task.identity == "one":
        return Constant(plan, task, value=1.0)
    if task.source == COMPUTED:
        return Computed(plan, task)
    if task.source == RANDOM:
        return Random(plan, task)
    if task.tensor.is_copied and not task.is_made:
        return Stored(plan, task)
    if is_norm:
        return (InsertedNorm if task.identity in ("zero", "unit") else Norm)(plan, task)
    return Gather(plan, task, _patches(plan, task))


def _patches(plan: Blueprint, task: Task) -> tuple[Patch, ...]:
    """What changes some of the gathered numbers, in this order."""
    found, row, upcycling = list[Patch](), task.tensor.row, plan.upcycling
    if (idle := asleep(plan, task)) is not None:
        (space,) = plan.small.family.mixtures
        found.append((Split if space.asleep is None else Sleep)(plan, task, idle))
    if plan.options.method == "fresh" and not task.is_made:
        found.append(Fresh(plan, task))
    if upcycling and upcycling.is_copied(row) and plan.options.drop:
        found.append(Drop(plan, task))
    if upcycling and upcycling.has_noise(row):
        found.append(Noise(plan, task))
    return tuple(found)


def build_each(
    plan: Blueprint,
    put: Callable[[Task, Tensor], Any],
    *,
    device: torch.device,
    backend: str | None = None,
) -> None:
    """Build all tensors in turn; `put` gets each when it is complete, and may let it go."""
    work = ops.work_on(device, backend)
    for task in plan.tasks:
        out = torch.empty(task.shape, dtype=plan.dtype_of(task), device=device)
        build_tensor(plan, task, backend=backend, out=out, work=work)
        work.then(partial(put, task, out))
    work.run()


def build_tensor(
    plan: Blueprint,
    task: Task,
    *,
    read: Read | None = None,
    backend: str | None = None,
    part: Part | None = None,
    out: Tensor | None = None,
    work: ops.Work | None = None,
) -> Tensor:
    """Build one target tensor or a part of it, in the dtype that the plan gives it.

    Args:
        read: returns a source tensor by name; default: from the plan's source. Of a memory-mapped
            tensor, only the rows that the part needs are read.
        part: one slice per axis of the target tensor; default: all of it. A part has the same bits
            as that place of the whole tensor.
        out: tensor to fill, of the part's shape and that dtype, on any device. Default: a
            new tensor on the CPU.
        work: batch of `work_on` to join. The result is then valid only after `work.run()`.

    Returns:
        `out`, or the new tensor.
    """
    read = read or plan.source.read
    part = tuple(part or (slice(None),) * len(task.shape))
    if out is None:
        out = torch.empty([len(where) for where in task.ranges(part)], dtype=plan.dtype_of(task))
    if (matrix := task.matrix) is not task:
        place = task.part_of_matrix(part)
        flat = out.view([s.stop - s.start for s in place])
        as_matrix = partial(_as_matrix, plan, matrix, read)
        build_tensor(plan, matrix, read=as_matrix, backend=backend, part=place, out=flat, work=work)
        return out
    kind_of(plan, task).build(read, part, out, work or ops.Work(backend))
    return out


def _as_matrix(plan: Blueprint, matrix: Task, read: Read, name: str) -> Tensor:
    return read(name).reshape([plan.small.axis_size(axis) for axis in matrix.tensor.axes])


def part_reader(
    plan: Blueprint,
    task: Task,
    part: Part,
    read: Read,
    check: Callable[[str], None] = lambda name: None,
) -> Read:
    """A function that reads only the entries that a part needs, where reading copies them.

    `check` is called with the name of a tensor before entries of it are read.
    """
    headers = plan.source.headers
    # of experts, each is read by itself
    is_small = task.source not in headers or headers[task.source].is_mapped or len(part) > 2
    index = None if is_small or task.matrix is not task else kind_of(plan, task).needs(part)
    if index is None:
        return read

    def read_part(name: str, entries: Sequence[int] | None = None) -> Tensor:
        if name in (task.source, task.upper):
            check(name)
            return headers[name].read_entries(index)
        return read(name, entries)

    return cache(read_part)
