"""Summarises the training runs of the demo in a table and a picture."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.table import Table

from growkern.demo.training import curve_from
from growkern.plot.curve import Curve, saving
from growkern.plot.losses import draw

NOT_REACHED = "not reached"


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


def result_table(rows: Sequence[dict[str, Any]], source: Curve) -> Table:
    """Make a rich table from the records of `summarize`.

    Args:
        rows: from `summarize`.
        source: of the small model.
    """
    target = rows[0]["final_loss"]
    caption = (
        f"The small model went from loss {source.losses[0]:.3f} to {source.losses[-1]:.3f} with "
        f"{source.flops[-1]:.3g} FLOPs in {source.seconds[-1]:.0f} s of training. FLOPs include "
        "those of teachers, but not evaluation."
    )
    if source.losses[-1] <= target:
        caption += (
            " The small model has already reached the loss where scratch ends. Training was too "
            "short for the savings to mean anything."
        )
    table = Table(
        title=f"Training the large model to validation loss {target:.3f} (where scratch ends)",
        caption=caption,
    )
    table.add_column("run")
    for head in ("start\nloss", "final\nloss", "FLOPs\nto it", "seconds\nto it"):
        table.add_column(head, justify="right", no_wrap=True)
    for head in ("FLOPs\nsaved", "saved, source\ncounted too"):
        table.add_column(head, justify="right", no_wrap=True)
    for row in rows:
        is_scratch = row is rows[0]
        table.add_row(
            row["run"],
            f"{row['start_loss']:.3f}",
            f"{row['final_loss']:.3f}",
            _number(row["flops"], ".3g", NOT_REACHED),
            _number(row["seconds"], ".0f"),
            "-" if is_scratch else _number(row["saving"], ".0%"),
            "-" if is_scratch else _number(row["saving_with_source"], ".0%"),
        )
    return table


def draw_results(results: dict[str, Any], out: Path) -> None:
    """Draw the training runs of the demo.

    Args:
        results: contents of `results.json`.
        out: PNG file to write.
    """
    size, device = results["config"]["target"], results["machine"]["devices"][0]
    title = f"BERT {size['num_hidden_layers']} x {size['hidden_size']}, {device}"
    source = curve_from(results["source"])
    draw([curve_from(record) for record in results["curves"]], out, title=title, source=source)


def _number(value: float | None, form: str, missing: str = "-") -> str:
    return missing if value is None else format(value, form)
