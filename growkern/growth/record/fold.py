"""`growkern.fold`: folds a grown checkpoint back into the source's shapes, W = P_out U E_in.

This is the inverse of growth for a model that was not trained since, and an average over the copies
after training. It works from `lineage.json` alone, without the source, and must follow every change
in how `growth.plan.tensors` builds tensors.

    written axis    copies are averaged, weighted with the shares of their readers          (1)
    read axis       copies are summed, weighted with the coefficients of their writers
    norm            gamma = sum_i c_i gamma_t[i], c_i = read_i write_i / kappa over the copies i,
                    with read of the space that the norm writes and write of the space that it
                    reads; this undoes (3) of `growkern.growth.space.spaces`
    no copies       the leading block is taken (vocabulary, DirectCopy)

Shares sum to 1, and noise cancels in the sums. Sums are float64 and rounded once at the end. Extra
coordinates are left out, as they hold nothing of their own.

Entries that AKI took from the next layer are left out too. The remaining copies get weights that
still add up to the source's entry, where s is the factor with which a copy was written:

    c_i = s_i / sum s_j^2                                                                   (2)
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor
from tqdm import tqdm

from growkern.arguments import path_of
from growkern.errors import GrowthError
from growkern.families.model import ModelSpec
from growkern.growth.disk.checksums import refuse_changed
from growkern.growth.disk.companions import complete
from growkern.growth.disk.sentence import fold_modules, is_sentence_model
from growkern.growth.disk.shards import ShardLayout, lay_out, write_rows
from growkern.growth.disk.staging import check_space, check_target, refusing, staging, sweep
from growkern.growth.models import class_shapes
from growkern.growth.options import GrowthOptions, parse_size
from growkern.growth.plan.blueprint import dtype_of
from growkern.growth.record.lineage import Origin, keep_lineage, read_index
from growkern.growth.record.recorded import Lineage, own_family_of, read_lineage_of
from growkern.growth.source.config import config_directory
from growkern.growth.source.parts import Parts, Stacked
from growkern.growth.source.source import Source, open_source
from growkern.growth.source.stored import row_blocks
from growkern.growth.space.spaces import Space
from growkern.growth.space.upcycling import parts_of
from growkern.ops.expand.op import folded
from growkern.publish.manifest import write_manifest

SpaceOf = Callable[[str], Space]
# the matrix of an expert, by its number
MatrixOf = Callable[[int], Tensor]
# a copy with a smaller share than this is lost in rounding, so its entry cannot be folded back
LEAST_SHARE = 2.0**-10
# tensor of a dense model -> where its mixture has it: tensor, place in its parts, and parts
Places = Mapping[str, tuple[str, int, Parts | None]]


class AxisFold(NamedTuple):
    """One axis of a fold, a weighted sum over k kept target entries.

    Source entry `entry[i]` gets `coefficient[i]` times target entry `keep[i]`.
    """

    keep: Tensor  # (k,) int64
    entry: Tensor  # (k,) int64
    coefficient: Tensor  # (k,) float64
    size: int  # of the source's axis


def fold_tensor(origin: Origin, space_of: SpaceOf, grown: Tensor) -> Tensor:
    """A whole target tensor folded into the source's shape, float64; spaces are of its layer."""
    return fold_rows(origin, axis_folds(origin, space_of), grown, 0, origin.source_shape[0])


def fold_rows(
    origin: Origin, folds: Sequence[AxisFold], grown: Tensor | MatrixOf, start: int, stop: int
) -> Tensor:
    """Rows [start, stop) of the folded tensor, float64. Only their copies in `grown` are read.

    `grown` is the target tensor, of the origin's shape, and may be memory-mapped. Or it reads the
    matrices of its experts: one at a time is in memory, however many copies there are.
    """
    return _sums(folds, grown, origin.offset, start, stop) / origin.factor - origin.offset


def _sums(
    folds: Sequence[AxisFold], grown: Tensor | MatrixOf, offset: float, start: int, stop: int
) -> Tensor:
    """The weighted sums over the copies of rows [start, stop), of a tensor plus `offset`."""
    rows, *others = folds
    wanted = (rows.entry >= start) & (rows.entry < stop)
    keep, index, coefficient = (x[wanted] for x in (rows.keep, rows.entry, rows.coefficient))
    if not isinstance(grown, Tensor):
        x = torch.zeros(stop - start, *(fold.size for fold in others), dtype=torch.float64)
        copies = zip(keep.tolist(), index.tolist(), coefficient.tolist(), strict=True)
        for number, place, factor in copies:
            matrix = grown(number)
            for first, last in row_blocks(x.shape[1:], x.itemsize):
                own = _sums(others, matrix, offset, first, last)
                x[place - start, first:last].add_(own, alpha=factor)
        return x
    x = grown.index_select(0, keep).double() + offset
    for dim, other in enumerate(others, 1):
        x = x.index_select(dim, other.keep).movedim(dim, -1) * other.coefficient
        shape = (*x.shape[:-1], other.size)
        x = folded(x.reshape(-1, len(other.keep)), 1, other.entry, other.size)
        x = x.view(shape).movedim(-1, dim)
    shape = x.shape[1:]
    x = x.reshape(len(x), -1) * coefficient[:, None]
    return folded(x, 0, index - start, stop - start).view(stop - start, *shape)


def axis_folds(origin: Origin, space_of: SpaceOf) -> list[AxisFold]:
    """How to fold each axis of a target tensor; args as in `fold_tensor`."""
    nothing = ("",) * len(origin.axes)
    axes = zip(origin.axes, origin.source_shape, origin.next_layer or nothing, strict=True)
    return [_axis_fold(origin, space_of, *axis) for axis in axes]


class _Copies(NamedTuple):
    """The target entries of an axis, (target,) each."""

    entry: Tensor  # of the source, int64
    factor: Tensor  # s of (2), float64
    weight: Tensor  # c before it is normalised, float64
    is_copy: Tensor  # False for entries to leave out


def _axis_fold(
    origin: Origin, space_of: SpaceOf, axis: str, size: int, next_layer: str
) -> AxisFold:
    role, _, names = axis.partition(":")
    if not names:
        return _joined(origin, [_leading(size, size)], size, next_layer)
    pieces, offset = [], 0
    for name in names.split("|"):
        space = space_of(name)
        piece = _copies_of(origin, space_of, space, role)
        entry = torch.where(piece.is_copy, piece.entry + offset, 0)
        pieces.append(piece._replace(entry=entry))
        offset += space.source
    return _joined(origin, pieces, size, next_layer)


def _leading(size: int, target: int) -> _Copies:
    """The first `size` target entries, as their own source entries."""
    ones = torch.ones(target, dtype=torch.float64)
    return _Copies(torch.arange(target), ones, ones, torch.arange(target) < size)


def _copies_of(origin: Origin, space_of: SpaceOf, space: Space, role: str) -> _Copies:
    if origin.holds == "block":
        return _leading(space.source, space.target)
    if origin.norm is None:
        pair = (space.scale(role), space.write if role == "read" else space.read)
        return _Copies(space.read_index, *pair, ~space.is_extra)
    entering, leaving = map(space_of, origin.norm)
    factor, weight = leaving.write, leaving.read
    if origin.is_gain:
        # where write is 0 the norm's input is 0 and its weight is free: avoid dividing by 0
        factor = entering.kappa * factor / torch.where(entering.write == 0, 1.0, entering.write)
        # kappa is left out here, as `_joined` normalises the weights
        weight = weight * entering.write
    return _Copies(entering.read_index, factor, weight, ~entering.is_extra & (weight != 0))


def _joined(origin: Origin, pieces: list[_Copies], size: int, next_layer: str) -> AxisFold:
    """The fold of an axis, with weights normalised so that copies give back their entry."""
    index, factor, weight, keep = (torch.cat(parts) for parts in zip(*pieces, strict=True))
    if next_layer:
        keep = keep.index_fill(0, read_index(next_layer), False)
        weight = factor
    keep = keep.nonzero().flatten()
    index, factor, weight = index[keep], factor[keep], weight[keep]
    total = torch.zeros(size, dtype=torch.float64).index_add_(0, index, factor * weight)
    if next_layer:
        lost = (total < LEAST_SHARE**2).nonzero().flatten().tolist()
        if lost:
            raise GrowthError(
                f"{origin.source}: {len(lost)} of {len(total)} entries, the first {lost[0]}, have "
                "no copy in the grown model, or one too small to recover: AKI replaced them by "
                "entries of the next layer, so this growth cannot be folded"
            )
    return AxisFold(keep, index, weight / total[index], size)


@dataclass(frozen=True)
class FoldReport:
    """Result of `growkern.fold`.

    Attributes:
        directory: the new checkpoint.
        tensors: name of every tensor in it -> name of the grown tensor that it was folded from.
        bytes_written: size of the weights, bytes.
        seconds: wall time.
    """

    directory: Path
    tensors: Mapping[str, str]
    bytes_written: int
    seconds: float


def fold(
    target: str | Path,
    directory: str | Path,
    *,
    lineage: str | Path | None = None,
    overwrite: bool = False,
    dtype: torch.dtype | None = None,
    max_shard_size: int | str = "5GB",
    progress: bool = True,
) -> FoldReport:
    """Shrink a grown checkpoint back to the source's sizes, even after further training.

    Every tensor is computed from its copies; the source is not needed. Straight after an exact
    growth with fpi the result is the source up to rounding. After training it is the average over
    the copies.

    Up to float32 it is the source bit for bit if growth rounded no weight. In 16 bits the plan says
    so: "exact: bfloat16". In any dtype it takes this:

    - Copies add up exactly: `symmetry="routing"` or `"split"`, or powers of two as their numbers.
    - Factors are powers of two. A padded stream and larger heads scale weights by the root of their
      growth. So do T5 and BART with `scale_embedding`, which multiply by the root of their width.
    - No norm of Gemma is scaled, as it stores its weight less 1. A padded stream scales them.
    - No gain is rounded around inserted post-norm blocks, as where `identity_gain` is small.

    In float64 the sums over the copies are rounded too. They are exact only for equal shares, with
    powers of two as the numbers of copies.

    Some of the target is dropped: all but the first copy of a layer, identity blocks with their
    training, new tokens, new entries of a padded stream or of larger heads, and units that AKI took
    from the next layer.

    Args:
        target: directory of the grown checkpoint, or of one trained from it.
        directory: directory to create; must not exist unless `overwrite`.
        lineage: the lineage file, or its directory; default: that of `target`. Give it after
            training into another directory by a trainer that does not copy it.
        overwrite: replace an existing directory.
        dtype: dtype of the result; default the source's.
        max_shard_size: as in `save_pretrained`.
        progress: show a progress bar.

    Raises:
        GrowthError: the lineage is missing, changed, or of another model; the model was grown with
            `method="random"`, or some source entries have no copy in the target. Nothing is
            written then.
    """
    start = time.perf_counter()
    target = path_of("target", target, "the directory of a grown model: save it first")
    out = path_of("directory", directory).resolve()
    shard_size = parse_size("max_shard_size", max_shard_size)
    with refusing(out):
        sweep(out)
        check_target(target, out, overwrite)
    opened = open_source(target, allow_nonfinite=True, family=own_family_of(lineage))
    record = read_lineage_of(target, lineage)
    refuse_changed(record.file)
    shown = record.shown(opened.spec.with_config(record.source_config))
    small, chosen = shown.dense or shown, choose(record, opened, shown)
    dtype = dtype or record.source_dtype
    places = places_in(shown, record.options)
    # of a dense model, what its mixture is made of
    shapes = {
        name: small.shapes[name] if shown.dense else record.origins[chosen[name]].source_shape
        for name in small.shapes
        if places.get(name, (name,))[0] in chosen
    }
    in_model = [name for name in class_shapes(small, dtype) if name in shapes]
    layout = lay_out(
        {name: shapes[name] for name in in_model} | shapes,
        {tensor.name: dtype_of(tensor, dtype) for tensor in small.tensors},
        shard_size,
        small.stored_names,
    )
    with refusing(out):
        check_space(out, sum(layout.sizes.values()))
    with staging(out, resume=False) as place:
        check_target(target, out, overwrite)
        new = place.open_new()
        _write(new, layout, opened, record, chosen, places, progress)
        copied = complete(new, small, dtype, layout, target)
        if is_sentence_model(beside := config_directory(target)):
            fold_modules(beside, new, record.space(small.output_space, None))
        # all of the grown model is read and copied now
        opened.refuse_changed()
        # the source may have been grown itself
        keep_lineage(record.earlier, new)
        # last, so that it covers every file
        write_manifest(new, copied)
        place.publish(overwrite=overwrite)
    size = sum(header.nbytes for header in layout.tensors.values())
    held = {name: chosen[places.get(name, (name,))[0]] for name in shapes}
    return FoldReport(out, held, size, time.perf_counter() - start)


def choose(lineage: Lineage, grown: Source, small: ModelSpec) -> dict[str, str]:
    """Source tensor -> the target tensor that it is folded from, the first that holds it."""
    file = lineage.file
    if lineage.data.get("model_class") != grown.class_name:
        raise GrowthError(
            f"{file} describes a {lineage.data.get('model_class')}, not a {grown.class_name}"
        )
    if lineage.options.method == "random":
        raise GrowthError(
            f"{file}: method='random' kept nothing of the source, so it cannot be folded"
        )
    drop = lineage.options.drop
    if drop and lineage.options.shared_expert == "zero":
        raise GrowthError(
            f"{file}: drop={drop:g} drew units of every expert again, so no mean over experts is "
            "the dense model: it cannot be folded"
        )
    chosen: dict[str, str] = {}
    for name, origin in lineage.origins.items():
        if origin.holds:
            chosen.setdefault(origin.source, name)
    for name in [t.name for t in small.own_tensors]:
        if name not in chosen:
            raise GrowthError(f"{name} cannot be folded: no tensor of the grown model holds it")
        origin, held = lineage.origins[chosen[name]], chosen[name]
        shape = grown.headers[held].shape if held in grown.headers else "missing"
        if shape != origin.shape or small.shapes[name] != origin.source_shape:
            raise GrowthError(
                f"{held} has shape {shape}, but {file} says {origin.shape}: give its lineage"
            )
        if origin.next_layer:
            axis_folds(origin, partial(lineage.space, layer=origin.layer))
    return {name: chosen[name] for name in small.shapes if name in chosen}


def places_in(shown: ModelSpec, options: GrowthOptions) -> Places:
    """`Places` of a mixture. Experts that added nothing at first do not count."""
    return {
        own: (name, number, part)
        for name, part in parts_of(shown).items()
        if bool(part.experts) != (options.shared_expert == "dense")
        for number, own in enumerate(part.names)
    }


def _write(
    directory: Path,
    layout: ShardLayout,
    grown: Source,
    lineage: Lineage,
    chosen: Mapping[str, str],
    places: Places,
    progress: bool,
) -> None:
    total = sum(header.nbytes for header in layout.tensors.values())
    with ExitStack() as stack:
        bar = tqdm(total=total, desc="folding", unit="B", unit_scale=True, disable=not progress)
        stack.enter_context(bar)
        files = layout.open(directory, stack)
        for name, header in layout.tensors.items():
            shown, number, part = places.get(name, (name, 0, None))
            origin, own = lineage.origins[chosen[shown]], partial(grown.read, chosen[shown])
            is_stack = isinstance(grown.headers[chosen[shown]], Stacked)
            tensor = partial(_matrix, own) if is_stack or (part and part.experts) else own()
            folds = axis_folds(origin, partial(lineage.space, layer=origin.layer))
            if part is not None and part.experts:
                whole = _part_of(partial(fold_rows, origin, folds, tensor), number, part)
                data = whole.to(header.dtype).contiguous()
                write_rows(files, header, 0, len(data), data.view(-1).view(torch.uint8))
                bar.update(data.nbytes)
                continue
            # 8 bytes per element, as sums are float64
            for rows in row_blocks(header.shape, 8):
                data = fold_rows(origin, folds, tensor, *rows).to(header.dtype).contiguous()
                write_rows(files, header, *rows, data.view(-1).view(torch.uint8))
                bar.update(data.nbytes)


def _matrix(read: Callable[[list[int]], Tensor], number: int) -> Tensor:
    return read([number])[0]


def _part_of(rows: Callable[[int, int], Tensor], number: int, part: Parts) -> Tensor:
    """A tensor of a dense model, float64, from the experts of its mixture.

    `rows` folds some of the experts; `number` is the place of the tensor in `part`.
    """
    matrices = (rows(expert, expert + 1)[0] for expert in range(part.experts))
    return torch.cat([m.chunk(len(part.names))[number] for m in matrices], part.axis)
