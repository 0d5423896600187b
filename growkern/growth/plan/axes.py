"""One axis of a target tensor: where each of its entries comes from, and what it is scaled by.

A weight U = E_out W P_in copies what it writes and divides what it reads (`spaces`, (1)). Its
gradient is the mirror image: while every reader of a space takes the same shares,

    dU = P_out^T dW E_in^T                                                                 (1)

so the written axis is divided, the read axis is copied, and a row that was scaled is unscaled.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from growkern.growth.plan.blueprint import Blueprint, Task
from growkern.growth.space import maps
from growkern.growth.space.shares import partial_sums


@dataclass(frozen=True)
class AxisMap:
    """One axis of a gather over the target: (target,) each.

    Attributes:
        index: source entry; beyond `source` the next layer's; in the last `extra` entries, one of
            the rows made for them.
        scale, noise: float64.
        source: length of the source's axis.
        extra: how many target entries at the end are gathered from made rows.
        sums: where shares sum back bit for bit, what `shares.take_shares` takes; it is then used
            in the place of `scale`.
    """

    index: Tensor
    scale: Tensor
    noise: Tensor
    source: int
    extra: int = 0
    sums: tuple[Tensor, Tensor] | None = None

    def block(self, where: range) -> dict[str, Tensor | None]:
        """Index, scale and noise of some target entries, None where they change nothing."""
        at = slice(where.start, where.stop)
        index, scale, noise = self.index[at], self.scale[at], self.noise[at]
        is_plain = torch.equal(index, torch.arange(self.source)) and not self.extra
        is_scaled = self.sums is None and not bool((scale == 1).all())
        return {
            "index": None if is_plain else index,
            "scale": scale if is_scaled else None,
            "noise": noise if bool(noise.any()) else None,
        }

    def sums_of(self, where: range) -> tuple[Tensor, Tensor] | None:
        """`sums` of some target entries, None where every share is all of it."""
        if self.sums is None:
            return None
        upto, before = (x[where.start : where.stop] for x in self.sums)
        return (upto, before) if bool((upto - before != 1).any()) else None

    def blocks(self, part: slice) -> Iterator[tuple[range, bool]]:
        """The wanted target entries in runs that are copies, then extra ones."""
        start, stop, _ = part.indices(len(self.index))
        first_extra = len(self.index) - self.extra
        for a, b, is_extra in (
            (start, min(stop, first_extra), False),
            (max(start, first_extra), stop, True),
        ):
            if a < b:
                yield range(a, b), is_extra


def axis_map(plan: Blueprint, task: Task, axis: str, size: int) -> AxisMap:
    """The map of one axis of a weight."""
    return plan.kept.get(("map", task.name, axis), lambda: _make_axis_map(plan, task, axis, size))


def _make_axis_map(plan: Blueprint, task: Task, axis: str, size: int) -> AxisMap:
    role, _, names = axis.partition(":")
    layout, layer = plan.layout, task.source_layer
    total = plan.small.axis_size(axis)
    if not names:
        # a larger vocabulary: the new tokens are zero
        is_old = torch.arange(size) < total
        index = torch.arange(size) % max(total, 1)
        return AxisMap(index, is_old.double(), torch.zeros(size, dtype=torch.float64), total)
    pieces, first, extra = [], 0, 0
    for name in names.split("|"):
        space = layout.space(name, layer)
        index = space.write_index if role == "write" else space.read_index
        scale = space.write if role == "write" else space.read
        fresh = from_next_layer(plan, task, role, name)
        noise = None
        if role == "read" and plan.options.symmetry == "noise" and not bool(fresh.any()):
            noise = space.noise(plan.options.noise)
        made = index >= space.source
        extra = int(made.sum())
        index = torch.where(made, index - space.source, index + first + total * fresh)
        none = torch.zeros(space.target, dtype=torch.float64)
        pieces.append((index, scale, none if noise is None else noise, ~space.is_extra))
        first += space.source
    joined, scales, noises, is_copy = (torch.cat(x) for x in zip(*pieces, strict=True))
    if role == "write":
        scales = scales * layout.scale(task.tensor.row)
    is_split = role == "read" and plan.options.symmetry == "split"
    sums = partial_sums(joined, scales, is_copy) if is_split else None
    return AxisMap(joined, scales, noises, total, extra, sums)


def gradient_map(plan: Blueprint, task: Task, axis: str, size: int) -> AxisMap:
    """The map of that axis of the gradient, (1): 0 for entries that copy none of the source's."""
    role, _, names = axis.partition(":")
    layout = plan.layout
    if not names:
        return axis_map(plan, task, axis, size)
    total = plan.small.axis_size(axis)
    pieces, first = [], 0
    for name in names.split("|"):
        space = layout.space(name, task.source_layer)
        index = space.read_index if role == "write" else space.write_index
        scale = space.read if role == "write" else space.write
        made = space.is_extra | (index >= space.source)
        index = (
            torch.where(made, 0, index) + first + total * from_next_layer(plan, task, role, name)
        )
        pieces.append((index, torch.where(made, 0.0, scale)))
        first += space.source
    joined, scales = (torch.cat(x) for x in zip(*pieces, strict=True))
    if role == "write":
        scales = scales / layout.scale(task.tensor.row)
    return AxisMap(joined, scales, torch.zeros_like(scales), total)


def noise_seed(plan: Blueprint, task: Task) -> int:
    """Of the noise on a weight, as `growkern.expand` takes it."""
    return maps.generator(plan.options.seed, "noise", task.name).initial_seed()


def old_entries(plan: Blueprint, task: Task, axis: str, size: int) -> Tensor:
    """Where an axis of the source stands in the target's, (size,) bool: the first of all copies."""
    _, _, names = axis.partition(":")
    if not names:
        return torch.arange(size) < plan.small.axis_size(axis)
    pieces = []
    for name in names.split("|"):
        space = plan.layout.space(name, task.source_layer)
        # a larger head holds copies that nothing reads among the old entries
        is_read = (space.read != 0) & ~space.is_extra
        old = torch.zeros_like(is_read)
        old[is_read] = maps.rank_in_group(space.read_index[is_read]) == 0
        pieces.append(old)
    return torch.cat(pieces)


def from_next_layer(plan: Blueprint, task: Task, role: str, name: str) -> Tensor:
    """Target units of this axis that come from the next layer, (target,) int64 of 0 and 1."""
    space = plan.layout.space(name, task.source_layer)
    none = torch.zeros(space.target, dtype=torch.int64)
    if task.upper is None:
        return none
    if plan.options.aki == "eq16":
        if role == "read":
            return none
        new = torch.arange(space.target) >= space.source
        return (new & ~space.is_extra).long()
    is_unit = plan.small.family.spaces[name].kind in ("heads", "units")
    return plan.layout.fresh(name).long() if is_unit else none
