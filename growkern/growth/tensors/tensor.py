"""Carries a plan out, tensor by tensor: one gather with two scales each.

Where the target has extra coordinates (uneven LayerNorm widths) they form a block of their own at
the end of an axis, gathered from a few rows made from the source (`growth.tensors.extras`).
Every tensor can be built whole or block by block, with the same result to the bit.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from itertools import product

import torch
from torch import Tensor

from growkern.growth.plan.axes import AxisMap, axis_map, noise_seed
from growkern.growth.plan.blueprint import Blueprint, Task
from growkern.growth.space.shares import take_shares
from growkern.growth.tensors.baselines import build_baseline, old_entries_within
from growkern.growth.tensors.extras import made_rows
from growkern.growth.tensors.norms import build_norm
from growkern.ops.expand.work import OneByOne, Work

Read = Callable[[str], Tensor]
Part = Sequence[slice]


def build_tensor(
    plan: Blueprint,
    task: Task,
    *,
    read: Read | None = None,
    backend: str | None = None,
    part: Part | None = None,
    out: Tensor | None = None,
    work: Work | None = None,
) -> Tensor:
    """The value of one target tensor, or of a block of it, in the plan's dtype.

    Args:
        read: gives a source tensor by name; default the plan's source. A memory-mapped tensor is
            read only where the block needs it.
        backend: of `growkern.expand`.
        part: one slice per axis of the target tensor; default the whole of it. A block has the
            bits of the same place in the whole.
        out: where to put it; its shape and the plan's dtype, on any device. Default: new memory
            on the CPU.
        work: of `work_on`, does it with others; the value is there after `work.run()`.
    """
    read = read or plan.source.read
    part = tuple(part or (slice(None),) * len(task.shape))
    if out is None:
        shape = [len(range(*s.indices(n))) for s, n in zip(part, task.shape, strict=True)]
        out = torch.empty(shape, dtype=plan.dtype)
    is_norm = task.tensor.norm is not None
    if task.source == "zero" or (task.identity == "zero" and not is_norm):
        return out.zero_()
    if plan.options.is_baseline:
        return build_baseline(plan, task, _on_cpu(read), part, out)
    if is_norm:
        # a vector of a few thousand numbers: made on the CPU, wherever it goes
        whole = build_norm(plan, task, _on_cpu(read), backend if out.is_cpu else None)
        return out.copy_(whole[part])
    return _build_weight(plan, task, read, part, out, work or OneByOne(backend))


def _on_cpu(read: Read) -> Read:
    return lambda name: read(name).cpu()


def source_index(plan: Blueprint, task: Task, part: Part) -> list[Tensor] | None:
    """Per axis, the entries of `task.source` and `task.upper` that a block needs; None: all."""
    if task.tensor.norm or task.identity == "zero" or task.is_made:
        return None
    if plan.options.is_baseline:
        return old_entries_within(plan, task, part)
    needed = []
    for axis, size, where in zip(task.tensor.axes, task.shape, part, strict=True):
        found = axis_map(plan, task, axis, size)
        is_whole = any(is_extra for _, is_extra in found.blocks(where))
        index = torch.arange(found.source) if is_whole else found.index[where] % found.source
        needed.append(index)
    return needed


# ------------------------------------------------------------------ weights


def _build_weight(
    plan: Blueprint,
    task: Task,
    read: Read,
    part: Part,
    out: Tensor,
    work: Work,
) -> Tensor:
    axes = [
        axis_map(plan, task, axis, size)
        for axis, size in zip(task.tensor.axes, task.shape, strict=True)
    ]
    seed = noise_seed(plan, task)
    for block in product(*(m.blocks(s) for m, s in zip(axes, part, strict=True))):
        extra = tuple(is_extra for _, is_extra in block)
        maps_of_block = [m.block(where) for m, (where, _) in zip(axes, block, strict=True)]
        rows, cols = (*maps_of_block, {})[:2]
        # the noise of a line hangs on its place in the whole tensor
        offsets = [where.start for where, _ in block] + [0]
        gathered = axes[0].index[block[0][0].start : block[0][0].stop] % axes[0].source
        # made rows are sums, in float64 and on the CPU
        readers = _on_cpu(read) if any(extra) else read
        upper, place = None, out[_within(part, block)]
        if task.upper is not None and _mixes(axes, block):
            upper = made_rows(plan, task, task.upper, readers, extra, gathered).to(out.device)
        work.expand(
            made_rows(plan, task, task.source, readers, extra, gathered).to(out.device),
            rows=rows["index"],
            cols=cols.get("index"),
            row_scale=rows["scale"],
            col_scale=cols.get("scale"),
            row_noise=rows["noise"],
            col_noise=cols.get("noise"),
            upper=upper,
            seed=seed,
            row_offset=offsets[0],
            col_offset=offsets[1],
            out=place,
        )
        for dim, (m, (where, _)) in enumerate(zip(axes, block, strict=True)):
            sums = m.sums_of(where)
            if sums is not None:
                work.then(partial(take_shares, place, dim, *sums))
    return out


def _within(part: Part, block: Sequence[tuple[range, bool]]) -> tuple[slice, ...]:
    """Where a block of the target stands in the part of it that is built."""
    starts = [s.start or 0 for s in part]
    return tuple(
        slice(where.start - first, where.stop - first)
        for (where, _), first in zip(block, starts, strict=True)
    )


def _mixes(axes: Sequence[AxisMap], block: Sequence[tuple[range, bool]]) -> bool:
    """True when some entry comes from the next layer."""
    return any(
        not is_extra and bool((m.index[where.start : where.stop] >= m.source).any())
        for m, (where, is_extra) in zip(axes, block, strict=True)
    )
