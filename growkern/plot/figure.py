"""The size of all pictures, colours for colour-blind readers, and how pictures are saved."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

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


@dataclass(frozen=True)
class Style:
    """How a curve is drawn: it can be told apart in black and white too."""

    color: str
    dashes: Any
    marker: str


def style_of(number: int) -> Style:
    """The style of a curve by its number, counted from 0."""
    return Style(
        COLORS[number % len(COLORS)],
        DASHES[number % len(DASHES)],
        MARKERS[number % len(MARKERS)],
    )


def plain(name: str) -> str:
    """A name as matplotlib prints it letter by letter: what stands between dollars is a formula."""
    return name.replace("$", r"\$")


def new_figure(height: float, *, layout: Literal["constrained"] | None = None) -> Any:
    """An empty figure of the width of all pictures.

    Args:
        height: inches.
        layout: of matplotlib; None leaves the place of everything to the caller.

    Raises:
        GrowthError: matplotlib is missing.
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


def check_format(out: Path) -> None:
    """Refuse a file whose name does not end with a format that matplotlib writes, or that is none.

    Raises:
        GrowthError: the name does not, matplotlib is missing, or the file is something else than a
            picture of matplotlib, which would be lost.
    """
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
    """Write a figure, in the format that the file's name ends with.

    Raises:
        GrowthError: the format is unknown, or the file cannot be written.
    """
    check_format(out)
    kind = out.suffix.lower().removeprefix(".")
    try:
        write_whole(out, lambda partial: figure.savefig(partial, format=kind, dpi=DPI))
    except OSError as error:
        raise GrowthError(f"{out}: {error.strerror or error}") from error
