"""Draws where each layer, head, neuron and hidden unit of a grown model comes from.

A colour stands for a unit of the source. The upper strip of a panel is the source, the lower one
the grown model: a colour that comes twice is a unit that was copied.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from growkern.errors import GrowthError
from growkern.growth.history import LINEAGE_FILE
from growkern.growth.plan.growth_plan import GrowthPlan
from growkern.growth.record.recorded import read_lineage, recorded_plan
from growkern.growth.source.config import read_config
from growkern.growth.source.hub import hub_model, located
from growkern.growth.space.layout import Layer
from growkern.plot.figure import GREY, SMALL, TEXT, WIDTH, check_format, new_figure, plain, save

NOTHING = -1
# boxes have the number of their source up to this many
MOST_NUMBERS = 48
# rows of a panel whose layers have maps of their own
MOST_ROWS = 12
# inches: height of the source's strip, of a row, between panels, and the margins
SOURCE, ROW, ONE_ROW, BETWEEN = 0.28, 0.24, 0.38, 0.72
LEFT, RIGHT, TOP, BOTTOM = 0.95, 0.3, 0.95, 0.4
# from dark to light, so that the order is seen without colours too
COLORS = "viridis"


class Units(NamedTuple):
    """Where the units or heads of one target layer come from."""

    source: Tensor  # source unit of every target unit, (target,) int64; `NOTHING`: a new one
    is_next: Tensor  # which of them come from the next source layer (AKI), (target,) bool


def recorded_growth(
    source: str | Path, grown: str | Path, lineage: str | Path | None = None
) -> GrowthPlan:
    """The growth that made one checkpoint from another; arguments as of `plot_weights`."""
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


@dataclass(frozen=True)
class Panel:
    """One kind of units, with the source unit of each: one row per layer, or one for all."""

    title: str
    count: int
    sources: np.ndarray  # `NOTHING` for new ones
    is_next: np.ndarray  # which come from the next source layer (AKI)
    inserted: np.ndarray  # which are new layers that compute nothing yet
    labels: tuple[str, ...]


def plot_weights(
    source: str | Path, grown: str | Path, out: str | Path, *, lineage: str | Path | None = None
) -> None:
    """Draw where each unit of a grown model comes from. No weights are read.

    Args:
        source, grown: directories of the checkpoints, or models on the Hub.
        out: file to write; its name ends with a format of matplotlib.
        lineage: the lineage file, or its directory; None: that of `grown`.
    """
    check_format(Path(out))
    source, grown = (located(model, weights=False) for model in (source, grown))
    plan = recorded_growth(source, grown, lineage)
    if plan.options.method == "random":
        raise GrowthError(
            f"{grown}: method='random' takes no unit from the source: nothing to draw"
        )
    small, large = plain(name_of(source)), plain(name_of(grown))
    title = f"Each unit of grown ({large}) has the colour of its unit in small ({small})"
    panels = [*layer_panels(plan), *unit_panels(plan)]
    _draw(panels, title, Path(out))


# ------------------------------------------------------------------- panels


def layer_panels(plan: GrowthPlan) -> list[Panel]:
    """One panel per stack of layers."""
    panels = []
    for stack, layers in plan.layer_maps.items():
        inserted = np.array([[(stack, i) in plan.inserted for i in range(len(layers))]])
        count = plan.small.size(plan.small.family.stacks[stack])
        name, nothing = f"{stack} layers".strip(), np.zeros_like(inserted)
        panels.append(Panel(name, count, np.array([layers]), nothing, inserted, ("grown",)))
    return panels


def unit_panels(plan: GrowthPlan) -> list[Panel]:
    """The panels of hidden units, heads, neurons and experts."""
    panels, seen = [], set()
    for name in plan.maps():
        spec = plan.small.family.spaces[name]
        # keys and values are arranged as the queries are, unless there are fewer of them
        if spec.kind not in ("stream", "heads", "units", "experts") or spec.size == "stream":
            continue
        what = (spec.kind, spec.heads or spec.size)
        if what in seen:
            continue
        seen.add(what)
        field = "stream" if spec.kind == "stream" else str(spec.heads or spec.size)
        old, _ = plan.layout.sizes(field)
        # the name of the size as users know it, such as `num_attention_heads`
        title = plan.small.family.config_field(field)
        panels.append(_panel(plan, name, title, old))
    return panels


def _panel(plan: GrowthPlan, name: str, title: str, old: int) -> Panel:
    first = next(iter(plan.layer_maps))
    stack = next((s for s in plan.layer_maps if s and name.startswith(s)), first)
    layers = range(len(plan.layer_maps[stack]))
    origins = [units_of(plan, name, stack, layer) for layer in layers]
    sources = np.array([units.source.numpy() for units in origins])
    is_next = np.array([units.is_next.numpy() for units in origins])
    # layers that are all alike are one row
    pairs = [(s.tobytes(), n.tobytes()) for s, n in zip(sources, is_next, strict=True)]
    firsts = [i for i, pair in enumerate(pairs) if pair not in pairs[:i]]
    if len(firsts) == 1:
        rows, labels = [0], ["grown"]
    elif len(layers) <= MOST_ROWS:
        rows, labels = list(layers), [f"layer {i}" for i in layers]
    else:
        rows = np.linspace(0, len(layers) - 1, MOST_ROWS).round().astype(int).tolist()
        labels = [f"layer {i}" for i in rows]
        title = f"{title}, {MOST_ROWS} of {len(layers)} layers"
    none = np.zeros_like(is_next[rows])
    return Panel(title, old, sources[rows], is_next[rows], none, tuple(labels))


# ------------------------------------------------------------------ drawing


def _draw(panels: Sequence[Panel], title: str, out: Path) -> None:
    heights = [SOURCE + 0.1 + _rows_height(panel) for panel in panels]
    height = TOP + sum(heights) + BETWEEN * (len(panels) - 1) + BOTTOM
    figure = new_figure(height)
    top = TOP
    for panel, own in zip(panels, heights, strict=True):
        axes = figure.add_axes(
            (LEFT / WIDTH, 1 - (top + own) / height, 1 - (LEFT + RIGHT) / WIDTH, own / height)
        )
        _draw_panel(axes, panel, own)
        top += own + BETWEEN
    figure.text(0.02, 1 - 0.3 / height, title, fontsize=TEXT + 1, va="center")
    save(figure, out)


def _rows_height(panel: Panel) -> float:
    return ONE_ROW if len(panel.labels) == 1 else ROW * len(panel.labels)


def _draw_panel(axes: Any, panel: Panel, height: float) -> None:
    """The source's strip, and below it that of the grown model, in inches of `height`."""
    from matplotlib import colormaps

    target = panel.sources.shape[1]
    row = _rows_height(panel) / len(panel.labels)
    axes.set_xlim(0, target)
    axes.set_ylim(height, 0)
    axes.spines[:].set_visible(False)
    colors = colormaps[COLORS](np.linspace(0.0, 0.95, max(panel.count, 2)))
    strips = [(0.0, SOURCE, np.arange(panel.count), None, None)]
    strips += [
        (SOURCE + 0.1 + i * row, row, *of)
        for i, of in enumerate(zip(panel.sources, panel.is_next, panel.inserted, strict=True))
    ]
    for top, high, sources, is_next, inserted in strips:
        picture = np.where((sources == NOTHING)[:, None], 1.0, colors[sources])[None]
        extent = (0, len(sources), top + high, top)
        axes.imshow(picture, extent=extent, aspect="auto", interpolation="nearest")
        _hatch(axes, sources == NOTHING, top, high, "....", GREY)
        if is_next is not None:
            _hatch(axes, is_next, top, high, "\\\\\\", "black")
            _hatch(axes, inserted, top, high, "////", "black")
            axes.axhline(top, color="white", linewidth=1)
        if target <= MOST_NUMBERS:
            _number(axes, sources, colors, top, high, inserted)
    places = [SOURCE / 2] + [top + high / 2 for top, high, *_ in strips[1:]]
    axes.set_yticks(places, ["small", *panel.labels], fontsize=SMALL)
    axes.tick_params(axis="y", length=0)
    if target <= MOST_NUMBERS:
        axes.set_xticks(np.arange(target) + 0.5, range(target), fontsize=SMALL - 1)
        axes.tick_params(axis="x", length=0, pad=2)
    else:
        axes.tick_params(axis="x", labelsize=SMALL - 1)
    title = f"{panel.title}: {panel.count} to {target}{_words(panel)}"
    axes.set_title(title, fontsize=TEXT, loc="left")


def _hatch(axes: Any, where: Any, top: float, high: float, hatch: str, color: str) -> None:
    """Hatch runs of units. Their colour is made lighter, so that the hatching is seen on any."""
    from matplotlib.patches import Rectangle

    steps = np.flatnonzero(np.diff(np.concatenate([[0], where.astype(int), [0]])))
    for start, stop in zip(steps[::2].tolist(), steps[1::2].tolist(), strict=True):
        place = ((start, top), stop - start, high)
        axes.add_patch(Rectangle(*place, facecolor="white", alpha=0.35, linewidth=0))
        axes.add_patch(Rectangle(*place, fill=False, hatch=hatch, edgecolor=color, linewidth=0))


def _number(axes: Any, sources: Any, colors: Any, top: float, high: float, inserted: Any) -> None:
    for i, source in enumerate(sources.tolist()):
        if source == NOTHING:
            continue
        is_dark = float(colors[source][:3] @ [0.3, 0.6, 0.1]) < 0.5
        box = {"facecolor": colors[source], "edgecolor": "none", "pad": 1.5}
        kind = {"ha": "center", "va": "center", "fontsize": SMALL}
        kind |= {"color": "white" if is_dark else "black"}
        kind |= {"bbox": box if inserted is not None else None}
        axes.text(i + 0.5, top + high / 2, str(source), **kind)


def _words(panel: Panel) -> str:
    """What the hatching of a panel means."""
    meanings = {
        "hatched: inserted, computes nothing yet": panel.inserted,
        "hatched: from the next layer": panel.is_next,
        "dotted: new, copies no unit": panel.sources == NOTHING,
    }
    return "".join(f"; {words}" for words, where in meanings.items() if where.any())
