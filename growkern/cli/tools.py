"""`growkern demo`, `bench` and `info`."""

import subprocess
import sys
from pathlib import Path
from typing import Annotated

import typer

from growkern.cli.app import AsJson, app, show
from growkern.errors import GrowthError, nearest


@app.command()
def demo(
    directory: Annotated[Path, typer.Option("--dir", help="Where to work.")] = Path("runs/demo"),
    quick: Annotated[bool, typer.Option("--quick", help="Minutes instead of a quarter.")] = False,
    seed: Annotated[int, typer.Option(help="Seed of the models and the data order.")] = 0,
) -> None:
    """Train, grow and train on here, on text that ships with Python: a table and a picture."""
    from growkern.demo import run_demo

    run_demo(directory, quick=quick, seed=seed)


@app.command(context_settings={"allow_extra_args": True, "ignore_unknown_options": True})
def bench(
    context: typer.Context,
    name: Annotated[str | None, typer.Argument(help="One benchmark; all when left out.")] = None,
) -> None:
    """Run the microbenchmarks of the source tree; further options go to the benchmark."""
    root = Path(__file__).parents[2]
    names = sorted(p.stem.removeprefix("bench_") for p in root.glob("bench/bench_*.py"))
    if not names:
        raise GrowthError("bench/ is not part of an installed package: run this in a source tree")
    if name is not None and name not in names:
        raise GrowthError(f"no benchmark {name!r}{nearest(name, names)}")
    for chosen in [name] if name else names:
        command = [sys.executable, "-m", f"bench.bench_{chosen}", *context.args]
        code = subprocess.run(command, cwd=root, check=False).returncode
        if code:
            raise typer.Exit(code)


@app.command()
def info(as_json: AsJson = False) -> None:
    """Show versions, devices, and which backends are live here and why."""
    from growkern.info import collect

    show(collect(), as_json)
