"""The README's first number and picture: a family of two sizes, GPT-2 of 4 x 64 and 4 x 128."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from bench.paper.briefs import savings
from bench.paper.compare import Row, committed, compared
from bench.paper.models import Size
from bench.paper.plans import lines_of
from bench.paper.questions import fixed_sizes
from bench.shared.pictures import READABLE, draw_units
from growkern.plot.figure import COLORS, GREY, new_figure

SMALL, GROWN = Size(4, 64, 4), ("table5", "fpi_padded", "")
Points = Sequence[tuple[float, float]]


def family_saving(results: Path) -> str:
    """The first sentences of the README that have a number."""
    saved, large = savings(committed(results), GROWN, ("family", "size"), (SMALL,))
    return (
        f"Two GPT-2, 4 x 64 and 4 x 128 (layers x width), take {saved} fewer "
        "training FLOPs if the large one is grown\nfrom the small one than if both are trained "
        "from scratch to the same losses. All training of both counts.\n"
        f"If only the large one is wanted, growth saves {large}."
    )


def _mean(curves: Sequence[Points]) -> Points:
    """The mean of the curves of several seeds, point by point."""
    return [
        (sum(x for x, _ in same) / len(same), sum(y for _, y in same) / len(same))
        for same in zip(*curves, strict=True)
    ]


def _curves(rows: Mapping[str, Row]) -> dict[str, Points]:
    """FLOPs and losses, means over the seeds, of the small model, of both large ones."""
    lines = compared(lines_of(GROWN[0], "tiny") or [], GROWN[0], rows)
    pairs = next(pairs for x, pairs in lines.items() if (x.system, x.label) == GROWN[1:])
    setting = next(iter(lines)).setting
    small = [fixed_sizes(setting, seed, rows)[SMALL] for seed in pairs]

    def ends(runs: Sequence[Row]) -> Points:
        return [(row["source flops"] + row["flops"][-1], row["losses"][-1]) for row in runs]

    begun = [
        [(own[0]["source flops"], own[0]["losses"][0]), *ends(own)] for own, _ in pairs.values()
    ]
    return {
        "small": _mean(small),
        "scratch": _mean([ends(base) for _, base in pairs.values()]),
        "grown": _mean(begun),
    }


def draw_family(results: Path) -> list[Path]:
    """Draw the README's picture: losses of the family, and where grown units come from."""
    if not (rows := committed(results)):
        return []
    figure = new_figure(4.4)
    _draw_losses(figure.add_axes((0.07, 0.15, 0.52, 0.70)), _curves(rows))
    draw_units(figure)
    figure.savefig(results / "readme.png")
    return [results / "readme.png"]


def _draw_losses(axes: Any, curves: Mapping[str, Points]) -> None:
    for name, color, dashes, words, place in (
        ("small", GREY, "-", "small model, going on", (2.6, 3.24)),
        ("scratch", "black", (0, (4, 2)), "large model, from scratch", (6.4, 3.74)),
        ("grown", COLORS[1], "-", "large model, grown", (10.9, 3.5)),
    ):
        x, y = zip(*((flops / 1e12, loss) for flops, loss in curves[name]), strict=True)
        axes.plot(x, y, color=color, linestyle=dashes, marker="o", linewidth=2.5)
        axes.text(*place, words, color=color, fontsize=READABLE)
    mark = curves["scratch"][-1][1]
    axes.axhline(mark, color="black", linestyle=":", linewidth=1)
    axes.set_ylim(3.1, 4.3)
    axes.set_xlabel("training FLOPs, 1e12, the small model's included", fontsize=READABLE)
    axes.tick_params(labelsize=READABLE - 2)
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
    words = "validation loss at the ends of runs, three seeds;\ndotted: where scratch ends"
    axes.set_title(words, fontsize=READABLE, loc="left")
