"""Summarises the training runs of the demo in a table and a picture."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.table import Table

from growkern.demo.training import curve_from
from growkern.plot.curve import Curve, saving
from growkern.plot.losses import draw

NOT_REACHED = "not reached"
# of a run, as shares of scratch's FLOPs: without and with the small model's training
SAVINGS = ("saving", "saving_with_source")
HEADS = (
    *("run", "start\nloss", "FLOPs\nto it", "seconds\nto it", "FLOPs\nsaved"),
    "source\ncounted",
)


def summarize(source: Curve, curves: Sequence[Curve]) -> list[dict[str, Any]]:
    """Compare the runs of the large model with the run from scratch.

    Args:
        source: of the small model.
        curves: of the large model; the first one is the run from scratch.

    Returns:
        One record per run. "flops" and "seconds" are counted until the run first reaches the final
        loss of scratch, teachers included; None if it never does. "saving" is the share of
        scratch's FLOPs that the run saved. "saving_with_source" also counts the whole training of
        the small model as a cost.
    """
    scratch = curves[0]
    target = scratch.losses[-1]
    rows = []
    for curve in curves:
        owed = 0.0 if curve is scratch else source.flops[-1]
        rows.append(
            {
                "run": curve.name,
                "start_loss": curve.losses[0],
                "final_loss": curve.losses[-1],
                "steps": curve.steps[-1],
                "flops": curve.flops_at(target),
                "seconds": curve.seconds_at(target),
                "saving": saving(curve, scratch),
                "saving_with_source": saving(curve, scratch, extra_flops=owed),
            }
        )
    return rows


def result_table(rows: Sequence[dict[str, Any]], sources: Sequence[Curve]) -> Table:
    """Make a rich table from the records of `summarize`, of one seed or more.

    Args:
        rows: from `summarize`, of all seeds.
        sources: of the small models, one per seed.
    """
    scratch = [row for row in rows if row["run"] == rows[0]["run"]]
    table = Table(
        title=f"Training the large model to the loss where scratch ends, {_mean(scratch)}",
        caption=_caption(scratch, sources),
    )
    for head in HEADS:
        first = head is HEADS[0]
        table.add_column(head, justify="left" if first else "right", no_wrap=not first)
    for cells in table_cells(rows):
        # a range takes two lines, so that the table fits into 80 columns
        table.add_row(cells[0], *(cell.replace(" to ", " to\n") for cell in cells[1:]))
    return table


def table_cells(rows: Sequence[dict[str, Any]]) -> list[list[str]]:
    """The cells of the table, a list for each run, under `HEADS`.

    Args:
        rows: from `summarize`, of one seed or more. A cell has the range over the seeds.
    """
    by_run: dict[str, list[dict[str, Any]]] = {}
    for row in rows:
        by_run.setdefault(row["run"], []).append(row)
    return [
        [
            name,
            _range(of_run, "start_loss", ".2f"),
            _range(of_run, "flops", ".2g", NOT_REACHED),
            _range(of_run, "seconds", ".0f"),
            *(_range(of_run, key, ".0%") if number else "-" for key in SAVINGS),
        ]
        for number, (name, of_run) in enumerate(by_run.items())
    ]


def _mean(scratch: Sequence[dict[str, Any]]) -> str:
    losses = [row["final_loss"] for row in scratch]
    of = f" (mean of {len(losses)} seeds)" if len(losses) > 1 else ""
    return f"{sum(losses) / len(losses):.3f}{of}"


def _caption(scratch: Sequence[dict[str, Any]], sources: Sequence[Curve]) -> str:
    ends = {f"{source.losses[-1]:.3f}" for source in sources}
    caption = (
        f"The small model ended at loss {' and '.join(sorted(ends))}, after "
        f"{sources[0].flops[-1]:.3g} FLOPs. FLOPs include those of teachers, but not evaluation. "
    )
    if len(sources) > 1:
        caption += f"Ranges are over {len(sources)} seeds. Those that overlap order nothing. "
    else:
        caption += "One seed does not order the methods. "
    caption += "The learning rate is constant, which favours ways that keep the function."
    pairs = zip(sources, scratch, strict=True)
    if any(source.losses[-1] <= row["final_loss"] for source, row in pairs):
        caption += (
            " The small model has already reached the loss where scratch ends. Training was too "
            "short for the savings to mean anything."
        )
    return caption


def _range(rows: Sequence[dict[str, Any]], key: str, form: str, missing: str = "-") -> str:
    """The lowest and the highest value of the seeds; one number if they read the same."""
    values = [row[key] for row in rows]
    if None in values:
        return missing
    ends = list(dict.fromkeys(format(value, form) for value in (min(values), max(values))))
    return " to ".join(ends)


def draw_results(results: dict[str, Any], out: Path) -> None:
    """Draw the training runs of the demo.

    Args:
        results: contents of `results.json`.
        out: PNG file to write.
    """
    size, device = results["config"]["target"], results["machine"]["devices"][0]
    title = f"GPT-2, {size['n_layer']} layers of width {size['n_embd']}, {device}"
    curves, sources = (list(map(curve_from, results[key])) for key in ("curves", "sources"))
    draw(curves, out, title=title, sources=sources, paired=True)
