"""The curves of training runs, and what each cost to reach the loss of the first, the reference.

The curve of a run comes from the log history in its training directory. It shows the validation
loss if that was measured, else the training loss. The FLOPs at which a loss is first reached are
interpolated linearly between the two nearest points.

With F(r, l) the FLOPs at which run r first reaches loss l,

    saving = 1 - F(run, l) / F(reference, l),   l = the reference's final loss            (1)
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from rich.table import Table

from growkern.errors import GrowthError
from growkern.files import read_json
from growkern.plot.figure import plain
from growkern.train.safety.checkpoints import STATE_FILE, checkpoints_in

# 300,000 lines of the log
MOST_BYTES = 100_000_000
# of FLOPs, and of anything else in a log
MOST = 1e40
NOT_REACHED = "not reached"
KEYS = ("start_loss", "flops", "flops_saved", "flops_saved_with_small_model")
HEADS = ("run", "start\nloss", "FLOPs\nto mark", "FLOPs\nsaved", "small model\ncounted")


@dataclass(frozen=True)
class Curve:
    """The losses of a run, with the steps and the FLOPs so far at which they were measured.

    `validation` says whether these are validation losses. Steps ascend. `growths` has the FLOPs at
    which the model grew inside the run. `finished` says whether the run came to its end.
    """

    name: str
    steps: tuple[int, ...]
    flops: tuple[float, ...]
    losses: tuple[float, ...]
    validation: bool = True
    growths: tuple[float, ...] = ()
    finished: bool = True


def first_crossing(costs: Sequence[float], losses: Sequence[float], target: float) -> float | None:
    """The cost at which a loss is first reached, interpolated linearly; None if it never is.

    Costs ascend.
    """
    for i, loss in enumerate(losses):
        if loss <= target:
            if i == 0:
                return costs[0]
            share = (losses[i - 1] - target) / (losses[i - 1] - loss)
            return costs[i - 1] + share * (costs[i] - costs[i - 1])
    return None


def log_of(directory: Path) -> Path:
    """The file with the log of a training directory, finished or not."""
    # an unfinished run has its log in its checkpoints only
    files = (place / STATE_FILE for place in (directory, *checkpoints_in(directory)))
    file = next((file for file in files if file.is_file()), None)
    if file is None:
        runs = ", ".join(map(str, sorted(directory.glob("generation-*"))))
        hint = f"give one of its runs, {runs}" if runs else "give the directory of a run"
        raise GrowthError(
            f"{directory} is not a training directory: it has no {STATE_FILE}: {hint}"
        )
    return file


def read_curve(directory: str | Path, name: str | None = None) -> Curve:
    """Read the curve of a training directory, finished or not. None takes the directory's name."""
    directory = Path(directory)
    file = log_of(directory)
    try:
        history = read_json(file, MOST_BYTES, "log")["log_history"]
        curve = curve_of(history, name or directory.resolve().name)
        curve = replace(curve, finished=file.parent == directory)
        for step, loss in zip(curve.steps, curve.losses, strict=True):
            if isinstance(loss, float) and not math.isfinite(loss):
                raise GrowthError(
                    f"{file}: the loss at step {step} is {loss}: the run diverged, and a curve "
                    "needs numbers"
                )
        for number in (*curve.steps, *curve.flops, *curve.losses, *curve.growths):
            # integers of a file may be too large for a float
            if isinstance(number, str) or not abs(float(number)) <= MOST:
                raise ValueError(f"{str(number)[:20]} is no number of a log")
    except GrowthError:
        raise
    except (KeyError, TypeError, AttributeError, ValueError, OverflowError) as error:
        raise GrowthError(f"{file}: not the log of a run: {repr(error)[:200]}") from error
    if not curve.steps:
        raise GrowthError(
            f"{file}: no line of the log has a loss and flops: lower log_every under [training]"
        )
    return curve


def curve_of(history: Sequence[dict[str, Any]], name: str) -> Curve:
    """Make a curve from the lines of a log. A step that a resumed run logged twice counts once."""
    validation = any("eval_loss" in line for line in history)
    # with a teacher, "loss" includes the KL term; only "mlm" can be compared with other runs
    keys = ("eval_loss",) if validation else ("mlm", "loss")
    points: dict[int, tuple[float, float]] = {}
    growths: dict[int, float] = {}
    flops_before = 0.0
    for line in history:
        # the first line of the grown model; the line before is that of its growth
        if "growth" in line:
            growths[line["growth"]] = flops_before
        flops_before = line.get("flops", flops_before)
        key = next((key for key in keys if key in line), None)
        if key is not None and "flops" in line:
            points[line["step"]] = line["flops"], line[key]
    steps = tuple(sorted(points))
    flops, losses = (tuple(points[step][i] for step in steps) for i in (0, 1))
    return Curve(name, steps, flops, losses, validation, tuple(growths.values()))


@dataclass(frozen=True)
class Group:
    """The runs of one name, a curve per seed."""

    name: str
    curves: tuple[Curve, ...]
    marks: tuple[float, ...]  # the loss that each curve is to reach
    sources: tuple[Curve, ...] = ()  # of the small model that they started from

    @property
    def before(self) -> float:
        """FLOPs that were spent before the runs started, on the small model."""
        return float(np.mean([source.flops[-1] for source in self.sources] or [0.0]))

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
        pairs = zip(self.curves, self.marks, strict=True)
        costs = [(first_crossing(curve.flops, curve.losses, mark), mark) for curve, mark in pairs]
        return [(cost, mark) for cost, mark in costs if cost is not None]

    def cost(self) -> float | None:
        """FLOPs, without `before`, to reach the marks: the mean over the runs if all of them do.

        Else it is that of their mean, and None if that does not reach the mean mark either.
        """
        reached = self.reached()
        if len(reached) == len(self.curves):
            return float(np.mean([cost for cost, _ in reached]))
        flops, losses = self.mean()
        mark = float(np.mean(self.marks))
        cost = first_crossing((flops - self.before).tolist(), losses.mean(0).tolist(), mark)
        return None if cost is None else float(cost)


def groups_of(
    curves: Sequence[Curve], sources: Sequence[Curve], paired: bool = False
) -> list[Group]:
    """The runs by name, in the order in which the names come first; arguments as of `draw`."""
    by_name: dict[str, list[Curve]] = {}
    for curve in curves:
        by_name.setdefault(curve.name, []).append(curve)
    reference, *_ = by_name.values()
    # Seeds of a masked model differ by a few FLOPs. The mean ends where the shortest of the runs
    # does: beyond that point a lower mark would not be reached
    end = float(Group("", tuple(reference), ()).mean()[1].mean(0)[-1])
    ends = [curve.losses[-1] for curve in reference]
    return [
        Group(
            name,
            tuple(runs),
            tuple(ends) if paired else (end,) * len(runs),
            () if runs is reference else tuple(sources),
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
        caption="Runs whose ranges overlap may differ by chance."
        if seeds > 1
        else "With one seed per run, small differences may be chance.",
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
    # that of a model that was grown for the run is measured before the first step
    starts = [curve.losses[0] for curve in group.curves if not curve.steps[0]]
    if len(costs) < len(group.curves):
        return [starts, [], [], []]
    if len(set(group.marks)) > 1:
        full = [cost for cost, _ in reference.reached()]
    else:
        full = [reference.cost() or 0.0] * len(costs)
    if group is reference or not all(full):
        return [starts, costs, [], []]
    saved = [1 - cost / whole for cost, whole in zip(costs, full, strict=True)]
    counted = [x - group.before / whole for x, whole in zip(saved, full, strict=True)]
    return [starts, costs, saved, counted if group.before else []]


def _range(values: Sequence[float], form: str) -> str:
    """The lowest and the highest value; one number if they read the same."""
    return " to ".join(dict.fromkeys(format(x, form) for x in (min(values), max(values))))
