"""Draws what each head of a grown model attends to, below the head that it comes from."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from growkern.errors import GrowthError
from growkern.growth.plan.growth_plan import GrowthPlan
from growkern.growth.record.outputs import load_model
from growkern.plot.figure import SMALL, TEXT, WIDTH, check_format, new_figure, save
from growkern.plot.units import NOTHING, heads_of, main_stack, recorded_growth
from growkern.train.load import load_tokenizer

# how many fit so that tokens can be read
MOST_HEADS, MOST_LAYERS = 9, 4
MOST_TOKENS = 12
# of a picture, inches: left of the maps, right of them, above and below
LEFT, RIGHT, TOP, BOTTOM = 1.65, 0.85, 0.75, 0.9
# light where little attention is, so that it prints well; its lightness only falls
COLORS = "YlGnBu"


@dataclass(frozen=True)
class Cell:
    """One attention map.

    Attributes:
        layer, head: of its model.
        title: above it.
    """

    layer: int
    head: int
    title: str


@dataclass(frozen=True)
class Row:
    """The maps of one layer of one model.

    Attributes:
        label: at the left.
        grown: True for the grown model.
        inserted: True for an identity layer.
        cells: None where a head comes from no head of the source.
    """

    label: str
    grown: bool
    inserted: bool
    cells: tuple[Cell | None, ...]


def attention_maps(model: Any, tokens: Tensor) -> Tensor:
    """The attention weights of every head.

    Args:
        model: of transformers, loaded with `attn_implementation="eager"`. For an encoder-decoder
            model these are the weights of the encoder.
        tokens: (1, length) int64.

    Returns:
        (layers, heads, length, length) float32.
    """
    inputs = {"input_ids": tokens}
    if model.config.is_encoder_decoder:
        inputs["decoder_input_ids"] = tokens
    with torch.no_grad():
        output = model(**inputs, output_attentions=True)
    maps = getattr(output, "attentions", None) or output.encoder_attentions
    return torch.stack([layer[0].float() for layer in maps])


def plot_attention(
    checkpoints: Sequence[str | Path],
    text: str,
    out: str | Path,
    *,
    lineage: str | Path | None = None,
    length: int = MOST_TOKENS,
) -> None:
    """Draw attention maps of a source, and of the model grown from it (bert2BERT, Figures 9-12).

    Args:
        checkpoints: a model alone, or a source and the model grown from it.
        text: is split into tokens by the tokenizer of the first checkpoint.
        out: file to write; its name ends with a format of matplotlib.
        lineage: the lineage file of the growth, or its directory; None: that of the grown model.
        length: tokens to show, from the start of the text.

    Raises:
        GrowthError: the text is empty, there are more than two checkpoints, the grown one has no
            growth record, matplotlib is missing, or the file cannot be written.
    """
    check_format(Path(out))
    if not text.strip():
        raise GrowthError("the text to draw attention maps for is empty")
    if len(checkpoints) > 2:
        raise GrowthError("attention is drawn for one model, or for a source and one grown from it")
    plan = recorded_growth(*checkpoints, lineage) if len(checkpoints) == 2 else None
    tokenizer = load_tokenizer(Path(checkpoints[0]))
    ids = tokenizer(text, return_tensors="pt", truncation=True, max_length=length)["input_ids"]
    words = [word.replace("Ġ", "_").replace("▁", "_") for word in tokenizer.convert_ids_to_tokens(ids[0])]
    models = (load_model(c, attention="eager") for c in checkpoints)
    maps = [attention_maps(model, ids).numpy() for model in models]
    heads = maps[-1].shape[1]
    rows = _alone(maps[0]) if plan is None else paired_rows(plan)
    names = [Path(c).resolve().name for c in checkpoints]
    title = names[0] if plan is None else f"{names[0]}, and below it {names[1]}, grown from it"
    shown = len(rows[0].cells)
    layers = f"{len(rows) // len(maps)} of {len(maps[-1])} layers"
    parts = f"{layers}, {shown} of {heads} heads" if shown < heads else layers
    _draw(rows, maps, words, f"Attention of {title} ({parts})", Path(out))


# --------------------------------------------------------------------- rows


def shown_layers(count: int, inserted: Sequence[int]) -> list[int]:
    """Layers to draw: the first, the last and some between, one of them inserted if any is."""
    chosen = np.linspace(0, count - 1, min(count, MOST_LAYERS)).round().astype(int).tolist()
    if inserted and not set(chosen) & set(inserted):
        middle = inserted[len(inserted) // 2]
        chosen[len(chosen) // 2] = middle
    return sorted(set(chosen))


def paired_rows(plan: GrowthPlan) -> list[Row]:
    """Two rows for each layer shown: heads of the source, and below them those grown from them.

    Heads are in the order of the heads they come from, so copies of one head are neighbours.
    """
    stack = main_stack(plan)
    space = _query_space(plan)
    layers = plan.layer_maps[stack]
    inserted = sorted(layer for name, layer in plan.inserted if name == stack)
    rows = []
    for layer in shown_layers(len(layers), inserted):
        heads, below = heads_of(plan, space, stack, layer), layers[layer]
        found = list(zip(heads.is_next.tolist(), heads.source.tolist(), strict=True))
        # heads that come from no head are last
        order = sorted(range(len(found)), key=lambda h: (found[h][1] == NOTHING, *found[h], h))
        above, own = [], []
        for head in order[:MOST_HEADS]:
            is_next, source = found[head]
            where = f"layer {below + 1}, " if is_next else ""
            is_copy = source != NOTHING
            title = f"{where}head {source}"
            above.append(Cell(below + is_next, source, title) if is_copy else None)
            own.append(Cell(layer, head, f"head {head}"))
        is_inserted = layer in inserted
        rows += [
            Row(f"small model\nlayer {below}", False, is_inserted, tuple(above)),
            Row(
                f"grown model\nlayer {layer}" + ("\ninserted" if is_inserted else ""),
                True,
                is_inserted,
                tuple(own),
            ),
        ]
    return rows


def _query_space(plan: GrowthPlan) -> str:
    """The space of the query heads, of the encoder if there are several stacks."""
    spaces = plan.small.family.spaces.items()
    return next(n for n, spec in spaces if spec.kind == "heads" and spec.heads != "kv_heads")


def _alone(maps: Any) -> list[Row]:
    heads = range(min(maps.shape[1], MOST_HEADS))
    return [
        Row(f"layer {i}", True, False, tuple(Cell(i, head, f"head {head}") for head in heads))
        for i in shown_layers(len(maps), ())
    ]


# ------------------------------------------------------------------ drawing


def _draw(
    rows: Sequence[Row], maps: Sequence[Any], words: Sequence[str], title: str, out: Path
) -> None:
    """Draw all maps into one pair of axes, in units of a cell. Axes of their own would be slow."""
    from matplotlib.patches import Rectangle

    columns, gap, pair = max(len(row.cells) for row in rows), 0.08, 0.22
    # a few heads need not fill the width
    cell = min((WIDTH - LEFT - RIGHT) / (columns * (1 + gap)), 1.9)
    tops, y = [], 0.0
    for row in rows:
        y += (0.5 if row.grown == rows[0].grown or len(maps) == 1 else 0.0) * (y > 0)
        tops.append(y + pair)
        y += 1 + pair
    height = cell * y + TOP + BOTTOM
    figure = new_figure(height)
    width = cell * columns * (1 + gap)
    axes = figure.add_axes(
        (LEFT / WIDTH, BOTTOM / height, width / WIDTH, cell * y / height),
        xlim=(0, columns * (1 + gap)),
        ylim=(y, 0),
    )
    axes.axis("off")
    drawn = [
        (row, column, top, shown)
        for row, top in zip(rows, tops, strict=True)
        for column, shown in enumerate(row.cells)
        if shown is not None
    ]
    pictures = [maps[-1 if row.grown else 0][one.layer, one.head] for row, _, _, one in drawn]
    most, size = max(float(picture.max()) for picture in pictures), len(words)
    font = min(SMALL, 72 * cell / size * 0.8)
    image = None
    for (row, column, top, one), picture in zip(drawn, pictures, strict=True):
        left = column * (1 + gap)
        place = (left, left + 1, top + 1, top)
        image = axes.imshow(picture, cmap=COLORS, vmin=0, vmax=most, extent=place, aspect="auto")
        edge = {"edgecolor": "#D55E00", "linewidth": 1.6, "linestyle": (0, (4, 2))}
        plain = {"edgecolor": "0.6", "linewidth": 0.6}
        is_marked = row.inserted and row.grown
        axes.add_patch(
            Rectangle((left, top), 1, 1, fill=False, zorder=3, **(edge if is_marked else plain))
        )
        axes.text(left + 0.5, top - 0.03, one.title, ha="center", va="bottom", fontsize=SMALL)
    for row, top in zip(rows, tops, strict=True):
        axes.text(
            -0.72 * TEXT / 10 / cell, top + 0.5, row.label, ha="right", va="center", fontsize=SMALL,
            color="#D55E00" if row.inserted and row.grown else "black",
            fontweight="bold" if row.grown else "normal",
        )  # fmt: skip
        for i, word in enumerate(words):
            at = top + (i + 0.5) / size
            axes.text(-0.04 / cell, at, word[:9], ha="right", va="center", fontsize=font)
    for column in range(columns):
        for i, word in enumerate(words):
            at = column * (1 + gap) + (i + 0.5) / size
            axes.text(at, y + 0.04 / cell, word[:9], ha="center", va="top", rotation=90, fontsize=font)
    axes.set_xlim(0, columns * (1 + gap))
    axes.set_ylim(y, 0)
    bar = figure.add_axes(
        ((LEFT + width + 0.1) / WIDTH, BOTTOM / height, 0.14 / WIDTH, min(3.0, cell * y) / height)
    )
    figure.colorbar(image, cax=bar)
    bar.set_title("weight", fontsize=SMALL)
    bar.tick_params(labelsize=SMALL)
    figure.text(0.02, 1 - 0.3 / height, title, fontsize=TEXT, va="center")
    where = "rows: token that attends; columns: token attended to"
    figure.text(0.02, 0.12 / height, where, fontsize=SMALL)
    save(figure, out)
