"""The short tables of the documentation: what some lines of the tables of all runs save."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import NamedTuple

from bench.paper.compare import (
    MARK,
    QUESTIONS,
    Pairs,
    Row,
    Share,
    best_of,
    check_savings,
    committed,
    compared,
    fixed_sizes,
    is_base,
    mean_and_half,
    saved,
    share,
    smaller_alone,
    text_of,
    title_of,
)
from bench.paper.lines import Line
from bench.paper.models import Size
from bench.paper.plans import TABLES, jobs_of_seed, lines_of
from bench.shared.results import table
from growkern.errors import GrowthError

# a line of a table at size "tiny": the table, and the line's system and label
Where = tuple[str, str, str]
FAMILIES = {"BERT": "table2", "GPT-2": "table5"}
SEEDS = 3


class NeverGrown(NamedTuple):
    """A model of one size; `where` is the baseline to whose loss it is trained.

    Without a size it is the baseline itself, which goes on with the small model.
    """

    where: Where
    size: Size | None = None


class Brief(NamedTuple):
    """A short table.

    Attributes:
        groups: names of the groups of columns -> the questions that each answers.
        lines: the first cell of each -> its line in each group; None: there is none.
        alone: the same of the models that are never grown.
    """

    head: str
    groups: Mapping[str, tuple[str, ...]]
    lines: Mapping[str, tuple[Where | None, ...]]
    alone: Mapping[str, tuple[NeverGrown | None, ...]]


# the last question has another control: nothing is trained but the large model
ALL = ("family", "size", "loss")


def _of_families(system: str, families: str = "BERT GPT-2") -> tuple[Where | None, ...]:
    return tuple((name, system, "") if f in families else None for f, name in FAMILIES.items())


def _both_rates(system: str, rates: str = "0.009 0.003") -> tuple[Where | None, ...]:
    return tuple(
        ("upcycling", system, f"at {rate}") if rate in rates else None
        for rate in ("0.009", "0.003")
    )


GPT2, BERT = ("table5", "scratch", ""), ("table2", "scratch", "")
ONE_RUN = ((64, "adamw"), (32, "adamw"), (64, "muon"))
BRIEFS = {
    "methods": Brief(
        "method",
        dict.fromkeys(FAMILIES, (*ALL, "existing")),
        {
            '`fpi`, `stream="padded"`': _of_families("fpi_padded"),
            '`fresh`, `stream="padded"`': _of_families("fresh", "GPT-2"),
            "`direct_copy`": _of_families("direct_copy"),
        },
        {
            "4 x 64, never grown": tuple(
                NeverGrown(x, Size(4, 64, 4)) for x in _of_families("fpi_padded") if x
            ),
            "4 x 32, never grown": (NeverGrown(BERT, Size(4, 32, 2)), None),
        },
    ),
    "one-run": Brief(
        "8 layers, of which the run begins with",
        dict.fromkeys(("AdamW, width 64", "AdamW, width 32", "Muon, width 64"), ("size", "loss")),
        {
            f"{layers} layers, `{depth}` at 70 % of the steps": tuple(
                ("one_run", f"{depth}_at_70", f"from {layers}x{width}, 8x{width}, {optimizer}")
                for width, optimizer in ONE_RUN
            )
            for layers, depth in ((2, "random"), (4, "stack"))
        },
        {
            f"{layers} layers, never grown": tuple(
                NeverGrown(
                    ("one_run", "scratch", f"8x{width}, {optimizer}"),
                    Size(layers, width, width // 16),
                )
                for width, optimizer in ONE_RUN
            )
            for layers in (4, 2)
        },
    ),
    "upcycling": Brief(
        "in place of training the dense model on",
        dict.fromkeys(("rate 0.009", "rate 0.003"), ("loss",)),
        {
            "whole copies": _both_rates("upcycled"),
            "whole copies, `drop=0.5`": _both_rates("upcycled_drop", "0.009"),
            "twice as many experts, half as wide": _both_rates("upcycled_halves"),
            "whole copies, and the dense model as a teacher": _both_rates(
                "upcycled_taught", "0.003"
            ),
        },
        {
            "dense model, never grown": tuple(
                NeverGrown(("upcycling", "continued", f"at {rate}")) for rate in ("0.009", "0.003")
            )
        },
    ),
}

# the same on the page of all tables. In that of a family as much is spent before a size as on the
# smaller ones alone, so that "a family" is all sizes up to this one
STUDIES = {
    "sources": Brief(
        "small model, its steps",
        {"": ALL},
        {
            **{
                f"GPT-2 of half the width, {steps}": (
                    ("moment", "fpi_padded", f"source of {steps} steps"),
                )
                for steps in ("200", "2,000", "8,000")
            },
            **{
                f"BERT of {size}": (place,)
                for size, place in {
                    "half the width and half the layers, 2,000": ("table3", "aki", "source 2x64"),
                    "a quarter of the width, 2,000": ("ages", "aki", "source 4x32"),
                    "a quarter of the width, 6,000": ("ages", "aki", "source 4x32 of 6,000 steps"),
                }.items()
            },
        },
        {
            "GPT-2 of half the width, never grown": (NeverGrown(GPT2, Size(4, 64, 4)),),
            "BERT of a quarter of the width, never grown": (NeverGrown(BERT, Size(4, 32, 2)),),
        },
    ),
    "family": Brief(
        "a family of 4 x 32, 4 x 64 and 4 x 96",
        dict.fromkeys(("up to 4 x 64", "up to 4 x 96"), ALL),
        {
            words: (("family", system, middle), ("family", system, "4x96"))
            for words, system, middle in (
                ("each grown from the one before", "chained", "4x64"),
                ("the same, `direct_copy`", "chained_copy", "4x64 at 0.0052"),
                ("the same, `fresh`", "chained_fresh", "4x64 at 0.0052"),
            )
        },
        {
            "4 x 32, never grown": tuple(
                NeverGrown(("family", "scratch", size), Size(4, 32, 2)) for size in ("4x64", "4x96")
            ),
            "4 x 64, never grown": (
                None,
                NeverGrown(("family", "scratch", "4x96"), Size(4, 64, 4)),
            ),
        },
    ),
}


def brief_text(results: Path, name: str) -> str:
    """A short table of the runs in a folder of results, in markdown.

    Raises:
        GrowthError: the table names no question, or has no model that is never grown.
    """
    brief, rows = (BRIEFS | STUDIES)[name], committed(results)
    groups = brief.groups
    for group, questions in groups.items():
        if not questions or set(questions) - set(QUESTIONS):
            raise GrowthError(
                f"table {name!r}, columns {group!r}: the questions are {questions!r}: name some of "
                f"{', '.join(QUESTIONS)}"
            )
    heads = [
        f"{group}: {QUESTIONS[question]}" if group else QUESTIONS[question]
        for group, questions in groups.items()
        for question in questions
    ]
    asked, grown, fixed = groups.values(), brief.lines.items(), brief.alone.items()
    columns = zip(*brief.alone.values(), strict=True) if brief.alone else [()] * len(groups)
    sizes = [[x.size for x in column if x and x.size] for column in columns]
    lines = []
    for words, places in grown:
        told = (savings(rows, *x) for x in zip(places, asked, sizes, strict=True))
        lines.append([words, *chain.from_iterable(told)])
    for words, small in fixed:
        told = (never_grown(rows, *x) for x in zip(small, asked, strict=True))
        lines.append([words, *chain.from_iterable(told)])
    return check_savings(name, table([brief.head, *heads], lines))


def savings(
    rows: Mapping[str, Row], where: Where | None, questions: Sequence[str], sizes: Sequence[Size]
) -> list[str]:
    """What a line saves by each question; "-" where it has no runs, or gives no answer.

    Args:
        sizes: of the models that are never grown. Where none was run, nothing is said of a loss.
    """
    line, pairs = runs_beside(rows, where)
    if line is None or where is None:
        return ["-"] * len(questions)
    if TABLES[where[0]].baseline != "scratch":
        # it goes on with the small model, and is the one that is never grown
        return [text_of([Share(saved(*x)) for x in pairs.values()], SEEDS)] * len(questions)
    smaller, texts = smaller_alone(line.setting, pairs, rows), []
    for question in questions:
        needs_source = question in ("family", "existing")
        if needs_source and not any(own[-1]["source flops"] for own, _ in pairs.values()):
            texts.append("-")
            continue
        shares = [
            share(question, own, best_of(smaller[seed].values()), base)
            for seed, (own, base) in pairs.items()
            if question != "loss" or smaller[seed].keys() & set(sizes)
        ]
        texts.append(text_of(shares, SEEDS))
    return texts


def never_grown(
    rows: Mapping[str, Row], place: NeverGrown | None, questions: Sequence[str]
) -> list[str]:
    """What a model that is never grown saves. It has another size, so it answers one question.

    Beside a grown line it is the line's small model, trained on. What that saves is told as a share
    of what growth is compared with.
    """
    line, pairs = runs_beside(rows, place and place.where)
    if line is None or place is None:
        return ["-"] * len(questions)
    if place.size is None:
        return [MARK] * len(questions)
    smaller = smaller_alone(line.setting, pairs, rows)
    known = {seed: of[place.size] for seed, of in smaller.items() if place.size in of}
    is_run = any(place.size in fixed_sizes(line.setting, seed, rows) for seed in pairs)
    spent = {n: own[-1]["source flops"] / base[-1]["flops"][-1] for n, (own, base) in pairs.items()}

    def text(question: str) -> str:
        if question != "loss" and not (question in ("family", "existing") and any(spent.values())):
            return "-"
        paid = dict.fromkeys(spent, 0.0) if question == "loss" else spent
        shares = [
            Share((x.value + paid[n]) / (1 + paid[n] * (question == "family")), x.bound)
            for n, x in known.items()
        ]
        return text_of(shares, SEEDS) if shares else "run too short" if is_run else "not run"

    return [text(question) for question in questions]


def runs_beside(rows: Mapping[str, Row], where: Where | None) -> tuple[Line | None, Pairs]:
    """A line of a table at size "tiny", and its runs beside those of its baseline."""
    name, *wanted = where or ("", "", "")
    lines = compared(lines_of(name, "tiny"), name, rows) if where else {}
    found = ((x, pairs) for x, pairs in lines.items() if [x.system, x.label] == wanted)
    return next(found, (None, {}))


def ends_of(rows: Mapping[str, Row], name: str) -> list[tuple[Line, Row]]:
    """The lines of a table of which each has one run, at a given rate, and the rows that are there.

    All have seed 1.
    """
    lines = lines_of(name, "tiny")
    jobs = [jobs_of_seed(line, 1, line.rate or 0.0)[-1].name for line in lines]
    return [(line, rows[job]) for line, job in zip(lines, jobs, strict=True) if job in rows]


def _below(marks: Sequence[float | None], loss: float) -> list[str]:
    """How far a loss is below others; "-" for one that is not there, or the same."""
    return ["-" if x is None or x == loss else f"{x - loss:+.3f}" for x in marks]


def diagnosis_text(results: Path) -> str:
    """The losses, and how far each is below those from scratch with the same seed, in markdown.

    The question is a given size: all FLOPs count, those of a source too. Of the rates from scratch
    only the best one is shown.
    """
    rows, by_line = committed(results), {}
    for line in lines_of("diagnosis", "tiny"):
        names = {n: jobs_of_seed(line, n, line.rate or 0.0)[-1].name for n in range(1, SEEDS + 1)}
        if found := {seed: rows[name] for seed, name in names.items() if name in rows}:
            by_line[line] = found
    losses = {
        line: {seed: row["losses"][-1] for seed, row in found.items()}
        for line, found in by_line.items()
    }
    scratch = [line for line in losses if line.system == "scratch"]
    steps = [line for line in scratch if line.label.startswith("equal steps")]
    # at the best of its rates
    marks = [*scratch[:1], *sorted(steps, key=lambda line: losses[line][1])[:1]]
    whole, cells = by_line[scratch[0]][1]["flops"][-1], []
    for line, found in by_line.items():
        if line in steps and line not in marks:
            continue
        spent = (found[1]["source flops"] + found[1]["flops"][-1]) / whole
        below = [_below_by_seed(losses[mark], losses[line]) for mark in marks]
        mean = statistics.fmean(losses[line].values())
        cells.append([title_of(line), f"{spent:.2f}", str(len(found)), f"{mean:.3f}", *below])
    heads = ["a given size", "FLOPs", "seeds", "loss", "below scratch, equal FLOPs", "equal steps"]
    return table(heads, cells)


def family_text(results: Path) -> str:
    """The losses of the larger sizes of a family after as many steps, in markdown.

    The question is a family. The smaller sizes are trained in any case, so equal steps are equal
    FLOPs of all sizes up to this one.
    """
    rows, cells = committed(results), []
    for line, pairs in compared(lines_of("family", "tiny"), "family", rows).items():
        own, base = (
            {seed: pair[which][-1]["losses"][-1] for seed, pair in pairs.items()}
            for which in (0, 1)
        )
        is_alone = is_base(pairs)
        title = f"{line.label} alone, never grown" if is_alone else title_of(line)
        below = "-" if is_alone else _below_by_seed(base, own)
        rate = next(iter(pairs.values()))[0][-1]["rate"]
        cells.append(
            [title, f"{rate:g}", str(len(own)), f"{statistics.fmean(own.values()):.3f}", below]
        )
    return table(["a family", "rate", "seeds", "loss", "below the size alone"], cells)


def _below_by_seed(mark: Mapping[int, float], losses: Mapping[int, float]) -> str:
    """How far losses are below others with the same seed: the mean, and an interval of three."""
    if mark is losses:
        return "-"
    below = [mark[seed] - loss for seed, loss in losses.items() if seed in mark]
    mean, half = mean_and_half(below)
    return f"{mean:+.3f} ± {half:.3f}" if len(below) >= SEEDS else f"{mean:+.3f}"


def frontier_text(results: Path) -> str:
    """Each line at the better of its rates, below the target and below the best fixed size."""
    best: dict[tuple[str, str], tuple[Line, Row]] = {}
    for line, row in ends_of(committed(results), "frontier"):
        known = best.setdefault((line.setting.name, line.system), (line, row))
        if row["losses"][-1] < known[1]["losses"][-1]:
            best[line.setting.name, line.system] = line, row
    fixed = [row["losses"][-1] for line, row in best.values() if line.system == "scratch"]
    marks = [fixed[0], min(fixed)] if fixed else []
    cells = [
        [
            title_of(line),
            f"{row['rate']:g}",
            f"{row['losses'][-1]:.3f}",
            *_below(marks, row["losses"][-1]),
        ]
        for line, row in best.values()
    ]
    heads = ["equal FLOPs", "rate", "loss", "below the target from scratch: a given size"]
    return table([*heads, "below the best fixed size: any size will do"], cells)
