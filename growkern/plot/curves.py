"""The curves of training runs, and what each cost to reach the loss of the first, the reference.

The curve of a run comes from the log in its training directory. It shows the validation
loss if that was measured, else the training loss. The FLOPs at which a loss is first reached are
interpolated linearly between the two nearest points.

To reach the reference's final loss, let a run take g FLOPs, the reference w, and the best size that
is never grown b. The small model took s. As docs/savings.md asks, a run saves

    of a family            1 - (s + g) / (s + w)
    of a given size        1 - (s + g) / w
    if any size will do    1 - (s + g) / b, and a smaller model that is never grown 1 - g / w   (1)
    if the small one exists          1 - g / w
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
from rich.table import Table

from growkern.errors import GrowthError, human
from growkern.files import parse_json, read_bounded, read_json
from growkern.growth.history import LINEAGE_FILE
from growkern.plot.figure import plain
from growkern.train.safety import LOG_FILE, STATE_FILE, checkpoints_in

# 300,000 lines of the log
MOST_BYTES = 100_000_000
# of FLOPs, and of anything else in a log
MOST = 1e40
NOT_REACHED, NOT_KNOWN = "not reached", "not known"
EARLY = ", below the mark at its start"
# the file with the settings of a run, and what a log line puts before new sizes
RUN_FILE, SIZE = "run.json", "growth/"
# the other numbers of such a line
LOSSES = ("loss_before", "loss_after")
# of the settings by which runs are told apart, and of a value; files and seeds are not shown
MOST_KEYS, LONGEST = 3, 40
# of a name in the table, to stand in one line
LONGEST_NAME = 24
# the method of a model that a run makes new
RANDOM = "random"
FILES = ("path", "paths", "source", "tokenizer", "train", "validation")
# a teacher comes and goes with the inheritance
UNSHOWN = (*FILES, "teacher", "seed", "method")
LABEL = "label_loss"
# what is drawn beside the loss -> words, and the number that it is divided by
MEASURED = {
    LABEL: ("label loss", 1),
    "kl": ("KL divergence from the teacher", 1),
    "top1_agreement": ("same likeliest token as teacher", 1),
    "grad_norm": ("norm of the gradient", 1),
    "learning_rate": ("learning rate", 1),
    "tokens_per_second": ("tokens per second", 1),
    "data_time_share": ("share of waiting for data", 1),
    "max_memory_allocated": ("peak memory of a GPU, GB", 1e9),
    "maxrss": ("peak memory of a process, GB", 1e9),
    "mfu": ("MFU", 1),
    "expert_entropy": ("load of experts: entropy", 1),
    "expert_largest_share": ("largest load; dotted: equal loads", 1),
}
# what such a number would be if all experts had equal loads: a dotted line
EQUAL = {"expert_largest_share": "expert_equal_share"}
QUESTIONS = {
    "family": "a family",
    "size": "a given size",
    "loss": "any size will do",
    "existing": "the small one exists",
}
KEYS = ("start_loss", "flops", *(f"saved_{name}" for name in QUESTIONS))
HEADS = ("run", "start loss", "FLOPs to mark", *(f"saved: {words}" for words in QUESTIONS.values()))
# a shorter run than this share of the reference does not tell that it cannot reach the mark
LONG_ENOUGH = 0.99


@dataclass(frozen=True)
class Curve:
    """The losses of a run, with the steps and the FLOPs so far at which they were measured.

    `validation` says whether these are validation losses. Steps ascend. `growths` has the FLOPs at
    which the model grew inside the run, `grown` the new sizes, and `began` those of a growth at its
    start. If it was evaluated before and after a growth, the second point is there by one bit more
    FLOPs. `last` has its last step, and the steps that it was to have. `settings` are those of its
    run file. `parameters` are those of the model at the end; 0: not known. `method` is that of its
    growth, "" without one. `taught` says whether the FLOPs hold those of a teacher. `measured` has
    FLOPs and values of those of `MEASURED` that were logged.
    """

    name: str
    steps: tuple[int, ...]
    flops: tuple[float, ...]
    losses: tuple[float, ...]
    validation: bool = True
    growths: tuple[float, ...] = ()
    finished: bool = True
    grown: tuple[str, ...] = ()
    last: tuple[int, int] = (0, 0)
    settings: Mapping[str, Any] = field(default_factory=dict)
    parameters: int = 0
    method: str = ""
    taught: bool = False
    began: str = ""
    measured: Mapping[str, Sequence[tuple[float, float]]] = field(default_factory=dict)

    @property
    def from_scratch(self) -> bool:
        """Whether it is known to begin with random weights."""
        return self.method == RANDOM

    @property
    def is_grown(self) -> bool:
        """Whether it is known to begin with weights of a smaller model."""
        return bool(self.method or self.began) and not self.from_scratch

    @property
    def is_whole(self) -> bool:
        """Whether it needed no other model, as far as is known."""
        return not (self.is_grown or self.growths or self.taught)

    @property
    def title(self) -> str:
        """Its name; a generation is called by what it is."""
        if not self.name.startswith("generation-") or (self.growths and not self.method):
            return self.name
        kind = f"grown by {self.method}" if self.method else "never grown"
        return f"{self.name}, {'from scratch' if self.from_scratch else kind}"

    @property
    def state(self) -> str:
        """How far an unfinished run is; empty if it is finished."""
        done, steps = self.last
        if self.finished:
            return ""
        words = f"unfinished: step {done}{f' of {steps}' if steps else ''}"
        is_behind = self.validation and 0 <= self.steps[-1] < done
        return f"{words}, last evaluation at step {self.steps[-1]}" if is_behind else words


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


def runs_in(directory: Path) -> list[Path]:
    """The generations that have a log, in a folder of them; else the directory itself."""
    runs = sorted(directory.glob("generation-*"), key=lambda run: (len(run.name), run.name))
    return [run for run in runs if _logs(run)] or [directory]


def log_of(directory: Path) -> Path:
    """The file with the log of a training directory, finished or not."""
    if found := _logs(directory):
        return found[0]
    has = f"has no {LOG_FILE} or {STATE_FILE}" if directory.exists() else "does not exist"
    raise GrowthError(f"{directory} {has}: give the directory of a run")


def _logs(directory: Path) -> list[Path]:
    # other trainers have the log of an unfinished run in its checkpoints only
    places = (directory, *checkpoints_in(directory))
    files = directory / LOG_FILE, *(place / STATE_FILE for place in places)
    return [file for file in files if file.is_file()]


def model_file(directory: Path, name: str) -> dict[str, Any]:
    """The table in a file of a run's model, or of its latest checkpoint; empty without one."""
    places = (directory, *checkpoints_in(directory))
    return next(filter(None, (record(place / name) for place in places)), {})


def read_curve(directory: str | Path) -> Curve:
    """Read the curve of a training directory, finished or not. It has the directory's name."""
    directory = Path(directory)
    file = log_of(directory)
    try:
        history = _lines_of(file)
        settings = record(directory / RUN_FILE).get("run") or {}
        # until there is a model
        asked = settings.get("growth") or {}
        growth = model_file(directory, LINEAGE_FILE).get("options", asked)
        last = history[-1]["step"] if history else 0, settings.get("training", {}).get("steps", 0)
        growths = asked if isinstance(asked, list) else [asked]
        first = [name for one in growths for name in one.get("sizes") or ()]
        curve = replace(
            curve_of(history, directory.resolve().name, first),
            # one that is resumed with more steps still has its model
            finished=(directory / STATE_FILE).is_file() and last[0] >= last[1],
            last=last,
            settings=settings,
            method=str(growth.get("method", "")) if isinstance(growth, dict) else "",
        )
        for step, loss in zip(curve.steps, curve.losses, strict=True):
            if isinstance(loss, float) and not math.isfinite(loss):
                raise GrowthError(f"{file}: the loss at step {step} is {loss}: the run diverged")
        for number in (*curve.steps, *curve.flops, *curve.losses, *curve.growths, *last):
            # integers of a file may be too large for a float
            if isinstance(number, str) or not abs(float(number)) <= MOST:
                raise ValueError(f"{str(number)[:20]} is no number of a log")
    except GrowthError:
        raise
    except (KeyError, TypeError, AttributeError, ValueError, OverflowError) as error:
        raise GrowthError(f"{file}: not the log of a run: {repr(error)[:200]}") from error
    if not curve.steps:
        raise GrowthError(f"{file}: no line has a loss and flops yet: wait, or lower log_every")
    return curve


def _lines_of(file: Path) -> list[Any]:
    """The lines of a log."""
    if file.name == STATE_FILE:
        return list(read_json(file, MOST_BYTES, "log")["log_history"])
    # the last one may be half written
    *lines, _ = read_bounded(file, MOST_BYTES, "log").split(b"\n")
    return [*map(parse_json, lines)]


def record(file: Path) -> dict[str, Any]:
    """The table in a file beside a log; empty without one."""
    found = read_json(file, MOST_BYTES, "record") if file.is_file() else {}
    return found if isinstance(found, dict) else {}


def settings_apart(curves: Sequence[Curve]) -> list[str]:
    """What tells the settings of runs apart, in a few words for each; none if one is not known."""
    found: list[list[str]] = [[] for _ in curves]
    sections = dict.fromkeys(name for curve in curves for name in curve.settings)
    for section in sections if all(curve.settings for curve in curves) else ():
        values: list[Any] = [curve.settings.get(section) for curve in curves]
        if section in UNSHOWN:
            continue
        # of random weights the sizes alone tell something, not that or how copies are made
        copied = [n for n, x in enumerate(curves) if section != "growth" or not x.from_scratch]
        if any(value is None for value in values):
            # names say which runs grew
            shown = values if section != "growth" else []
            rows = [("no" if value is None else "with", section) for value in shown]
            _add_differing(rows, found)
        elif all(isinstance(value, dict) for value in values):
            for key in dict.fromkeys(key for value in values for key in value):
                told = range(len(curves)) if key == "sizes" else copied
                if key not in UNSHOWN:
                    rows = [(key, _short(values[n].get(key))) for n in told]
                    _add_differing(rows, [found[n] for n in told])
    return [", ".join(words[:MOST_KEYS]) for words in found]


def _add_differing(rows: Sequence[tuple[str, str]], found: Sequence[list[str]]) -> None:
    if len(set(rows)) > 1:
        for words, row in zip(found, rows, strict=True):
            # a text that is empty by default, such as that of `to`, says nothing
            words += [" ".join(row)] if row[1] else []


def _short(value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{key} {inner}" for key, inner in value.items())[:LONGEST]
    return str(value)[:LONGEST]


def curve_of(history: Sequence[dict[str, Any]], name: str, first: Sequence[str] = ()) -> Curve:
    """Make a curve from the lines of a log. A step that a resumed run logged twice counts once.

    New sizes that are named in `first` come first.
    """
    validation = any("eval_loss" in line for line in history)
    # with a teacher, "loss" includes the KL term; only "label_loss" can be compared with other runs
    keys = ("eval_loss",) if validation else ("label_loss", "loss")
    points: dict[tuple[int, bool], tuple[float, float]] = {}
    growths: dict[int, tuple[float, str]] = {}
    last: dict[str, Any] = {}
    grows_at = set[int]()
    for line in history:
        # the first line of the grown model; the training line before is that of its growth
        if "growth" in line:
            new = [x for x in line if x.startswith(SIZE) and not x.endswith(LOSSES)]
            new.sort(key=lambda x: x.removeprefix(SIZE) not in first)
            sizes = "\n".join(f"{x.removeprefix(SIZE)} {line[x]}" for x in new)
            growths[line["growth"]] = last.get("flops", 0.0), sizes
            if line["growth"]:
                grows_at.add(last.get("step", 0))
        if "loss" in line:
            last = line
    for line in history:
        key = next((key for key in keys if key in line), None)
        if key is not None and "flops" in line:
            step = line["step"]
            is_after = step in grows_at and (step, False) in points
            flops = math.nextafter(line["flops"], math.inf) if is_after else line["flops"]
            points[step, is_after] = flops, line[key]
    places = sorted(points)
    steps = tuple(step for step, _ in places)
    flops, losses = (tuple(points[place][i] for place in places) for i in (0, 1))
    # number 0 is the growth that the run began with
    _, began = growths.pop(0, (0.0, ""))
    at = tuple(cost for cost, _ in growths.values())
    grown = tuple(sizes for _, sizes in growths.values())
    measured = {
        name: [
            (line["flops"], line[name])
            for line in history
            if "flops" in line and type(line.get(name)) in (int, float) and abs(line[name]) <= MOST
        ]
        for name in (*MEASURED, *EQUAL.values())
    }
    counts = [line["parameters"] for line in history if "parameters" in line]
    return Curve(
        name,
        steps,
        flops,
        losses,
        validation=validation,
        growths=at,
        grown=grown,
        began=began,
        parameters=counts[-1] if counts else 0,
        taught=any("kl" in line for line in history),
        measured={name: points for name, points in measured.items() if points},
    )


@dataclass(frozen=True)
class Group:
    """The runs of one name, a curve per seed."""

    name: str
    curves: tuple[Curve, ...]
    marks: tuple[float, ...]  # the loss that each curve is to reach
    sources: tuple[Curve, ...] = ()  # of the small model that they started from
    about: str = ""  # what tells its settings from those of the others
    is_compared: bool = True  # whether it has the size of the reference

    @property
    def finished(self) -> bool:
        """Whether all of its runs came to their end."""
        return all(curve.finished for curve in self.curves)

    @property
    def is_beyond(self) -> bool:
        """Whether a small model ends below a mark, so that the training was too short to judge."""
        ends = [source.losses[-1] for source in self.sources]
        return any(end <= float(np.mean(self.marks)) for end in ends)

    @property
    def is_never_grown(self) -> bool:
        """Whether it is a model of another size than the reference's that needed no other one."""
        return not self.is_compared and self.curves[0].is_whole

    @property
    def spent(self) -> float:
        """FLOPs, without `before`, of its shortest run."""
        return min(curve.flops[-1] for curve in self.curves)

    @property
    def last_loss(self) -> str:
        """What its last loss is, in words."""
        return "final loss" if self.finished else "last loss so far"

    @property
    def state(self) -> str:
        """How far its first unfinished run is; empty if all are finished."""
        return next(filter(None, (curve.state for curve in self.curves)), "")

    @property
    def before(self) -> float:
        """FLOPs that were spent before the runs started, on the small model."""
        return float(np.mean([source.flops[-1] for source in self.sources] or [0.0]))

    @property
    def title(self) -> str:
        """See `Curve.title`."""
        return replace(self.curves[0], name=self.name).title

    @property
    def label(self) -> str:
        runs = [f"{len(self.curves)} runs"] if len(self.curves) > 1 else []
        more = ", ".join([*runs, *filter(None, (size_of(self.curves), self.about, self.state))])
        return plain(f"{self.title} ({more})" if more else self.title)

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


def size_of(curves: Sequence[Curve]) -> str:
    """The parameters of the first model in words; empty if they are not known."""
    return f"{human(curves[0].parameters)} parameters" if curves[0].parameters else ""


def runs_by_name(
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
    about = settings_apart([runs[0] for runs in by_name.values()])
    groups = []
    for (name, runs), words in zip(by_name.items(), about, strict=True):
        marks = tuple(ends) if paired else (end,) * len(runs)
        is_compared = len({runs[0].parameters, reference[0].parameters} - {0}) <= 1
        is_first = runs is reference and len(by_name) > 1 and not runs[0].is_grown
        is_alone = runs[0].from_scratch or is_first or (runs[0].is_whole and not is_compared)
        before = () if is_alone else tuple(sources)
        groups.append(Group(name, tuple(runs), marks, before, words, is_compared))
    return groups


def savings_table(groups: Sequence[Group]) -> Table:
    """A table of what the runs cost and saved, with a row per name."""
    mark = float(np.mean(groups[0].marks))
    of = ("mean " if len(groups[0].curves) > 1 else "") + groups[0].last_loss
    table = Table(
        title=f'FLOPs to the mark: the {of} of "{groups[0].title}", {mark:.3f}',
        caption="Runs whose ranges overlap may differ by chance."
        if max(len(group.curves) for group in groups) > 1
        else "With one seed per run, small differences may be chance.",
    )
    rows = savings_cells(groups)
    # a question that no run answers takes no room
    shown = [
        i for i in range(len(HEADS)) if i < 3 or {cells[i] for cells in rows} - {"-", NOT_KNOWN}
    ]
    names = [cells[0].replace(", ", ",\n") for cells in rows]
    # no name is broken, if heads can give it room: one that is cut would be like another one
    is_short = max(len(line) for name in names for line in name.split("\n")) <= LONGEST_NAME
    for i in shown:
        kind: Any = {"justify": "right"} if i else {"no_wrap": is_short}
        head = HEADS[i].replace(": ", ":\n")
        head = head.replace("a given", "a").replace("the small one", "small")
        table.add_column(head, overflow="fold", **kind)
    for name, cells in zip(names, rows, strict=True):
        # a range takes two lines, so that the table fits into 80 columns
        table.add_row(name, *(cells[i].replace(" to ", " to\n") for i in shown[1:]))
    return table


def savings_rows(groups: Sequence[Group]) -> list[dict[str, Any]]:
    """The table for JSON, a row per name: lists with a number for each seed, None for none."""
    rows = []
    for group, numbers in _rows(groups):
        found = zip(KEYS, [values or None for values in numbers], strict=True)
        rows.append({"run": group.name, **dict(found)})
    return rows


def savings_cells(groups: Sequence[Group]) -> list[list[str]]:
    """The cells under HEADS, a list for each name. Those of several seeds are ranges. (1)"""
    rows, forms = [], (".2f", ".2g", *[".0%"] * len(QUESTIONS))
    mark, has_others = groups[0].cost(), any(group.is_never_grown for group in with_small(groups))
    for group, numbers in _rows(groups):
        cells = [_range(x, form) if x else "-" for x, form in zip(numbers, forms, strict=True)]
        # a negative share reads as a slip
        for i in (i for i, x in enumerate(numbers) if i > 1 and x and max(x) < 0):
            cells[i] = f"costs {_range([1 - x for x in numbers[i]], '.3g')}x"
        if cells[1] == "-":
            cells[1] = NOT_REACHED
            if group.is_never_grown and mark and group.spent < LONG_ENOUGH * mark:
                cells[1] = f"stopped at {group.spent / mark:.0%} of these FLOPs"
                cells[4] = NOT_KNOWN
        elif cells[3] != "-" and cells[4] == "-" and has_others:
            cells[4] = NOT_KNOWN
        pairs = zip(group.curves, group.marks, strict=True)
        if group is not groups[0] and all(curve.losses[0] <= end for curve, end in pairs):
            cells[1] += EARLY
        rows.append([group.title, *cells])
    return rows


def with_small(groups: Sequence[Group]) -> list[Group]:
    """The groups, and after the first one the small model if it is never grown, with its marks.

    Not beside a run of its size that is never grown: that one answers the question.
    """
    first, *others = groups
    sources = next((group.sources for group in groups if group.sources), ())
    sizes = {group.curves[0].parameters for group in groups if group.is_never_grown}
    are_alone = all(source.is_whole and source.parameters not in sizes for source in sources)
    if not (sources and are_alone):
        return [*groups]
    is_paired = len(first.marks) == len(sources)
    marks = first.marks if is_paired else (float(np.mean(first.marks)),) * len(sources)
    return [first, Group("small model, never grown", sources, marks, is_compared=False), *others]


def best_never_grown(groups: Sequence[Group]) -> float | None:
    """FLOPs of the best size that is never grown, to the mark. None: not known, or one size."""
    fixed = [groups[0], *(group for group in with_small(groups) if group.is_never_grown)]
    costs = [group.cost() for group in fixed]
    best = min((cost for cost in costs if cost is not None), default=0.0)
    # one that was stopped before might have been there first
    pairs = zip(fixed, costs, strict=True)
    is_told = all(cost is not None or x.spent >= LONG_ENOUGH * best for x, cost in pairs)
    return best if len(fixed) > 1 and best and is_told else None


def shares(
    group: Group, cost: float, reference: Group, whole: float, best: float | None
) -> list[float | None]:
    """What a group saved by `QUESTIONS`, None where that is not known. (1)

    Args:
        cost: FLOPs that the group took to the mark, without `before`.
        whole: those of the reference.
        best: see `best_never_grown`.
    """
    # a control that is not finished has no final loss, and one that was grown is none
    if not (whole and reference.finished) or group.is_beyond or reference.curves[0].is_grown:
        return [None] * len(QUESTIONS)
    if group.is_never_grown:
        return [None, None, 1 - cost / whole, None]
    total, curve, compared = group.before + cost, group.curves[0], group.is_compared
    # the FLOPs of a small model that is not among the runs are not known
    is_known = bool(group.before) or not curve.is_grown or bool(curve.growths)
    return [
        1 - total / (whole + group.before) if group.before and compared else None,
        1 - total / whole if is_known and compared else None,
        1 - total / best if is_known and best else None,
        1 - cost / whole if compared and (group.before or not is_known) else None,
    ]


def _rows(groups: Sequence[Group]) -> list[tuple[Group, list[list[float]]]]:
    """The groups and a small model that is never grown, with the numbers of KEYS of all seeds."""
    (reference, *_), best = groups, best_never_grown(groups)
    rows = []
    for group in with_small(groups):
        costs = [cost for cost, _ in group.reached()]
        costs = costs if len(costs) == len(group.curves) else []
        # that of a model that was grown for the run is measured before the first step
        starts = [curve.losses[0] for curve in group.curves if not curve.steps[0]]
        full = [cost for cost, _ in reference.reached()]
        if len(set(group.marks)) == 1 or len(full) != len(costs):
            full = [reference.cost() or 0.0] * len(costs)
        pairs = zip(costs, full, strict=True) if group is not reference else ()
        of_seeds = [shares(group, cost, reference, whole, best) for cost, whole in pairs]
        saved = zip(*of_seeds, strict=True) if of_seeds else [()] * len(QUESTIONS)
        known = [[share for share in column if share is not None] for column in saved]
        # as long as its bar in the picture
        rows.append((group, [starts, [group.before + cost for cost in costs], *known]))
    return rows


def _range(values: Sequence[float], form: str) -> str:
    """The lowest and the highest value; one number if they read the same."""
    return " to ".join(dict.fromkeys(format(x, form) for x in (min(values), max(values))))
