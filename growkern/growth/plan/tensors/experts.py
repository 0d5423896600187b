"""Makes the copies of experts differ: those of a dense FFN, and those that sleep.

Drop-Upcycling (arXiv 2502.19261) draws a share of the units of every expert again. A unit is a row
of the gate, one of the up matrix and a column of the down matrix. Its new numbers are normal, with
the mean and the deviation that all numbers of the same matrix have. The seed, the layer and the
expert decide which units are drawn.

Noise cancels between two copies. A weight w of the down matrix becomes w (1 + noise) in one of them
and 2 w - w (1 + noise) in the other. The larger of the two is rounded, and the difference then
is a number of the dtype. So their sum is 2 w, bit for bit.

Copies of a mixture's experts share its tokens, by (2) of `growkern.growth.space.rules`, or sleep
behind their bias, (1) of `growkern.growth.space.rules`.
Nothing reads the scores of experts that sleep. With equal rows, an expert and its copy would always
be chosen together once the copy is awake. So a copy's row gets noise that is as long as the row.

The bits of a weight depend on its place in the whole tensor. So parts have the bits of the whole.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from itertools import groupby

import numpy as np
import torch
from torch import Tensor

from growkern.growth.models import Initial
from growkern.growth.plan.axes import asleep, axis_maps
from growkern.growth.plan.blueprint import Blueprint, Part, Task
from growkern.growth.plan.tensors.untrained import TILE, fill_random, philox_key
from growkern.growth.source import Read
from growkern.growth.space import depth_of_sleep, is_output, taken_together

# how long the rows are that part the tokens of an expert's copies, beside those of the router
SPLIT = 4.0
# units that are in memory in wide numbers at once
BLOCK = 64


def is_dropped(plan: Blueprint, task: Task) -> bool:
    """True for the matrices of experts of which units are drawn again."""
    return bool(plan.options.drop) and _is_of_copies(plan, task)


def _is_of_copies(plan: Blueprint, task: Task) -> bool:
    """True for the matrices of experts that are copies of a dense FFN."""
    return (
        plan.small.dense_model is not None and bool(task.tensor.row.dense) and len(task.shape) == 3
    )


def drop_units(
    plan: Blueprint, task: Task, part: Part, out: Tensor, build: Callable[[int], Tensor]
) -> None:
    """Draw units again in a part of a tensor of experts, which holds copies of the source.

    `build` makes the whole matrix of an expert, as a copy. It is called if the part cuts it.
    """
    ranges = task.ranges(part)
    is_whole = [len(r) for r in ranges[1:]] == list(task.shape[1:])
    for number, matrix in zip(ranges[0], out, strict=True):
        if is_whole:
            statistics = _statistics(task, matrix)
        else:
            make = partial(_of_built, task, build, number)
            statistics = plan.cache.get(("drop", task.name, number), make)
        _draw(plan, task, number, statistics, ranges[1:], matrix)


def _of_built(task: Task, build: Callable[[int], Tensor], number: int) -> list[tuple[float, float]]:
    return _statistics(task, build(number))


def _matrices(task: Task) -> tuple[int, int]:
    """How many matrices lie side by side in an expert's, and the axis of their units."""
    axis = 2 if is_output(task.tensor.row) else 1
    return task.tensor.axes[axis].count("|") + 1, axis


def _statistics(task: Task, matrix: Tensor) -> list[tuple[float, float]]:
    """Mean and deviation of each matrix of an expert, the same on any number of threads."""
    count, _ = _matrices(task)
    result = []
    for part in matrix.chunk(count):
        wide = (rows.cpu().double() for rows in part.split(BLOCK))
        blocks = [(x.mean(1), x.square().mean(1)) for x in wide]
        mean, square = (torch.cat(means).mean().item() for means in zip(*blocks, strict=True))
        result.append((mean, math.sqrt(max(square - mean**2, 0.0))))
    return result


def _draw(
    plan: Blueprint,
    task: Task,
    number: int,
    statistics: Sequence[tuple[float, float]],
    ranges: Sequence[range],
    out: Tensor,
) -> None:
    """Draw units of one expert; `ranges` are the place of `out` in its matrix."""
    count, axis = _matrices(task)
    units = task.shape[axis] // count
    # the same units of all matrices of an expert
    layer = (task.tensor.stack, task.tensor.layer)
    rng = _generator(plan, "units", *layer, number)
    gone = np.sort(rng.permutation(units)[: round(plan.options.drop * units)])
    rng = _generator(plan, task.name, number)
    of_units, others = ranges[axis - 1], ranges[2 - axis]
    view = out if axis == 1 else out.T
    for place, (mean, deviation) in enumerate(statistics):
        for block in np.split(gone + place * units, range(BLOCK, len(gone), BLOCK)):
            drawn = rng.standard_normal((len(block), task.shape[3 - axis]), dtype=np.float32)
            inside = (block >= of_units.start) & (block < of_units.stop)
            numbers = drawn[inside, others.start : others.stop] * np.float32(deviation)
            rows = torch.from_numpy(block[inside] - of_units.start).to(out.device)
            view[rows] = torch.from_numpy(numbers + np.float32(mean)).to(out)


def is_noisy(plan: Blueprint, task: Task) -> bool:
    """True for the matrices that noise makes differ between two copies of an FFN."""
    is_noise = plan.options.symmetry == "noise"
    return is_noise and _is_of_copies(plan, task) and is_output(task.tensor.row)


def add_noise(plan: Blueprint, task: Task, part: Part, out: Tensor) -> None:
    """Add noise to a part of a tensor of experts; arguments as in `drop_units`."""
    numbers = task.ranges(part)[0]
    together = taken_together(plan.small, plan.options)
    for number, matrix in zip(numbers, out, strict=True):
        pair, place = divmod(number, together)
        copy, which = divmod(place, together // 2)
        rng = _generator(plan, "noise", task.name, pair, which)
        rows, bytes_each = task.shape[1], -(-task.shape[2] // 8)
        bits = np.frombuffer(rng.bytes(rows * bytes_each), np.uint8).reshape(rows, bytes_each)
        own = torch.from_numpy(bits[part[1]].copy())
        for block, some in zip(matrix.split(BLOCK), own.split(BLOCK), strict=True):
            signs = np.unpackbits(some.numpy(), axis=1, count=task.shape[2])[:, part[2]]
            is_larger = torch.from_numpy(signs == copy).to(out.device)
            larger = block * (1 + plan.options.noise)
            block.copy_(torch.where(is_larger, larger, block - (larger - block)))


def _generator(plan: Blueprint, *which: object) -> np.random.Generator:
    return np.random.Generator(np.random.Philox(key=philox_key(plan, "drop", *which)))


def put_to_sleep(plan: Blueprint, task: Task, read: Read, part: Part, out: Tensor) -> None:
    """Change a part of a router's bias or matrix, `out`, where experts sleep."""
    sleeps = asleep(plan, task)
    assert sleeps is not None
    (space,) = plan.small.family.mixtures
    if space.asleep is None:
        _split_choice(plan, task, read, part, out)
        return
    where, source = task.ranges(part), read(task.source)
    numbers = [number for number in where[0] if sleeps[number]]
    rows, *others = axis_maps(plan, task)
    if not others:
        bias = source.cpu().double()
        # a model that is loaded in float64 has it in float32 too
        lowered = (bias - depth_of_sleep(bias)).float().to(out)
        for number in numbers:
            out[number - where[0].start] = lowered[rows.index[number]]
        return
    (cols,) = others
    # a tile of random numbers has rows of many experts
    for _, group in groupby(numbers, lambda number: number // TILE[0]):
        some = [*group]
        drawn = range(some[0], some[-1] + 1)
        noise = torch.empty(len(drawn), len(where[1]))
        initial = Initial(0.0, deviation=1.0)
        fill_random(plan, task, "asleep", initial, [drawn, where[1]], noise)
        for number in some:
            row = source[rows.index[number]].cpu().double()[cols.index % cols.source] * cols.scale
            size = row.norm() / len(row) ** 0.5
            out[number - where[0].start] += (noise[number - drawn.start].double() * size).to(out)


def _split_choice(plan: Blueprint, task: Task, read: Read, part: Part, out: Tensor) -> None:
    """Add n_j of (2) of `growkern.growth.space.rules` to a part of a router's matrix, `out`."""
    if not task.tensor.axes[-1].startswith("read:"):
        # a bias of the router or of the experts
        return
    rows, cols = axis_maps(plan, task)
    numbers, entries = task.ranges(part)
    source = read(task.source).cpu().double()[:, cols.index % cols.source] * cols.scale
    size = SPLIT * source.square().mean().sqrt().item()
    for place, number in enumerate(numbers):
        if copy := number // rows.source:
            noise = torch.empty(1, len(entries))
            initial = Initial(0.0, deviation=size)
            fill_random(plan, task, "split", initial, [range(copy, copy + 1), entries], noise)
            out[place] += noise[0].to(out)
