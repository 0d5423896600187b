"""The commands `growkern eval` and `plot`."""

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
    show,
    silence_transformers,
)
from growkern.errors import GrowthError, print_table, say

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
    sequence_length: Annotated[int, typer.Option(help="Tokens per block.")] = 128,
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
    from growkern.train.evaluation.evaluate import evaluate as measure
    from growkern.train.evaluation.from_file import read_arguments

    silence_transformers()
    options = dict(context.params)
    as_json, file = options.pop("as_json"), Path(options["model"])
    if file.suffix != ".toml":
        options["text"] = [*(options["text"] or ()), *(options.pop("more") or ())]
        if options["split"] is None:
            del options["split"]
    else:
        for key in options:
            source = context.get_parameter_source(key)
            if key != "model" and source is not None and source.name == "COMMANDLINE":
                raise GrowthError(f"{key} is given beside {file}: put it into the file")
        options = read_arguments(file)
    show(measure(**options, progress=sys.stderr.isatty()), as_json)


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
    from growkern.plot.curves import savings_rows, savings_table
    from growkern.plot.losses import notes_on, plot_runs
    from growkern.plot.weights import plot_weights
    from growkern.train.dataset.source import read_text

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
        groups = plot_runs(directories, out, sources=sources or [])
        for note in notes_on(groups):
            say(f"growkern: {note}", sys.stderr)
    if as_json:
        print_json({"out": str(out), **({"runs": savings_rows(groups)} if groups else {})})
        return
    if len(groups) > 1:
        print_table(savings_table(groups))
    say(out)
