"""The picture of a table, and attention of sources and grown models before and after training.

A table has a panel for each line, and below them what each line saves. bert2BERT shows such maps of
attention in its Figures 9-12.
"""

from __future__ import annotations

import math
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np

import growkern
from bench.paper.attention import plot_attention
from bench.paper.compare import (
    Pairs,
    Row,
    Share,
    is_base,
    is_early,
    mean_and_half,
    points_of,
    saved,
    share,
    text_of,
    title_of,
    whole,
)
from bench.paper.jobs import Job
from bench.paper.plans import Line, lines_of
from bench.paper.settings import SIZES, Setting
from bench.paper.systems import job_of, run_of
from growkern import GrowthStep
from growkern.growth.options import GrowthOptions
from growkern.plot.figure import COLORS, GREY, SMALL, TEXT, new_figure, save

BASELINE, OWN, WITH_SOURCE = COLORS[0], COLORS[1], COLORS[2]
# in one row of panels; of these the number that leaves fewer places empty
COLUMNS = (4, 3)
# inches
PANEL, LINE, MARGIN = 1.95, 0.36, 1.05


def draw(by_line: Mapping[Line, Pairs], out: Path, *, title: str) -> None:
    """Draw the lines of a table, all with the same seeds.

    Args:
        by_line: lines, each with its runs and those of its baseline. One of those that are drawn is
            no baseline.
    """
    shown = whole(by_line)
    others = {line: list(pairs.values()) for line, pairs in shown.items() if not is_base(pairs)}
    columns = min(COLUMNS, key=lambda n: (-len(others) % n, -n)) if len(others) > 2 else 2
    rows = math.ceil(len(others) / columns)
    heights = [PANEL * rows + 0.5, LINE * len(others) + MARGIN]
    figure = new_figure(sum(heights), layout="constrained")
    above, below = figure.subfigures(2, 1, height_ratios=heights)
    panels = list(above.subplots(rows, columns, sharex=True, sharey=True, squeeze=False).flat)
    for axes, (line, pairs) in zip(panels, others.items(), strict=False):
        _draw_losses(axes, title_of(line), pairs)
    for axes in panels[len(others) :]:
        axes.set_visible(False)
    # a teacher costs some more than the baseline
    most = max(_shares(own, base)[-1] for pairs in others.values() for own, base in pairs)
    panels[0].set_xlim(0, 1.04 * max(1.0, most))
    panels[0].set_xticks([0, 0.5, 1], ["0", "0.5", "1"])  # "1.0" would touch the next "0.0"
    count = len(next(iter(others.values())))
    seeds = f"means of {count} seeds; thin: each seed" if count > 1 else "one seed"
    bases = [title_of(line) for line in shown if line not in others]
    black = bases[0] if len(bases) == 1 else "the last baseline before it"
    words = f"validation loss, {seeds}; black: {black}"
    above.suptitle(f"{title}\n{words}", fontsize=TEXT, x=0.01, ha="left")
    above.supxlabel("FLOPs, as a share of the longest black run's", fontsize=SMALL)
    _draw_savings(below.subplots(), others)
    save(figure, out)


def _draw_losses(axes: Any, title: str, pairs: Sequence[tuple[list[Row], list[Row]]]) -> None:
    """One line beside its baseline: the loss at the end of runs of each length."""
    bases = [base for _, base in pairs]
    for runs, color, style in (
        (bases, BASELINE, {"linestyle": (0, (4, 2)), "marker": "o"}),
        ([own for own, _ in pairs], OWN, {"marker": "s"}),
    ):
        points = [
            (_shares(line_runs, base), points_of(line_runs)[2])
            for line_runs, base in zip(runs, bases, strict=True)
        ]
        for shares, losses in points if len(points) > 1 else ():
            axes.plot(shares, losses, color=color, linewidth=0.5, alpha=0.6)
        mean = np.mean([shares for shares, _ in points], 0)
        losses = np.mean([losses for _, losses in points], 0)
        axes.plot(mean, losses, color=color, linewidth=1.6, markersize=4, **style)
    mark = float(np.mean([base[-1]["losses"][-1] for base in bases]))
    axes.axhline(mark, color=GREY, linewidth=0.8, linestyle=":")
    axes.set_title(_wrapped(title, 30), fontsize=SMALL, color=OWN)
    axes.tick_params(labelsize=SMALL)
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)


def _shares(runs: Sequence[Row], baseline: Sequence[Row]) -> Any:
    """The FLOPs of runs as shares of those of the longest run of their baseline."""
    return np.array(points_of(runs)[1]) / baseline[-1]["flops"][-1]


def _wrapped(title: str, width: int) -> str:
    # no line begins with a sign of its own
    for mark in ("%", "="):
        title = title.replace(f" {mark}", f"\N{NO-BREAK SPACE}{mark}")
    return textwrap.fill(title.replace("= ", "=\N{NO-BREAK SPACE}"), width)


def _draw_savings(axes: Any, lines: Mapping[Line, Sequence[tuple[list[Row], list[Row]]]]) -> None:
    """The savings of each line: a bar to their mean, its interval, and a point for each seed."""
    names, lowest = [], 0.0
    for number, (line, pairs) in enumerate(lines.items()):
        shares = [100 * saved(*pair) for pair in pairs]
        counted = [100 * saved(*pair, with_source=True) for pair in pairs]
        names.append(_wrapped(title_of(line), 40))
        words = {"va": "center", "fontsize": SMALL, "transform": axes.get_yaxis_transform()}
        told = [share("existing", own, Share(0.0), base) for own, base in pairs]
        axes.text(1.01, number, text_of(told, len(told)).replace("%", " %"), **words)
        if any(map(math.isnan, shares)):
            continue
        mean, half = mean_and_half(shares)
        if any(is_early(*pair) for pair in pairs):
            half = math.nan
        axes.barh(number, mean, height=0.5, color=OWN, alpha=0.35)
        axes.errorbar(mean, number, xerr=0 if math.isnan(half) else half, color=OWN, capsize=3)
        axes.plot(shares, [number] * len(shares), "o", color=OWN, markersize=3.5)
        with_source, _ = mean_and_half(counted)
        hollow = {"markeredgecolor": WITH_SOURCE, "markerfacecolor": "white", "markersize": 6}
        axes.plot([with_source], [number], "D", **hollow)
        lowest = min(lowest, with_source, *shares, mean if math.isnan(half) else mean - half)
    axes.set_yticks(range(len(names)), names, fontsize=SMALL)
    axes.set_ylim(len(names) - 0.4, -0.6)
    axes.set_xlim(min(-5.0, lowest - 5), 100)
    axes.axvline(0, color=GREY, linewidth=0.8)
    axes.set_title(
        "% of FLOPs saved to reach the final loss of the black run (dotted). Bar: mean, whisker: "
        "95 % interval,\nnone for a bound (≥); point: seed; diamond: mean, with the training of "
        "the source counted",
        fontsize=SMALL,
        loc="left",
    )
    axes.tick_params(axis="x", labelsize=SMALL)
    axes.tick_params(axis="y", length=0)
    axes.grid(alpha=0.25, axis="x")
    axes.set_axisbelow(True)
    axes.spines[["top", "right", "left"]].set_visible(False)


# the tables with a grown model whose maps are drawn
DRAWN = {"table2": "fpi", "table5": "fpi_padded"}
MOMENTS = ("grown", "trained")
WHEN = ("right after growth", "after its training")
HEAD = """## Attention

Heads of the source, and below each the head that was grown from it (bert2BERT, Figures 9-12): first
right after growth, then after training. The copies of a head are equal at first, and differ in the
end.
"""
SHOWN = "def read(self, size=-1):\n    return self.file.read(size)\n"


def picture_of(setting: Setting, moment: str) -> str:
    """The file of a setting's maps "grown", before the training, or "trained"."""
    return f"paper-attention-{setting.name}-{moment}.png"


def drawn_lines(size: str) -> list[Line]:
    """The lines whose maps are drawn."""
    lines = [(line, system) for name, system in DRAWN.items() for line in lines_of(name, size)]
    return [line for line, system in lines if line.system == system]


def draw_maps(folder: Path, rows: Mapping[str, Any], size: str, out: Path) -> list[Path]:
    """Draw the maps of the first seed, of every setting whose models are in the folder."""
    made = []
    for line in drawn_lines(size):
        setting = line.setting
        jobs = (job_of(setting, line.system, 1, rate, setting.steps) for rate in setting.rates)
        drawable = [job for job in jobs if job.name in rows and _has_models(folder, job)]
        if not drawable:
            continue
        source, grown = folder / drawable[0].needs[0].name, folder / f"{drawable[0].name}-before"
        _grow_again(drawable[0], folder, grown)
        for moment, model in zip(MOMENTS, (grown, folder / drawable[0].name), strict=True):
            made.append(out / picture_of(setting, moment))
            plot_attention([source, model], SHOWN, made[-1], lineage=grown)
    return made


def maps_text(results: Path) -> str:
    """The part of the page that shows the maps in a folder of results, or nothing."""
    parts = []
    for line in (line for size in SIZES for line in drawn_lines(size)):
        setting = line.setting
        pictures = [picture_of(setting, moment) for moment in MOMENTS]
        if all((results / picture).is_file() for picture in pictures):
            names = (f"{setting.name}, {moment}" for moment in WHEN)
            links = zip(names, pictures, strict=True)
            parts += [text for name, file in links for text in (f"![{name}]({file})", "")]
    return "\n".join([HEAD, *parts]) if parts else ""


def _has_models(folder: Path, job: Job) -> bool:
    return all((folder / each.name / "model.safetensors").is_file() for each in (job, *job.needs))


def _grow_again(job: Job, folder: Path, target: Path) -> None:
    """Write the model with which a job began."""
    step = run_of(job).growth
    assert isinstance(step, GrowthStep)
    options = {option.name: getattr(step, option.name) for option in fields(GrowthOptions)}
    how: dict[str, Any] = {**step.sizes, **options}
    source = folder / job.needs[0].name
    growkern.grow_checkpoint(source, target, overwrite=True, progress=False, **how)
