"""Draws at random: whole tensors, those of DirectCopy, rows of routers, and parts of experts.

DirectCopy (bert2BERT, Table 1) puts the source into the leading block of a random tensor.

Random numbers are drawn in tiles, so that a part of a tensor has the same bits as the whole and
costs only the tiles that it touches. The seed and the tensor's name form the key of a Philox
generator; the tile's position sets the upper words of its counter. Changing `TILE` or the key
changes every random model.

The rows of a router may come from a safetensors file with a matrix for each layer, `layers.0`. The
option is its path. A plan adds the checksum to it, `FILE@xxh3:CHECKSUM`. So a record names the
rows, and another file is refused.

Copies of experts are made to differ: those of a dense FFN, and those that sleep. Drop-Upcycling
(arXiv 2502.19261) draws a share of the units of every expert again. A unit is a row of the gate,
one of the up matrix and a column of the down matrix. Its new numbers are normal, with the mean and
the deviation that all numbers of the same matrix have. The seed, the layer and the expert decide
which units are drawn.

Noise cancels between two copies. A weight w of the down matrix becomes w (1 + noise) in one of them
and 2 w - w (1 + noise) in the other. The larger of the two is rounded, and the difference then
is a number of the dtype. So their sum is 2 w, bit for bit.

Copies of a mixture's experts share its tokens, by (2) of `growkern.growth.space.rules`, or sleep
behind their bias, (1) of `growkern.growth.space.rules`. Nothing reads the scores of experts that
sleep. With equal rows, an expert and its copy would always be chosen together once the copy is
awake. So a copy's row gets noise that is as long as the row.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from itertools import groupby, product
from pathlib import Path
from typing import Any

import numpy as np
import safetensors
import torch
from torch import Tensor

from growkern.errors import GrowthError
from growkern.files import checksum, regular_size
from growkern.growth.models import Initial
from growkern.growth.options import ROUTERS, GrowthOptions
from growkern.growth.plan.axes import asleep, axis_maps
from growkern.growth.plan.blueprint import RANDOM, Blueprint, Part, Task
from growkern.growth.space import Upcycling, depth_of_sleep, is_output
from growkern.growth.stored import Read

# how long the rows are that part the tokens of an expert's copies, beside those of the router
SPLIT = 4.0
# units that are in memory in wide numbers at once
BLOCK = 64
# a tile takes 0.3 ms to draw and its generator 0.02 ms to make. Eight ranks that share 4096 columns
# get one tile's width each, so that no number is drawn twice
TILE = (64, 512)


def build_baseline(plan: Blueprint, task: Task, read: Read, part: Part, out: Tensor) -> Tensor:
    """Build a part of a target tensor, `out`: random as its class initialises it, or DirectCopy."""
    ranges = task.ranges(part)
    initial = plan.initial_tensors[task.name]
    if initial.deviation:
        fill_random(plan, task, "init", initial, ranges, out)
    else:
        out.fill_(initial.value)
    for row in initial.zero_rows:
        if row in ranges[0]:
            out[row - ranges[0].start] = 0.0
    if plan.options.method == "direct_copy" and not task.is_made:
        old = read(task.source)
        for block in product(*_old_runs(plan, task, part)):
            entries, places = zip(*block, strict=True)
            out[places] = old[entries].to(out.dtype)
    return out


def fill_random(
    plan: Blueprint,
    task: Task,
    purpose: str,
    initial: Initial,
    ranges: Sequence[range],
    out: Tensor,
) -> None:
    """Fill a part of a target tensor with random numbers, which depend on their places in it."""
    key = philox_key(plan, purpose, task.name)
    for tile in product(*map(_tiles, ranges, task.shape, (1, *TILE)[-len(ranges) :])):
        drawn = _drawn(key, tile, initial.cutoff)
        inside, wanted = [], []
        for where, (_, covered) in zip(ranges, tile, strict=True):
            start, stop = max(where.start, covered.start), min(where.stop, covered.stop)
            inside.append(slice(start - covered.start, stop - covered.start))
            wanted.append(slice(start - where.start, stop - where.start))
        numbers = torch.from_numpy(drawn)[tuple(inside)]
        out[tuple(wanted)] = numbers * initial.deviation + initial.value


def _drawn(key: int, tile: Sequence[tuple[int, range]], cutoff: float) -> Any:
    """The normal numbers of a tile of `_tiles`, float32 of NumPy."""
    place = [number for number, _ in tile]
    # the lowest of the counter's four words counts up inside the tile, so it starts at 0
    counter = [0, *place, *[0] * (3 - len(place))]
    rng = np.random.Generator(np.random.Philox(key=key, counter=counter))
    drawn = rng.standard_normal([len(covered) for _, covered in tile], dtype=np.float32)
    while (beyond := np.abs(drawn) > cutoff).any():
        drawn[beyond] = rng.standard_normal(int(beyond.sum()), dtype=np.float32)
    return drawn


def untrained_places(plan: Blueprint, task: Task) -> list[tuple[Tensor, Tensor]]:
    """With method="fresh": where a tensor begins untrained, by two vectors for each axis.

    The first, (target,) bool, has the rows of new heads and units, and the columns that read what
    is 0. An entry begins untrained if an axis has it. The second has the rows that must stay as
    they are, those that write the stream's extra entries.

    Returns:
        [] if the tensor has no such entries.
    """
    is_made = task.is_made or task.tensor.norm or task.tensor.is_copied or task.identity == "zero"
    if plan.options.method != "fresh" or is_made or task.name not in plan.initial_tensors:
        return []
    result = [
        _untrained_of(plan, task, *axis) for axis in zip(task.tensor.axes, task.shape, strict=True)
    ]
    return result if any(bool(new.any()) for new, _ in result) else []


def _untrained_of(plan: Blueprint, task: Task, axis: str, size: int) -> tuple[Tensor, Tensor]:
    role, _, names = axis.partition(":")
    none = torch.zeros(size, dtype=torch.bool)
    if not names or role == "factor":
        return none, none
    new, kept = [], []
    for name in names.split("|"):
        space = plan.layout.space(name, task.source_layer)
        is_free = space.is_extra & space.free_extra
        new.append(is_free if role == "read" else plan.layout.untrained_units(name))
        kept.append(space.is_extra & (role == "write"))
    return torch.cat(new), torch.cat(kept)


def draw_untrained(
    plan: Blueprint, task: Task, places: Sequence[tuple[Tensor, Tensor]], part: Part, out: Tensor
) -> None:
    """Draw the entries of `untrained_places` in a part of a target tensor, `out`."""
    initial, where = plan.initial_tensors[task.name], task.ranges(part)
    for axis in range(len(places)):
        free = [new if dim == axis else ~kept for dim, (new, kept) in enumerate(places)]
        # blocks of rows of one tile, so that little memory is needed
        runs = [_runs(x, r, TILE[0]) for x, r in zip(free[:-1], where[:-1], strict=True)]
        for box in product(*runs, _runs(free[-1], where[-1])):
            numbers = torch.full([*map(len, box)], initial.value, dtype=torch.float32)
            if initial.deviation:
                fill_random(plan, task, "init", initial, box, numbers)
            place = (
                slice(b.start - r.start, b.stop - r.start) for b, r in zip(box, where, strict=True)
            )
            out[tuple(place)] = numbers.to(out)


def _runs(wanted: Tensor, where: range, tile: int | None = None) -> list[range]:
    """The runs of wanted entries of an axis in a range, cut where tiles of this length meet."""
    entries = wanted[where.start : where.stop].nonzero().flatten() + where.start
    ends = [*(entries.diff() > 1).nonzero().flatten().add(1).tolist()]
    runs = [range(int(run[0]), int(run[-1]) + 1) for run in entries.tensor_split(ends) if len(run)]
    if tile is None:
        return runs
    return [
        range(max(run.start, first), min(run.stop, first + tile))
        for run in runs
        for first in range(run.start // tile * tile, run.stop, tile)
    ]


def build_random(
    plan: Blueprint,
    task: Task,
    part: Part,
    out: Tensor,
    build: Callable[[Part, Tensor], Tensor],
) -> Tensor:
    """Build a part of a random tensor by `build`, which fills parts with each row there once.

    A new router has equal rows for the experts that it takes together.
    """
    upcycling = plan.upcycling
    experts = upcycling.together if upcycling and upcycling.is_router(task.tensor) else 1
    if experts == 1:
        return build(part, out)
    rows = torch.arange(task.shape[0])[part[0]] // experts
    drawn = slice(int(rows[0]), int(rows[-1]) + 1)
    numbers = torch.empty(drawn.stop - drawn.start, *out.shape[1:], dtype=out.dtype)
    build((drawn, *part[1:]), numbers)
    return out.copy_(numbers[rows - drawn.start])


def philox_key(plan: Blueprint, *which: object) -> int:
    """The key of a generator that draws for one purpose."""
    digest = hashlib.sha256(repr((plan.options.seed, *which)).encode()).digest()
    return int.from_bytes(digest[:16], "little")


def _tiles(where: range, size: int, length: int) -> list[tuple[int, range]]:
    """The tiles of one axis that a range touches: number of the tile, and the range it covers."""
    numbers = range(where.start // length, -(-where.stop // length)) if where else range(0)
    return [(n, range(n * length, min((n + 1) * length, size))) for n in numbers]


def old_entries_within(plan: Blueprint, task: Task, part: Part) -> list[Tensor]:
    """Per axis, the source entries that DirectCopy puts into a part of the target, int64."""
    runs = _old_runs(plan, task, part)
    return [torch.cat([torch.arange(a.start, a.stop) for a, _ in axis]) for axis in runs]


def _old_runs(plan: Blueprint, task: Task, part: Part) -> list[list[tuple[slice, slice]]]:
    """Per axis, `_runs_of` the part."""
    axes = zip(task.tensor.axes, task.ranges(part), strict=True)
    return [_runs_of(plan, axis, where) for axis, where in axes]


def _runs_of(plan: Blueprint, axis: str, where: range) -> list[tuple[slice, slice]]:
    """The source entries that lie in a range of the target's axis, one run for each of its spaces.

    A run is a slice of the source's axis and the slice of `where` that it fills.
    """
    role, colon, names = axis.partition(":")
    blocks = [f"{role}:{name}" for name in names.split("|")] if colon else [axis]
    sizes = [[model.axis_size(block) for block in blocks] for model in (plan.small, plan.large)]
    runs, old, new = [], 0, 0
    for kept, grown in zip(*sizes, strict=True):
        start = min(max(where.start - new, 0), kept)
        stop = max(min(where.stop - new, kept), start)
        place = new - where.start
        runs.append((slice(old + start, old + stop), slice(place + start, place + stop)))
        old, new = old + kept, new + grown
    # drop empty runs: their slices may lie outside the range
    return [run for run in runs if run[0].start < run[0].stop] or [(slice(0, 0), slice(0, 0))]


MARK = "@xxh3:"


def with_checksum(options: GrowthOptions) -> GrowthOptions:
    """The options, whose file of rows has its checksum."""
    if options.router in ROUTERS or MARK in options.router:
        return options
    digest = _checksum(Path(options.router))
    return replace(options, router=f"{options.router}{MARK}{digest}")


def centroids_of(plan: Blueprint, task: Task) -> Tensor | None:
    """The rows that a router gets, (copies of the FFN, hidden size); None: they are random."""
    upcycling, is_new = plan.upcycling, task.source_layer is None
    if plan.options.router in ROUTERS or is_new or not upcycling:
        return None
    if not upcycling.is_router(task.tensor):
        return None
    layer = str(task.source_layer).rpartition(".")[2]
    return plan.cache.get(("centroids", layer), lambda: _read(plan, upcycling, layer))


def check_centroids(plan: Blueprint) -> None:
    """Refuse a file that is another one than when it was planned, or whose rows do not fit."""
    if plan.options.router in ROUTERS:
        return
    name, _, known = plan.options.router.partition(MARK)
    if (current := _checksum(Path(name))) != known:
        raise GrowthError(
            f"router={name!r}: the file has changed: its checksum is {current}, not {known}. Put "
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
            f"router={str(file)!r}: {why}: give a .safetensors file of rows, or one of "
            f"{', '.join(ROUTERS)}"
        ) from error


def _read(plan: Blueprint, upcycling: Upcycling, layer: str) -> Tensor:
    """The rows of a source layer in float64."""
    file, key = plan.options.router.partition(MARK)[0], f"layers.{layer}"
    try:
        with safetensors.safe_open(file, "pt") as opened:
            rows = opened.get_tensor(key)
    except (OSError, safetensors.SafetensorError) as error:
        raise GrowthError(f"router={file!r}: cannot read {key!r}: {error}") from error
    (space,) = plan.small.family.mixtures
    copies = plan.large.size(str(space.size)) // upcycling.together
    wanted = (copies, plan.small.size("stream"))
    if rows.shape != wanted or not rows.isfinite().all():
        raise GrowthError(
            f"router={file!r}: {key} is {rows.dtype} {list(rows.shape)}: it must be {list(wanted)} "
            "and finite, one row for each copy of the FFN: make the file with this model and "
            f"{copies} rows (examples/centroids.py)"
        )
    return rows.double()


def is_dropped(plan: Blueprint, task: Task) -> bool:
    """True for the matrices of experts of which units are drawn again."""
    upcycling = plan.upcycling
    return bool(plan.options.drop and upcycling and upcycling.is_copied(task.tensor.row))


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
    row, upcycling = task.tensor.row, plan.upcycling
    is_noise = plan.options.symmetry == "noise" and is_output(row)
    return bool(is_noise and upcycling and upcycling.is_copied(row))


def add_noise(plan: Blueprint, task: Task, part: Part, out: Tensor) -> None:
    """Add noise to a part of a tensor of experts; arguments as in `drop_units`."""
    numbers, upcycling = task.ranges(part)[0], plan.upcycling
    assert upcycling is not None
    together = upcycling.together
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
