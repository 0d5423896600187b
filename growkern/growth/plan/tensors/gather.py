"""A target tensor: how it comes from the source, and all that follows from it. One class a kind.

`Gather` is the kind whose entries are copies of the source's, each with a share. The others
override what differs. Code that builds, predicts, records, compares and trains a tensor asks its
class. `growth.plan.tensors.tensor.kind_of` alone tells tensors apart.

A weight is one gather with two scales. At uneven LayerNorm widths the target has extra coordinates
at the end of an axis. They are gathered in a separate call, from a few rows that
`growth.plan.tensors.extras` computes from the source.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from itertools import product

import torch
from torch import Tensor

from growkern.growth.plan.axes import AxisMap, axis_maps, gradient_map, matrix_of, noise_seed
from growkern.growth.plan.blueprint import Blueprint, Part, Task
from growkern.growth.plan.tensors.extras import extra_rows
from growkern.growth.space import take_shares
from growkern.growth.stored import Read
from growkern.ops import expand as ops
from growkern.ops.expand import Routing


@dataclass(frozen=True)
class Patch:
    """Changes some of the numbers that a tensor gathers."""

    plan: Blueprint
    task: Task
    # as of `Gather`
    idle: Tensor | None = None
    # True if the tensor then holds no copies of the source
    loses = False

    def apply(self, read: Read, part: Part, out: Tensor, backend: str | None) -> None:
        """Change a part, `out`; arguments as of `build_tensor`."""

    def drawn(self) -> list[Tensor]:
        """As of `Gather`."""
        return []


@dataclass(frozen=True)
class Gather:
    """Copies, or an identity matrix where the source has no such tensor."""

    plan: Blueprint
    task: Task
    patches: tuple[Patch, ...] = ()

    def build(self, read: Read, part: Part, out: Tensor, work: ops.Work) -> None:
        """Fill `out` with a part; arguments as of `build_tensor`."""
        self.gather(axis_maps(self.plan, self.task), read, part, out, work)
        for patch in self.patches:
            work.then(partial(patch.apply, read, part, out, work.backend))

    def needs(self, part: Part) -> list[Tensor] | None:
        """Per axis, the entries of `task.source` and `task.upper` that a part needs, int64.

        None: the part may need all entries.
        """
        if self.task.is_made or (self.idle is not None and len(part) < 3):
            return None
        needed, maps = [], axis_maps(self.plan, self.task)
        for axis, own, where in zip(self.task.tensor.axes, maps, part, strict=True):
            blocks = list(own.blocks(where))
            if any(is_extra for _, is_extra in blocks) and not self._is_nothing(axis):
                needed.append(torch.arange(own.source))
                continue
            copied = [own.index[b.start : b.stop] for b, is_extra in blocks if not is_extra]
            # of a part that is all nothing one entry is read, as no tensor is without entries
            needed.append(torch.cat(copied or [own.index[:1]]) % own.source)
        return needed

    def rounds(self) -> bool:
        """True if building the tensor rounds weights.

        That is so if its copies add up to the source times a factor that rounds (`rounds`), or if
        some of its rows are computed as sums.
        """
        maps = axis_maps(self.plan, self.task)
        # rows of new tokens are sums too, but no old output depends on them. Without a mean the
        # extra coordinates are 0
        centres = self.plan.layout.family.norm.centres
        computed = zip(maps, self.task.tensor.axes, strict=True) if centres else ()
        if any(m.extra for m, axis in computed if ":" in axis):
            return True
        # no output depends on weights that read 0
        factors = [
            whole(m.index[:end], m.gathered_scale[:end], m.sums is not None)
            for m, end in ((m, len(m.index) - m.free) for m in maps)
        ]
        return rounds(factors, self.plan.dtype)

    def drawn(self) -> list[Tensor]:
        """Per axis, which entries are random numbers amid copies, bool; []: no entry."""
        return next((found for patch in self.patches if (found := patch.drawn())), [])

    # ---- for records, see `growth.record.lineage.origin_of`

    @property
    def source(self) -> str:
        return self.task.source

    @property
    def holds(self) -> str:
        return "" if self.task.is_made or any(patch.loses for patch in self.patches) else "copies"

    @property
    def factor(self) -> float:
        return self.plan.layout.scale(self.task.tensor.row)

    @property
    def offset(self) -> float:
        tensor = self.task.tensor
        return self.plan.layout.family.norm.offset(tensor.is_bias) if tensor.norm else 0.0

    # ---- for `growkern.verify`: by the maps alone, and without code that builds tensors

    @property
    def has_inverse(self) -> bool:
        """True if a grown tensor gives the source's back."""
        return self.holds == "copies" and self.task.upper is None

    def inverse(self, grown: Tensor) -> Tensor:
        """A grown tensor in the source's shape, float64.

            written axis    copies are averaged, weighted with the shares of their readers
            read axis       copies are summed, weighted with the coefficients of their writers
            other axes      the leading entries are taken, as of a vocabulary

        Shares sum to 1, and noise cancels in the sums. Extra coordinates are left out, as they hold
        nothing of the source.
        """
        x = grown.double()
        for dim, axis in enumerate(self.task.tensor.axes):
            entry, coefficient = self._copies(axis)
            kept = coefficient.nonzero().flatten()
            across = (-1, *(1 for _ in x.shape[dim + 1 :]))
            weighted = x.index_select(dim, kept) * coefficient[kept].view(across)
            shape = (*x.shape[:dim], self.plan.small.axis_size(axis), *x.shape[dim + 1 :])
            x = x.new_zeros(shape).index_add_(dim, entry[kept], weighted)
        return x / self.factor

    def _copies(self, axis: str) -> tuple[Tensor, Tensor]:
        """Of the target entries of an axis: the source entry of each, and its weight in the sum."""
        (role, _, names), size = axis.partition(":"), self.plan.small.axis_size(axis)
        if not names:
            return torch.arange(size), torch.ones(size, dtype=torch.float64)
        entries, weights, factors, offset = [], [], [], 0
        for name in names.split("|"):
            space = self.plan.layout.space(name, self.task.source_layer)
            weight = space.write if role == "read" else space.read * (space.write != 0)
            entries.append(torch.where(space.is_extra, 0, space.read_index + offset))
            weights.append(torch.where(space.is_extra, 0.0, weight))
            factors.append(space.scale(role))
            offset += space.source
        entry, weight, factor = torch.cat(entries), torch.cat(weights), torch.cat(factors)
        # copies of an entry give it back
        total = torch.zeros(size, dtype=torch.float64).index_add_(0, entry, factor * weight)
        return entry, weight / total[entry]

    # ---- for optimizers, see (2) and (4) of `growth.optimizer.moments`

    @property
    def has_known_gradient(self) -> bool:
        """False if the source's gradient does not tell that of the target's copies.

        With symmetry="split", every reader of a residual stream takes shares of its own, and
        attention reads heads by other shares than the projection above it. The gradient that comes
        back to a copy is then no fixed share of the source's. Only FFN units and the outputs of
        most norms have a single kind of reader. A norm over units mixes their gradients.
        """
        if self.plan.options.symmetry != "split":
            return True
        axes = (axis.partition(":") for axis in self.task.tensor.axes)
        written = [name for role, _, names in axes if role != "read" for name in names.split("|")]
        return not any(
            space.kind in ("stream", "heads")
            or space.weighted
            or (space.kind == "units" and space.size == "stream")
            for space in [self.plan.small.family.spaces[name] for name in written if name]
        )

    @property
    def is_new(self) -> bool:
        """True if the tensor holds nothing learned: it is in an inserted block or has no source."""
        is_inserted = (self.task.tensor.stack, self.task.tensor.layer) in self.plan.inserted
        return self.task.is_made or (is_inserted and self.task.identity != "affine")

    @property
    def idle(self) -> Tensor | None:
        """Which entries of the first axis have no gradient yet, (size,) bool; None: no entry."""
        return next((p.idle for p in self.patches if p.idle is not None), None)

    def rates(self) -> list[AxisMap] | None:
        """Per axis the map of u; None if all entries learn as usual."""
        return axis_maps(self.plan, self.task)

    def gradients(self, power: int = 1) -> list[AxisMap]:
        """Per axis the map of g, or of g^2 for means of squares."""
        named = zip(self.task.tensor.axes, self.task.shape, strict=True)
        maps = [gradient_map(self.plan, self.task, *axis) for axis in named]
        if power == 2 and self.idle is not None:
            # a new expert has had no gradient yet, but will have such as its source
            maps[0] = replace(maps[0], scale=maps[0].scale.masked_fill(self.idle, 1.0))
        return [replace(m, scale=m.scale**power) for m in maps]

    def pull(self) -> Tensor | None:
        """s, if weight decay pulls the source's value to 0 and the target's elsewhere."""
        return None

    # ---- building

    def gather(
        self, axes: list[AxisMap], read: Read, part: Part, out: Tensor, work: ops.Work
    ) -> None:
        """Fill `out` with a part by the maps of all axes: of the tensor, or of its moment."""
        task = self.task
        if len(axes) < 3:
            self._matrix(task, axes, read, part, out, work)
            return
        numbers = task.ranges(part)[0]
        if out.is_contiguous() and self._may_join(axes, part):
            # as one matrix, which has the bits of each expert built by itself
            at = slice(numbers.start, numbers.stop)
            entries, index = axes[0].index[at].unique(return_inverse=True)
            maps = [axes[1].within(index, axes[0].scale[at], len(entries)), axes[2]]
            matrix, own = matrix_of(task, numbers.start, len(numbers)), _of(read, entries.tolist())
            where, flat = (slice(0, matrix.shape[0]), part[2]), out.flatten(0, 1)
            self._matrix(matrix, maps, own, where, flat, work, numbers.start)
            if extra := axes[1].extra:
                work.then(out[:, -extra:].zero_)
            return
        for place, number in enumerate(numbers):
            maps = [axes[1].times(axes[0].scale[number].item()), axes[2]]
            matrix, own = matrix_of(task, number), _of(read, [int(axes[0].index[number])])
            self._matrix(matrix, maps, own, part[1:], out[place], work, number)

    def _may_join(self, axes: Sequence[AxisMap], part: Part) -> bool:
        """Whether the experts of a part can be built by one call, their rows one after another."""
        rows, named = self.task.shape[1], self.task.tensor.axes[1:]
        # rows that are read have noise and routing of their own in every expert
        may = part[1].indices(rows) == (0, rows, 1) and not named[0].startswith("read:")
        own = zip(axes[1:], named, strict=True)
        return may and not any(m.extra and not self._is_nothing(axis) for m, axis in own)

    def _matrix(
        self,
        task: Task,
        axes: Sequence[AxisMap],
        read: Read,
        part: Part,
        out: Tensor,
        work: ops.Work,
        number: int = 0,
    ) -> None:
        """A weight of one or two axes: the whole tensor, or its matrices from a number on."""
        plan, first = self.plan, number * self.task.shape[1] if number else 0
        # read rows
        seeded = task if task.tensor.axes[0].startswith("read:") else self.task
        starts = [s.start or 0 for s in part]
        for block in product(*(m.blocks(s) for m, s in zip(axes, part, strict=True))):
            wheres, extra = zip(*block, strict=True)
            cells = [*zip(axes, wheres, strict=True)]
            inside = zip(wheres, starts, strict=True)
            place = out[tuple(slice(w.start - start, w.stop - start) for w, start in inside)]
            if any(e and self._is_nothing(a) for e, a in zip(extra, task.tensor.axes, strict=True)):
                place.zero_()
                continue
            rows, cols = (*(m.block(where) for m, where in cells), {})[:2]
            # noise and routing depend on the place in the whole tensor: parts have the same bits
            row, col = (*(where.start for where in wheres), 0)[:2]
            gathered = axes[0].index[wheres[0].start : wheres[0].stop] % axes[0].source
            rows_of = partial(self._source_rows, task, read, extra, gathered)
            # of the axis that has copies to choose from
            routing = (
                Routing(dim, own["copies"], plan.options.routing)
                for dim, own in enumerate((rows, cols))
                if own.get("copies") is not None
            )
            upper = None
            if task.upper is not None and _mixes(cells, extra):
                upper = rows_of(task.upper).to(out.device)
            work.expand(
                rows_of(task.source).to(out.device),
                rows=rows["index"],
                cols=cols.get("index"),
                row_scale=rows["scale"],
                col_scale=cols.get("scale"),
                row_noise=rows["noise"],
                col_noise=cols.get("noise"),
                routing=next(routing, None),
                upper=upper,
                seed=noise_seed(plan, seeded, max(m.group(where) for m, where in cells)),
                offsets=(first + row, col),
                out=place,
            )
            for dim, (m, where) in enumerate(cells):
                if (sums := m.sums_of(where)) is not None:
                    work.then(partial(take_shares, place, dim, *sums))

    def _is_nothing(self, axis: str) -> bool:
        """True if the extra entries of an axis are 0: a stream whose norms take no mean away."""
        family = self.plan.small.family
        space = family.spaces.get(axis.partition(":")[2])
        return space is not None and space.kind == "stream" and not family.norm.centres

    def _source_rows(
        self, task: Task, read: Read, extra: Sequence[bool], rows: Tensor, name: str
    ) -> Tensor:
        """The tensor that a block is gathered from; arguments as of `extra_rows`."""
        if name == "identity":
            sizes = [self.plan.small.axis_size(axis) for axis in task.tensor.axes]
            weight = torch.eye(*sizes, dtype=self.plan.source.dtype)
        else:
            weight = read(name)
        if not any(extra):
            return weight
        # float64 sums, which are computed on the CPU
        return extra_rows(self.plan, task, name, weight.cpu(), on_cpu(read), extra, rows)


class Kept(Gather):
    """A tensor whose numbers are the same with every method of growth."""

    has_inverse = False


class Stored(Kept):
    """A tensor that never grows."""

    def build(self, read: Read, part: Part, out: Tensor, work: ops.Work) -> None:
        out.copy_(read(self.task.source)[part])

    def needs(self, part: Part) -> list[Tensor] | None:
        return [torch.arange(n)[where] for n, where in zip(self.task.shape, part, strict=True)]


class Computed(Kept):
    """A tensor that follows from the target's config."""

    def build(self, read: Read, part: Part, out: Tensor, work: ops.Work) -> None:
        out.copy_(self.plan.computed[self.task.name].view(self.task.shape)[part])


@dataclass(frozen=True)
class Constant(Kept):
    """Zeros or ones, with which a layer computes what the source does without the tensor."""

    value: float = 0.0

    holds = ""

    @property
    def source(self) -> str:
        return self.task.source if self.value else "zero"

    def build(self, read: Read, part: Part, out: Tensor, work: ops.Work) -> None:
        out.fill_(self.value)

    def needs(self, part: Part) -> None:
        return None


def on_cpu(read: Read) -> Read:
    """The same reader, whose tensors lie on the CPU."""
    return lambda *which: read(*which).cpu()


def _of(read: Read, entries: list[int]) -> Read:
    """A reader of the source's matrices of some experts, one below the other."""
    # every block of columns asks for it
    return cache(lambda name: read(name, entries).flatten(0, 1))


def _mixes(cells: Sequence[tuple[AxisMap, range]], extra: Sequence[bool]) -> bool:
    """True if some entry of a block comes from the next layer (AKI)."""
    return any(
        not is_extra and bool((m.index[where.start : where.stop] >= m.source).any())
        for (m, where), is_extra in zip(cells, extra, strict=True)
    )


def whole(index: Tensor, factor: Tensor, is_split: bool) -> Tensor:
    """The factor of every target entry, or that of all copies of its source entry together.

    With `is_split`, copies are shares that add up bit for bit (`take_shares`).
    """
    if not is_split:
        return factor
    return torch.zeros(int(index.max()) + 1, dtype=factor.dtype).index_add_(0, index, factor)[index]


def rounds(factors: list[Tensor], dtype: torch.dtype) -> bool:
    """True if a weight may be rounded when it is multiplied by one factor of every vector.

    Powers of two round nothing. But the half of a number below 1.2e-4 has more digits than float16
    holds. In other dtypes such numbers are too small to matter, and numbers too large are refused.
    """
    powers = [factor[factor != 0].abs().log2() for factor in factors]
    # sums of shares are off by float64 rounding, far below the rounding of the weights
    if any(bool(((power - power.round()).abs() > 1e-12).any()) for power in powers):
        return True
    least = sum(power.round().min().item() for power in powers if len(power))
    return dtype == torch.float16 and least < 0
