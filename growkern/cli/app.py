"""The typer application that the command modules register with, and what they share."""

import json
from pathlib import Path
from typing import Annotated, Any

import typer

app = typer.Typer(
    name="growkern",
    help="Grow a trained transformer into a larger one, and train on from where it was.",
    epilog="Add --debug to any command to see where an error came from.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)

Source = Annotated[Path, typer.Argument(metavar="SRC", help="Checkpoint directory.")]
Target = Annotated[Path, typer.Argument(metavar="DST", help="Directory of the grown checkpoint.")]
Overwrite = Annotated[bool, typer.Option("--overwrite", help="Replace the result if it exists.")]
ShardSize = Annotated[str, typer.Option(help="Largest file of the result.")]
MemoryLimit = Annotated[
    str, typer.Option(help="Most that weights take up in memory, whatever the model.")
]
NoResume = Annotated[
    bool, typer.Option("--no-resume", help="Start over where a run was interrupted.")
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")]


def silence_transformers() -> None:
    """Its bars for reading and writing say nothing that ours does not."""
    from transformers.utils import logging

    logging.disable_progress_bar()


def show(result: Any, as_json: bool = False) -> None:
    """Print a report as its table, or as JSON."""
    if as_json:
        print_json(result.to_dict())
    else:
        print_table(result.table())


def print_json(data: dict[str, Any]) -> None:
    print(json.dumps(data, indent=2))


def print_table(table: Any) -> None:
    from rich.console import Console

    Console().print(table)
