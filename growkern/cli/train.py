"""The commands `growkern train` and `growkern plot`."""

from pathlib import Path
from typing import Annotated

import typer

from growkern.cli.app import app, silence_transformers


@app.command()
def train(
    run: Annotated[
        Path, typer.Argument(metavar="RUN.toml", help="File with the settings of the run.")
    ],
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Delete another run in the output directory.")
    ] = False,
) -> None:
    """Train as RUN.toml says. Started again, it resumes from the last checkpoint."""
    import torch.distributed as dist

    from growkern.train.run import train as start

    result = start(run, overwrite=overwrite)
    if dist.is_initialized():
        is_first = dist.get_rank() == 0
        dist.destroy_process_group()
        if not is_first:
            return
    if result is None:
        print("this run is finished already; nothing was done")
    else:
        print(f"{result.global_step} steps, mean training loss {result.training_loss:.4f}")


@app.command()
def plot(
    directories: Annotated[
        list[Path],
        typer.Argument(
            metavar="RUN...", help="Training directories; with --attention, checkpoints."
        ),
    ],
    out: Annotated[
        Path | None, typer.Option(help="PNG file.  \\[loss_vs_flops.png or attention.png]")
    ] = None,
    attention: Annotated[
        Path | None, typer.Option(metavar="TEXT", help="Draw attention maps for this text file.")
    ] = None,
) -> None:
    """Draw loss against FLOPs of runs side by side, or attention maps of checkpoints."""
    from growkern.plot import plot_attention, plot_runs

    if attention is None:
        out = out or Path("loss_vs_flops.png")
        plot_runs(directories, out)
    else:
        out = out or Path("attention.png")
        silence_transformers()
        plot_attention(directories, attention.read_text(encoding="utf-8")[:4096], out)
    print(out)
