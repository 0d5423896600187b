"""`growkern.fold`: shrinks a grown checkpoint back to the source's sizes, without the source."""

from __future__ import annotations

import time
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from tqdm import tqdm

from growkern.arguments import path_of
from growkern.errors import GrowthError
from growkern.families.model import ModelSpec
from growkern.growth.disk.checksums import refuse_changed
from growkern.growth.disk.companions import complete
from growkern.growth.disk.sentence import fold_modules, is_sentence_model
from growkern.growth.disk.shards import ShardLayout, TargetFile, lay_out, write_rows
from growkern.growth.disk.staging import check_space, check_target, refusing, staging, sweep
from growkern.growth.models import class_shapes
from growkern.growth.options import parse_size
from growkern.growth.plan.blueprint import dtype_of
from growkern.growth.record.fold import axis_folds, fold_rows
from growkern.growth.record.lineage import keep_lineage
from growkern.growth.record.recorded import Lineage, own_family_of, read_lineage_of
from growkern.growth.source.config import config_directory
from growkern.growth.source.files import row_blocks
from growkern.growth.source.source import Source, open_source
from growkern.publish.manifest import write_manifest


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
    small = opened.spec.with_config(record.source_config)
    chosen = choose(record, opened, small)
    dtype = dtype or record.source_dtype
    shapes = {name: record.origins[held].source_shape for name, held in chosen.items()}
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
        _write(new, layout, opened, record, chosen, progress)
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
    return FoldReport(out, chosen, size, time.perf_counter() - start)


def choose(lineage: Lineage, grown: Source, small: ModelSpec) -> dict[str, str]:
    """Choose the target tensor that each source tensor is folded from: the first that holds it.

    Returns:
        Source tensor name -> target tensor name.
    """
    file = lineage.file
    if lineage.data.get("model_class") != grown.class_name:
        raise GrowthError(
            f"{file} describes a {lineage.data.get('model_class')}, not a {grown.class_name}"
        )
    if lineage.options.method == "random":
        raise GrowthError(
            f"{file}: method='random' kept nothing of the source, so it cannot be folded"
        )
    chosen: dict[str, str] = {}
    for name, origin in lineage.origins.items():
        if origin.holds:
            chosen.setdefault(origin.source, name)
    for name in [t.name for t in small.own_tensors]:
        if name not in chosen:
            raise GrowthError(f"{name} cannot be folded: no tensor of the grown model holds it")
        origin, held = lineage.origins[chosen[name]], chosen[name]
        found = tuple(grown.read(held).shape) if held in grown.dtypes else "missing"
        if found != origin.shape or small.shapes[name] != origin.source_shape:
            raise GrowthError(
                f"{held} has shape {found}, but {file} says {origin.shape}: give its lineage"
            )
        if origin.next_layer:
            axis_folds(origin, partial(lineage.space, layer=origin.layer))
    return {name: chosen[name] for name in small.shapes if name in chosen}


def _write(
    directory: Path,
    layout: ShardLayout,
    grown: Source,
    lineage: Lineage,
    chosen: Mapping[str, str],
    progress: bool,
) -> None:
    total = sum(header.nbytes for header in layout.tensors.values())
    with ExitStack() as stack:
        bar = tqdm(total=total, desc="folding", unit="B", unit_scale=True, disable=not progress)
        stack.enter_context(bar)
        files = {}
        for name, size in layout.sizes.items():
            files[name] = TargetFile(directory / name, size, layout.heads[name])
            stack.callback(files[name].close)
        for name, header in layout.tensors.items():
            origin, tensor = lineage.origins[chosen[name]], grown.read(chosen[name])
            folds = axis_folds(origin, partial(lineage.space, layer=origin.layer))
            # 8 bytes per element, as sums are float64
            for rows in row_blocks(header.shape, 8):
                data = fold_rows(origin, folds, tensor, *rows).to(header.dtype).contiguous()
                write_rows(files, header, *rows, data.view(-1).view(torch.uint8))
                bar.update(data.nbytes)
