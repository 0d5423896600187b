"""Draws at random: whole tensors, those of DirectCopy, new heads and units, and rows of routers.

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

Copies of a mixture's experts share its tokens, by (2) of `growkern.growth.space.ways`, or sleep
behind their bias, (1) of `growkern.growth.space.ways`. Nothing reads the scores of experts that
sleep. With equal rows, an expert and its copy would always be chosen together once the copy is
awake. So a copy's row gets noise that is as long as the row.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
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
from growkern.growth.plan.axes import axis_maps
from growkern.growth.plan.blueprint import RANDOM, Blueprint, Part, Task
from growkern.growth.plan.tensors.gather import Constant, Gather, Kept, Patch, on_cpu
from growkern.growth.space import Upcycling, depth_of_sleep, is_output
from growkern.growth.stored import Read
from growkern.ops import expand as ops

# how long the rows are that part the tokens of an expert's copies, beside those of the router
SPLIT = 4.0
# units that are in memory in wide numbers at once
BLOCK = 64
# a tile takes 0.3 ms to draw and its generator 0.02 ms to make. Eight ranks that share 4096 columns
# get one tile's width each, so that no number is drawn twice
TILE = (64, 512)


@dataclass(frozen=True)
class Baseline:
    """Random numbers in place of an operation's, or DirectCopy. All else is as with `usual`."""

    usual: Gather

    # the record has no factors, and the names of sources as they are
    factor, offset, has_inverse = 1.0, 0.0, False

    def __getattr__(self, name: str) -> Any:
        return getattr(self.usual, name)

    @property
    def source(self) -> str:
        return str(self.task.source)

    @property
    def holds(self) -> str:
        is_lost = self.task.is_made or isinstance(self.usual, Constant)
        return "" if is_lost or self.plan.options.method == "random" else "block"

    def build(self, read: Read, part: Part, out: Tensor, work: ops.Work) -> None:
        if isinstance(self.usual, Kept):
            self.usual.build(read, part, out, work)
            return
        draw(self.plan, self.task, part, out)
        if self.plan.options.method == "direct_copy" and not self.task.is_made:
            old = read(self.task.source).cpu()
            for block in product(*_old_runs(self.plan, self.task, part)):
                entries, places = zip(*block, strict=True)
                out[places] = old[entries].to(out.dtype)

    def needs(self, part: Part) -> list[Tensor] | None:
        needed = self.usual.needs(part)
        if needed is None or isinstance(self.usual, Kept):
            return needed
        runs = _old_runs(self.plan, self.task, part)
        return [torch.cat([torch.arange(a.start, a.stop) for a, _ in axis]) for axis in runs]


class Random(Gather):
    """Random numbers as the class draws them, or the rows of a router from a file."""

    def build(self, read: Read, part: Part, out: Tensor, work: ops.Work) -> None:
        upcycling = self.plan.upcycling
        if upcycling is None or not upcycling.is_router(self.task.tensor):
            self._fill(part, out)
            return
        # a new router has equal rows for the experts that it takes together
        rows = torch.arange(self.task.shape[0])[part[0]] // upcycling.together
        drawn = slice(int(rows[0]), int(rows[-1]) + 1)
        numbers = torch.empty(drawn.stop - drawn.start, *out.shape[1:], dtype=out.dtype)
        self._fill((drawn, *part[1:]), numbers)
        out.copy_(numbers[rows - drawn.start])

    def rates(self) -> None:
        return None

    def rounds(self) -> bool:
        return False

    def _fill(self, part: Part, out: Tensor) -> None:
        """Fill a part of a tensor that has each row once."""
        plan, task = self.plan, self.task
        if (rows := self.rows()) is None:
            draw(plan, task, part, out)
            return
        # rows of the source's stream, in the target's; on the CPU for any device, as norms are
        size = len(rows)
        tensor = replace(task.tensor, axes=(str(size), task.tensor.axes[1]))
        shape = (size, task.shape[1])
        widened = Gather(plan, replace(task, tensor=tensor, shape=shape, source="centroids"))
        whole = torch.empty(out.shape, dtype=out.dtype)
        widened.build(lambda name: rows, part, whole, ops.Work())
        out.copy_(whole)

    def rows(self) -> Tensor | None:
        """The rows that a router gets, (copies of the FFN, hidden size); None: they are random."""
        plan, layer = self.plan, self.task.source_layer
        upcycling = plan.upcycling
        if plan.options.router in ROUTERS or layer is None or not upcycling:
            return None
        if not upcycling.is_router(self.task.tensor):
            return None
        key = str(layer).rpartition(".")[2]
        return plan.cache.get(("centroids", key), lambda: _read(plan, upcycling, key))


class Fresh(Patch):
    """With method="fresh": rows of new heads and units, and columns that read what is 0."""

    def _places(self) -> list[tuple[Tensor, Tensor]]:
        """Where the tensor begins untrained, by two vectors for each axis.

        An entry begins untrained if the first vector of an axis, (target,) bool, has it. The second
        has the rows that must stay as they are, those that write the stream's extra entries.
        """
        if self.task.name not in self.plan.initial_tensors:
            return []
        axes = zip(self.task.tensor.axes, self.task.shape, strict=True)
        result = [self._places_of(*axis) for axis in axes]
        return result if any(bool(new.any()) for new, _ in result) else []

    def _places_of(self, axis: str, size: int) -> tuple[Tensor, Tensor]:
        role, _, names = axis.partition(":")
        none = torch.zeros(size, dtype=torch.bool)
        if not names or role == "factor":
            return none, none
        new, kept = [], []
        for name in names.split("|"):
            space = self.plan.layout.space(name, self.task.source_layer)
            is_free = space.is_extra & space.free_extra
            new.append(is_free if role == "read" else self.plan.layout.untrained_units(name))
            kept.append(space.is_extra & (role == "write"))
        return torch.cat(new), torch.cat(kept)

    def drawn(self) -> list[Tensor]:
        return [new for new, _ in self._places()]

    def apply(self, read: Read, part: Part, out: Tensor, backend: str | None) -> None:
        plan, task, places = self.plan, self.task, self._places()
        where = task.ranges(part)
        for axis in range(len(places)):
            initial = plan.initial_tensors[task.name]
            free = [new if dim == axis else ~kept for dim, (new, kept) in enumerate(places)]
            # blocks of rows of one tile, so that little memory is needed
            runs = [_runs(x, r, TILE[0]) for x, r in zip(free[:-1], where[:-1], strict=True)]
            for box in product(*runs, _runs(free[-1], where[-1])):
                numbers = torch.full([*map(len, box)], initial.value, dtype=torch.float32)
                if initial.deviation:
                    fill_random(plan, task, "init", initial, box, numbers)
                cells = zip(box, where, strict=True)
                place = tuple(slice(b.start - r.start, b.stop - r.start) for b, r in cells)
                out[place] = numbers.to(out)


def _generator(plan: Blueprint, *which: object) -> np.random.Generator:
    return np.random.Generator(np.random.Philox(key=philox_key(plan, "drop", *which)))


class Sleep(Patch):
    """Experts that no token reaches: in a router's bias or matrix, and in what they compute."""

    def apply(self, read: Read, part: Part, out: Tensor, backend: str | None) -> None:
        if len(part) > 2:
            # experts themselves stay copies
            return
        plan, task, sleeps = self.plan, self.task, self.idle
        assert sleeps is not None
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
            fill_random(plan, task, "asleep", Initial(0.0, deviation=1.0), [drawn, where[1]], noise)
            for number in some:
                row = source[rows.index[number]].cpu().double()
                row = row[cols.index % cols.source] * cols.scale
                size = row.norm() / len(row) ** 0.5
                added = noise[number - drawn.start].double() * size
                out[number - where[0].start] += added.to(out)


class Split(Sleep):
    """Experts that share the tokens of the source's: n_j of (2) in a router's matrix."""

    def apply(self, read: Read, part: Part, out: Tensor, backend: str | None) -> None:
        plan, task = self.plan, self.task
        if len(part) > 2 or not task.tensor.axes[-1].startswith("read:"):
            # experts, or a bias of them or of their router
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


class Drop(Patch):
    """Draws a share of the units of every expert again."""

    loses = True

    def apply(self, read: Read, part: Part, out: Tensor, backend: str | None) -> None:
        ranges = self.task.ranges(part)
        is_whole = [len(r) for r in ranges[1:]] == list(self.task.shape[1:])
        for number, matrix in zip(ranges[0], out, strict=True):
            if is_whole:
                statistics = self._statistics(matrix)
            else:
                make = partial(self._whole_statistics, read, backend, number)
                statistics = self.plan.cache.get(("drop", self.task.name, number), make)
            self._draw(number, statistics, ranges[1:], matrix)

    def _whole_statistics(
        self, read: Read, backend: str | None, number: int
    ) -> list[tuple[float, float]]:
        part = (slice(number, number + 1), slice(None), slice(None))
        copy = torch.empty(1, *self.task.shape[1:], dtype=self.plan.dtype_of(self.task))
        Gather(self.plan, self.task).build(on_cpu(read), part, copy, ops.Work(backend))
        return self._statistics(copy[0])

    def _matrices(self) -> tuple[int, int]:
        """How many matrices lie side by side in an expert's, and the axis of their units."""
        axis = 2 if is_output(self.task.tensor.row) else 1
        return self.task.tensor.axes[axis].count("|") + 1, axis

    def _statistics(self, matrix: Tensor) -> list[tuple[float, float]]:
        """Mean and deviation of each matrix of an expert, the same on any number of threads."""
        count, _ = self._matrices()
        result = []
        for part in matrix.chunk(count):
            wide = (rows.cpu().double() for rows in part.split(BLOCK))
            blocks = [(x.mean(1), x.square().mean(1)) for x in wide]
            mean, square = (torch.cat(means).mean().item() for means in zip(*blocks, strict=True))
            result.append((mean, math.sqrt(max(square - mean**2, 0.0))))
        return result

    def _draw(
        self,
        number: int,
        statistics: Sequence[tuple[float, float]],
        ranges: Sequence[range],
        out: Tensor,
    ) -> None:
        """Draw units of one expert; `ranges` are the place of `out` in its matrix."""
        plan, task = self.plan, self.task
        count, axis = self._matrices()
        units = task.shape[axis] // count
        # the same units of all matrices of an expert
        rng = _generator(self.plan, "units", task.tensor.stack, task.tensor.layer, number)
        gone = np.sort(rng.permutation(units)[: round(plan.options.drop * units)])
        rng = _generator(self.plan, task.name, number)
        of_units, others = ranges[axis - 1], ranges[2 - axis]
        view = out if axis == 1 else out.T
        for place, (mean, deviation) in enumerate(statistics):
            for block in np.split(gone + place * units, range(BLOCK, len(gone), BLOCK)):
                drawn = rng.standard_normal((len(block), task.shape[3 - axis]), dtype=np.float32)
                inside = (block >= of_units.start) & (block < of_units.stop)
                numbers = drawn[inside, others.start : others.stop] * np.float32(deviation)
                rows = torch.from_numpy(block[inside] - of_units.start).to(out.device)
                view[rows] = torch.from_numpy(numbers + np.float32(mean)).to(out)


class Noise(Patch):
    """Noise that cancels between two copies of an FFN."""

    def apply(self, read: Read, part: Part, out: Tensor, backend: str | None) -> None:
        task, numbers, upcycling = self.task, self.task.ranges(part)[0], self.plan.upcycling
        assert upcycling is not None
        together = upcycling.together
        for number, matrix in zip(numbers, out, strict=True):
            pair, place = divmod(number, together)
            copy, which = divmod(place, together // 2)
            rng = _generator(self.plan, "noise", task.name, pair, which)
            rows, bytes_each = task.shape[1], -(-task.shape[2] // 8)
            bits = np.frombuffer(rng.bytes(rows * bytes_each), np.uint8).reshape(rows, bytes_each)
            own = torch.from_numpy(bits[part[1]].copy())
            for block, some in zip(matrix.split(BLOCK), own.split(BLOCK), strict=True):
                signs = np.unpackbits(some.numpy(), axis=1, count=task.shape[2])[:, part[2]]
                is_larger = torch.from_numpy(signs == copy).to(out.device)
                larger = block * (1 + self.plan.options.noise)
                block.copy_(torch.where(is_larger, larger, block - (larger - block)))


def draw(plan: Blueprint, task: Task, part: Part, out: Tensor) -> None:
    """Fill a part of a target tensor, `out`, as its class initialises it."""
    ranges, initial = task.ranges(part), plan.initial_tensors[task.name]
    if initial.deviation:
        fill_random(plan, task, "init", initial, ranges, out)
    else:
        out.fill_(initial.value)
    for row in initial.zero_rows:
        if row in ranges[0]:
            out[row - ranges[0].start] = 0.0


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


def philox_key(plan: Blueprint, *which: object) -> int:
    """The key of a generator that draws for one purpose."""
    digest = hashlib.sha256(repr((plan.options.seed, *which)).encode()).digest()
    return int.from_bytes(digest[:16], "little")


def _tiles(where: range, size: int, length: int) -> list[tuple[int, range]]:
    """The tiles of one axis that a range touches: number of the tile, and the range it covers."""
    numbers = range(where.start // length, -(-where.stop // length)) if where else range(0)
    return [(n, range(n * length, min((n + 1) * length, size))) for n in numbers]


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
    return replace(options, router=f"{options.router}{MARK}{_checksum(Path(options.router))}")


def check_centroids(plan: Blueprint) -> None:
    """Refuse a file that is another one than when it was planned, or whose rows do not fit."""
    name, _, known = plan.options.router.partition(MARK)
    if (current := _checksum(Path(name))) != known:
        raise GrowthError(
            f"router={name!r}: the file has changed: its checksum is {current}, not {known}. Put "
            "back the one that the growth began with"
        )
    for task in plan.tasks:
        if task.source == RANDOM:
            Random(plan, task).rows()


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
