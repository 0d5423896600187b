"""The commands `growkern train`, `export` and `cache-teacher`."""

import signal
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from growkern.cli.app import (
    Overwrite,
    Revision,
    app,
    checkpoint_there,
    known_dtype,
    silence_transformers,
)
from growkern.errors import GrowthError, counted, human, say
from growkern.growth.source import located
from growkern.train.run import check_paths, load_runs
from growkern.train.safety import exportable


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
    # before PyTorch is imported, which takes seconds
    check_paths(load_runs(run), run.parent)
    from growkern.train.distributed import leave_processes
    from growkern.train.run import run as start
    from growkern.train.safety import INTERRUPTIONS, Terminated, settle

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
        str | None,
        typer.Option(
            callback=known_dtype, help="Dtype of the weights; default: as in the checkpoint."
        ),
    ] = None,
    overwrite: Overwrite = False,
) -> None:
    """Make an ordinary Hugging Face directory of the last checkpoint of a run."""
    exportable(run)
    from growkern.train.safety.export import export as make

    silence_transformers()
    checkpoint = make(run, target, dtype=dtype, overwrite=overwrite)
    say(f"{target}: the model of {checkpoint}")


def _without_run(text: str) -> Any:
    """An option of `cache-teacher` whose value a run file gives instead."""
    return typer.Option(help=text, rich_help_panel="Without --run")


Texts = Annotated[
    list[Path] | None,
    typer.Argument(exists=True, metavar="TEXT...", help="UTF-8 text files."),
]
Teacher = Annotated[
    str,
    typer.Argument(
        metavar="SRC",
        help="Directory of the teacher, a model on the Hub, or the URL of a server of vLLM that "
        "runs it.",
    ),
]
RunFile = Annotated[
    Path | None,
    typer.Option(
        exists=True,
        help="Run file, in place of TEXT and of the options in the other box. It may name any data "
        "that training reads, except a stream.",
    ),
]
Temperature = Annotated[
    float | None,
    _without_run("Softmax temperature, required; must equal inheritance.temperature of the run."),
]
Rows = Annotated[
    str | None,
    _without_run("Rows to store: labels | all (every token except padding).  \\[labels]"),
]
Length = Annotated[int | None, _without_run("data.sequence_length of the run.  \\[128]")]
Probability = Annotated[
    float | None,
    _without_run("Share of tokens to mask; must equal the run's (masked models).  \\[0.15]"),
]
Seed = Annotated[int | None, _without_run("Seed of the masks: training.seed of the run.  \\[0]")]
Tokenizer = Annotated[Path | None, _without_run("Tokenizer; required if SRC is a server.  \\[SRC]")]
Kind = Annotated[str, typer.Option(help="Log-probs: float16 | bfloat16 | float32.")]
Epochs = Annotated[
    int, typer.Option(help="Number of different maskings per block (masked models).")
]


@app.command()
def cache_teacher(
    source: Teacher,
    texts: Texts = None,
    *,
    out: Annotated[Path, typer.Option(help="Directory of the new cache.")],
    k: Annotated[int, typer.Option("--k", help="Tokens stored per row.")],
    revision: Revision = None,
    run: RunFile = None,
    temperature: Temperature = None,
    rows: Rows = None,
    dtype: Kind = "float16",
    sequence_length: Length = None,
    masking_probability: Probability = None,
    seed: Seed = None,
    epochs: Epochs = 1,
    tokenizer: Tokenizer = None,
    batch_size: Annotated[int, typer.Option(help="Blocks per call of the teacher.")] = 32,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace the cache.")] = False,
) -> None:
    """Run the teacher SRC once over texts and store its k likeliest tokens per row.

    "The run" below is the training run that will use the cache.
    """
    from growkern.train.topk_teacher import is_server

    served = is_server(source)
    if not served:
        checkpoint_there(Path(source))
    of_run = {
        "TEXT": texts or None,
        "--temperature": temperature,
        "--rows": rows,
        "--sequence-length": sequence_length,
        "--masking-probability": masking_probability,
        "--seed": seed,
        "--tokenizer": tokenizer,
    }
    if (given := {name: value for name, value in of_run.items() if value is not None}) and run:
        raise GrowthError(f"--run FILE says what {', '.join(given)} would: leave it out")
    from growkern.train.topk_teacher import cache_teacher as make, check_cache_options, check_place

    # before the data is read, which may take hours. A run file is checked when it is read
    heat = 1.0 if temperature is None else temperature
    check_cache_options(k, heat, rows or "labels", dtype, epochs, batch_size)
    check_place(out.resolve(), overwrite)
    silence_transformers()
    place = source if served else located(Path(source), revision)
    read = _of_texts(place, k, given) if run is None else _of_run(place, k, run)
    report = make(
        directory=out,
        k=k,
        dtype=dtype,
        epochs=epochs,
        batch_size=batch_size,
        overwrite=overwrite,
        progress=sys.stderr.isatty(),
        **read,
    )
    say(
        f"{report.directory}: {counted(report.rows, 'row')} of {counted(report.tokens, 'token')}, "
        f"{human(report.bytes)}B, {report.bytes_per_row:.0f} bytes/row, "
        f"{report.bytes_per_token:.1f} bytes/token, {report.seconds:.1f} s"
    )


def _opened(
    source: Path | str, k: int, reader: Any, length: int, tokens: int | None = None
) -> tuple[Any, bool]:
    """The teacher in a directory or on a server, and whether it predicts the next token.

    Args:
        tokens: of a teacher on a server; None: all of the reader's.
    """
    from growkern.train.model import (
        check_fits,
        has_tokenizer,
        is_causal,
        load_language_model,
        load_tokenizer,
    )
    from growkern.train.topk_teacher import ServedTeacher

    if isinstance(source, str):
        # a server has no tokenizer to compare with, and gives log-probs at temperature 1
        return ServedTeacher(source, k, vocab_size=tokens or len(reader)), True
    # the reader may have tokens that the teacher lacks
    check_fits(source, load_tokenizer(source) if has_tokenizer(source) else reader, length)
    model = load_language_model(source)
    return model, is_causal(model)


def _of_texts(source: Path | str, k: int, given: dict[str, Any]) -> dict[str, Any]:
    """The arguments of `cache_teacher` that the command line gives."""
    from growkern.train.dataset import pack_text
    from growkern.train.model import load_tokenizer
    from growkern.train.objectives import CausalLMCollator, MaskedLMCollator, check_probability

    for name in ("TEXT", "--temperature", *(["--tokenizer"] if isinstance(source, str) else [])):
        if name not in given:
            raise GrowthError(f"give {name}, or a run file: --run FILE")
    length = given.get("--sequence-length", 128)
    probability = given.get("--masking-probability", 0.15)
    check_probability(probability)
    reader = load_tokenizer(given.get("--tokenizer", source))
    model, causal = _opened(source, k, reader, length)
    return {
        "model": model,
        "dataset": pack_text(given["TEXT"], reader, length),
        "collator": CausalLMCollator(reader)
        if causal
        else MaskedLMCollator(reader, probability, given.get("--seed", 0)),
        "tokenizer": reader,
        "temperature": given["--temperature"],
        "rows": given.get("--rows", "labels"),
    }


def _of_run(source: Path | str, k: int, file: Path) -> dict[str, Any]:
    """The arguments of `cache_teacher` for the run of a run file."""
    from growkern.train.dataset import load_data
    from growkern.train.loss import check_tokenizers
    from growkern.train.model import load_tokenizer
    from growkern.train.run import load_run, locate
    from growkern.train.topk_teacher import cache_arguments

    base = file.parent
    run = load_run(file)
    if run.inheritance is None:
        raise GrowthError(f"{file} has no [inheritance]: it trains without a teacher")
    if run.data.streaming:
        raise GrowthError(
            f"{file} streams its data, whose rows do not repeat: set data.streaming to false"
        )
    reader = load_tokenizer(locate(base, *run.words))
    if isinstance(source, Path):
        check_tokenizers(reader, [load_tokenizer(source)])
    tokens = run.teacher.vocab_size if run.teacher else None
    model, causal = _opened(source, k, reader, run.data.sequence_length, tokens)
    # the rows without their weights, which the teacher does not see
    data = load_data(run.data, reader, base=base, progress=sys.stderr.isatty())
    return {
        "model": model,
        "dataset": data.train,
        "collator": data.collator(reader, causal=causal, seed=run.training.seed),
        "tokenizer": reader,
        **cache_arguments(run.inheritance),
    }
