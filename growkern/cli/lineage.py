"""`growkern fold` and `replay`."""

import sys
from pathlib import Path
from typing import Annotated

import typer

from growkern.cli.app import (
    MemoryLimit,
    NoResume,
    Overwrite,
    ShardSize,
    Source,
    Target,
    app,
    silence_transformers,
)
from growkern.cli.growth import dtype_of, print_growth


@app.command()
def fold(
    target: Target,
    out: Annotated[Path, typer.Argument(metavar="OUT", help="Directory of the small checkpoint.")],
    lineage: Annotated[
        Path | None, typer.Option(help="lineage.json of the growth; else DST's own.")
    ] = None,
    overwrite: Overwrite = False,
    dtype: Annotated[str | None, typer.Option(help="Of the result; else the source's.")] = None,
    max_shard_size: ShardSize = "5GB",
) -> None:
    """Fold the grown checkpoint DST, trained since or not, back into the source's sizes."""
    from growkern.growth.plan.table import human
    from growkern.growth.record.fold_checkpoint import fold as make

    silence_transformers()
    report = make(
        target,
        out,
        lineage=lineage,
        overwrite=overwrite,
        dtype=dtype_of(dtype),
        max_shard_size=max_shard_size,
        progress=sys.stderr.isatty(),
    )
    print(f"{report.directory}: {len(report.tensors)} tensors, {human(report.bytes_written)}B")


@app.command()
def replay(
    lineage: Annotated[Path, typer.Argument(help="A grown checkpoint, or its lineage.json.")],
    source: Source,
    target: Target,
    overwrite: Overwrite = False,
    memory_limit: MemoryLimit = "1GiB",
    no_resume: NoResume = False,
) -> None:
    """Grow SRC into DST once more, as LINEAGE says: the same files to the byte."""
    from growkern.growth.replay import replay as make

    silence_transformers()
    print_growth(
        make(
            lineage,
            source,
            target,
            overwrite=overwrite,
            memory_limit=memory_limit,
            resume=not no_resume,
            progress=sys.stderr.isatty(),
        )
    )
