"""Draws the README's picture, the demo's curves and those of a GPU; makes the demo's table."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

import transformers
from matplotlib.patches import Rectangle

from bench.shared import tables
from bench.shared.results import quotable, read, table
from growkern import plan
from growkern.plot.curves import HEADS, Curve, groups_of, savings_cells
from growkern.plot.figure import COLORS, GREY, new_figure
from growkern.plot.losses import draw as draw_losses
from growkern.plot.weights import NOTHING, unit_panels

Row = dict[str, Any]
# points: a picture of 1500 pixels is shown with 640
READABLE = 13


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


def draw_early(folder: Path) -> list[Path]:
    """Draw the losses of one GPU's first seed against all FLOPs, the small model's included."""
    rows = (
        next(tables.early_seeds(folder.parent), [])
        if (folder / "gpt_110m_1.json").is_file()
        else []
    )
    if not rows:
        return []
    figure = new_figure(4.4)
    axes = figure.add_axes((0.07, 0.13, 0.9, 0.82))
    for (system, words), color in zip(
        tables.EARLY_SYSTEMS, (GREY, "black", *COLORS[1:4]), strict=True
    ):
        before, runs = tables.flops_before(rows, system), tables.early_runs(rows, system)
        runs = sorted((r for r in runs if "loss" in r), key=lambda row: row["flops"])
        trunk = [row for row in runs if not row["ends a run"]]
        ends = [row for row in runs if row["ends a run"]]
        for part, style in ((trunk, "-"), (ends, "o")):
            x, y = [(before + r["flops"]) / 1e16 for r in part], [r["loss"] for r in part]
            axes.plot(
                x, y, style, color=color, label=words.replace("`", "") if part is ends else None
            )
    mark = tables.early_runs(rows, "scratch", ends=True)[-1]["loss"]
    axes.axhline(mark, color="black", linestyle=":", linewidth=1)
    axes.set_ylim(1.9, 4.2)
    axes.set_xlabel("training FLOPs, 1e16, the small model's included")
    axes.set_ylabel("validation loss")
    axes.legend(title="lines: while training; points: ends of runs", frameon=False)
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(folder / "early.png")
    return [folder / "early.png"]


def _demo_curves(demo: Row) -> tuple[list[Curve], list[Curve]]:
    """The curves of the large models and of the small ones."""
    names = [field.name for field in fields(Curve)]
    large, small = (
        [Curve(**{name: curve[name] for name in names}) for curve in demo[key]]
        for key in ("curves", "sources")
    )
    return large, small


def demo_table(results: Path) -> str:
    """The table of the demo."""
    if not (demo := read(results / "demo.json")):
        return "not measured yet"
    heads = [head.replace("\n", " ") for head in HEADS]
    return table(heads, savings_cells(groups_of(*_demo_curves(demo), paired=True)))


def draw_demo(results: Path) -> list[Path]:
    """Draw the picture of the demo beside its JSON. Without a result there is none."""
    if not (demo := read(results / "demo.json")):
        return []
    curves, sources = _demo_curves(demo)
    title = f"GPT-2, 4 layers of width 128, {demo['machine']['devices'][0]}"
    draw_losses(curves, results / "demo.png", title=title, sources=sources, paired=True)
    return [results / "demo.png"]


def _demo_savings(demo: Row) -> Iterator[float]:
    """The mean share of FLOPs that growth saved, without and with those of the small model."""
    rows = [row for row in demo["rows"] if row["run"] == "FPI"]
    return (sum(row[key] for row in rows) / len(rows) for key in ("saving", "saving_with_source"))


def demo_saving(results: Path) -> str:
    """The first sentence of the README that has a number."""
    if not (demo := read(results / "demo.json")):
        return "The demo was not measured yet."
    saved, counted = _demo_savings(demo)
    return (
        f"In the demo, growth takes a GPT-2 to the loss of training from scratch with {saved:.0%} "
        f"fewer FLOPs,\nor {counted:.0%} fewer if training the small model counts too."
    )


def draw_readme(results: Path) -> list[Path]:
    """Draw the README's picture: losses of the demo, and where grown units come from."""
    if not (demo := read(results / "demo.json")):
        return []
    figure = new_figure(4.4)
    _draw_demo_losses(figure.add_axes((0.06, 0.15, 0.53, 0.70)), demo)
    _draw_units(figure)
    figure.savefig(results / "readme.png")
    return [results / "readme.png"]


def _draw_demo_losses(axes: Any, demo: Row) -> None:
    """Means over the seeds of the small model, the grown one and the one from scratch."""
    large, small = _demo_curves(demo)
    spent = small[0].flops[-1]
    for name, start, color, dashes, words, place in (
        ("source", 0.0, GREY, "-", "small model", (0.05, 4.15)),
        ("scratch", 0.0, "black", (0, (4, 2)), "large model, from scratch", (1.45, 4.62)),
        ("FPI", spent, COLORS[1], "-", "large model, grown", (1.3, 3.98)),
    ):
        runs = [curve for curve in (*small, *large) if curve.name == name]
        flops = min((curve.flops for curve in runs), key=len)
        losses = zip(*(curve.losses[: len(flops)] for curve in runs), strict=True)
        x, y = [(start + f) / 1e12 for f in flops], [sum(each) / len(each) for each in losses]
        axes.plot(x, y, color=color, linestyle=dashes, marker="o", linewidth=2.5)
        axes.text(*place, words, color=color, fontsize=READABLE)
    axes.set_ylim(3.9, 5.45)
    axes.set_xlabel("training FLOPs, 1e12", fontsize=READABLE)
    axes.tick_params(labelsize=READABLE - 2)
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
    saved, counted = _demo_savings(demo)
    words = f"validation loss: {saved:.0%} fewer FLOPs to the loss from scratch,\n"
    words += f"{counted:.0%} fewer with the small model's own training counted"
    axes.set_title(words, fontsize=READABLE, loc="left")


def _draw_units(figure: Any) -> None:
    """The units of a tiny GPT-2 grown with the defaults, in the colours of their sources."""
    sizes = {"vocab_size": 8, "n_positions": 8, "bos_token_id": 0, "eos_token_id": 0}
    config = transformers.GPT2Config(**sizes, n_embd=4, n_layer=1, n_head=2, n_inner=6)
    small = transformers.GPT2LMHeadModel(config)
    panels = unit_panels(plan(small, n_embd=8, n_head=4, n_inner=9))
    names = {"n_embd": "hidden units", "n_head": "heads", "n_inner": "neurons"}
    figure.text(0.65, 0.87, "where each unit comes from", fontsize=READABLE)
    for i, panel in enumerate(panels):
        axes = figure.add_axes((0.65, 0.60 - 0.245 * i, 0.33, 0.2))
        axes.set_xlim(0, panel.sources.shape[1])
        axes.set_ylim(2.1, 0)
        axes.axis("off")
        axes.text(0, -0.12, names[panel.title], fontsize=READABLE - 1)
        for top, sources in ((0.0, range(panel.count)), (1.1, panel.sources[0].tolist())):
            for x, source in enumerate(sources):
                is_new = source == NOTHING
                color = "white" if is_new else COLORS[1 + source % (len(COLORS) - 1)]
                box = Rectangle((x + 0.04, top), 0.92, 0.95, facecolor=color, edgecolor=GREY)
                axes.add_patch(box)
                words = "0" if is_new else "abcdef"[source]
                middle = (x + 0.5, top + 0.5)
                axes.text(*middle, words, ha="center", va="center", fontsize=READABLE - 2)


def _curves(rows: Sequence[Row]) -> dict[tuple[str, str], list[Row]]:
    curves: dict[tuple[str, str], list[Row]] = {}
    for row in rows:
        curves.setdefault((row["op"], row["provider"]), []).append(row)
    return curves


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
