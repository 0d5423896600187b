"""Builds the target's tensors from the source's: one gather with two scales per tensor.

A tensor can be built whole or in parts, with the same bits. Growth onto disk and into sharded
models depend on that.

At uneven LayerNorm widths the target has extra coordinates at the end of an axis. They are gathered
in a separate call, from a few rows that `growth.plan.tensors.extras` computes from the source.

Norms follow (3) of `growkern.growth.space.spaces`: gamma_t = kappa c / a gamma, beta_t = c beta.
Extra coordinates and the norms around inserted blocks have rules of their own.
`growth.optimizer.moments` mirrors all of these; keep both in step.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache, partial
from itertools import product
from typing import Any

import torch
from torch import Tensor

from growkern.growth.plan.axes import AxisMap, asleep, axis_maps, matrix_of, noise_seed
from growkern.growth.plan.blueprint import (
    COMPUTED,
    RANDOM,
    Blueprint,
    Part,
    Task,
    affine_gain,
    unit_gain,
)
from growkern.growth.plan.tensors.extras import extra_rows
from growkern.growth.plan.tensors.untrained import (
    add_noise,
    build_baseline,
    build_random,
    centroids_of,
    draw_untrained,
    drop_units,
    is_dropped,
    is_noisy,
    old_entries_within,
    put_to_sleep,
    untrained_places,
)
from growkern.growth.space import Space, partial_sums, take_shares
from growkern.growth.stored import Read
from growkern.ops.expand import OneByOne, Routing, Work, expand, work_on


def build_each(
    plan: Blueprint,
    put: Callable[[Task, Tensor], Any],
    *,
    device: torch.device,
    backend: str | None = None,
) -> None:
    """Build all tensors in turn; `put` gets each when it is complete, and may let it go."""
    work = work_on(device, backend)
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
    work: Work | None = None,
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
        shape = [len(where) for where in task.ranges(part)]
        out = torch.empty(shape, dtype=plan.dtype_of(task))
    is_norm = task.tensor.norm is not None
    if task.source == "zero" or (task.identity == "zero" and not is_norm):
        return out.zero_()
    if task.identity == "one":
        return out.fill_(1.0)
    if task.source == COMPUTED:
        return out.copy_(plan.computed[task.name][part])
    if task.tensor.is_copied and not task.is_made:
        return out.copy_(read(task.source)[part])
    if (matrix := task.matrix) is not task:
        place = task.part_of_matrix(part)
        flat = out.view([s.stop - s.start for s in place])
        as_matrix = partial(_as_matrix, plan, matrix, read)
        build_tensor(plan, matrix, read=as_matrix, backend=backend, part=place, out=flat, work=work)
        return out
    if plan.options.is_baseline:
        return build_baseline(plan, task, _on_cpu(read), part, out)
    if task.source == RANDOM:
        build = partial(build_baseline, plan, task, _on_cpu(read))
        if (rows := centroids_of(plan, task)) is not None:
            build = partial(_widen_rows, plan, task, rows)
        return build_random(plan, task, part, out, build)
    if is_norm:
        # norms are short vectors, so they are computed on the CPU for any device
        whole = build_norm(plan, task, _on_cpu(read), backend if out.is_cpu else None)
        return out.copy_(whole[part])
    work = work or OneByOne(backend)
    _build_weight(plan, task, read, part, out, work)
    if places := untrained_places(plan, task):
        work.then(partial(draw_untrained, plan, task, places, part, out))
    if is_dropped(plan, task):
        build = partial(_expert, plan, task, read, backend)
        work.then(partial(drop_units, plan, task, part, out, build))
    if is_noisy(plan, task):
        work.then(partial(add_noise, plan, task, part, out))
    return out


def _widen_rows(plan: Blueprint, task: Task, rows: Tensor, part: Part, out: Tensor) -> Tensor:
    """A part of a router with new rows, which read the source's stream, in the target's."""
    size = len(rows)
    tensor = replace(task.tensor, axes=(str(size), task.tensor.axes[1]))
    widened = replace(task, tensor=tensor, shape=(size, task.shape[1]), source="centroids")
    # computed on the CPU for any device, as norms are
    whole = torch.empty(out.shape, dtype=out.dtype)
    read = lambda name: rows  # noqa: E731
    return out.copy_(_build_weight(plan, widened, read, part, whole, OneByOne(None)))


def _expert(plan: Blueprint, task: Task, read: Read, backend: str | None, number: int) -> Tensor:
    """The matrix of one expert, as a copy of the source's."""
    part = (slice(number, number + 1), slice(None), slice(None))
    out = torch.empty(1, *task.shape[1:], dtype=plan.dtype_of(task))
    return _build_weight(plan, task, _on_cpu(read), part, out, OneByOne(backend))[0]


def _as_matrix(plan: Blueprint, matrix: Task, read: Read, name: str) -> Tensor:
    return read(name).reshape([plan.small.axis_size(axis) for axis in matrix.tensor.axes])


def _on_cpu(read: Read) -> Read:
    return lambda *which: read(*which).cpu()


def source_index(plan: Blueprint, task: Task, part: Part) -> list[Tensor] | None:
    """Per axis, the entries of `task.source` and `task.upper` that a part needs, int64.

    None: the part may need all entries.
    """
    is_constant = task.is_made or task.identity in ("zero", "one")
    if task.tensor.norm or is_constant or task.matrix is not task:
        return None
    if len(part) < 3 and asleep(plan, task) is not None:
        return None
    if task.tensor.is_copied:
        return [torch.arange(n)[where] for n, where in zip(task.shape, part, strict=True)]
    if plan.options.is_baseline:
        return old_entries_within(plan, task, part)
    needed = []
    for axis, gather, where in zip(task.tensor.axes, axis_maps(plan, task), part, strict=True):
        blocks = list(gather.blocks(where))
        if any(is_extra for _, is_extra in blocks) and not _is_nothing(plan, axis):
            needed.append(torch.arange(gather.source))
            continue
        copied = [gather.index[b.start : b.stop] for b, is_extra in blocks if not is_extra]
        # of a part that is all nothing one entry is read, as there is no tensor without entries
        needed.append(torch.cat(copied or [gather.index[:1]]) % gather.source)
    return needed


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
    index = None if is_small else source_index(plan, task, part)
    if index is None:
        return read

    def read_part(name: str, entries: Sequence[int] | None = None) -> Tensor:
        if name in (task.source, task.upper):
            check(name)
            return headers[name].read_entries(index)
        return read(name, entries)

    return cache(read_part)


def _build_weight(
    plan: Blueprint,
    task: Task,
    read: Read,
    part: Part,
    out: Tensor,
    work: Work,
) -> Tensor:
    axes = axis_maps(plan, task)
    if is_noisy(plan, task):
        # noise on copies of a unit would differ between the experts whose noise cancels
        axes = [replace(m, noise=torch.zeros_like(m.noise)) for m in axes]
    if len(axes) < 3:
        _build_matrix(plan, task, axes, read, part, out, work)
        if asleep(plan, task) is not None:
            work.then(partial(put_to_sleep, plan, task, read, part, out))
        return out
    numbers = task.ranges(part)[0]
    if out.is_contiguous() and _may_join(plan, task, axes, part):
        # as one matrix, which has the bits of each expert built by itself
        at = slice(numbers.start, numbers.stop)
        entries, index = axes[0].index[at].unique(return_inverse=True)
        # every block of columns asks for it
        of_experts = cache(partial(_matrices_of, read, entries=entries.tolist()))
        maps = [axes[1].within(index, axes[0].scale[at], len(entries)), axes[2]]
        matrix = matrix_of(task, numbers.start, len(numbers))
        where, whole = (slice(0, matrix.shape[0]), part[2]), (task, numbers.start)
        _build_matrix(plan, matrix, maps, of_experts, where, out.flatten(0, 1), work, whole)
        if extra := axes[1].extra:
            work.then(out[:, -extra:].zero_)
        return out
    for place, number in enumerate(numbers):
        of_expert = cache(partial(_matrices_of, read, entries=[int(axes[0].index[number])]))
        rows = axes[1].times(axes[0].scale[number].item())
        maps, whole = [rows, axes[2]], (task, number)
        matrix = matrix_of(task, number)
        _build_matrix(plan, matrix, maps, of_expert, part[1:], out[place], work, whole)
    return out


def _may_join(plan: Blueprint, task: Task, axes: Sequence[AxisMap], part: Part) -> bool:
    """Whether the experts of a part can be built by one call, their rows one after another."""
    own = zip(axes[1:], task.tensor.axes[1:], strict=True)
    is_whole = part[1].indices(task.shape[1]) == (0, task.shape[1], 1)
    # rows that are read have noise and routing of their own in every expert
    is_written = not task.tensor.axes[1].startswith("read:")
    return is_whole and is_written and not any(m.extra and not _is_nothing(plan, a) for m, a in own)


def _matrices_of(read: Read, name: str, entries: Sequence[int]) -> Tensor:
    """The source's matrices of some experts, one below the other."""
    return read(name, entries).flatten(0, 1)


def _build_matrix(
    plan: Blueprint,
    task: Task,
    axes: Sequence[AxisMap],
    read: Read,
    part: Part,
    out: Tensor,
    work: Work,
    whole: tuple[Task, int] | None = None,
) -> Tensor:
    """A weight of one or two axes, with their maps.

    `whole`: the tensor that it is a matrix of, and its number there.
    """
    first, seeded = 0, task
    if whole is not None:
        first = whole[1] * whole[0].shape[1]
        # read rows
        seeded = task if task.tensor.axes[0].startswith("read:") else whole[0]
    starts = [s.start or 0 for s in part]
    for block in product(*(m.blocks(s) for m, s in zip(axes, part, strict=True))):
        wheres, extra = zip(*block, strict=True)
        cells = [*zip(axes, wheres, strict=True)]
        inside = zip(wheres, starts, strict=True)
        place = out[tuple(slice(w.start - start, w.stop - start) for w, start in inside)]
        if any(e and _is_nothing(plan, a) for e, a in zip(extra, task.tensor.axes, strict=True)):
            place.zero_()
            continue
        rows, cols = (*(m.block(where) for m, where in cells), {})[:2]
        # noise and routing depend on the place in the whole tensor: parts have the same bits
        row, col = (*(where.start for where in wheres), 0)[:2]
        gathered = axes[0].index[wheres[0].start : wheres[0].stop] % axes[0].source
        # extra rows are float64 sums; they are computed on the CPU
        readers = _on_cpu(read) if any(extra) else read
        upper = None
        if task.upper is not None and _mixes(axes, block):
            upper = _gathered_rows(plan, task, task.upper, readers, extra, gathered).to(out.device)
        work.expand(
            _gathered_rows(plan, task, task.source, readers, extra, gathered).to(out.device),
            rows=rows["index"],
            cols=cols.get("index"),
            row_scale=rows["scale"],
            col_scale=cols.get("scale"),
            row_noise=rows["noise"],
            col_noise=cols.get("noise"),
            routing=_routing(plan, rows, cols),
            upper=upper,
            seed=noise_seed(plan, seeded, max(m.group(where) for m, where in cells)),
            offsets=(first + row, col),
            out=place,
        )
        for dim, (m, where) in enumerate(cells):
            if (sums := m.sums_of(where)) is not None:
                work.then(partial(take_shares, place, dim, *sums))
    return out


def _is_nothing(plan: Blueprint, axis: str) -> bool:
    """True if the extra entries of an axis are 0: a stream whose norms take no mean away."""
    space = plan.small.family.spaces.get(axis.partition(":")[2])
    return space is not None and space.kind == "stream" and not plan.small.family.norm.centres


def _routing(plan: Blueprint, *axes: dict[str, Any]) -> Routing | None:
    """The routing of the axis that has copies to choose from."""
    for dim, of_axis in enumerate(axes):
        if of_axis.get("copies") is not None:
            return Routing(dim, of_axis["copies"], plan.options.routing)
    return None


def _mixes(axes: Sequence[AxisMap], block: Sequence[tuple[range, bool]]) -> bool:
    """True if some entry of the block comes from the next layer (AKI)."""
    return any(
        not is_extra and bool((m.index[where.start : where.stop] >= m.source).any())
        for m, (where, is_extra) in zip(axes, block, strict=True)
    )


def build_norm(plan: Blueprint, task: Task, read: Read, backend: str | None) -> Tensor:
    """Weight or bias of one norm of the target, (target's size,) in the plan's dtype."""
    assert task.tensor.norm is not None
    entering, leaving = task.tensor.norm
    offset = plan.layout.family.norm.offset(task.tensor.is_bias)
    if task.identity == "zero":
        # where nothing enters, any weight adds 0, and lets the matrix below learn
        extra = plan.layout.space(entering, task.source_layer).is_extra
        free = 0.0 if task.tensor.is_bias or plan.layout.family.norm.centres else 1.0
        return torch.where(extra, free - offset, -offset).to(plan.dtype)
    if task.identity == "unit":
        gain = 0.0 if task.tensor.is_bias else unit_gain(plan, task)
        return torch.full(task.shape, gain, dtype=plan.dtype)
    value = read(task.source)
    # some models multiply by 1 + weight: scale the sum in float64, as rounding it loses digits
    value = value.to(plan.sum_dtype(value)) if offset == 0 else value.double() + offset
    gain = affine_gain(plan, task)
    index, scale, value = _gather(plan, task, value)
    exact = offset != 0 or gain != 1
    dtype = torch.float64 if exact else plan.dtype
    from_next, upper = norm_from_next_layer(plan, task), None
    if task.upper is not None and bool(from_next.any()):
        # AKI takes whole heads from the next layer's norm
        upper, index = read(task.upper).to(value.dtype) + offset, index + len(value) * from_next
    sums = None
    if not exact and plan.options.shares_add_up and plan.layout.is_dual(leaving):
        # the output enters a tied head
        sums = partial_sums(index, scale, ~plan.layout.space(entering).is_extra)
    built = expand(
        value,
        rows=index,
        row_scale=scale if sums is None else None,
        upper=upper,
        out_dtype=dtype,
        backend=backend,
    )
    if sums is not None:
        take_shares(built, 0, *sums)
    return (built * gain - offset).to(plan.dtype) if exact else built


def _gather(plan: Blueprint, task: Task, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Index and scale over the target, (n,) each, and the vector that they gather from."""
    layout = plan.layout
    assert task.tensor.norm is not None
    entering, leaving = (layout.space(name, task.source_layer) for name in task.tensor.norm)
    index, scale = entering.read_index, leaving.write
    if not task.tensor.is_bias:
        # a coordinate that is always 0 may have any weight: a copy's weight trains like a copy
        inverse = torch.where(entering.write == 0, 1.0, 1 / entering.write)
        scale = entering.kappa * torch.where(entering.write == 0, 1.0, leaving.write) * inverse
    extra = entering.is_extra
    if not bool(extra.any()):
        return index, scale, value
    appended, extra_scale, is_appended = _extra(plan, task, value, entering, leaving)
    index = torch.where(extra & is_appended, len(value), index)
    scale = torch.where(extra, extra_scale, scale)
    return index, scale, torch.cat([value, appended.to(value.dtype)])


def _extra(
    plan: Blueprint, task: Task, value: Tensor, entering: Space, leaving: Space
) -> tuple[Tensor, Tensor, Tensor]:
    """Weight or bias of a norm at the extra coordinates.

    Returns:
        An element to append to the source vector, (1,).
        The scale of every target coordinate, (n,) float64; only extra ones are set.
        Which target coordinates gather the appended element, (n,) bool.
    """
    layout, is_bias, extra = plan.layout, task.tensor.is_bias, entering.is_extra
    scale = torch.zeros(entering.target, dtype=torch.float64)
    is_appended = torch.zeros(entering.target, dtype=torch.bool)
    appended = torch.ones(1, dtype=torch.float64)
    if task.tensor.row.extra == "free" or not layout.family.norm.centres:
        # the centred input is 0 here, so any weight is exact; take the copies' mean, since a
        # weight of 0 would block the gradient
        copies = (entering.kappa * leaving.write / entering.write)[~extra]
        scale[extra] = 0.0 if is_bias else copies.mean()
        return appended, scale, is_appended
    carries = layout.is_carried and task.tensor.row.extra == "carry"
    if is_bias and (carries or not layout.is_carried):
        appended = value.double().mean()[None]
        scale[extra], is_appended[extra] = leaving.write[extra], True
    elif carries:
        signs = entering.extra_signs
        # the signs of a single extra coordinate do not sum to 0, which shifts the mean
        centred = signs - signs.sum() / entering.target
        scale[extra] = entering.kappa / (plan.options.carry * centred)
        is_appended[extra] = True
    return appended, scale, is_appended


def norm_from_next_layer(plan: Blueprint, task: Task) -> Tensor:
    """Which target entries of a norm AKI takes from the next layer, (n,) bool."""
    assert task.tensor.norm is not None
    if task.upper is None or plan.options.aki != "unit":
        return torch.zeros(task.shape, dtype=torch.bool)
    return plan.layout.next_layer_units(task.tensor.norm[1])


def _gathered_rows(
    plan: Blueprint, task: Task, name: str, read: Read, extra: Sequence[bool], rows: Tensor
) -> Tensor:
    """The tensor that a block of the target is gathered from.

    This is the source tensor `name` itself, an identity matrix if the source has no such tensor, or
    the rows computed for extra coordinates and for new tokens.

    Args:
        extra: per axis, True if the block's target entries are extra ones or new tokens.
        rows: source entries of the first axis that the block gathers, int64. Other rows of the
            result may be undefined.
    """
    if name == "identity":
        sizes = [plan.small.axis_size(axis) for axis in task.tensor.axes]
        weight = torch.eye(*sizes, dtype=plan.source.dtype)
    else:
        weight = read(name)
    return extra_rows(plan, task, name, weight, read, extra, rows) if any(extra) else weight
