"""Draws loss against FLOPs of training runs, and below it the FLOPs to reach the mark.

The mark is the final loss of the reference, the first run. Runs of one name are seeds of one setup:
they are drawn as their mean, with a band from the lowest to the highest loss. Runs of equal seeds
are compared with each other: each has the final loss of its own seed's reference as its mark. If
the run of the small model is given, every other run starts after it: its FLOPs are part of what
they cost. A reference that was grown, and runs of a single name, start after it too.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np

from growkern.errors import GrowthError
from growkern.plot.curves import (
    EQUAL,
    LABEL,
    MEASURED,
    QUESTIONS,
    Curve,
    Group,
    best_never_grown,
    read_curve,
    runs_by_name,
    shares,
    size_of,
)
from growkern.plot.figure import (
    GREY,
    SMALL,
    TEXT,
    check_picture,
    draw_mark,
    new_figure,
    overview,
    plain,
    save,
    style_of,
)
from growkern.plot.roles import arrange

NO_VALIDATION = (
    "no validation loss in the logs, so this is the training loss: "
    "set validation or validation_split under [data]"
)
ONE_LOSS = "one loss only: to see a curve, set eval_every or log_every lower under [training]"
BEYOND = "the small model ends below the mark: the training is too short to tell what growth saves"
NO_SCRATCH = (
    "no saving is known without a run of the large model from scratch: give one too "
    '([growth] method = "random")'
)
UNFINISHED = "the run that sets the mark is not finished, so nothing is said of savings yet"
# a start loss that is this many times as far above the lowest loss as the loss after a tenth of the
# run is shown in the overview alone
FAR_START = 4.0
# zoom in if that leaves out at least this share of the height
LEAST_ZOOM = 0.35
# of the panels below, in inches, and how many are beside each other at most
PANEL, IN_A_ROW = 1.6, 4
# of the time: waiting less for data slows no run
LEAST_WAIT = 0.1
# points of a curve that are all marked
MOST_MARKED = 24
# characters of a bar's name in one line
LINE = 110
# of the sizes beside a growth, and the share of the width that they take
MOST_SIZES, ROOM = 3, 0.2


def plot_runs(
    runs: Sequence[str | Path], out: str | Path, *, sources: Sequence[str | Path] = ()
) -> list[Group]:
    """Draw training directories together, see `draw`.

    Args:
        runs: training directories. Those whose directories have one name are seeds of one setup.
            Seeds are compared with each other if they are in the same folder.
        sources: training directories of the small model, one per seed. If none is given, they are
            found among `runs`, and so is the reference, see `growkern.plot.roles.arrange`.
    """
    check_picture(Path(out))
    curves, places = [read_curve(run) for run in runs], list(map(Path, runs))
    small = list(map(read_curve, sources))
    if not small:
        curves, small, places = arrange(curves, places)
    folders: dict[str, list[Path]] = {}
    for curve, run in zip(curves, places, strict=True):
        folders.setdefault(curve.name, []).append(run.resolve().parent)
    reference, *others = folders.values()
    paired = len(reference) > 1 and all(other == reference for other in others)
    return draw(curves, out, sources=small, paired=paired)


def draw(
    curves: Sequence[Curve],
    out: str | Path,
    *,
    sources: Sequence[Curve] = (),
    paired: bool = False,
) -> list[Group]:
    """Draw loss against FLOPs. The first curve is the reference.

    Args:
        curves: at least one. Those of one name are seeds of one setup.
        out: file to write; its name ends with a format of matplotlib.
        sources: of the small model, one per seed, that all but the reference started from. Curves
            of a single name have no reference: they started from it.
        paired: whether the curves of each name have the same seeds in the same order. The mark of
            each is then the final loss of the reference of its seed.

    Returns:
        The runs by name, the reference first.
    """
    check_picture(Path(out))
    drawn = [*curves, *sources]
    if len({curve.validation for curve in drawn}) != 1:
        raise GrowthError("give runs that all have a validation loss, or runs that all have none")
    groups = runs_by_name(curves, sources, paired)
    shown = _measured(curves)
    heights = [5.4, *[0.5 + 0.42 * len(groups)] * (len(groups) > 1)]
    below = len(heights) > 1
    # rows that are about equally full
    rows = np.array_split(shown, -(-len(shown) // IN_A_ROW)) if shown else []
    heights += [PANEL] * len(rows)
    figure = new_figure(sum(heights), layout="constrained")
    grid = figure.add_gridspec(len(heights), 1, height_ratios=heights)
    axes = bars = figure.add_subplot(grid[0])
    if below:
        bars = figure.add_subplot(grid[1], sharex=axes)
        axes.tick_params(labelbottom=False)
    mark = float(np.mean(groups[0].marks))
    unit = _unit(max(group.before + c.flops[-1] for group in groups for c in group.curves))
    _draw_curves(axes, groups, sources, unit)
    _draw_growths(axes, groups, unit)
    if below:
        _draw_costs(bars, groups, unit)
    scale = f" (1e{round(math.log10(unit))})" if unit > 1 else ""
    start = ", starting with the small model's" if sources else ""
    teacher = ", teacher included" if any(curve.taught for curve in drawn) else ""
    bars.set_xlabel(f"training FLOPs{scale}{teacher}{start}", fontsize=TEXT)
    for number, row in enumerate(rows, 1 + below):
        for place, name in zip(grid[number].subgridspec(1, len(row)), row, strict=True):
            panel = figure.add_subplot(place)
            _draw_measured(panel, name, groups, unit)
            panel.set_xlim(axes.get_xlim())
            panel.set_xlabel(f"FLOPs{scale}", fontsize=SMALL - 1.5)
    # beside others a run is named by its bar
    asked = f'Which run reaches the loss of "{plain(groups[0].title)}" with the fewest FLOPs?'
    title = asked if below else groups[0].label
    if sources:
        title += f" (grey: {', '.join(filter(None, ('small model', size_of(sources))))})"
    axes.set_title(title, fontsize=TEXT, loc="left")
    figure.supxlabel("\n".join(notes_on(groups)), fontsize=SMALL, x=0.01, ha="left")
    figure.get_layout_engine().set(w_pad=0.12, h_pad=0.1)
    figure.canvas.draw()
    # later text must not move what the labels were placed by
    figure.set_layout_engine("none")
    of = f"{plain(groups[0].title)}{', mean' if len(groups[0].curves) > 1 else ''}"
    if below:
        draw_mark(axes, mark, f"mark: {groups[0].last_loss} of {of}, {mark:.3f}")
    overview(axes)
    save(figure, Path(out))
    return groups


def notes_on(groups: Sequence[Group]) -> list[str]:
    """What a reader of the curves and of their savings has to know, in sentences."""
    curves = [curve for group in groups for curve in group.curves]
    notes = [] if curves[0].validation else [NO_VALIDATION]
    if curves[0].validation and all(len(curve.steps) == 1 for curve in curves):
        notes.append(ONE_LOSS)
    if len(groups) > 1 and any(group.is_beyond for group in groups):
        notes.append(BEYOND)
    if len(groups) > 1 and not groups[0].finished:
        notes.append(UNFINISHED)
    if groups[0].sources or (len(groups) > 1 and groups[0].curves[0].is_grown):
        notes.append(NO_SCRATCH)
    return notes


def _measured(curves: Sequence[Curve]) -> list[str]:
    """Those of `MEASURED` that are drawn: they tell something that the curve does not."""
    logged = {name: [y for c in curves for _, y in c.measured.get(name, ())] for name in MEASURED}
    memory, waited = logged["maxrss"] or [0.0], logged["data_time_share"] or [0.0]
    unwanted = {
        LABEL: not curves[0].validation,
        # most memory of a process is that of imports, which tell nothing of a run
        "maxrss": max(memory) <= 1.1 * min(memory),
        "data_time_share": float(np.quantile(waited, 0.9)) < LEAST_WAIT,
    }
    return [name for name, found in logged.items() if found and not unwanted.get(name)]


def _unit(most: float) -> float:
    """A power of 1000 to count FLOPs in."""
    return 10.0 ** (3 * (math.log10(most) // 3)) if most > 0 else 1.0


# ------------------------------------------------------------------- curves


def _draw_curves(axes: Any, groups: Sequence[Group], sources: Sequence[Curve], unit: float) -> None:
    for number, source in enumerate(sources):
        # one label for all of them
        named = {} if number else {"label": "small model", "gid": "curve"}
        x = np.array(source.flops) / unit
        # wider than the curve of a run that goes on where it ends, and behind it
        axes.plot(x, source.losses, color="0.65", linewidth=4, zorder=1.8, **named)
    for number, group in enumerate(groups):
        style = style_of(number)
        flops, losses = group.mean()
        for curve in group.curves if len(group.curves) > 1 else ():
            x = (np.array(curve.flops) + group.before) / unit
            axes.plot(x, curve.losses, color=style.color, linewidth=0.5, alpha=0.6)
        if len(group.curves) > 1:
            low, high = losses.min(0), losses.max(0)
            axes.fill_between(flops / unit, low, high, color=style.color, alpha=0.18, linewidth=0)
        # all points, or about eight, not at the same places as those of other curves
        every = 1 if len(flops) <= MOST_MARKED else len(flops) // 8
        shape = "" if every > 1 and len(groups) == 1 else style.marker
        marked = {"marker": shape, "markevery": (number % every, every), "markersize": 4.5}
        line = {"color": style.color, "linestyle": style.dashes, "linewidth": 1.7}
        named = {"label": plain(group.title), "gid": "curve"}
        axes.plot(flops / unit, losses.mean(0), **line, **marked, **named)
    kind = "validation loss" if groups[0].curves[0].validation else "training loss"
    has_band = any(len(group.curves) > 1 for group in groups)
    band = "; line: mean of the runs, band: min to max" if has_band else ""
    axes.set_ylabel(kind + band, fontsize=TEXT)
    # room for markers at 0
    axes.set_xlim(left=-0.01 * axes.get_xlim()[1])
    axes.set_ylim(*loss_limits(groups, sources))
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)


def _draw_growths(axes: Any, groups: Sequence[Group], unit: float) -> None:
    """A line where a model grew, with its new sizes at the end of the line that is free.

    If the loss was measured before and after the growth, two points show both.
    """
    (left, right), (low, high) = axes.get_xlim(), axes.get_ylim()
    # of growths at the start of runs, one for all that are alike. Without the small model's curve
    # nothing in the picture grows there
    starts = {(group.before, group.curves[0].began): None for group in groups if group.before}
    marks = [(at / unit, 1.0, ["grown to", *_shown(began)], GREY) for at, began in starts if began]
    for number, group in enumerate(groups):
        # runs of one name grow alike
        curve = group.curves[0]
        grown = curve.grown or ("",) * len(curve.growths)
        for cost, sizes in zip(curve.growths, grown, strict=True):
            level = float(np.interp(cost, curve.flops, curve.losses))
            at, color = (group.before + cost) / unit, style_of(number).color
            words = ["grows to", *_shown(sizes)] if sizes else ["grows"]
            pairs = zip(curve.flops, curve.losses, strict=True)
            ends = [loss for x, loss in pairs if cost <= x <= math.nextafter(cost, math.inf)]
            if len(ends) > 1:
                words.append(f"loss {ends[0]:.3f}, then {ends[1]:.3f}")
                point = {"marker": "o", "linestyle": "", "color": color, "markersize": 7}
                axes.plot([at] * 2, ends, **point, markeredgecolor="white", zorder=3, gid="growth")
            marks.append((at, (level - low) / (high - low), words, color))
    last, used = {0: left, 1: left}, {0: 0, 1: 0}
    for at, level, words, color in sorted(marks):
        axes.axvline(at, color=color, linestyle=":", linewidth=1.0, gid="growth")
        end = 1 if level < 0.6 else 0
        # below, or above, those of a growth shortly before
        skipped = used[end] if at - last[end] < ROOM * (right - left) else 0
        last[end], used[end] = at, skipped + len(words)
        is_late = at - left > (1 - ROOM) * (right - left)
        text = "\n".join([*[""] * skipped, *words] if end else [*words, *[""] * skipped])
        axes.annotate(
            text, (at, end), xycoords=("data", "axes fraction"), xytext=(-4 if is_late else 4, 0),
            textcoords="offset points", va="top" if end else "bottom", color=color,
            ha="right" if is_late else "left", fontsize=SMALL, gid="growth",
        )  # fmt: skip


def _shown(sizes: str) -> list[str]:
    """As many of the new sizes as there is room for, and how many more there are."""
    lines = sizes.split("\n")
    more = len(lines) - MOST_SIZES
    # a line that says "1 more" could as well hold it
    return lines if more < 2 else [*lines[:MOST_SIZES], f"and {more} more"]


def _draw_measured(axes: Any, name: str, groups: Sequence[Group], unit: float) -> None:
    """One of `MEASURED` over the FLOPs of all runs; from 0 on, unless it is a loss."""
    words, scale = MEASURED[name]
    for number, group in enumerate(groups):
        style = style_of(number)
        looks = {name: (style.color, style.dashes), EQUAL.get(name): (GREY, ":")}
        for curve, (key, (color, dashes)) in product(group.curves, looks.items()):
            if key in curve.measured:
                x, y = np.array(curve.measured[key]).T
                # one point is no line
                marked = {"marker": style.marker if len(x) == 1 else "", "markersize": 4}
                line = {"color": color, "linestyle": dashes, "linewidth": 1.2, **marked}
                axes.plot((x + group.before) / unit, y / scale, **line)
    if name != LABEL:
        axes.set_ylim(0, 1.1 * (axes.get_ylim()[1] or 1))
    axes.set_title(words, fontsize=SMALL, loc="left")
    axes.tick_params(labelsize=SMALL - 1.5)
    axes.locator_params(nbins=4)
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)


def loss_limits(groups: Sequence[Group], sources: Sequence[Curve]) -> tuple[float, float]:
    """The range of losses to show: that of the runs compared, from their start to their end.

    The reference and the small model start from random weights. Their early fall is left out, as
    it would squeeze all else into a line.
    """
    drawn = [*(curve for group in groups for curve in group.curves), *sources]
    low, high = min(min(c.losses) for c in drawn), max(max(c.losses) for c in drawn)
    tops = []
    for curve in (curve for group in groups[1:] or groups for curve in group.curves):
        span = curve.flops[-1] - curve.flops[0]
        settled = float(np.interp(curve.flops[0] + span / 10, curve.flops, curve.losses))
        early = curve.losses[0] - low <= FAR_START * (settled - low)
        tops.append(max(settled, curve.losses[0]) if early else settled)
        # the jump of a growth stays in the picture
        tops += [
            float(np.interp(math.nextafter(x, math.inf), curve.flops, curve.losses))
            for x in curve.growths
        ]
    tops += [max(curve.losses[-1] for curve in drawn)]
    top = low + 1.35 * (max(tops) - low)
    if top - low > (1 - LEAST_ZOOM) * (high - low):
        top = high + 0.03 * (high - low)
    pad = 0.11 * ((top - low) or max(abs(low), 1.0))
    return low - pad, max(top, low + pad)


# -------------------------------------------------------------------- costs


def _draw_costs(axes: Any, groups: Sequence[Group], unit: float) -> None:
    """One bar per group: the FLOPs until it reaches the mark."""
    best = best_never_grown(groups)
    for number, group in enumerate(groups):
        style, cost, costs = style_of(number), group.cost(), [cost for cost, _ in group.reached()]
        place: dict[str, Any] = {"y": number + 0.22, "height": 0.2}
        before = group.before / unit
        if group.before:
            axes.barh(width=before, color="white", edgecolor=GREY, hatch="////", **place)
        # an open bar ends where the longest run does, without reaching the mark
        kind = {"color": style.color} if cost else {"color": "white", "edgecolor": style.color}
        width = max(curve.flops[-1] for curve in group.curves) if cost is None else cost
        axes.barh(width=width / unit, left=before, gid="cost", **place, **kind)
        if len(group.curves) > 1 and len(costs) == len(group.curves):
            ends = before + np.array([min(costs), max(costs)]) / unit
            axes.plot(ends, [place["y"]] * 2, color="0.6", linewidth=1.5, marker="|")
        kept = {"transform": axes.get_yaxis_transform(), "clip_on": False}
        line = {"color": style.color, "linestyle": style.dashes, "linewidth": 1.7, **kept}
        marked = {"marker": style.marker, "markevery": [1], "markersize": 4.5}
        axes.plot([0.005, 0.025, 0.045], [number - 0.2] * 3, **line, **marked)
        words = _saved(group, cost, groups[0], best) if number else "reference"
        text = ": ".join(filter(None, (group.label, words)))
        text = text if len(text) <= LINE else f"{group.label}:\n{words}"
        axes.text(0.055, number - 0.2, text, va="center", fontsize=SMALL, gid="cost", **kept)
    before = any(group.before for group in groups)
    many = "; grey line: min to max" if any(len(group.curves) > 1 for group in groups) else ""
    hatched = "; hatched: the small model's training (grey curve)" if before else ""
    marks = groups[0].marks
    its = f"the loss of {plain(groups[0].title)}"
    loss = f"loss {marks[0]:.3f}" if len(set(marks)) == 1 else its
    axes.set_title(f"FLOPs to reach {loss}{many}{hatched}", fontsize=TEXT, loc="left")
    axes.set_ylim(len(groups) - 0.5, -0.5)
    axes.set_yticks([])
    axes.grid(alpha=0.25, axis="x")
    axes.set_axisbelow(True)
    axes.spines[["top", "right", "left"]].set_visible(False)


def _saved(group: Group, cost: float | None, reference: Group, best: float | None) -> str:
    """The shares that a group saved, in words, with the question of each."""
    found = shares(group, cost or 0.0, reference, reference.cost() or 0.0, best)
    if cost is None:
        return "not reached"
    # a curve may begin below the mark, and after some training
    ends = zip(group.curves, group.marks, strict=True)
    early = any(curve.flops[0] > 0 and curve.losses[0] <= mark for curve, mark in ends)
    pairs = zip(found, QUESTIONS.values(), strict=True)
    told = [(share, question) for share, question in pairs if share is not None]
    words = [f"{'≥ ' * early}{x:.0%} ({question})" for x, question in told if x >= 0]
    lost = [(f"{'≤ ' * early}{1 - x:.3g}", question) for x, question in told if x < 0]
    saved = [f"saved {', '.join(words)}"] if words else []
    # a negative share reads as a slip
    return "; ".join([*saved, *(f"costs {x} times as much ({question})" for x, question in lost)])
