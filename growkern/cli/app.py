"""The typer application, and what several commands share."""

import json
import os
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from growkern.errors import GrowthError, nearest, print_table
from growkern.growth.source import config_directory, is_hub_name, refuse_other_names
from growkern.package import version

DTYPES = ("float32", "bfloat16", "float16", "float64")

app = typer.Typer(
    name="growkern",
    epilog="Add --debug to any command to see the traceback of an error.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)


def _print_version(asked: bool) -> None:
    if asked:
        print(f"growkern {version()}")
        raise typer.Exit


@app.callback()
def options(
    asked: Annotated[
        bool,
        typer.Option(
            "--version", callback=_print_version, is_eager=True, help="Print the version."
        ),
    ] = False,
) -> None:
    """Grow a trained transformer into a larger one, and train it further."""


def checkpoint_there(path: Path) -> Path:
    """The path of a checkpoint, which must exist, or the name of a model on the Hub.

    Arguments are checked before a command imports PyTorch, which takes seconds.
    """
    if not os.path.exists(path):
        refuse_other_names(str(path))
    # a Path has lost the ./ that it was typed with
    if os.path.exists(path) or f"./{path}" in sys.argv or not is_hub_name(str(path)):
        config_directory(path)
    return path


def known_dtype(name: str | None) -> str | None:
    """The name of a dtype of PyTorch."""
    if name is not None and name not in DTYPES:
        raise GrowthError(f"--dtype {name!r}{nearest(name, DTYPES)}")
    return name


SOURCE: Any = {
    "metavar": "SRC",
    "help": "Directory of the source checkpoint, or a model on the Hub, ORGANISATION/NAME.",
}
SourcePath = Annotated[Path, typer.Argument(callback=checkpoint_there, **SOURCE)]
Revision = Annotated[
    str | None, typer.Option(help="Branch, tag or commit of an SRC on the Hub.  \\[main]")
]
Target = Annotated[Path, typer.Argument(metavar="DST", help="Directory of the grown checkpoint.")]
Overwrite = Annotated[bool, typer.Option("--overwrite", help="Replace the output if it exists.")]
ShardSize = Annotated[str, typer.Option(help="Largest size of a weight file.")]
MemoryLimit = Annotated[
    str, typer.Option(help="Most memory that weights may take, for models of any size.")
]
NoResume = Annotated[
    bool, typer.Option("--no-resume", help="Start again instead of resuming an interrupted run.")
]
LineageFile = Annotated[
    Path | None,
    typer.Option(exists=True, help="lineage.json of the growth; default: the one in DST."),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")]


def silence_transformers() -> None:
    """Switch off the progress bars of transformers, which repeat our own."""
    from transformers.utils import logging

    logging.disable_progress_bar()


def show(result: Any, as_json: bool = False) -> None:
    """Print a report, by its method `table`, or as JSON by `to_dict`."""
    if as_json:
        print_json(result.to_dict())
    else:
        print_table(result.table())


def print_json(data: dict[str, Any]) -> None:
    """Print a dictionary as indented JSON."""
    # letters beyond ASCII, and controls, are spelt out
    print(json.dumps(data, indent=2))
