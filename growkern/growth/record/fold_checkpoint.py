"""`fold`: a grown checkpoint back in the source's shapes, from its files and its lineage alone."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from tqdm import tqdm

from growkern.errors import GrowthError
from growkern.families.model import ModelSpec
from growkern.growth.disk.companions import complete
from growkern.growth.disk.shards import ShardLayout, lay_out
from growkern.growth.disk.staging import check_space, check_target, refusing, staging, sweep
from growkern.growth.disk.target_file import TargetFile
from growkern.growth.models import in_model_order
from growkern.growth.options import parse_size
from growkern.growth.record.fold import axis_folds, fold_rows
from growkern.growth.record.lineage import Lineage, read_lineage
from growkern.growth.source.files import row_blocks
from growkern.growth.source.source import Source, open_source


@dataclass(frozen=True)
class FoldReport:
    """What `growkern.fold` did.

    Attributes:
        directory: the new checkpoint.
        tensors: of every tensor there, the grown model's that it was folded from.
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
    """Fold a grown checkpoint, trained since or not, back into a model of the source's sizes.

    Every tensor is read back through its copies (`record.fold`); the source is not needed.
    Straight after an exact growth with fpi the result is the source: bit for bit where the grown
    weights sum to the source's (`symmetry="split"`; noise or equal shares where they are powers of
    two), else within rounding. After training it is the model that the copies make on average.

    Of a layer that the target has several times the first one counts; identity blocks are dropped,
    and what training put into them. New tokens, what a larger head added, and units that AKI took
    from the next layer are left out: an entry comes from its own copies or not at all.

    Args:
        target: directory of the grown checkpoint, or of one trained from it.
        directory: where to; must not exist unless `overwrite`.
        lineage: the lineage file, or the directory it lies in; default the target's own. Trainers
            do not copy it.
        dtype: of the result; default the source's.
        max_shard_size: as in `save_pretrained`.

    Raises:
        GrowthError: before anything is written: no lineage, or that of another model; random
            weights (`method="random"`); a source tensor, or some of its entries, that has no copy
            of its own in the target.
    """
    start, target, out = time.perf_counter(), Path(target), Path(directory).resolve()
    shard_size = parse_size("max_shard_size", max_shard_size)
    with refusing(out):
        sweep(out)
        check_target(target, out, overwrite)
    opened = open_source(target, allow_nonfinite=True)
    record = read_lineage(Path(lineage or target))
    small = opened.spec.with_config(record.source_config)
    chosen = choose(record, opened, small)
    dtype = dtype or record.source_dtype
    shapes = {name: record.origins[held].source_shape for name, held in chosen.items()}
    names = in_model_order(shapes, small, dtype)
    layout = lay_out(names, dtype, shard_size, small.stored_names)
    with refusing(out):
        check_space(out, sum(layout.sizes.values()))
    with staging(out, resume=False) as place:
        check_target(target, out, overwrite)
        new = place.open_new()
        _write(new, layout, opened, record, chosen, progress)
        complete(new, small, dtype, layout, target)
        place.publish(overwrite=overwrite)
    size = sum(header.nbytes for header in layout.tensors.values())
    return FoldReport(out, chosen, size, time.perf_counter() - start)


def choose(lineage: Lineage, grown: Source, small: ModelSpec) -> dict[str, str]:
    """For every source tensor the first target tensor that holds it.

    Args:
        small: the source, by the config in the lineage.

    Raises:
        GrowthError: a model the lineage does not speak of; a source tensor that nothing holds.
    """
    file = lineage.file
    if lineage.data.get("model_class") != grown.class_name:
        raise GrowthError(f"{file}: of a {lineage.data.get('model_class')}, not {grown.class_name}")
    if lineage.options.method == "random":
        raise GrowthError(f"{file}: method='random' kept nothing of the source to fold back onto")
    chosen: dict[str, str] = {}
    for name, origin in lineage.origins.items():
        if origin.holds:
            chosen.setdefault(origin.source, name)
    for name in [t.name for t in small.own_tensors]:
        if name not in chosen:
            raise GrowthError(f"{name}: nothing in the grown model comes from it; cannot be folded")
        origin, held = lineage.origins[chosen[name]], chosen[name]
        found = tuple(grown.read(held).shape) if held in grown.dtypes else "missing"
        if found != origin.shape or small.shapes[name] != origin.source_shape:
            raise GrowthError(f"{held} is {found}, {file} says {origin.shape}; give its lineage")
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
    with tqdm(total=total, desc="folding", unit="B", unit_scale=True, disable=not progress) as bar:
        for file_name, size in layout.sizes.items():
            file = TargetFile(directory / file_name, size, layout.heads[file_name])
            try:
                for name, header in layout.tensors.items():
                    if header.file != file_name:
                        continue
                    origin, tensor = lineage.origins[chosen[name]], grown.read(chosen[name])
                    folds = axis_folds(origin, partial(lineage.space, layer=origin.layer))
                    at = header.start
                    # sums are float64
                    for rows in row_blocks(header.shape, 8):
                        data = fold_rows(origin, folds, tensor, *rows).to(header.dtype).contiguous()
                        file.write(data.view(-1).view(torch.uint8), at)
                        at += data.nbytes
                        bar.update(data.nbytes)
            finally:
                file.close()
