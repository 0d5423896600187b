"""The commands `growkern plan`, `growkern grow` and `growkern verify`."""

import shlex
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any, cast

import typer

from growkern.cli.app import (
    AsJson,
    LineageFile,
    MemoryLimit,
    NoResume,
    Overwrite,
    Revision,
    ShardSize,
    Source,
    Target,
    app,
    lineage_there,
    print_json,
    print_table,
    show,
    silence_transformers,
)
from growkern.cli.options import completing, takes_growth
from growkern.errors import GrowthError, nearest
from growkern.printing import human, say

DTYPES = ("float32", "bfloat16", "float16", "float64")


def token_count(text: str | float) -> float:
    """A number of tokens from the command line.

    Raises:
        typer.BadParameter: `text` is no number.
    """
    try:
        return float(text)
    except ValueError:
        raise typer.BadParameter(f"{text!r} is no number: write 100 billion as 1e11") from None


@app.command()
@takes_growth
def plan(
    source: Source,
    growth: dict[str, Any],
    revision: Revision = None,
    as_json: AsJson = False,
    verbose: Annotated[
        bool, typer.Option("--verbose", help="Also show maps, layers and every measurement.")
    ] = False,
    ranks: Annotated[
        int, typer.Option(min=1, help="Processes (GPUs) that will share the model, with FSDP2.")
    ] = 1,
    source_tokens: Annotated[
        float | None,
        typer.Option(
            help="Tokens that SRC was trained on, such as 2e10, with --tokens.",
            parser=token_count,
            metavar="FLOAT",
        ),
    ] = None,
    tokens: Annotated[
        float | None,
        typer.Option(
            help="Tokens to train the target on, such as 1e11: shows what that costs, and what "
            "growth saved elsewhere.",
            parser=token_count,
            metavar="FLOAT",
        ),
    ] = None,
) -> None:
    """Show what growing would do. Reads the config and the file headers.

    Where it must measure a bound, it also runs SRC on random texts, and reads its weights.
    """
    from growkern.growth.plan.growth_plan import plan as make_plan

    made = make_plan(source, revision=revision, **growth)
    if as_json:
        more = {
            "estimate": made.estimate(ranks, tokens, source_tokens),
            "measurements": made.measurements(),
            "advice": made.advice(tokens, source_tokens),
            "portability": made.portability(),
        }
        print_json({**made.to_dict(), **more})
    else:
        print_table(made.table(ranks, source_tokens, tokens, verbose=verbose))


@app.command()
@takes_growth
def grow(
    source: Source,
    target: Target,
    growth: dict[str, Any],
    revision: Revision = None,
    overwrite: Overwrite = False,
    dtype: Annotated[
        str | None,
        typer.Option(
            help=f"{' | '.join(DTYPES)}; default: as in SRC.", autocompletion=completing(DTYPES)
        ),
    ] = None,
    max_shard_size: ShardSize = "5GB",
    memory_limit: MemoryLimit = "1GiB",
    no_resume: NoResume = False,
    allow_nonfinite: Annotated[
        bool, typer.Option("--allow-nonfinite", help="Accept NaN and Inf in SRC.")
    ] = False,
    text: Annotated[
        Path | None, typer.Option(help="Text file to compare the losses of SRC and DST on.")
    ] = None,
    optimizer: Annotated[
        Path | None, typer.Option(help="optimizer.pt of transformers' Trainer, to be grown too.")
    ] = None,
    moments: Annotated[
        str | None,
        typer.Option(help="Moments of --optimizer: grow | old_slices | reset.  \\[grow]"),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Grow the checkpoint SRC into the new checkpoint DST."""
    from growkern.growth.grow import grow_checkpoint
    from growkern.growth.source.hub import located

    silence_transformers()
    if moments is not None and optimizer is None:
        raise GrowthError("--moments has no effect without an optimizer: give --optimizer as well")
    compared = {} if text is None else tokens_of(located(source, revision), text)
    report = grow_checkpoint(
        source,
        target,
        overwrite=overwrite,
        dtype=dtype_of(dtype),
        max_shard_size=max_shard_size,
        memory_limit=memory_limit,
        resume=not no_resume,
        allow_nonfinite=allow_nonfinite,
        revision=revision,
        progress=sys.stderr.isatty(),
        optimizer=optimizer,
        moments=cast(Any, moments or "grow"),
        **growth,
    )
    with_moments = optimizer is not None and moments in (None, "grow")
    tell_growth(report, source, revision, compared, with_moments, as_json)


def tell_growth(
    report: Any,
    source: Path,
    revision: str | None,
    compared: dict[str, Any],
    with_moments: bool,
    as_json: bool,
) -> None:
    """Print a growth, and verify it where there is a text to compare on; exit 1 if that fails.

    Args:
        report: of `growkern.grow_checkpoint`.
        source, revision: as they were given.
        compared: tokens and labels from `tokens_of`; empty without a text.
        with_moments: whether the optimizer's moments were grown.
    """
    from growkern.growth.optimizer.findings import moment_findings
    from growkern.growth.record.verify import verify as check

    found = moment_findings(report.plan) if with_moments else ()
    if not as_json:
        print_growth(report)
        for finding in found:
            say(finding.line())
    place, checked = report.plan.source.directory or source, None
    if compared:
        checked = check(place, report.directory, **compared)
    if as_json:
        more = {"moments": [asdict(one) for one in found]}
        print_json({**report.to_dict(), **more, "verified": checked and checked.to_dict()})
    elif checked:
        show(checked)
    else:
        at = [] if revision is None else ["--revision", revision]
        words = ["growkern", "verify", str(source), str(report.directory), *at]
        say(f"check the result with: {shlex.join(words)}")
    if checked and not checked.ok:
        raise typer.Exit(1)


def dtype_of(name: str | None) -> Any:
    """The torch dtype of a name, or None for None.

    Raises:
        GrowthError: the name is not in DTYPES.
    """
    import torch

    if name is not None and name not in DTYPES:
        raise GrowthError(f"--dtype {name!r}{nearest(name, DTYPES)}")
    return None if name is None else getattr(torch, name)


def print_growth(report: Any) -> None:
    """Print the findings of a growth, and how much it wrote and how fast."""
    for finding in report.plan.findings:
        say(finding.line())
    for line in report.plan.portability():
        say(f"note: {line}")
    speed = (report.bytes_written - report.bytes_kept) / max(report.seconds, 1e-9)
    kept = f", {human(report.bytes_kept)}B of it by an earlier run" if report.bytes_kept else ""
    say(f"{report.directory}: {human(report.bytes_written)}B{kept}, {human(speed)}B/s")


@app.command()
def verify(
    source: Source,
    target: Annotated[
        Path | None, typer.Argument(metavar="DST", help="Directory of the grown checkpoint.")
    ] = None,
    revision: Revision = None,
    text: Annotated[Path | None, typer.Option(help="Text file to compare the models on.")] = None,
    lineage: LineageFile = None,
    checksums: Annotated[
        bool,
        typer.Option(
            "--checksums",
            help="Only check whether files changed since they were written. Takes SRC and DST, or "
            "one directory: a grown, folded or exported model, a teacher cache, a run or a "
            "checkpoint of it.",
        ),
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Check that DST was grown from SRC: every tensor, then the outputs. Exit 1 if not."""
    from growkern.growth.record.verify import verify as check
    from growkern.growth.source.hub import located

    silence_transformers()
    if checksums:
        options: dict[str, object] = {"--text": text, "--lineage": lineage}
        # one directory has no source whose revision could count
        options |= {} if target else {"--revision": revision}
        if given := [name for name, value in options.items() if value is not None]:
            raise GrowthError(f"{given[0]} has no effect with --checksums: give one of them")
        compare_checksums(source, target, revision, as_json)
        return
    if target is None:
        raise GrowthError("no DST: give the grown checkpoint, or --checksums for one directory")
    source = located(source, revision)
    compared = {} if text is None else tokens_of(source, text)
    report = check(source, target, **compared, lineage=lineage_there(lineage))
    show(report, as_json)
    if not report.ok:
        raise typer.Exit(1)


def compare_checksums(
    source: Path, target: Path | None, revision: str | None = None, as_json: bool = False
) -> None:
    """Print the files and tensors that changed; exit 1 if any did.

    Args:
        source: what the grown checkpoint was grown from; its tensors are checked too.
        target: the grown checkpoint. None: `source` is the directory to check, of any kind.
        revision: of a source on the Hub.

    Raises:
        GrowthError: one of the two is missing; or `target` is of a kind that has no source.
    """
    from growkern.growth.disk.checksums import CHECKSUMS_FILE, verify_checksums
    from growkern.growth.source.formats import weight_files
    from growkern.growth.source.hub import located
    from growkern.publish.manifest import differences

    place = target or source
    if not place.is_dir():
        raise GrowthError(f"{place}: no such directory: give one whose files have checksums")
    is_grown = (place / CHECKSUMS_FILE).exists()
    origin = None if target is None else located(source, revision)
    if origin is not None and not origin.is_dir():
        raise GrowthError(
            f"{origin}: no such directory: give the source of {place}, or {place} alone"
        )
    if origin is not None and not is_grown:
        raise GrowthError(
            f"SRC has no effect, as {place} has no {CHECKSUMS_FILE} with checksums of a source: "
            f"give {place} alone"
        )
    if not is_grown:
        found = differences(place, weight_files())
        wrong, checked = list(found.wrong), {"files": found.checked}
        uncovered = list(found.uncovered)
    else:
        report = verify_checksums(place, origin)
        wrong, checked, uncovered = list(report.wrong), dict(report.checked), []
    if as_json:
        print_json({"checked": checked, "changed": wrong, "uncovered": uncovered})
    else:
        print_uncovered(uncovered)
        for difference in wrong:
            say(f"changed: {difference}")
        counts = {"target": "target tensors", "files": "files", "source": "source tensors"}
        counted = ", ".join(f"{count} {counts[what]}" for what, count in checked.items())
        say(f"{counted}: {len(wrong)} changed")
    if wrong:
        raise typer.Exit(1)


def print_uncovered(files: Sequence[str], most: int = 5) -> None:
    """Name the files of which no checksums were recorded."""
    if files:
        more = f" and {len(files) - most} more" if len(files) > most else ""
        say(f"not covered by checksums: {', '.join(files[:most])}{more}")


def tokens_of(source: Path, text: Path, length: int = 128, most: int = 4096) -> dict[str, Any]:
    """The start of a text as tokens and labels for the source model.

    Args:
        source: checkpoint with a tokenizer.
        text: UTF-8 text file.
        length: tokens per row, if the model has as many positions.
        most: largest number of tokens.

    Returns:
        "tokens" and "labels", (rows, length) int64 each.

    Raises:
        GrowthError: the text is too short.
    """
    from growkern.growth.source.loading import longest_of
    from growkern.growth.source.source import open_source
    from growkern.train.dataset.files import read_text
    from growkern.train.dataset.load import pack_text
    from growkern.train.model.head import align_labels
    from growkern.train.model.load import load_tokenizer
    from growkern.train.objectives.language_modeling import CausalLMCollator, MaskedLMCollator

    opened = open_source(source, allow_nonfinite=True, dequantize=True)
    tokenizer = load_tokenizer(source)
    length = min(length, longest_of(opened.spec))
    # 16 characters per token are more than enough for any tokenizer
    blocks = pack_text([read_text(text, 16 * most)], tokenizer, length)
    rows = [blocks[i] for i in range(min(len(blocks), most // length))]
    if not rows:
        raise GrowthError(f"{text} has fewer than {length} tokens: give more text")
    masked = opened.class_name.endswith("ForMaskedLM")
    collate = MaskedLMCollator(tokenizer) if masked else CausalLMCollator(tokenizer)
    batch = collate(rows)
    labels = align_labels(batch["labels"], causal=not masked)
    return {"tokens": batch["input_ids"], "labels": labels}
