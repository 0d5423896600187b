"""Draws the demo's curves and those of a GPU. Says where the units of a growth come from."""

from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from bench.shared import tables
from bench.shared.results import read, table
from growkern.errors import GrowthError
from growkern.growth.history import LINEAGE_FILE
from growkern.growth.plan import GrowthPlan
from growkern.growth.record.lineage import read_lineage, recorded_plan
from growkern.growth.source import read_config
from growkern.growth.source.hub import hub_model
from growkern.growth.space import Layer
from growkern.plot.curves import HEADS, Curve, runs_by_name, savings_cells
from growkern.plot.figure import COLORS, GREY, MARKERS, new_figure
from growkern.plot.losses import draw as draw_losses

Row = dict[str, Any]
# points: a picture of 1500 pixels is shown with 640
READABLE = 13


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
    colors = (GREY, "black", *COLORS[1:4])
    for (system, words), color, marker in zip(tables.EARLY_SYSTEMS, colors, MARKERS, strict=True):
        before, runs = tables.flops_before(rows, system), tables.early_runs(rows, system)
        runs = sorted((r for r in runs if "loss" in r), key=lambda row: row["flops"])
        trunk = [row for row in runs if not row["ends a run"]]
        ends = [row for row in runs if row["ends a run"]]
        for part, style in ((trunk, "-"), (ends, marker)):
            x, y = [(before + r["flops"]) / 1e16 for r in part], [r["loss"] for r in part]
            label = words.replace("`", "") if part is ends else None
            # ends lie close together
            axes.plot(x, y, style, color=color, fillstyle="none", markersize=8, label=label)
    mark = tables.early_runs(rows, "scratch", ends=True)[-1]["loss"]
    axes.axhline(mark, color="black", linestyle=":", linewidth=1)
    axes.set_ylim(1.9, 4.2)
    axes.set_xlabel("training FLOPs, 1e16, the small model's included", fontsize=READABLE)
    axes.set_ylabel("validation loss", fontsize=READABLE)
    title = "lines: while training; points: ends of runs;\ndotted: the loss from scratch"
    axes.legend(title=title, frameon=False)
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(folder / "early.png")
    return [folder / "early.png"]


def _demo_curves(demo: Row) -> list[list[Curve]]:
    """The curves of the large models and of the small ones."""
    return [[Curve(**curve) for curve in demo[key]] for key in ("curves", "sources")]


def demo_table(results: Path) -> str:
    """The table of the demo."""
    if not (demo := read(results / "demo.json")):
        return "not measured yet"
    cells = savings_cells(runs_by_name(*_demo_curves(demo), paired=True))
    return table(HEADS, cells)


def draw_demo(results: Path) -> list[Path]:
    """Draw the picture of the demo beside its JSON. Without a result there is none."""
    if not (demo := read(results / "demo.json")):
        return []
    curves, sources = _demo_curves(demo)
    draw_losses(curves, results / "demo.png", sources=sources, paired=True)
    return [results / "demo.png"]


# ---------------------------------------------------- where units come from

NOTHING = -1


class Units(NamedTuple):
    """Where the units or heads of one target layer come from."""

    source: Tensor  # source unit of every target unit, (target,) int64; `NOTHING`: a new one
    is_next: Tensor  # which of them come from the next source layer (AKI), (target,) bool


def recorded_growth(
    source: str | Path, grown: str | Path, lineage: str | Path | None = None
) -> GrowthPlan:
    """The growth that made one checkpoint from another, by the record beside it or in `lineage`."""
    source, grown = Path(source), Path(grown)
    configs = [read_config(source), read_config(grown)]
    if lineage is None and not (grown / LINEAGE_FILE).is_file():
        raise GrowthError(
            f"{grown}: no {LINEAGE_FILE}, which says where each unit comes from: give that of the "
            "growth with --lineage"
        )
    plan = recorded_plan(read_lineage(Path(lineage or grown)))
    changes = plan.size_changes().items()
    for which, directory in enumerate((source, grown)):
        for name, sizes in changes:
            own = getattr(configs[which], name, None)
            if own not in (sizes[which], None):
                raise GrowthError(
                    f"{directory}: {name}={own}, the growth record says {sizes[which]}: give the "
                    "small model first, and then the model grown from it"
                )
    return plan


def name_of(directory: str | Path) -> str:
    """The name of a model: that on the Hub if it has one, else that of its directory."""
    directory = Path(directory)
    on_hub = hub_model(directory)
    return on_hub.id if on_hub else directory.resolve().name


def units_of(plan: GrowthPlan, space: str, stack: str, layer: int) -> Units:
    """Where the units or heads of a space of the table come from, in a layer of the target.

    A unit of several entries counts once.
    """
    spec, layout = plan.small.family.spaces[space], plan.layout
    number = plan.layer_maps[stack][layer]
    # as `Task.source_layer`
    source_layer: Layer = f"{stack}.{number}" if stack else number
    if spec.kind == "heads":
        old, _ = layout.sizes(str(spec.heads))
        source = layout.head_map(str(spec.heads), layout.key(space, source_layer)[1])
    else:
        old, _ = layout.sizes(str(spec.size or "stream"))
        units = layout.space(space, source_layer)
        width = units.source // old
        source = torch.where(units.is_extra, NOTHING, units.read_index // width)[::width]
    if plan.options.is_baseline:
        # without copies: new units have random weights, and the old ones lead
        source = torch.where(torch.arange(len(source)) < old, source, NOTHING)
    is_next = torch.zeros(len(source), dtype=torch.bool)
    is_own = spec.kind in ("heads", "units") and spec.size != "stream"
    # the last source layer has no next one
    if plan.options.method == "aki" and is_own and number != max(plan.layer_maps[stack]):
        is_next = layout.next_layer_units(space).reshape(len(source), -1)[:, 0]
    return Units(source, is_next)
