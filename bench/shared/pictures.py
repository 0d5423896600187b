"""Draws the demo's curves and makes its table; of one GPU draws time, memory and limits."""

import math
from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

from bench.shared.results import quotable, read, table
from growkern.plot.curve import Curve
from growkern.plot.groups import HEADS, groups_of, savings_cells
from growkern.plot.losses import draw as draw_losses

Row = dict[str, Any]


def draw(folder: Path) -> list[Path]:
    """Draw the pictures of one GPU into its directory. Without results there are none."""
    scaling = quotable(folder / "scaling.json").get("rows", [])
    ceilings = quotable(folder / "ceilings.json").get("rows", [])
    if not scaling:
        return []
    jobs = (("speed", _draw_speed), ("memory", _draw_memory), ("roofline", _draw_roofline))
    made = []
    for name, drawn in jobs:
        from matplotlib.figure import Figure

        figure = Figure(figsize=(9, 5.5), layout="constrained")
        axes = figure.add_subplot(xscale="log", yscale="log")
        drawn(axes, scaling, ceilings)
        axes.grid(alpha=0.25)
        axes.legend(fontsize="small")
        figure.savefig(folder / f"{name}.png", dpi=130)
        made.append(folder / f"{name}.png")
    return made


def _demo_curves(found: Row) -> tuple[list[Curve], list[Curve]]:
    """The curves of the large models and of the small ones."""
    names = [field.name for field in fields(Curve)]
    large, small = (
        [Curve(**{name: curve[name] for name in names}) for curve in found[key]]
        for key in ("curves", "sources")
    )
    return large, small


def demo_table(results: Path) -> str:
    """The table of the demo."""
    if not (found := read(results / "demo.json")):
        return "not measured yet"
    heads = [head.replace("\n", " ") for head in HEADS]
    return table(heads, savings_cells(groups_of(*_demo_curves(found), paired=True)))


def draw_demo(results: Path) -> list[Path]:
    """Draw the picture of the demo beside its JSON. Without a result there is none."""
    if not (found := read(results / "demo.json")):
        return []
    curves, sources = _demo_curves(found)
    title = f"GPT-2, 4 layers of width 128, {found['machine']['devices'][0]}"
    draw_losses(curves, results / "demo.png", title=title, sources=sources, paired=True)
    return [results / "demo.png"]


def _curves(rows: Sequence[Row]) -> dict[tuple[str, str], list[Row]]:
    found: dict[tuple[str, str], list[Row]] = {}
    for row in rows:
        found.setdefault((row["op"], row["provider"]), []).append(row)
    return found


def slope(rows: Sequence[Row]) -> float:
    """How time grows with work between the two largest sizes; 1 means in proportion."""
    a, b = sorted(rows, key=lambda row: row["size"])[-2:]
    return math.log(b["ms"] / a["ms"]) / math.log(b["size"] / a["size"])


def _draw_speed(axes: Any, rows: Sequence[Row], ceilings: Sequence[Row]) -> None:
    for (op, provider), curve in _curves(rows).items():
        label = f"{op}, {provider}" + (f", slope {slope(curve):.2f}" if len(curve) > 1 else "")
        axes.plot([r["size"] for r in curve], [r["ms"] for r in curve], marker="o", label=label)
    axes.set_xlabel("elements (expand), rows (losses)")
    axes.set_ylabel("ms")


def _draw_memory(axes: Any, rows: Sequence[Row], ceilings: Sequence[Row]) -> None:
    for (op, provider), curve in _curves(rows).items():
        if op != "expand" and all(r["extra MiB"] for r in curve):
            x, y = ([r[key] for r in curve] for key in ("size", "extra MiB"))
            axes.plot(x, y, marker="o", label=f"{op}, {provider}")
    axes.set_xlabel("rows")
    axes.set_ylabel("extra memory, MiB")


def _draw_roofline(axes: Any, rows: Sequence[Row], ceilings: Sequence[Row]) -> None:
    for (op, provider), curve in _curves(rows).items():
        x = [r["flops"] / r["bytes"] for r in curve]
        y = [r["flops"] / r["ms"] / 1e9 for r in curve]
        axes.plot(x, y, marker="o", linestyle="", label=f"{op}, {provider}")
    bandwidth = max((r["value"] for r in ceilings if r["ceiling"] == "copy"), default=None)
    rate = max((r["value"] for r in ceilings if r["ceiling"] == "GEMM bfloat16"), default=None)
    if bandwidth and rate:
        x = [0.1, rate / bandwidth, 1e4]
        label = f"measured: {bandwidth:.2f} TB/s, {rate:.0f} TFLOP/s"
        axes.plot(x, [min(rate, v * bandwidth) for v in x], color="0.4", label=label)
    axes.set_xlabel("FLOPs per byte that must move")
    axes.set_ylabel("TFLOP/s")
