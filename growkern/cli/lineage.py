"""The commands `growkern fold`, `growkern replay` and `growkern family check`."""

import sys
from pathlib import Path
from typing import Annotated, cast

import typer

from growkern.cli.app import (
    AsJson,
    LineageFile,
    MemoryLimit,
    NoResume,
    Overwrite,
    Revision,
    ShardSize,
    Source,
    Target,
    app,
    lineage_there,
    show,
    silence_transformers,
)
from growkern.cli.growth import DTYPES, dtype_of, print_growth
from growkern.cli.options import completing
from growkern.printing import human, say

tables = typer.Typer(no_args_is_help=True, help="Tables of your own, for other models.")
app.add_typer(tables, name="family", rich_help_panel="Growing")


@app.command()
def fold(
    target: Target,
    out: Annotated[Path, typer.Argument(metavar="OUT", help="Directory of the small checkpoint.")],
    lineage: LineageFile = None,
    overwrite: Overwrite = False,
    dtype: Annotated[
        str | None,
        typer.Option(
            help="Dtype of OUT; default: as in the source.", autocompletion=completing(DTYPES)
        ),
    ] = None,
    max_shard_size: ShardSize = "5GB",
) -> None:
    """Shrink DST back to the sizes of its source, even after further training."""
    from growkern.growth.record.fold import fold as make

    silence_transformers()
    report = make(
        target,
        out,
        lineage=lineage_there(lineage),
        overwrite=overwrite,
        dtype=dtype_of(dtype),
        max_shard_size=max_shard_size,
        progress=sys.stderr.isatty(),
    )
    say(f"{report.directory}: {len(report.tensors)} tensors, {human(report.bytes_written)}B")


@app.command()
def replay(
    lineage: Annotated[Path, typer.Argument(help="A grown checkpoint, or its lineage.json.")],
    source: Source,
    target: Target,
    revision: Revision = None,
    overwrite: Overwrite = False,
    memory_limit: MemoryLimit = "1GiB",
    no_resume: NoResume = False,
) -> None:
    """Repeat the growth that LINEAGE records: grow SRC into DST, byte for byte the same."""
    from growkern.growth.replay import replay as make

    silence_transformers()
    print_growth(
        make(
            cast(Path, lineage_there(lineage)),
            source,
            target,
            overwrite=overwrite,
            memory_limit=memory_limit,
            revision=revision,
            resume=not no_resume,
            progress=sys.stderr.isatty(),
        )
    )


@tables.command()
def check(
    table: Annotated[Path, typer.Argument(metavar="TABLE", help="TOML file of the table.")],
    source: Source,
    as_json: AsJson = False,
) -> None:
    """Compare TABLE with SRC, and grow a tiny model in every size. Exit 1 if one is wrong."""
    from growkern.growth.own_table import check_table
    from growkern.growth.source.hub import located

    silence_transformers()
    report = check_table(table, located(source, weights=False))
    show(report, as_json)
    if not report.ok:
        raise typer.Exit(1)
