"""The table of growth inside a run whose target is worth its size: one change at a time."""

from __future__ import annotations

from pathlib import Path

from bench.paper.compare import committed, title_of
from bench.paper.plans import jobs_of_seed, lines_of
from bench.shared.results import table

SEED = 1


def diagnosis_text(results: Path) -> str:
    """The losses of one seed, and how far each is below those from scratch, in markdown.

    The question is a given size: all FLOPs count, those of a source too.
    """
    rows, lines = committed(results), lines_of("diagnosis", "tiny") or []
    found = []
    for line in lines:
        (job,) = jobs_of_seed(line, SEED, line.rate or 0.0)
        if job.name in rows:
            found.append((line, rows[job.name]))
    marks = {line.label: row["losses"][-1] for line, row in found if line.system == "scratch"}
    controls = [marks.get(f"equal {what}") for what in ("FLOPs", "steps at 0.0052")]
    cells = []
    for line, row in found:
        loss = row["losses"][-1]
        below = ["-" if x is None or x == loss else f"{x - loss:+.3f}" for x in controls]
        spent = (row["source flops"] + row["flops"][-1]) / found[0][1]["flops"][-1]
        cells.append([title_of(line), f"{spent:.2f}", f"{loss:.3f}", *below])
    heads = ["a given size", "FLOPs", "loss", "below scratch, equal FLOPs", "equal steps"]
    return table(heads, cells)
