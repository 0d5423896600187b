"""The command `growkern plot`."""

import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from growkern.cli.app import (
    AsJson,
    LineageFile,
    app,
    lineage_there,
    print_json,
    print_table,
    silence_transformers,
)
from growkern.errors import GrowthError
from growkern.printing import say

Runs = Annotated[
    list[Path],
    typer.Argument(
        metavar="RUN...",
        help="Training directories, the first is the reference; with --attention or --weights "
        "a checkpoint and the one grown from it.",
    ),
]


@app.command()
def plot(
    directories: Runs,
    out: Annotated[
        Path | None,
        typer.Option(
            help="File to write, .png, .svg, .pdf ...  "
            "\\[loss_vs_flops.png, attention.png or weights.png]"
        ),
    ] = None,
    attention: Annotated[
        Path | None, typer.Option(metavar="TEXT", help="Draw attention maps for this text file.")
    ] = None,
    weights: Annotated[
        bool, typer.Option("--weights", help="Draw where each unit of the large model comes from.")
    ] = False,
    sources: Annotated[
        list[Path] | None,
        typer.Option(
            "--source",
            metavar="RUN",
            help="Training directory of the small model, to count its FLOPs too; again per seed.",
        ),
    ] = None,
    lineage: LineageFile = None,
    as_json: AsJson = False,
) -> None:
    """Draw loss against FLOPs, attention maps, or where the units of a grown model come from."""
    from growkern.plot.attention import plot_attention
    from growkern.plot.groups import savings_rows, savings_table
    from growkern.plot.weights import plot_weights
    from growkern.train.dataset.files import read_text

    is_growth = weights or attention is not None
    if weights and attention is not None:
        raise GrowthError("give --attention or --weights, not both: a picture shows one of them")
    if is_growth and sources:
        raise GrowthError("--source is for loss curves: leave it out with --attention or --weights")
    if lineage_there(lineage) is not None and not is_growth:
        raise GrowthError("--lineage goes with --attention or --weights")
    silence_transformers()
    groups: list[Any] = []
    if weights:
        if len(directories) != 2:
            raise GrowthError("--weights needs two checkpoints: the small one and the grown one")
        out = out or Path("weights.png")
        plot_weights(directories[0], directories[1], out, lineage=lineage)
    elif attention is not None:
        out = out or Path("attention.png")
        plot_attention(directories, read_text(attention, 4096), out, lineage=lineage)
    else:
        out = out or Path("loss_vs_flops.png")
        groups = _plot_losses(directories, out, sources or [])
    if as_json:
        print_json({"out": str(out), **({"runs": savings_rows(groups)} if groups else {})})
        return
    if len(groups) > 1:
        print_table(savings_table(groups))
    say(out)


def _plot_losses(runs: list[Path], out: Path, sources: list[Path]) -> list[Any]:
    from growkern.plot.losses import lacks, plot_runs

    groups = plot_runs(runs, out, sources=sources)
    if lacking := lacks([curve for group in groups for curve in group.curves]):
        say(f"growkern: {lacking}", sys.stderr)
    return groups
