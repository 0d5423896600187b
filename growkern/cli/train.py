"""`growkern train` and `plot`."""

from pathlib import Path
from typing import Annotated

import typer

from growkern.cli.app import app


@app.command()
def train(
    run: Annotated[Path, typer.Argument(metavar="RUN.toml", help="Settings of the run.")],
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Drop another run in the output directory.")
    ] = False,
) -> None:
    """Train in two stages as RUN.toml says; started again, it goes on where it was."""
    from growkern.train.run import train as start

    result = start(run, overwrite=overwrite)
    if result is None:
        print("this run is finished; nothing was done")
    else:
        print(f"{result.global_step} steps, mean training loss {result.training_loss:.4f}")


@app.command()
def plot(
    runs: Annotated[list[Path], typer.Argument(metavar="RUN...", help="Training directories.")],
    out: Annotated[Path, typer.Option(help="PNG to write.")] = Path("loss_vs_flops.png"),
) -> None:
    """Draw loss against FLOPs for runs side by side."""
    from growkern.plot import plot_runs

    plot_runs(runs, out)
    print(out)
