"""Places labels at the ends of curves, and an overview of all losses where no curve is."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from growkern.plot.figure import SMALL

# places of a label beside the end of its curve: offset in points, and how the text is aligned
PLACES = (
    ((7, 0), "left", "center"),
    ((6, 9), "left", "bottom"),
    ((6, -9), "left", "top"),
    ((0, 9), "center", "bottom"),
    ((-6, 9), "right", "bottom"),
    ((0, -9), "center", "top"),
    ((-6, -9), "right", "top"),
)
# of the overview, as shares of the axes: its sizes, and its right and upper ends
SIZES = ((0.28, 0.36), (0.22, 0.26))
ENDS = ((0.98, 0.94), (0.68, 0.94), (0.38, 0.94), (0.98, 0.5), (0.68, 0.5))
# room that its numbers take at the left and below, as shares of the axes
NUMBERS = (0.05, 0.07)
# where the name of the mark may stand along it, as shares of the axes
ALONG = (0.01, 0.2, 0.4, 0.6, 0.75)
# pixels between a label and a curve
GAP = 4


def curves_in(axes: Any) -> list[Any]:
    """The lines that have a label."""
    return [line for line in axes.lines if line.get_gid() == "curve"]


def overview(axes: Any) -> Any | None:
    """Draw all of the curves small, in a corner, if the axes leave out some of them.

    Returns:
        The axes of the overview, None if there is nothing to add or no room.
    """
    lines = curves_in(axes)
    low, high = axes.get_ylim()
    if max(np.max(line.get_ydata()) for line in lines) <= high:
        return None
    paths = np.concatenate([*map(_path, [*lines, *_marks_in(axes)])])
    points = axes.transAxes.inverted().transform(paths)
    left, below = NUMBERS
    places = ((x - w, y - h, w, h) for w, h in SIZES for x, y in ENDS)
    free = (
        p
        for p in places
        if not _inside(points, p[0] - left, p[1] - below, p[2] + left, p[3] + below)
    )
    place = next(free, None)
    if place is None:
        return None
    inset = axes.inset_axes(place)
    for line in lines:
        inset.plot(
            *line.get_data(), color=line.get_color(), linestyle=line.get_linestyle(), linewidth=1
        )
    inset.axhspan(low, high, color="0.85", zorder=0)
    inset.set_title("all losses; grey: the range of this picture", fontsize=SMALL - 1, pad=3)
    inset.set_xlim(axes.get_xlim())
    inset.locator_params(nbins=5)
    inset.tick_params(labelsize=SMALL - 1.5)
    return inset


def draw_mark(axes: Any, mark: float, name: str) -> None:
    """Draw a line at a loss, with its name where that covers no curve. Call it before the others.

    Args:
        axes: with all curves and limits.
        mark: the loss.
        name: of the mark.
    """
    color = "0.25"
    axes.axhline(mark, color=color, linewidth=0.9, linestyle=(0, (4, 3)), zorder=1.5, gid="mark")
    renderer = axes.figure.canvas.get_renderer()
    paths = np.concatenate([*map(_path, _runs_in(axes))])
    room = axes.get_window_extent(renderer)
    kind = {"xycoords": ("axes fraction", "data"), "textcoords": "offset points", "gid": "mark"}
    text = axes.annotate(name, (0, mark), xytext=(0, 0), color=color, fontsize=SMALL, **kind)
    places = [(along, va) for va in ("top", "bottom") for along in ALONG]
    # where it covers a curve everywhere, it stays at the first place
    for along, va in [*places, places[0]]:
        text.set(va=va, position=(0, -4 if va == "top" else 4))
        text.xy = (along, mark)
        box = text.get_window_extent(renderer)
        is_in = box.x1 <= room.x1 and room.y0 <= box.y0
        if is_in and not _inside(paths, box.x0, box.y0, box.width, box.height):
            return


def _runs_in(axes: Any) -> list[Any]:
    """All lines and points, without the mark."""
    return [line for line in axes.lines if line.get_gid() != "mark"]


def _marks_in(axes: Any) -> list[Any]:
    return [line for line in axes.lines if line.get_gid() == "mark"]


def label_ends(axes: Any, lines: Sequence[Any]) -> bool:
    """Write the names of curves at their ends, if no name covers another or a curve.

    Args:
        axes: that hold them.
        lines: the curves to label, of `curves_in`.

    Returns:
        False if the names do not fit: then none is written.
    """
    renderer = axes.figure.canvas.get_renderer()
    paths = np.concatenate([*map(_path, axes.lines)])
    taken = [text.get_window_extent(renderer) for text in axes.texts]
    taken += [inset.get_tightbbox(renderer) for inset in axes.child_axes]
    made: list[Any] = []
    for line in lines:
        text = next(_fitting(axes, line, paths, taken, renderer), None)
        if text is None:
            for label in made:
                label.remove()
            return False
        made.append(text)
        taken.append(text.get_window_extent(renderer))
    return True


def _fitting(axes: Any, line: Any, paths: Any, taken: Any, renderer: Any) -> Iterator[Any]:
    """A label at the end of a line, at the first place where it covers nothing."""
    color = line.get_color()
    for offset, ha, va in PLACES:
        text = axes.annotate(
            line.get_label(),
            (line.get_xdata()[-1], line.get_ydata()[-1]),
            xytext=offset,
            textcoords="offset points",
            ha=ha,
            va=va,
            color=color,
            fontsize=SMALL,
            gid="end",
        )
        box, room = text.get_window_extent(renderer), axes.get_window_extent(renderer)
        near = _inside(paths, box.x0 - GAP, box.y0 - GAP, box.width + 2 * GAP, box.height + 2 * GAP)
        is_in = room.x0 <= box.x0 and box.x1 <= room.x1 and room.y0 <= box.y0 and box.y1 <= room.y1
        is_free = not any(box.overlaps(other) for other in taken)
        if is_in and is_free and not near:
            yield text
        text.remove()


def _path(line: Any) -> Any:
    """Points along a line, close together, in pixels, (points, 2)."""
    corners = line.get_transform().transform(np.column_stack(line.get_data()))
    # a mark is one long segment
    share = np.linspace(0, 1, 40 if len(corners) > 2 else 400)[:, None, None]
    between = corners[:-1] + share * (corners[1:] - corners[:-1])
    return np.concatenate([corners, between.reshape(-1, 2)])


def _inside(points: Any, left: float, bottom: float, width: float, height: float) -> int:
    """How many points lie in a rectangle."""
    x, y = points.T
    within = (left <= x) & (x <= left + width) & (bottom <= y) & (y <= bottom + height)
    return int(within.sum())
