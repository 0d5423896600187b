"""Draws what each head of a grown model attends to, below the head that it comes from."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from bench.shared.pictures import NOTHING, name_of, recorded_growth, units_of
from growkern.errors import GrowthError
from growkern.growth.plan import GrowthPlan
from growkern.growth.source import load_model, located
from growkern.plot.figure import SMALL, TEXT, WIDTH, check_picture, new_figure, plain, save
from growkern.train.model import load_tokenizer

# how many fit so that tokens can be read
MOST_HEADS, MOST_LAYERS = 8, 4
MOST_TOKENS = 10
# letters of a token
MOST_LETTERS = 9
# of a picture, inches: left of the maps, right of them, above and below
LEFT, RIGHT, TOP, BOTTOM = 1.7, 0.85, 0.45, 0.85
# inches: the most of a map, the title above it, between two layers, and beside a row for tokens
MOST_CELL, TITLE, BETWEEN, TOKENS = 1.9, 0.2, 0.2, 0.72
# between two maps of a row, as a share of one
GAP = 0.08
# light where little attention is, so that it prints well; its lightness only falls
COLORS, INSERTED = "YlGnBu", "#B03A00"


class Cell(NamedTuple):
    """One attention map: its layer and head in its model, and the title above it."""

    layer: int
    head: int
    title: str


class Row(NamedTuple):
    """The maps of one layer of one model, `grown` or its source; None for a head without origin."""

    label: str
    grown: bool
    inserted: bool
    cells: tuple[Cell | None, ...]


def attention_maps(model: Any, tokens: Tensor) -> Tensor:
    """The attention weights of every head, (layers, heads, length, length) float32.

    Of an encoder-decoder model these are the weights of the encoder. The tokens are (1, length)
    int64.
    """
    # the others do not make the weights
    model.set_attn_implementation("eager")
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
        checkpoints: a model alone, or a source and the model grown from it. Directories, or models
            on the Hub.
        text: is split into tokens by the tokenizer of the first checkpoint.
        out: file to write; its name ends with a format of matplotlib.
        lineage: the lineage file of the growth, or its directory; None: that of the grown model.
        length: tokens to show, from the start of the text.
    """
    check_picture(Path(out))
    if not text.strip():
        raise GrowthError("the text to draw attention maps for is empty")
    if len(checkpoints) > 2:
        raise GrowthError("attention is drawn for one model, or for a source and one grown from it")
    is_pair = len(checkpoints) == 2
    checkpoints = [located(checkpoint) for checkpoint in checkpoints]
    plan = recorded_growth(checkpoints[0], checkpoints[1], lineage) if is_pair else None
    tokenizer = load_tokenizer(Path(checkpoints[0]))
    ids = tokenizer(text, return_tensors="pt", truncation=True, max_length=length)["input_ids"]
    words = [_readable(token) for token in tokenizer.convert_ids_to_tokens(ids[0])]
    models = (load_model(Path(c), torch.float32) for c in checkpoints)
    maps = [attention_maps(model, ids).numpy() for model in models]
    heads = maps[-1].shape[1]
    rows = _alone(maps[0]) if plan is None else paired_rows(plan)
    names = [plain(name_of(checkpoint)) for checkpoint in checkpoints]
    pair = f"small ({names[0]}), and below it grown ({names[-1]})"
    title = names[0] if plan is None else pair
    shown = len(rows[0].cells)
    layers = f"{len(rows) // len(maps)} of {len(maps[-1])} layers"
    parts = f"{layers}, {shown} of {heads} heads" if shown < heads else layers
    _draw(rows, maps, words, f"Attention of {title} ({parts})", Path(out))


def _readable(token: str) -> str:
    """A token as short text; the signs for a space of several tokenizers become "_"."""
    text = token.replace("\u0120", "_").replace("\u2581", "_")
    return plain(text if len(text) <= MOST_LETTERS else text[: MOST_LETTERS - 1] + "\u2026")


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
    # the encoder if there are several
    stack = next(iter(plan.layer_maps))
    space = _query_space(plan)
    layers = plan.layer_maps[stack]
    inserted = sorted(layer for name, layer in plan.inserted if name == stack)
    rows = []
    for layer in shown_layers(len(layers), inserted):
        heads, below = units_of(plan, space, stack, layer), layers[layer]
        origins = zip(heads.source.tolist(), heads.is_next.tolist(), strict=True)
        # heads that come from no head are last
        ordered = sorted((x == NOTHING, x, is_next, i) for i, (x, is_next) in enumerate(origins))
        above, own = [], []
        for is_new, source, is_next, head in ordered[:MOST_HEADS]:
            title = f"layer {below + 1}, head {source}" if is_next else f"head {source}"
            above.append(None if is_new else Cell(below + is_next, source, title))
            own.append(Cell(layer, head, f"head {head}"))
        is_inserted = layer in inserted
        note = "\ninserted" if is_inserted else ""
        rows += [
            Row(f"small\nlayer {below}", False, is_inserted, tuple(above)),
            Row(f"grown\nlayer {layer}{note}", True, is_inserted, tuple(own)),
        ]
    return rows


def _query_space(plan: GrowthPlan) -> str:
    """The space of the query heads, of the encoder if there are several stacks."""
    spaces = {name: plan.small.family.spaces[name] for name in plan.maps()}
    is_query = {n: spec.kind == "heads" and spec.heads != "kv_heads" for n, spec in spaces.items()}
    return next(name for name in spaces if is_query[name])


def _alone(maps: Any) -> list[Row]:
    heads = range(min(maps.shape[1], MOST_HEADS))
    return [
        Row(f"layer {i}", True, False, tuple(Cell(i, head, f"head {head}") for head in heads))
        for i in shown_layers(len(maps), ())
    ]


# ------------------------------------------------------------------ drawing


def _tops(rows: Sequence[Row], cell: float) -> list[float]:
    """The upper ends of all rows, in maps of `cell` inches."""
    top = TITLE / cell
    tops = [top]
    for row in rows[1:]:
        # the grown model's row belongs to the source's row above it
        top += 1 + (TITLE + (BETWEEN if row.grown == rows[0].grown else 0)) / cell
        tops.append(top)
    return tops


def _draw(
    rows: Sequence[Row], maps: Sequence[Any], words: Sequence[str], title: str, out: Path
) -> None:
    """Draw all maps into one pair of axes, in widths of a map: a pair for each would be slow."""
    from matplotlib.colors import PowerNorm

    lefts = [column * (1 + GAP) for column in range(max(len(row.cells) for row in rows))]
    width = len(lefts) * (1 + GAP)
    # inches
    cell = min((WIDTH - LEFT - RIGHT) / width, MOST_CELL)
    tops = _tops(rows, cell)
    bottom = tops[-1] + 1
    height = cell * bottom + TOP + BOTTOM
    figure = new_figure(height)
    size = (width * cell / WIDTH, bottom * cell / height)
    axes = figure.add_axes((LEFT / WIDTH, BOTTOM / height, *size))
    shown: list[tuple[Any, ...]] = []
    for row, top in zip(rows, tops, strict=True):
        of_model = maps[-1 if row.grown else 0]
        for left, drawn in zip(lefts, row.cells, strict=False):
            if drawn is not None:
                look = drawn.title, row.grown and row.inserted
                shown.append((of_model[drawn.layer, drawn.head], (left, top), *look))
    # with a root, weak attention is seen beside strong
    norm = PowerNorm(0.5, vmin=0, vmax=max(float(picture.max()) for picture, *_ in shown))
    for picture, corner, title_of, is_inserted in shown:
        image = _draw_map(axes, picture, norm, corner, title_of, is_inserted)
    _write_tokens(axes, words, cell, lefts, tops)
    for row, top in zip(rows, tops, strict=True):
        color = INSERTED if row.grown and row.inserted else "black"
        place = {"x": -TOKENS / cell, "y": top + 0.5, "ha": "right", "va": "center"}
        axes.text(s=row.label, fontsize=SMALL, color=color, gid="row", **place)
    axes.set(xlim=(0, width), ylim=(bottom, 0))
    axes.axis("off")
    left, high = LEFT + width * cell + 0.12, min(2.2, cell * bottom - TITLE)
    bar = figure.add_axes(
        (left / WIDTH, 1 - (TOP + TITLE + high) / height, 0.14 / WIDTH, high / height)
    )
    figure.colorbar(image, cax=bar)
    bar.set_ylabel("attention weight", fontsize=SMALL)
    bar.tick_params(labelsize=SMALL - 1)
    figure.text(0.02, 1 - 0.25 / height, title, fontsize=TEXT + 1, va="center", gid="title")
    where = "Rows of a map: the token that attends. Columns: the token attended to."
    figure.text(0.02, 0.12 / height, where, fontsize=SMALL)
    save(figure, out)


def _draw_map(
    axes: Any, picture: Any, norm: Any, corner: tuple[float, float], title: str, is_inserted: bool
) -> Any:
    from matplotlib.patches import Rectangle

    left, top = corner
    place = (left, left + 1, top + 1, top)
    image = axes.imshow(picture, cmap=COLORS, norm=norm, extent=place, aspect="auto")
    edge: dict[str, Any] = {"edgecolor": "0.6", "linewidth": 0.6}
    if is_inserted:
        edge = {"edgecolor": INSERTED, "linewidth": 2.0, "linestyle": (0, (4, 1.5))}
    axes.add_patch(Rectangle((left, top), 1, 1, fill=False, zorder=3, **edge))
    axes.text(left + 0.5, top - 0.03, title, ha="center", va="bottom", fontsize=SMALL, gid="cell")
    return image


def _write_tokens(
    axes: Any, words: Sequence[str], cell: float, lefts: Sequence[float], tops: Sequence[float]
) -> None:
    """Tokens at the left of every row of maps, and below the last one."""
    places = (np.arange(len(words)) + 0.5) / len(words)
    font = min(SMALL, 72 * cell / len(words) * 0.85)
    for place, word in zip(places, words, strict=True):
        kind = {"s": word, "fontsize": font, "gid": "token"}
        for top in tops:
            axes.text(-0.04 / cell, top + place, ha="right", va="center", **kind)
        for left in lefts:
            at = (left + place, tops[-1] + 1 + 0.04 / cell)
            axes.text(*at, ha="center", va="top", rotation=90, **kind)
