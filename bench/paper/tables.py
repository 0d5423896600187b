"""The tables of the runs: losses, and the FLOPs that are saved at equal loss."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

from bench.paper.settings import SETTINGS
from bench.paper.systems import RATE_SEED, SOURCE, SYSTEMS
from growkern.plot.curve import first_crossing
from growkern.train.evaluation.interval import ratio_interval

Row = dict[str, Any]
BASELINE = "scratch"


def interval(values: Sequence[float], digits: int = 3) -> str:
    """Mean and 95 % interval of numbers that belong to different seeds."""
    mean, (_, high) = ratio_interval(values, [1] * len(values), 0.95)
    if len(values) == 1:
        return f"{mean:.{digits}f}"
    return f"{mean:.{digits}f} ± {high - mean:.{digits}f}"


def saved(row: Row, baseline: Row, *, with_source: bool = False) -> float:
    """The share of the baseline's FLOPs that a run saved to reach the baseline's final loss.

    NaN if the run never reaches it.
    """
    spent = first_crossing(row["flops"], row["losses"], baseline["losses"][-1])
    if spent is None:
        return math.nan
    return 1 - (spent + (row["source flops"] if with_source else 0.0)) / baseline["flops"][-1]


def report(rows: Iterable[Row]) -> str:
    """All tables in markdown."""
    rows = list(rows)
    parts = []
    for setting in SETTINGS.values():
        own = [row for row in rows if row["setting"] == setting.name]
        found = [row for row in own if row["seed"] != RATE_SEED and row["system"] != SOURCE]
        if any(row["system"] == BASELINE for row in found):
            sources = [row for row in own if row["system"] == SOURCE and row["seed"] != RATE_SEED]
            parts.append(_systems_table(setting.name, found, sources))
    return "\n".join(parts)


def _systems_table(name: str, rows: Sequence[Row], sources: Sequence[Row]) -> str:
    by_system = {
        system: {row["seed"]: row for row in rows if row["system"] == system} for system in SYSTEMS
    }
    baseline = by_system[BASELINE]
    lines = [
        f"### {name}",
        "",
        "| system | rate | start loss | final loss | below scratch | FLOPs saved | "
        "with the source's | seeds |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for system, runs in by_system.items():
        seeds = sorted(runs.keys() & baseline.keys())
        if not seeds:
            continue
        pairs = [(runs[seed], baseline[seed]) for seed in seeds]
        cells = [
            SYSTEMS[system].title,
            f"{pairs[0][0]['rate']:g}",
            interval([row["losses"][0] for row, _ in pairs]),
            interval([row["losses"][-1] for row, _ in pairs]),
            interval([base["losses"][-1] - row["losses"][-1] for row, base in pairs]),
            _savings([saved(*pair) for pair in pairs]),
            _savings([saved(*pair, with_source=True) for pair in pairs]),
            str(len(seeds)),
        ]
        lines.append("| " + " | ".join(cells) + " |")
    if sources:
        final = interval([row["losses"][-1] for row in sources])
        lines += ["", f"The source ends at {final}."]
    return "\n".join(lines) + "\n"


def _savings(shares: Sequence[float]) -> str:
    if any(math.isnan(share) for share in shares):
        missed = sum(math.isnan(share) for share in shares)
        return f"not reached by {missed} of {len(shares)}"
    return interval([100 * share for share in shares], 1) + " %"
