"""The commands `growkern train` and `growkern export`."""

import signal
import sys
from pathlib import Path
from typing import Annotated

import typer

from growkern.cli.app import Overwrite, app, silence_transformers
from growkern.errors import GrowthError
from growkern.printing import say

# of the error of a data loader
DEAD_WORKER = "DataLoader worker"


@app.command()
def train(
    run: Annotated[
        Path, typer.Argument(metavar="RUN.toml", help="File with the settings of the run.")
    ],
    overwrite: Annotated[
        bool,
        typer.Option(
            "--overwrite", help="Delete another run in the output directory, with its checkpoints."
        ),
    ] = False,
) -> None:
    """Train as RUN.toml says. Started again, it resumes from the last checkpoint.

    Ctrl-C and SIGTERM save a checkpoint and end the run with exit code 130 or 143.
    """
    from growkern.train.distributed.shard import leave_processes
    from growkern.train.run.messages import resume_command
    from growkern.train.run.start import run as start
    from growkern.train.safety.signals import INTERRUPTIONS, Terminated, settle

    silence_transformers()
    code = 0
    try:
        start(run, overwrite=overwrite)
    except INTERRUPTIONS as stop:
        settle()
        # a run that saved has said so
        if str(stop):
            say(f"growkern: {stop}", sys.stderr)
        code = 128 + (signal.SIGTERM if isinstance(stop, Terminated) else signal.SIGINT)
    except RuntimeError as error:
        if not str(error).startswith(DEAD_WORKER):
            raise
        # the system kills it where memory is short; PyTorch's traceback has a hundred lines
        raise GrowthError(
            f"a data worker was killed, which happens when memory is short; to resume: "
            f"{resume_command(run)}"
        ) from error
    leave_processes()
    raise typer.Exit(code)


@app.command()
def export(
    run: Annotated[
        Path,
        typer.Argument(metavar="RUN", help="Output directory of a run, or a checkpoint in it."),
    ],
    target: Annotated[
        Path, typer.Argument(metavar="MODEL_DIR", help="Hugging Face directory to be made.")
    ],
    dtype: Annotated[
        str | None, typer.Option(help="Dtype of the weights; default: as in the checkpoint.")
    ] = None,
    overwrite: Overwrite = False,
) -> None:
    """Make an ordinary Hugging Face directory of the last checkpoint of a run."""
    from growkern.train.safety.export import export as make

    silence_transformers()
    checkpoint = make(run, target, dtype=dtype, overwrite=overwrite)
    say(f"{target}: the model of {checkpoint}")
