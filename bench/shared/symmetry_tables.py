"""The tables and the picture of `bench.symmetry`, the study of how copies are told apart."""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

# the learning rate with which the sources end
END_RATE = 1e-3
# steps of a run that is more than the choice of a learning rate, and the columns of its table
LONG = 2000
LONGER = 2 * LONG
SHOWN = {LONG: (50, 200, 400, 1000, LONG), LONGER: (400, 1000, LONG, 3000, LONGER)}
# the columns of the short table: title, variant and optimizer
SHORT = {
    "small model, trained on": ("continued", "adamw"),
    "noise 0.5, AdamW": ("noise 0.5", "adamw"),
    "noise 0.5, GrowthAdamW": ("noise 0.5", "growth"),
    "routing, AdamW": ("routing 1", "adamw"),
    "routing, GrowthAdamW": ("routing 1", "growth"),
}
# of the learning rate, in steps
WARMUP = 50
Row = Mapping[str, Any]
Setup = tuple[str, str, float, int]


HEAD = """# How growth tells copies apart

`python -m bench.symmetry run` trains small models on the text of Python's standard library, grows
them to twice their width (or three times) and trains them further. Numbers are validation losses
in nats per byte, means over the seeds.

- "bump" is how far the loss rises above its start within the first 100 steps.
- "apart" is the share of the copies' size that is not their mean: 0 for equal copies, about 0.71
  for unrelated ones.
- "ahead from" is the first step from which the grown model stays ahead of the small one that was
  trained on at the same rate, with the same warm-up.
- "growth" is GrowthAdamW. "growth-clipped" clips by `growkern.growth_clip_norm_`, as the trainer
  does; all others clip by the plain norm.
- All optimizers start afresh, the small model's too. With "moments" they start with the moments of
  the source's optimizer.
- Most lines are of one seed. Compare them with others at the same seeds: "each seed" has them in
  the order of the seeds 11, 12, 13.
- "noise 0.5" was uniform between -0.5 and 0.5 in these runs. Noise has since one size and a random
  sign: of size 0.29 it has the same variance.
- "half-" routes half of the connections, and "aki-" takes new heads and units from the next layer.
- "padded-" has empty entries in the hidden state in place of copies. All others have copies.

"""


def _groups(rows: Iterable[Row], steps: int = LONG) -> dict[str, dict[Setup, list[Row]]]:
    """Runs of so many steps by model, then by variant, optimizer, learning rate and warm-up."""
    found: dict[str, dict[Setup, list[Row]]] = defaultdict(lambda: defaultdict(list))
    for row in rows:
        if row["steps"] == steps:
            name = (
                f"{row['symmetry']} {row['amplitude']:g}" if row["amplitude"] else row["symmetry"]
            )
            setup = (name, row["optimizer"], row["rate"], row.get("warmup", WARMUP))
            found[row["model"]][setup].append(row)
    return found


def _continued(variants: Mapping[Setup, Sequence[Row]], setup: Setup) -> Sequence[Row]:
    """The runs of the small model that was trained on at the same rate, with the same warm-up."""
    _, optimizer, rate, warmup = setup
    moments = "-moments" if optimizer.endswith("-moments") else ""
    return variants.get(("continued", f"adamw{moments}", rate, warmup), [])


def _mean(rows: Sequence[Row], step: int) -> float:
    return statistics.fmean(row["losses"][str(step)] for row in rows)


def _bump(row: Row) -> float:
    """How far the loss rises above its start within the first 100 steps; 0 if it does not."""
    losses = row["losses"]
    return max(0.0, max(losses[s] for s in ("25", "50", "100")) - losses["0"])


def _ahead(rows: Sequence[Row], small: Sequence[Row]) -> str:
    """The first step from which the mean loss stays below the continued source's."""
    steps = sorted(map(int, rows[0]["losses"]))
    first = None
    for step in reversed(steps):
        if step == 0 or _mean(rows, step) >= _mean(small, step):
            break
        first = step
    return "never" if first is None else str(first)


def _line(setup: Setup, rows: Sequence[Row], small: Sequence[Row], end: int) -> str:
    ends = [row["losses"][str(end)] for row in sorted(rows, key=lambda row: row["seed"])]
    means = " | ".join(f"{_mean(rows, step):.4f}" for step in SHOWN[end])
    apart = [row["apart"][str(end)] for row in rows if row["apart"]]
    between = "- | -"
    if apart:
        stream, ffn = (statistics.fmean(x[k] for x in apart) for k in ("stream", "ffn"))
        between = f"{stream:.2f} | {ffn:.2f}"
    bump = statistics.fmean(map(_bump, rows))
    each = " ".join(f"{x:.3f}" for x in ends)
    name, optimizer, rate, warmup = setup
    small = _same_seeds(small, rows)
    ahead = "-" if name == "continued" or len(small) < len(rows) else _ahead(rows, small)
    first = f"| {name} | {optimizer} | {rate:g} | {warmup}"
    return f"{first} | {means} | {each} | {bump:.3f} | {between} | {ahead} |"


def _same_seeds(rows: Sequence[Row], like: Sequence[Row]) -> list[Row]:
    seeds = {row["seed"] for row in like}
    return [row for row in rows if row["seed"] in seeds]


def short_table(rows: Iterable[Row]) -> tuple[list[str], list[list[str]]]:
    """The mean loss at the end, per model, of the runs at the rate with which the sources ended.

    Returns:
        The head, and one line per model: over the seeds that all of its variants have.
    """
    groups, lines = _groups(rows), []
    for model, variants in sorted(groups.items()):
        found = [variants.get((*name, END_RATE, WARMUP), []) for name in SHORT.values()]
        seeds = set.intersection(*({row["seed"] for row in rows} for rows in found))
        if not seeds:
            continue
        any_row = found[0][0]
        cells = [model, f"{any_row['source_loss']:.3f}", str(len(seeds))]
        for same in found:
            own = [row for row in same if row["seed"] in seeds]
            cells.append(f"{_mean(own, LONG):.3f}")
        lines.append(cells)
    return ["model", "source", "seeds", *SHORT], lines


def report(rows: Iterable[Row]) -> str:
    """The tables in markdown: one per model, one line per variant, optimizer, rate and warm-up."""
    rows = list(rows)
    lines = _tables(_groups(rows), LONG)
    if longer := _groups(rows, LONGER):
        lines += ["## Twice as long", "", *_tables(longer, LONGER)]
    return "\n".join(lines)


def _tables(groups: Mapping[str, Mapping[Setup, Sequence[Row]]], end: int) -> list[str]:
    """The lines of one table per model."""
    lines = list[str]()
    for model, variants in sorted(groups.items()):
        any_row = next(iter(variants.values()))[0]
        lines += [f"### {model} (source {any_row['source_loss']:.4f})", ""]
        steps = " | ".join(map(str, SHOWN[end]))
        lines.append(
            f"| symmetry | optimizer | rate | warm-up | {steps} | each seed at {end} | bump | "
            "stream apart | units apart | ahead from |"
        )
        lines.append("|---|---|---|---|" + "---|" * (len(SHOWN[end]) + 5))
        ordered = sorted(variants.items(), key=lambda item: -_mean(item[1], end))
        lines += [_line(setup, found, _continued(variants, setup), end) for setup, found in ordered]
        lines.append("")
    return lines


# the picture of the README: models, and the rate that is best for the small one, see the tables
LEAD = (
    ("gpt2 2x48-96", "GPT-2, 2 layers, width 48"),
    ("llama 2x48-96", "Llama, 2 layers, width 48"),
)
LEAD_RATE = 5e-4


def draw_lead(rows: Iterable[Row], file: Path) -> None:
    """Draw how the defaults of growth compare with training the small model further.

    Lines are means over the seeds, bands reach from the lowest to the highest seed.
    """
    from matplotlib.figure import Figure

    groups = _groups(rows)
    figure = Figure(figsize=(10, 3.9), dpi=150, layout="constrained")
    panels = figure.subplots(1, len(LEAD))
    for axes, (model, title) in zip(panels, LEAD, strict=True):
        variants = groups[model]
        lines = (
            ("small model, trained on", ("continued", "adamw"), "#000000", "--"),
            ("grown to width 96", ("routing 1", "growth"), "#0072B2", "-"),
        )
        for label, name, color, style in lines:
            runs = variants[(*name, LEAD_RATE, WARMUP)]
            steps = sorted(map(int, runs[0]["losses"]))
            losses = [[run["losses"][str(step)] for run in runs] for step in steps]
            axes.plot(steps, [statistics.fmean(x) for x in losses], style, color=color)
            axes.fill_between(
                steps, list(map(min, losses)), list(map(max, losses)), color=color, alpha=0.2, lw=0
            )
            end = statistics.fmean(losses[-1])
            # above and below both bands
            above = name[0] == "continued"
            axes.annotate(
                f"{label}: {end:.3f}",
                (steps[-1], end),
                textcoords="offset points",
                xytext=(0, 34 if above else -12),
                ha="right",
                va="bottom" if above else "top",
                color=color,
            )
        start = variants["continued", "adamw", LEAD_RATE, WARMUP][0]["losses"]["0"]
        axes.plot([0], [start], "o", color="#000000", clip_on=False)
        axes.annotate(
            f"both start at {start:.3f}", (0, start), textcoords="offset points", xytext=(10, 0)
        )
        axes.set(title=title, xlabel="training steps after growth", xlim=(0, LONG))
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(alpha=0.3)
    panels[0].set(ylabel="validation loss, nats per byte")
    for axes in panels:
        low, high = axes.get_ylim()
        axes.set_ylim(low - 0.12 * (high - low), high)
    figure.savefig(file)


def page(rows: Sequence[Mapping[str, Any]]) -> str:
    """The text of symmetry.md."""
    return HEAD + report(rows)
