"""Puts copies of experts to sleep: lowers their bias, and moves their rows of the router.

The bias is (1) of `growkern.growth.space.experts`. Nothing reads the scores of experts that sleep.
With equal rows, an expert and its copy would always be chosen together once the copy is awake. So a
copy's row gets noise that is as long as the row itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby

import torch
from torch import Tensor

from growkern.growth.plan.axes import AxisMap, asleep, axis_map
from growkern.growth.plan.blueprint import Blueprint, Task
from growkern.growth.plan.initialisation import Initial
from growkern.growth.plan.tensors.baselines import TILE, fill_random
from growkern.growth.source.stored import Read
from growkern.growth.space.experts import depth_of_sleep


def put_to_sleep(
    plan: Blueprint, task: Task, read: Read, part: Sequence[slice], out: Tensor
) -> None:
    """Change a part of a router's bias or matrix where experts sleep.

    Args:
        read: returns a source tensor by name.
        out: the part, filled with copies.
    """
    sleeps = asleep(plan, task)
    assert sleeps is not None
    where = [range(*s.indices(n)) for s, n in zip(part, task.shape, strict=True)]
    numbers = [number for number in where[0] if sleeps[number]]
    rows, *cols = (
        axis_map(plan, task, *axis) for axis in zip(task.tensor.axes, task.shape, strict=True)
    )
    if not cols:
        bias = read(task.source).cpu().double()
        # a model that is loaded in float64 has it in float32 too
        lowered = (bias - depth_of_sleep(bias)).float().to(out)
        for number in numbers:
            out[number - where[0].start] = lowered[rows.index[number]]
        return
    # a tile of random numbers has rows of many experts
    for _, some in groupby(numbers, lambda number: number // TILE[0]):
        _add_noise(plan, task, read, (rows, cols[0]), [*some], where, out)


def _add_noise(
    plan: Blueprint,
    task: Task,
    read: Read,
    axes: tuple[AxisMap, AxisMap],
    numbers: Sequence[int],
    where: Sequence[range],
    out: Tensor,
) -> None:
    """Add noise to some rows of a router.

    Args:
        numbers: the rows, in the whole tensor.
        where: the part that `out` holds.
    """
    rows, cols = axes
    first = numbers[0]
    noise = torch.empty(numbers[-1] + 1 - first, len(where[1]))
    drawn = [range(first, numbers[-1] + 1), where[1]]
    fill_random(plan, task, "asleep", Initial(0.0, deviation=1.0), drawn, noise)
    source = read(task.source)
    for number in numbers:
        row = source[rows.index[number]].cpu().double()[cols.index % cols.source] * cols.scale
        size = row.norm() / len(row) ** 0.5
        out[number - where[0].start] += (noise[number - first].double() * size).to(out)
