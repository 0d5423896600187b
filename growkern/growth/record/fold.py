"""`growkern.fold`: folds a grown checkpoint back into the source's shapes.

`fold_rows` has the sums. This module reads the grown checkpoint and writes the other one.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path

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
from growkern.growth.plan.target import unread_in
from growkern.growth.record.fold_rows import axis_folds, fold_rows
from growkern.growth.record.lineage import keep_lineage
from growkern.growth.record.recorded import Lineage, own_family_of, read_lineage_of
from growkern.growth.source.config import config_directory
from growkern.growth.source.parts import Parts, Stacked
from growkern.growth.source.source import Source, open_source
from growkern.growth.source.stored import row_blocks
from growkern.growth.space.upcycling import parts_of
from growkern.publish.manifest import write_manifest

# tensor of a dense model -> where its mixture has it: tensor, place in its parts, and parts
Places = Mapping[str, tuple[str, int, Parts | None]]


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
    for name in unread_in(small):
        # the grown model has none of the layers that these fields count
        setattr(small.text, name, 0)
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
