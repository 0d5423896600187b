"""The commands `growkern eval` and `plot`."""

import sys
from pathlib import Path
from typing import Annotated

import typer

from growkern.cli.app import (
    AsJson,
    app,
    checkpoint_there,
    print_json,
    show,
    silence_transformers,
)
from growkern.errors import GrowthError, print_table, say
from growkern.files import matching_files, read_toml

Model = Annotated[
    Path,
    typer.Argument(
        metavar="MODEL",
        help="Directory of the checkpoint, a model on the Hub, or a TOML file with all options.",
    ),
]
Tokenizer = Annotated[Path | None, typer.Option(help="Tokenizer; default: MODEL.")]
Confidence = Annotated[float, typer.Option(help="Of the interval.")]


@app.command("eval")
def evaluate(
    context: typer.Context,
    model: Model,
    more: Annotated[
        list[str] | None, typer.Argument(metavar="FILE...", help="More files, as --text.")
    ] = None,
    *,
    text: Annotated[
        list[str] | None, typer.Option(help="File of text or records, or a pattern of them.")
    ] = None,
    dataset: Annotated[
        str | None, typer.Option(help="Instead: a directory, or a name on the Hub.")
    ] = None,
    dataset_config: Annotated[str | None, typer.Option(help="Part of the data set.")] = None,
    revision: Annotated[str | None, typer.Option(help="Of a data set on the Hub.")] = None,
    split: Annotated[str | None, typer.Option(help="Of the data set.  \\[train]")] = None,
    text_column: Annotated[str, typer.Option(help="Column with text.")] = "text",
    input_ids_column: Annotated[str | None, typer.Option(help="Column with token ids.")] = None,
    labels_column: Annotated[str | None, typer.Option(help="Column with labels.")] = None,
    attention_mask_column: Annotated[str | None, typer.Option(help="Column with 1 or 0.")] = None,
    packing: Annotated[
        bool | None, typer.Option(help="Join records; default: text, not token ids.")
    ] = None,
    cache: Annotated[str | None, typer.Option(help="Directory of tokenised data.")] = None,
    sequence_length: Annotated[
        int | None, typer.Option(help="Tokens per block.  \\[as MODEL's run, or 128]")
    ] = None,
    masking_probability: Annotated[
        float, typer.Option(help="Share of tokens to mask (masked models).")
    ] = 0.15,
    tokenizer: Tokenizer = None,
    seed: Annotated[int, typer.Option(help="Of the masks.")] = 0,
    batch_size: Annotated[int, typer.Option(help="Blocks per call of the model.")] = 16,
    confidence: Confidence = 0.95,
    as_json: AsJson = False,
) -> None:
    """Measure the masked-LM loss or the perplexity of MODEL on text, with its uncertainty.

    A file MODEL.toml has the options in a table \\[evaluate], by the names of growkern.evaluate.
    """
    options = dict(context.params)
    as_json, file = options.pop("as_json"), Path(options["model"])
    if file.suffix == ".toml":
        read_toml(file)
    else:
        checkpoint_there(file)
        for pattern in [*(text or ()), *(more or ())]:
            matching_files(Path(), pattern)
    from growkern.train.evaluation import read_arguments
    from growkern.train.evaluation.evaluate import evaluate as measure

    silence_transformers()
    if file.suffix != ".toml":
        options["text"] = [*(options["text"] or ()), *(options.pop("more") or ())]
        for key in ("split", "sequence_length"):
            if options[key] is None:
                del options[key]
    else:
        for key in options:
            source = context.get_parameter_source(key)
            if key != "model" and source is not None and source.name == "COMMANDLINE":
                raise GrowthError(f"{key} is given beside {file}: put it into the file")
        options = read_arguments(file)
    show(measure(**options, progress=sys.stderr.isatty()), as_json)


@app.command()
def plot(
    directories: Annotated[
        list[Path],
        typer.Argument(
            metavar="RUN...",
            help="Training directories. A folder with generation-1 and so on stands for these.",
        ),
    ],
    out: Annotated[
        Path | None,
        typer.Option(
            help="File to write, .png, .svg, .pdf ...  \\[loss_vs_flops.png, in a single RUN]"
        ),
    ] = None,
    sources: Annotated[
        list[Path] | None,
        typer.Option(
            "--source",
            metavar="RUN",
            help="Training directory of the small model; again per seed. Default: found in RUN...",
        ),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Draw loss against FLOPs."""
    from growkern.plot import log_of, runs_in, savings_rows, savings_table

    if out is None:
        # that of another run is not replaced
        out = (directories[0] if len(directories) == 1 else Path()) / "loss_vs_flops.png"
    # before matplotlib is imported
    runs = [run for directory in directories for run in runs_in(directory)]
    for run in (*runs, *(sources or ())):
        log_of(run)
    from growkern.plot import notes_on, plot_runs

    groups = plot_runs(runs, out, sources=sources or [])
    for note in notes_on(groups):
        say(f"growkern: {note}", sys.stderr)
    if as_json:
        print_json({"out": str(out), "runs": savings_rows(groups)})
        return
    if len(groups) > 1:
        print_table(savings_table(groups))
    say(out)
