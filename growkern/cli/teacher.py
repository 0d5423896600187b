"""The command `growkern cache-teacher`."""

import sys
from pathlib import Path
from typing import Annotated

import typer

from growkern.cli.app import Source, app, silence_transformers
from growkern.units import human


@app.command()
def cache_teacher(
    source: Source,
    texts: Annotated[list[Path], typer.Argument(metavar="TEXT...", help="UTF-8 text files.")],
    out: Annotated[Path, typer.Option(help="Directory of the new cache.")],
    k: Annotated[int, typer.Option("--k", help="Tokens stored per row.")],
    temperature: Annotated[
        float,
        typer.Option(help="Softmax temperature; must equal inheritance.temperature of the run."),
    ],
    rows: Annotated[
        str, typer.Option(help="Rows to store: labels | all (every token except padding).")
    ] = "labels",
    dtype: Annotated[
        str, typer.Option(help="Log-probs: float16 | bfloat16 | float32.")
    ] = "float16",
    sequence_length: Annotated[int, typer.Option(help="data.sequence_length of the run.")] = 128,
    masking_probability: Annotated[
        float, typer.Option(help="Share of tokens to mask; must equal the run's (masked models).")
    ] = 0.15,
    seed: Annotated[int, typer.Option(help="Seed of the masks: training.seed of the run.")] = 0,
    epochs: Annotated[
        int, typer.Option(help="Number of different maskings per block (masked models).")
    ] = 1,
    tokenizer: Annotated[Path | None, typer.Option(help="Tokenizer; default: SRC.")] = None,
    batch_size: Annotated[int, typer.Option(help="Blocks per call of the teacher.")] = 32,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace the cache.")] = False,
) -> None:
    """Run the teacher SRC once over texts and store its k likeliest tokens per row.

    "The run" below is the training run that will use the cache.
    """
    from growkern.train import data
    from growkern.train.cached_teacher.write import cache_teacher as make
    from growkern.train.load import check_fits, is_causal, load_language_model, load_tokenizer

    silence_transformers()
    data.check_probability(masking_probability)
    model = load_language_model(source)
    reader = load_tokenizer(tokenizer or source)
    check_fits(source, reader, sequence_length)
    report = make(
        model,
        data.pack_text(texts, reader, sequence_length),
        out,
        k=k,
        temperature=temperature,
        rows=rows,
        dtype=dtype,
        collator=data.CausalLMCollator(reader)
        if is_causal(model)
        else data.MaskedLMCollator(reader, masking_probability, seed),
        epochs=epochs,
        tokenizer=reader,
        batch_size=batch_size,
        overwrite=overwrite,
        progress=sys.stderr.isatty(),
    )
    print(
        f"{report.directory}: {report.rows} rows of {report.tokens} tokens, "
        f"{human(report.bytes)}B, {report.bytes_per_row:.0f} bytes/row, "
        f"{report.bytes_per_token:.1f} bytes/token, {report.seconds:.1f} s"
    )
