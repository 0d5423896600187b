"""Maps one axis of a target tensor to the source: the index and scale of every entry.

A weight U = E_out W P_in copies along its written axis and divides along its read axis (see (1) of
`growkern.growth.space.spaces`). Its gradient does the reverse. It divides along the written axis,
copies along the read axis, and undoes the scale of a row:

    dU = P_out^T dW E_in^T                                                                 (1)

(1) holds while all readers of a space take the same shares.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from growkern.growth.plan.blueprint import Blueprint, Task
from growkern.growth.space import generator, partial_sums, rank_in_group

# noise so large that it leaves the sign to the hash
RANDOM_SIGN = 256.0


@dataclass(frozen=True)
class AxisMap:
    """One axis of the gather that builds a target tensor.

    Attributes:
        index: source entry of every target entry, (target,) int64. Values from `source` on mean
            entries of the next layer (AKI). In the last `extra` entries, the index points into rows
            computed for them (`growth.plan.tensors.extras`).
        scale: factor of every target entry, (target,) float64.
        noise: size of the noise on every target entry, (target,) float64.
        source: length of the source's axis.
        extra: how many target entries at the end are gathered from computed rows.
        sums: with `symmetry="split"`, the two vectors of `take_shares`, (target,) float64
            each. They then replace `scale`. None otherwise.
        free: how many target entries at the end hold 0 where they are read, so that any weight may
            read them.
        copies: with `symmetry="routing"`, number and count of every copy, (target, 2) int64. A hash
            then gives each weight to one of them. None otherwise.
    """

    index: Tensor
    scale: Tensor
    noise: Tensor
    source: int
    extra: int = 0
    sums: tuple[Tensor, Tensor] | None = None
    copies: Tensor | None = None
    free: int = 0

    @cached_property
    def gathered_scale(self) -> Tensor:
        """The factor of the weight that an entry gathers: `scale`, or that of all copies together.

        With routing the copies of an entry share one weight, so its factor is the sum of theirs.
        """
        if self.copies is None:
            return self.scale
        whole = self.scale * self.copies[:, 1]
        # count times 1/count may be off by one rounding
        power = whole.abs().clamp(min=1e-300).log2().round().exp2().copysign(whole)
        return torch.where((whole / power - 1).abs() < 1e-12, power, whole)

    def times(self, factor: float) -> AxisMap:
        """This map with another factor for all entries."""
        if factor == 1:
            return self
        sums = self.sums and (self.sums[0] * factor, self.sums[1] * factor)
        return dataclasses.replace(self, scale=self.scale * factor, sums=sums)

    def within(self, index: Tensor, scale: Tensor, count: int) -> AxisMap:
        """This map within `count` entries of an axis before it, both as one axis without extras.

        Args:
            index, scale: of the target entries of that axis, (n,).
        """
        total = count * self.source
        own = torch.where(self.index < self.source, self.index, self.index - self.source + total)
        joined = (index[:, None] * self.source + own).flatten()
        scales = (scale[:, None] * self.scale).flatten()
        return AxisMap(joined, scales, self.noise.repeat(len(index)), total)

    def block(self, where: range) -> dict[str, Any]:
        """Index, scale, noise and copies of some entries, each None if it changes nothing."""
        at = slice(where.start, where.stop)
        index, scale, noise = self.index[at], self.gathered_scale[at], self.noise[at]
        copies = None if self.copies is None else self.copies[at]
        is_plain = torch.equal(index, torch.arange(self.source)) and not self.extra
        is_free = self.group(where) > 0
        if is_free:
            # s/n (1 +- n) is about +-s
            scale, noise = scale / RANDOM_SIGN, torch.full_like(noise, RANDOM_SIGN)
        is_scaled = (self.sums is None or is_free) and not bool((scale == 1).all())
        return {
            "index": None if is_plain else index,
            "scale": scale if is_scaled else None,
            "noise": noise if bool(noise.any()) else None,
            "copies": None if copies is None or bool((copies[:, 1] == 1).all()) else copies,
        }

    def group(self, where: range) -> int:
        """0 for copies. Free entries of one source entry have equal signs in one group only."""
        beyond = where.start - (len(self.index) - self.free)
        return 0 if beyond < 0 or not self.free else 1 + beyond // self.source

    def sums_of(self, where: range) -> tuple[Tensor, Tensor] | None:
        """`sums` of some target entries; None if every share is 1."""
        if self.sums is None or self.group(where):
            return None
        upto, before = (x[where.start : where.stop] for x in self.sums)
        return (upto, before) if bool((upto - before != 1).any()) else None

    def blocks(self, part: slice) -> Iterator[tuple[range, bool]]:
        """The copies, groups of free entries and extra ones of a slice; True for the last."""
        start, stop, _ = part.indices(len(self.index))
        end = len(self.index)
        first_extra = end - self.extra
        starts = [0, *range(end - self.free, end, self.source), first_extra, end]
        for first, last in pairwise(starts):
            a, b = max(start, first), min(stop, last)
            if a < b:
                yield range(a, b), a >= first_extra


def axis_map(plan: Blueprint, task: Task, axis: str, size: int) -> AxisMap:
    """The map of one axis of a weight: "write:SPACE", "read:SPACE" or the name of a size."""
    return plan.cache.get(("map", task.name, axis), lambda: _make_axis_map(plan, task, axis, size))


def axis_maps(plan: Blueprint, task: Task) -> list[AxisMap]:
    """The maps of all axes of a weight."""
    axes = zip(task.tensor.axes, task.shape, strict=True)
    return [axis_map(plan, task, axis, size) for axis, size in axes]


def _make_axis_map(plan: Blueprint, task: Task, axis: str, size: int) -> AxisMap:
    role, _, names = axis.partition(":")
    layout, layer = plan.layout, task.source_layer
    total = plan.small.axis_size(axis)
    if not names:
        # not a space but a plain size, such as the vocabulary: new entries copy a computed one
        index = torch.where(torch.arange(size) < total, torch.arange(size), 0)
        scale = torch.ones(size, dtype=torch.float64)
        return AxisMap(index, scale, torch.zeros_like(scale), total, extra=size - total)
    is_routed = role == "read" and plan.options.symmetry == "routing"
    # noise on copies of a unit would differ between the experts whose noise cancels
    cancels = plan.upcycling is not None and plan.upcycling.has_noise(task.tensor.row)
    has_noise = role == "read" and plan.options.symmetry == "noise" and not cancels
    is_new = (task.tensor.stack, task.tensor.layer) in plan.inserted
    pieces, copies, offset, extra, free = [], list[Tensor](), 0, 0, 0
    for name in names.split("|"):
        space = layout.space(name, layer)
        if is_new and plan.small.family.spaces[name].kind == "units":
            # what reads a block that adds nothing is 0: two zeros would never learn
            space = space.beside()
        if role == "read" and space.free_extra and plan.options.symmetry != "none":
            free = int(space.is_extra.sum())
        index = space.read_index if role == "read" else space.write_index
        from_next = from_next_layer(plan, task, role, name)
        is_mixed = bool(from_next.any())
        noise = space.noise(plan.options.noise) if has_noise and not is_mixed else None
        noise = torch.zeros(space.target, dtype=torch.float64) if noise is None else noise
        is_computed = index >= space.source
        extra = int(is_computed.sum())
        index = torch.where(is_computed, index - space.source, index + offset + total * from_next)
        if is_routed:
            # entries of two layers share one index: they are no copies of each other
            copies.append(
                torch.tensor([0, 1]).expand(space.target, 2) if is_mixed else space.copies
            )
        pieces.append((index, space.scale(role), noise, ~space.is_extra & (space.write != 0)))
        offset += space.source
    joined, scales, noises, is_copy = (torch.cat(x) for x in zip(*pieces, strict=True))
    if axis == _scaled_axis(task):
        scales = scales * layout.scale(task.tensor.row)
    is_split = role == "read" and plan.options.symmetry == "split"
    sums = partial_sums(joined, scales, is_copy) if is_split else None
    routed = torch.cat(copies) if is_routed else None
    return AxisMap(joined, scales, noises, total, extra, sums, routed, free)


def _scaled_axis(task: Task) -> str:
    """The axis that takes a tensor's factor `scale`: the first one that lies in a space."""
    return next(axis for axis in task.tensor.axes if ":" in axis)


def matrix_of(task: Task, number: int, count: int = 1) -> Task:
    """The task of `count` matrices of a tensor with three axes from a number on, joined to one."""
    tensor = dataclasses.replace(
        task.tensor, name=f"{task.name}.{number}", axes=task.tensor.axes[1:]
    )
    return dataclasses.replace(task, tensor=tensor, shape=(count * task.shape[1], task.shape[2]))


def gradient_map(plan: Blueprint, task: Task, axis: str, size: int) -> AxisMap:
    """The map of one axis of the gradient, as in (1), with scale 0 for what copies nothing."""
    role, _, names = axis.partition(":")
    layout = plan.layout
    total = plan.small.axis_size(axis)
    if not names:
        result = axis_map(plan, task, axis, size)
        scale = (torch.arange(size) < total).double()
        return dataclasses.replace(result, scale=scale, extra=0)
    pieces, offset = [], 0
    for name in names.split("|"):
        space = layout.space(name, task.source_layer)
        index = space.write_index if role == "read" else space.read_index
        # a factor multiplies the source's vector times `write`, and its gradient is as that's
        scale = space.write if role == "read" else space.read
        scale = scale * space.write if role == "factor" else scale
        has_source = ~space.is_extra & (index < space.source) & ~layout.untrained_units(name)
        has_source &= space.write != 0
        index = torch.where(has_source, index, 0) + offset
        index = index + total * from_next_layer(plan, task, role, name)
        pieces.append((index, torch.where(has_source, scale, 0.0)))
        offset += space.source
    joined, scales = (torch.cat(x) for x in zip(*pieces, strict=True))
    if axis == _scaled_axis(task):
        scales = scales / layout.scale(task.tensor.row)
    return AxisMap(joined, scales, torch.zeros_like(scales), total)


def noise_seed(plan: Blueprint, task: Task, group: int = 0) -> int:
    """The seed of a weight's noise or routing, of a group of `AxisMap.group`."""
    key = ("noise", task.name, group) if group else ("noise", task.name)
    return generator(plan.options.seed, *key).initial_seed()


def old_entries(plan: Blueprint, task: Task, axis: str, size: int) -> Tensor:
    """Which target entries are the first copy of a source entry, (size,) bool."""
    _, _, names = axis.partition(":")
    if not names:
        return torch.arange(size) < plan.small.axis_size(axis)
    pieces = []
    for name in names.split("|"):
        space = plan.layout.space(name, task.source_layer)
        # in larger heads, entries with read == 0 are copies that nothing reads: they are new
        is_read = (space.read != 0) & ~space.is_extra
        old = torch.zeros_like(is_read)
        old[is_read] = rank_in_group(space.read_index[is_read]) == 0
        pieces.append(old)
    return torch.cat(pieces)


def asleep(plan: Blueprint, task: Task) -> Tensor | None:
    """Which entries of the first axis are of new experts, where as many are chosen as before.

    They sleep, or share the tokens of the source's. (size,) bool; None: no entry is of such.
    """
    if not plan.small.is_of_experts(task.tensor):
        return None
    name = task.tensor.axes[0].partition(":")[2]
    sleeps = plan.layout.space(name, task.source_layer).read == 0
    return sleeps if bool(sleeps.any()) else None


def from_next_layer(plan: Blueprint, task: Task, role: str, name: str) -> Tensor:
    """1 for target units of this axis that come from the next source layer (AKI), else 0, int64."""
    space, kind = plan.layout.space(name, task.source_layer), plan.small.family.spaces[name].kind
    new = torch.zeros(space.target, dtype=torch.bool)
    if task.upper is None or kind == "experts":
        # copies of an expert stay whole
        pass
    elif plan.options.aki == "unit" and kind in ("heads", "units"):
        new = plan.layout.next_layer_units(name)
    elif plan.options.aki == "eq16" and role != "read":
        new = (torch.arange(space.target) >= space.source) & ~space.is_extra
    return new.long()
