"""Runs by name: what they cost to reach the loss of the reference, the first one.

With F(r, l) the FLOPs at which run r first reaches loss l,

    saving = 1 - F(run, l) / F(reference, l),   l = the reference's final loss            (1)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from rich.table import Table

from growkern.plot.curve import Curve, first_crossing
from growkern.plot.figure import plain

NOT_REACHED = "not reached"
KEYS = ("start_loss", "flops", "flops_saved", "flops_saved_with_small_model")
HEADS = ("run", "start\nloss", "FLOPs\nto mark", "FLOPs\nsaved", "small model\ncounted")


@dataclass(frozen=True)
class Group:
    """The runs of one name.

    Attributes:
        name: of all of them.
        curves: one per seed.
        marks: the loss that each curve is to reach.
        before: FLOPs that were spent before they started, on the small model.
    """

    name: str
    curves: tuple[Curve, ...]
    marks: tuple[float, ...]
    before: float = 0.0

    @property
    def label(self) -> str:
        return plain(self.name) + (f" ({len(self.curves)} runs)" if len(self.curves) > 1 else "")

    def mean(self) -> tuple[np.ndarray, np.ndarray]:
        """FLOPs and all losses, (points,) and (runs, points), where all of the runs have some."""
        if len(self.curves) == 1:
            return np.array(self.curves[0].flops) + self.before, np.array([self.curves[0].losses])
        first = max(curve.flops[0] for curve in self.curves)
        last = min(curve.flops[-1] for curve in self.curves)
        points = np.unique([x for c in self.curves for x in c.flops if first <= x <= last])
        losses = [np.interp(points, curve.flops, curve.losses) for curve in self.curves]
        return points + self.before, np.array(losses)

    def reached(self) -> list[tuple[float, float]]:
        """FLOPs, without `before`, and the mark, of each run that reaches its mark."""
        found = [(c.flops_at(mark), mark) for c, mark in zip(self.curves, self.marks, strict=True)]
        return [(cost, mark) for cost, mark in found if cost is not None]

    def cost(self) -> float | None:
        """FLOPs, without `before`, to reach the marks: the mean over the runs if all of them do.

        Else it is that of their mean, and None if that does not reach the mean mark either.
        """
        found = self.reached()
        if len(found) == len(self.curves):
            return float(np.mean([cost for cost, _ in found]))
        flops, losses = self.mean()
        mark = float(np.mean(self.marks))
        cost = first_crossing((flops - self.before).tolist(), losses.mean(0).tolist(), mark)
        return None if cost is None else float(cost)


def groups_of(
    curves: Sequence[Curve], sources: Sequence[Curve], paired: bool = False
) -> list[Group]:
    """The runs by name, in the order in which the names come first. The first is the reference.

    Args:
        curves: of all runs.
        sources: of the small model.
        paired: see `draw`.
    """
    by_name: dict[str, list[Curve]] = {}
    for curve in curves:
        by_name.setdefault(curve.name, []).append(curve)
    reference, *_ = by_name.values()
    before = float(np.mean([source.flops[-1] for source in sources])) if sources else 0.0
    # Seeds of a masked model differ by a few FLOPs. The mean ends where the shortest of the runs
    # does: beyond that point a lower mark would not be reached
    end = float(Group("", tuple(reference), ()).mean()[1].mean(0)[-1])
    ends = [curve.losses[-1] for curve in reference]
    return [
        Group(
            name,
            tuple(runs),
            tuple(ends) if paired else (end,) * len(runs),
            0.0 if runs is reference else before,
        )
        for name, runs in by_name.items()
    ]


def savings_table(groups: Sequence[Group]) -> Table:
    """A table of what the runs cost and saved, with a row per name."""
    mark = float(np.mean(groups[0].marks))
    of = "mean final loss" if len(groups[0].curves) > 1 else "final loss"
    seeds = max(len(group.curves) for group in groups)
    table = Table(
        title=f"FLOPs to the {of} of {groups[0].name}, {mark:.3f}",
        caption="Ranges that overlap order nothing." if seeds > 1 else "One seed orders nothing.",
    )
    for head in HEADS:
        table.add_column(head, justify="left" if head == "run" else "right")
    for cells in savings_cells(groups):
        # a range takes two lines, so that the table fits into 80 columns
        table.add_row(cells[0], *(cell.replace(" to ", " to\n") for cell in cells[1:]))
    return table


def savings_rows(groups: Sequence[Group]) -> list[dict[str, Any]]:
    """The table for JSON, a row per name: lists with a number for each seed, None for none."""
    rows = []
    for group in groups:
        numbers = [values or None for values in _numbers(group, groups[0])]
        rows.append({"run": group.name, **dict(zip(KEYS, numbers, strict=True))})
    return rows


def savings_cells(groups: Sequence[Group]) -> list[list[str]]:
    """The cells under HEADS, a list for each name. Those of several seeds are ranges. (1)"""
    rows = []
    for group in groups:
        numbers = zip(_numbers(group, groups[0]), (".2f", ".2g", ".0%", ".0%"), strict=True)
        start, cost, *shares = [_range(values, form) if values else "-" for values, form in numbers]
        rows.append([group.name, start, NOT_REACHED if cost == "-" else cost, *shares])
    return rows


def _numbers(group: Group, reference: Group) -> list[list[float]]:
    """The numbers of KEYS, one for each seed; none where there are none."""
    costs = [cost for cost, _ in group.reached()]
    found = [[curve.losses[0] for curve in group.curves]]
    if len(costs) < len(group.curves):
        return [*found, [], [], []]
    found.append(costs)
    if len(set(group.marks)) > 1:
        full = [cost for cost, _ in reference.reached()]
    else:
        full = [reference.cost() or 0.0] * len(costs)
    if group is reference or not all(full):
        return [*found, [], []]
    saved = [1 - cost / whole for cost, whole in zip(costs, full, strict=True)]
    counted = [x - group.before / whole for x, whole in zip(saved, full, strict=True)]
    return [*found, saved, counted if group.before else []]


def _range(values: Sequence[float], form: str) -> str:
    """The lowest and the highest value; one number if they read the same."""
    return " to ".join(dict.fromkeys(format(x, form) for x in (min(values), max(values))))
