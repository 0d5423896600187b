"""The commands `growkern eval` and `growkern finetune`."""

import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from growkern.cli.app import AsJson, app, show, silence_transformers
from growkern.errors import GrowthError

Model = Annotated[
    Path,
    typer.Argument(
        metavar="MODEL",
        help="Directory of the checkpoint, a model on the Hub, or a TOML file with all options.",
    ),
]
Tokenizer = Annotated[Path | None, typer.Option(help="Tokenizer; default: MODEL.")]
Confidence = Annotated[float, typer.Option(help="Of the interval.")]


def _arguments(context: typer.Context, name: str, options: dict[str, Any]) -> dict[str, Any]:
    """The arguments of a function: of the command line, or of the file that is in MODEL's place.

    Args:
        context: of the command.
        name: of the function, and of its table in a file.
        options: of the command line, with MODEL.

    Raises:
        GrowthError: there is a file, and an option beside it; or see `read_arguments`.
    """
    from growkern.train.evaluation.from_file import read_arguments

    file = Path(options["model"])
    if file.suffix != ".toml":
        return options
    for key in context.params:
        source = context.get_parameter_source(key)
        given = source is not None and source.name == "COMMANDLINE"
        if given and key not in ("model", "as_json"):
            raise GrowthError(f"{key} is given beside {file}: put it into [{name}] of the file")
    return read_arguments(file, name)


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

    silence_transformers()
    options = {
        "model": model,
        "text": [*(text or ()), *(more or ())],
        "tokenizer": tokenizer,
        "seed": seed,
        "batch_size": batch_size,
        "confidence": confidence,
        "dataset": dataset,
        "dataset_config": dataset_config,
        "revision": revision,
        **({} if split is None else {"split": split}),
        "text_column": text_column,
        "input_ids_column": input_ids_column,
        "labels_column": labels_column,
        "attention_mask_column": attention_mask_column,
        "packing": packing,
        "cache": cache,
        "sequence_length": sequence_length,
        "masking_probability": masking_probability,
    }
    found = _arguments(context, "evaluate", options)
    show(measure(**found, progress=sys.stderr.isatty()), as_json)


@app.command()
def finetune(
    context: typer.Context,
    model: Model,
    text: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="SOURCE...", help="Two or more sources: files, folders or patterns of text."
        ),
    ] = None,
    *,
    tokenizer: Tokenizer = None,
    seeds: Annotated[int, typer.Option(help="Number of runs.")] = 3,
    seed: Annotated[int, typer.Option(help="Of the first run.")] = 0,
    epochs: Annotated[float, typer.Option(help="Passes over the training passages.")] = 3.0,
    batch_size: Annotated[int, typer.Option(help="Passages per step.")] = 16,
    learning_rate: Annotated[float, typer.Option(help="Of AdamW, at its highest.")] = 5e-5,
    sequence_length: Annotated[int, typer.Option(help="Tokens per passage.")] = 128,
    passages: Annotated[int, typer.Option(help="Most passages of a source.")] = 500,
    confidence: Confidence = 0.95,
    as_json: AsJson = False,
) -> None:
    """Fine-tune MODEL to tell which SOURCE a passage comes from, and test it.

    A file MODEL.toml has the options in a table \\[finetune], by the names of growkern.finetune.
    """
    from growkern.train.evaluation.finetune import finetune as tune

    silence_transformers()
    options = {
        "model": model,
        "text": text or (),
        "tokenizer": tokenizer,
        "seeds": seeds,
        "seed": seed,
        "epochs": epochs,
        "batch_size": batch_size,
        "learning_rate": learning_rate,
        "sequence_length": sequence_length,
        "passages": passages,
        "confidence": confidence,
    }
    found = _arguments(context, "finetune", options)
    show(tune(**found, progress=sys.stderr.isatty()), as_json)
