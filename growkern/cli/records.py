"""The commands `growkern verify` and `growkern family draft`."""

from pathlib import Path
from typing import Annotated, Any

import typer

from growkern.cli.app import (
    SOURCE,
    AsJson,
    LineageFile,
    Revision,
    SourcePath,
    app,
    checkpoint_there,
    print_json,
    show,
    silence_transformers,
)
from growkern.cli.growing import tokens_of
from growkern.errors import GrowthError, counted, listed, say
from growkern.files import write_whole
from growkern.growth.history import has_record, refuse_unrecorded

tables = typer.Typer(no_args_is_help=True, help="Tables of your own, for other models.")
app.add_typer(tables, name="family", rich_help_panel="Growing")


@app.command()
def verify(
    source: Annotated[Path, typer.Argument(**SOURCE)],
    target: Annotated[
        Path | None, typer.Argument(metavar="DST", help="Directory of the grown checkpoint.")
    ] = None,
    revision: Revision = None,
    text: Annotated[
        Path | None, typer.Option(exists=True, help="Text file to compare the models on.")
    ] = None,
    lineage: LineageFile = None,
    checksums: Annotated[
        bool,
        typer.Option(
            "--checksums",
            help="Only check whether files changed since they were written. Takes SRC and DST, or "
            "one directory: a grown or exported model, a teacher cache, a run or a "
            "checkpoint of it.",
        ),
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Check that DST was grown from SRC: every tensor, then the outputs. Exit 1 if not."""
    if checksums:
        options: dict[str, object] = {"--text": text, "--lineage": lineage}
        # one directory has no source whose revision could count
        options |= {} if target else {"--revision": revision}
        if given := [name for name, value in options.items() if value is not None]:
            raise GrowthError(f"{given[0]} has no effect with --checksums: give one of them")
        compare_checksums(source, target, revision, as_json)
        return
    if target is None:
        again = f"growkern verify SRC {source}` if it was grown from SRC, or `growkern verify"
        raise GrowthError(f"no DST: `{again} {source} --checksums` for its files alone")
    for path in (source, target):
        checkpoint_there(path)
    # of two that were exchanged, `verify` tells
    if lineage is None and target.is_dir() and not has_record(source):
        refuse_unrecorded(target)
    from growkern.growth.source import located

    source = located(source, revision)
    from growkern.growth.record.verify import verify as check

    silence_transformers()
    compared = {} if text is None else tokens_of(source, text)
    report = check(source, target, **compared, lineage=lineage)
    show(report, as_json)
    if not report.ok:
        raise typer.Exit(1)


def compare_checksums(
    source: Path, target: Path | None, revision: str | None, as_json: bool
) -> None:
    """Print the files and tensors that changed; exit 1 if any did.

    Args:
        source: what the grown checkpoint was grown from; its tensors are checked too.
        target: the grown checkpoint. None: `source` is the directory to check, of any kind.
    """
    place = target or source
    if not place.is_dir():
        raise GrowthError(f"{place}: no such directory: give one whose files have checksums")
    from growkern.growth.disk import CHECKSUMS_FILE, verify_checksums
    from growkern.growth.source import located, weight_files
    from growkern.publish import differences

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
    found = verify_checksums(place, origin) if is_grown else differences(place, weight_files())
    if as_json:
        lists = {"changed": list(found.wrong), "uncovered": list(found.uncovered)}
        print_json({"checked": dict(found.checked), **lists})
    else:
        if found.uncovered:
            say(f"not covered by checksums: {listed(found.uncovered, 5)}")
        for difference in found.wrong:
            say(f"changed: {difference}")
        nouns = {"target": "target tensor", "files": "file", "source": "source tensor"}
        counts = ", ".join(counted(count, nouns[what]) for what, count in found.checked.items())
        say(f"{counts}: {len(found.wrong)} changed")
    if not found.ok:
        raise typer.Exit(1)


@tables.command()
def draft(
    source: SourcePath,
    output: Annotated[
        Path | None, typer.Option("-o", "--output", help="TOML file to write; default: print it.")
    ] = None,
    table: Annotated[
        Path | None,
        typer.Option(exists=True, help="Draft none: compare this TOML file with SRC, and grow it."),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Draft a table for SRC, a model without one, and check it. Exit 1 if it is not verified."""
    if output is not None and table is not None:
        raise GrowthError("--output has no effect with --table, which drafts nothing: give one")
    from growkern.growth.draft import draft_family
    from growkern.growth.own_table import check_table
    from growkern.growth.source import located

    silence_transformers()
    place = located(source, weights=False)
    made: Any = draft_family(place) if table is None else check_table(table, place)
    if output is not None:
        write_whole(output, lambda file: file.write_text(made.toml, encoding="utf-8"))
    if output is not None or table is not None or as_json:
        show(made, as_json)
    else:
        # it may go into a file
        for line in made.toml.splitlines():
            say(line)
    if not made.verified:
        raise typer.Exit(1)
