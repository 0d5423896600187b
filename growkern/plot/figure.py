"""What pictures share: their size, colours for colour-blind readers, and how they are saved.

It also places the name of the mark, and an overview of all losses where no curve is.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np

from growkern.errors import GrowthError
from growkern.files import read_bounded, write_whole

# inches and dots per inch: no picture is wider than 1600 pixels
WIDTH, DPI = 10.0, 150
TEXT, SMALL = 10.0, 8.5
GREY = "0.45"
# of a picture
MOST_BYTES = 64_000_000
# needs LaTeX
UNUSED_FORMATS = {"pgf"}

# Okabe and Ito (2008), from dark to light. The lengths have no common factor, so that a style
# repeats after 7 x 6 x 5 curves
COLORS = ("#000000", "#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")
DASHES: tuple[Any, ...] = (
    *("-", (0, (6, 2)), (0, (2, 1.5)), (0, (7, 2, 1.5, 2)), (0, (10, 3))),
    (0, (6, 1.5, 1.5, 1.5, 1.5, 1.5)),
)
MARKERS = ("o", "s", "^", "D", "X")

# of the overview, as shares of the axes: its sizes, and its right and upper ends
SIZES = ((0.28, 0.36), (0.22, 0.26))
ENDS = ((0.98, 0.94), (0.68, 0.94), (0.38, 0.94), (0.98, 0.5), (0.68, 0.5))
# room that its numbers take at the left and below, as shares of the axes
NUMBERS = (0.05, 0.07)
# where the name of the mark may stand along it, as shares of the axes
ALONG = (0.01, 0.2, 0.4, 0.6, 0.75)


class Style(NamedTuple):
    """How a curve is drawn: it can be told apart in black and white too."""

    color: str
    dashes: Any
    marker: str


def style_of(number: int) -> Style:
    """The style of a curve by its number, counted from 0."""
    return Style(*(each[number % len(each)] for each in (COLORS, DASHES, MARKERS)))


def plain(name: str) -> str:
    """A name as matplotlib prints it letter by letter: what stands between dollars is a formula."""
    return name.replace("$", r"\$")


def new_figure(height: float, *, layout: Literal["constrained"] | None = None) -> Any:
    """An empty figure of the width of all pictures, and of a height in inches.

    `layout` is that of matplotlib; None leaves the place of everything to the caller.
    """
    try:
        # not pyplot: it would choose a display and keep every figure in memory
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise GrowthError("plots need matplotlib: pip install matplotlib") from error
    figure = Figure(figsize=(WIDTH, height), layout=layout, dpi=DPI)
    FigureCanvasAgg(figure)
    return figure


def check_picture(out: Path) -> None:
    """Refuse a file that matplotlib cannot write, or that is no picture of it and would be lost."""
    known = sorted(new_figure(1).canvas.get_supported_filetypes().keys() - UNUSED_FORMATS)
    if out.suffix.lower().removeprefix(".") not in known:
        raise GrowthError(
            f"{out}: {out.suffix!r} is no format of a picture: end the name with one of "
            f"{', '.join(known)}"
        )
    if not out.parent.is_dir():
        raise GrowthError(f"{out}: {out.parent} is no folder: make it, or give another name")
    # matplotlib writes its name into the formats that have a place for it
    is_taken = out.is_file() and out.stat().st_size > 0
    if is_taken and b"matplotlib" not in read_bounded(out, MOST_BYTES, "picture").lower():
        raise GrowthError(
            f"{out} exists and is not a picture of matplotlib: delete it, or give another name"
        )


def save(figure: Any, out: Path) -> None:
    """Write a figure, in the format that the file's name ends with, see `check_picture`.

    A PNG has its titles and words as its description.
    """
    kind = out.suffix.lower().removeprefix(".")
    titles = "\n".join(axes.get_title("left") for axes in figure.axes)
    words = "\n".join(text.get_text() for axes in figure.axes for text in axes.texts)
    told = {"metadata": {"Description": f"{titles}\n\n{words}"}} if kind == "png" else {}
    try:
        write_whole(out, lambda partial: figure.savefig(partial, format=kind, dpi=DPI, **told))
    except OSError as error:
        raise GrowthError(f"{out}: {error.strerror or error}") from error


# ------------------------------------------------------------------- labels


def curves_in(axes: Any) -> list[Any]:
    """The lines that have a label."""
    return [line for line in axes.lines if line.get_gid() == "curve"]


def overview(axes: Any) -> None:
    """Draw all of the curves small, in a corner, if the axes leave out some and there is room."""
    from matplotlib.transforms import Bbox

    lines = curves_in(axes)
    low, high = axes.get_ylim()
    if max(np.max(line.get_ydata()) for line in lines) <= high:
        return
    marks = [line for line in axes.lines if line.get_gid() == "mark"]
    paths = np.concatenate([*map(_path, [*lines, *marks])])
    points = axes.transAxes.inverted().transform(paths)
    left, below = NUMBERS
    for x, y, w, h in ((x - w, y - h, w, h) for w, h in SIZES for x, y in ENDS):
        if not Bbox.from_bounds(x - left, y - below, w + left, h + below).count_contains(points):
            break
    else:
        return
    inset = axes.inset_axes((x, y, w, h))
    for line in lines:
        inset.plot(
            *line.get_data(), color=line.get_color(), linestyle=line.get_linestyle(), linewidth=1
        )
    inset.axhspan(low, high, color="0.85", zorder=0)
    inset.set_title("all losses; grey: the range of this picture", fontsize=SMALL - 1, pad=3)
    inset.set_xlim(axes.get_xlim())
    inset.locator_params(nbins=5)
    inset.tick_params(labelsize=SMALL - 1.5)


def draw_mark(axes: Any, mark: float, name: str) -> None:
    """Draw a line at a loss, with its name where that covers no curve.

    The axes have all curves and limits already.
    """
    color = "0.25"
    axes.axhline(mark, color=color, linewidth=0.9, linestyle=(0, (4, 3)), zorder=1.5, gid="mark")
    renderer = axes.figure.canvas.get_renderer()
    runs = [line for line in axes.lines if line.get_gid() != "mark"]
    paths = np.concatenate([*map(_path, runs)])
    room = axes.get_window_extent(renderer)
    kind = {"xycoords": ("axes fraction", "data"), "textcoords": "offset points", "gid": "mark"}
    text = axes.annotate(name, (0, mark), xytext=(0, 0), color=color, fontsize=SMALL, **kind)
    places = [(along, va) for va in ("top", "bottom") for along in ALONG]
    # where it covers a curve everywhere, it stays at the first place
    for along, va in [*places, places[0]]:
        text.set(va=va, position=(0, -4 if va == "top" else 4))
        text.xy = (along, mark)
        box = text.get_window_extent(renderer)
        if box.x1 <= room.x1 and room.y0 <= box.y0 and not box.count_contains(paths):
            return


def _path(line: Any) -> Any:
    """Points along a line, close together, in pixels, (points, 2)."""
    path = line.get_path()
    # a mark is one long segment
    steps = 40 if len(path.vertices) > 2 else 400
    return line.get_transform().transform(path.interpolated(steps).vertices)
