"""The `growkern` command: reads options, calls the library, prints what it returns.

Exit codes: 0 done, 1 the check failed, 2 bad usage or bad input (one line on stderr).
"""

import functools
import inspect
import json
import subprocess
import sys
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import Annotated, Any

import typer

from growkern.errors import GrowthError, nearest
from growkern.families.load import load_family, supported_families
from growkern.growth.options import CHOICES, GrowthOptions
from growkern.growth.target import growable_fields

app = typer.Typer(
    name="growkern",
    help="Grow a trained transformer into a larger one, and train on from where it was.",
    epilog="Add --debug to any command to see where an error came from.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)

DTYPES = ("float32", "bfloat16", "float16", "float64")

# the growth options that are numbers; the others list their choices
OTHER_OPTIONS = {
    "noise": "Size of the cancelling noise, relative to each weight.",
    "carry": "Size of the mean that extra coordinates carry through a post-norm; 0: none.",
    "seed": "Seed of maps, noise, shares and random weights.",
}

Source = Annotated[Path, typer.Argument(metavar="SRC", help="Checkpoint directory.")]
Target = Annotated[Path, typer.Argument(metavar="DST", help="Directory of the grown checkpoint.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")]


def growth_options() -> list[tuple[str, type, Any]]:
    """Name, type and typer option of everything growth can be told, from its own definitions."""
    options = []
    for field in fields(GrowthOptions):
        text = " | ".join(CHOICES.get(field.name, ())) or OTHER_OPTIONS[field.name]
        option = typer.Option(help=f"{text}  \\[{field.default}]", rich_help_panel="Growth")
        options.append((field.name, type(field.default), option))
    families_with: dict[str, list[str]] = {}
    for model_type in supported_families():
        for name in growable_fields(load_family(model_type)):
            families_with.setdefault(name, []).append(model_type)
    for name, families in families_with.items():
        option = typer.Option(help=", ".join(families), rich_help_panel="Target sizes")
        options.append((name, int, option))
    return options


def takes_growth(command: Callable[..., None]) -> Callable[..., None]:
    """Gives a command the growth options and one option per target size, as a dict `growth`."""
    own = [p for p in inspect.signature(command).parameters.values() if p.name != "growth"]
    added = [
        inspect.Parameter(
            name,
            inspect.Parameter.KEYWORD_ONLY,
            default=None,
            annotation=Annotated[kind | None, option],
        )
        for name, kind, option in growth_options()
    ]

    @functools.wraps(command)
    def run(**given: Any) -> None:
        values = {p.name: given.pop(p.name) for p in own}
        command(**values, growth={k: v for k, v in given.items() if v is not None})

    parameters = [p.replace(kind=inspect.Parameter.KEYWORD_ONLY) for p in own] + added
    run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    run.__annotations__ = {p.name: p.annotation for p in parameters}
    return run


def silence_transformers() -> None:
    """Its bars for reading and writing say nothing that ours does not."""
    from transformers.utils import logging

    logging.disable_progress_bar()


def show(result: Any, as_json: bool = False) -> None:
    """Print a plan or report as its table, or as JSON."""
    if as_json:
        print(json.dumps(result.to_dict(), indent=2))
    else:
        from rich.console import Console

        Console().print(result.table())


@app.command()
@takes_growth
def plan(source: Source, growth: dict[str, Any], as_json: AsJson = False) -> None:
    """Show what growing would do, from the config and the file headers alone."""
    from growkern.growth.plan import plan as make_plan

    show(make_plan(source, **growth), as_json)


@app.command()
@takes_growth
def grow(
    source: Source,
    target: Target,
    growth: dict[str, Any],
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Replace DST if it exists.")
    ] = False,
    dtype: Annotated[
        str | None, typer.Option(help=f"{' | '.join(DTYPES)}; else the source's.")
    ] = None,
    max_shard_size: Annotated[str, typer.Option(help="Largest file of the result.")] = "5GB",
    allow_nonfinite: Annotated[
        bool, typer.Option("--allow-nonfinite", help="Go on past NaN and Inf.")
    ] = False,
    text: Annotated[
        Path | None, typer.Option(help="Text to report the loss before and after on.")
    ] = None,
) -> None:
    """Grow the checkpoint SRC into the new checkpoint DST."""
    import torch

    from growkern.growth.grow import grow_checkpoint
    from growkern.growth.show import human

    silence_transformers()
    compared = {} if text is None else tokens_of(source, text)
    if dtype is not None and dtype not in DTYPES:
        raise GrowthError(f"--dtype {dtype!r}{nearest(dtype, DTYPES)}")
    report = grow_checkpoint(
        source,
        target,
        overwrite=overwrite,
        dtype=None if dtype is None else getattr(torch, dtype),
        max_shard_size=max_shard_size,
        allow_nonfinite=allow_nonfinite,
        progress=sys.stderr.isatty(),
        **growth,
    )
    for finding in report.plan.findings:
        print(f"{finding.level}: {finding.what} ({finding.why})")
    speed = report.bytes_written / max(report.seconds, 1e-9)
    print(f"{report.directory}: {human(report.bytes_written)}B, {human(speed)}B/s")
    if text is None:
        print(f"check it with: growkern verify {source} {report.directory}")
    else:
        finish(source, report.directory, compared)


@app.command()
def verify(
    source: Source,
    target: Target,
    text: Annotated[Path | None, typer.Option(help="Text to compare the models on.")] = None,
) -> None:
    """Check that DST is SRC grown: every tensor, then the outputs of both. Exit 1 if it is not."""
    silence_transformers()
    finish(source, target, {} if text is None else tokens_of(source, text))


def finish(source: Path, target: Path, compared: dict[str, Any]) -> None:
    """Show how the grown checkpoint compares; exit 1 if it is not what it should be."""
    from growkern.growth.verify import verify as check

    report = check(source, target, **compared)
    show(report)
    if not report.ok:
        raise typer.Exit(1)


def tokens_of(source: Path, text: Path, length: int = 128, most: int = 4096) -> dict[str, Any]:
    """The start of a text as tokens and labels, (rows, length) each, at most `most` ids."""
    from transformers import AutoConfig, AutoTokenizer

    from growkern.train.data import CausalLMCollator, MaskedLMCollator, pack_text
    from growkern.train.head import align_labels

    config = AutoConfig.from_pretrained(source)
    tokenizer = AutoTokenizer.from_pretrained(source)
    length = min(length, config.max_position_embeddings)
    # 16 characters a token: far more than any tokenizer needs on average
    blocks = pack_text([text.read_text(encoding="utf-8")[: 16 * most]], tokenizer, length)
    rows = [blocks[i] for i in range(min(len(blocks), most // length))]
    if not rows:
        raise GrowthError(f"{text}: less than {length} tokens; give more text")
    masked = any(name.endswith("ForMaskedLM") for name in config.architectures or ())
    collate = MaskedLMCollator(tokenizer) if masked else CausalLMCollator(tokenizer)
    batch = collate(rows)
    labels = align_labels(batch["labels"], causal=not masked)
    return {"tokens": batch["input_ids"], "labels": labels}


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
    root = Path(__file__).parents[1]
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


def one_line(error: Exception) -> str:
    # the parser's own errors carry their text in format_message, wherever typer keeps its parser
    text = error.format_message() if hasattr(error, "format_message") else str(error)
    return f"growkern: {' '.join(text.split())}"


def main() -> None:
    """Entry point: one line and exit 2 for whatever the user can mend."""
    debug = "--debug" in sys.argv
    arguments = [a for a in sys.argv[1:] if a != "--debug"]
    try:
        sys.exit(app(arguments, prog_name="growkern", standalone_mode=False))
    except KeyboardInterrupt:
        sys.exit(130)
    except Exception as error:
        expected = isinstance(error, ValueError | OSError) or hasattr(error, "format_message")
        if debug or not expected:
            raise
        print(one_line(error), file=sys.stderr)
        sys.exit(2)
