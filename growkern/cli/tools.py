"""The commands `growkern demo`, `growkern bench` and `growkern info`."""

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Annotated

import typer

from growkern.cli.app import AsJson, app, show
from growkern.errors import GrowthError, nearest


@app.command()
def demo(
    directory: Annotated[Path, typer.Option("--dir", help="Directory for all files.")] = Path(
        "runs/demo"
    ),
    quick: Annotated[
        bool, typer.Option("--quick", help="One seed and fewer steps; takes a few minutes.")
    ] = False,
    seed: Annotated[
        int, typer.Option(min=0, max=2**32 - 1, help="Seed of the models and the data order.")
    ] = 0,
) -> None:
    """Train a small model, grow it and compare ways to train on. Needs no download."""
    from growkern.demo.run import run_demo

    run_demo(directory, quick=quick, seed=seed)


@app.command(context_settings={"allow_extra_args": True, "ignore_unknown_options": True})
def bench(
    context: typer.Context,
    name: Annotated[str | None, typer.Argument(help="Name of a benchmark; default: all.")] = None,
) -> None:
    """Run the benchmarks of the source tree. Other options are passed on to the benchmark."""
    root = Path(__file__).parents[2]
    files = {p.stem.removeprefix("bench_"): p for p in root.glob("bench/**/bench_*.py")}
    names = sorted(files)
    if not names:
        raise GrowthError("an installed package has no bench/: run this in a source tree")
    if name is not None and name not in names:
        raise GrowthError(f"no benchmark {name!r}{nearest(name, names)}")
    for chosen in [name] if name else names:
        module = files[chosen].relative_to(root).with_suffix("")
        command = [sys.executable, "-m", ".".join(module.parts), *context.args]
        code = exit_code(command, root)
        if code:
            raise typer.Exit(code)


def exit_code(command: list[str], directory: Path) -> int:
    """Run a command. If this process is stopped, so are all processes that the command started."""
    # in a session of its own: Ctrl-C reaches this process alone, and then its whole group is ended
    with subprocess.Popen(command, cwd=directory, start_new_session=True) as process:
        try:
            return process.wait()
        except BaseException:
            os.killpg(process.pid, signal.SIGKILL)
            raise


@app.command()
def info(as_json: AsJson = False) -> None:
    """Show versions, devices, and which backends run on this machine and why."""
    from growkern.info import collect

    show(collect(), as_json)
