"""What growth saved where it was measured, and what that says of a planned growth.

The figures of `measurements.toml` are printed as they are. No forecast is made from them, and no
size counts as too large: few people measured this, on other models and texts.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from growkern.errors import human
from growkern.families import ModelSpec
from growkern.files import parse_toml
from growkern.growth.plan.blueprint import Blueprint

# the questions that a saving answers: what is wanted, and what to do where growth saves nothing
QUESTIONS = {
    "family": ("both models are wanted", "train each from scratch"),
    "size": ("only the large one is wanted", "train it from scratch"),
    "existing": ("the small one exists already", "train it from scratch"),
}
OTHER_FIELDS = ("tokens", "axes", "kind", "times", "setting", "citation", "date")
FIELDS = (*QUESTIONS, *OTHER_FIELDS)
# tokens per parameter within a factor of two are alike
NEAR = math.log(2)
# lines of a list
MOST = 40
PILOT = "run a short pilot of both ways"
Row = Mapping[str, Any]


def measurements(plan: Blueprint) -> tuple[dict[str, Any], ...]:
    """The measurements of growth along the axes of a plan, with `FIELDS`, None where not said."""
    old, new = plan.layout.stream_sizes
    wider, layers = new > old, plan.small.family.stacks.values()
    deeper = any(plan.large.size(key) > plan.small.size(key) for key in layers)
    axes = {"width": wider, "depth": deeper, "both": wider and deeper}
    file = Path(__file__).with_name("measurements.toml")
    rows = parse_toml(file.read_text(encoding="utf-8"))["measurement"]
    return tuple({name: row.get(name) for name in FIELDS} for row in rows if axes[row["axes"]])


def is_decoder(model: ModelSpec) -> bool:
    """Whether a model predicts the next token."""
    return "CausalLM" in model.class_name or model.class_name.endswith("LMHeadModel")


def kind_of(model: ModelSpec) -> str:
    """The kind of a model in `measurements.toml`."""
    if len(model.family.stacks) > 1:
        return "encoder-decoder"
    return "decoder" if is_decoder(model) else "encoder"


def verdict(plan: Blueprint, tokens: float) -> tuple[str, ...]:
    """What the nearest measurements say of a growth, a line for each question.

    They are of the same kind of model, and grew at most twice, or by as much as this one. Those
    without tokens turn a verdict that they contradict into a pilot.

    Args:
        tokens: those that the target will be trained on.
    """
    kind = kind_of(plan.small)
    keys = ("stream", *plan.small.family.stacks.values())
    times = max(2.0, *(plan.large.size(key) / plan.small.size(key) for key in keys))
    rows = [x for x in measurements(plan) if x["kind"] == kind and (x["times"] or 0) <= times]
    mine = tokens / plan.parameters()
    lines = [f"  {words}: {_says(rows, name, mine)}" for name, (words, _) in QUESTIONS.items()]
    title = (
        f"in short, at {human(mine)} tokens per parameter (saved: training FLOPs to the loss from "
        "scratch; own runs: models of at most 2 million parameters):"
    )
    other = "at few tokens (2 to 9) train a smaller one longer; at 20, scratch was level or ahead"
    return title, *lines, f"  any size will do: {other}"


def distance(mine: float, row: Row) -> float:
    """How far the tokens per parameter of a measurement are away, as the log of their ratio."""
    return math.inf if row["tokens"] is None else abs(math.log(row["tokens"] / mine))


def _says(rows: Sequence[Row], question: str, mine: float) -> str:
    """The verdict of one question, and the figures it rests on."""
    known = [row for row in rows if row[question]]
    nearest = min((distance(mine, row) for row in known), default=math.inf)
    near = [row for row in known if distance(mine, row) <= max(nearest + 0.2, NEAR) < math.inf]
    others = [row for row in known if row["tokens"] is None and _saves(row[question])]
    found = [_told(part, question) for part in (near, others) if part]
    if not near or nearest > NEAR:
        far = "not measured within a factor of 2" if near else "not measured at known tokens"
        return f"{PILOT} ({'; '.join([far, *found])})"
    words = _weigh(near, question)
    if others and _weigh(others, question) != words:
        words = PILOT
    return f"{words} ({'; '.join(found)})"


def _weigh(rows: Sequence[Row], question: str) -> str:
    """Whether most rows saved (grow), or most missed the loss or none saved (scratch)."""
    saved = sum(_saves(row[question]) > 0 for row in rows)
    missed = sum(_saves(row[question]) < 0 for row in rows)
    if 2 * saved > len(rows):
        return "grow"
    return QUESTIONS[question][1] if not saved or 2 * missed > len(rows) else PILOT


def _saves(figure: str) -> int:
    """1 if a figure is above 0 with its interval, -1 if below or not reached, otherwise 0."""
    found = re.fullmatch(r"(at least |up to |)(-?\d+)%(?: ± (\d+)%)?", figure)
    if found is None:
        return -1
    mean, half = int(found[2]), int(found[3] or 0)
    if mean > half:
        return int(found[1] != "up to ")
    return -int(mean < -half and found[1] != "at least ")


def _told(rows: Sequence[Row], question: str) -> str:
    """In how many of some measurements growth saved, how much, and who measured."""
    tokens = sorted({row["tokens"] for row in rows} - {None})
    at = " to ".join(f"{x:g}" for x in dict.fromkeys([*tokens[:1], *tokens[-1:]]))
    saved = [row[question].split(" ±")[0] for row in rows if _saves(row[question]) > 0]
    saved.sort(key=lambda figure: int(re.sub(r"\D", "", figure)))
    much = " to ".join(dict.fromkeys([*saved[:1], *saved[-1:]]))
    who = ", ".join(dict.fromkeys(row["citation"].split(",")[0] for row in rows))
    where = f"at {at}" if at else "tokens not said"
    return f"{where}: {len(saved)} of {len(rows)} saved{much and ', '}{much}, {who}"


def listed(plan: Blueprint, tokens: float) -> list[str]:
    """The nearest `MOST` measurements under a head, one line each: those of such models first."""
    rows, mine = measurements(plan), tokens / plan.parameters()
    kind, title = kind_of(plan.small), "training FLOPs that growth saved to the loss from scratch"
    if not rows:
        return [f"{title}: not measured for such a growth, neither in a paper nor by us"]
    lines = [f"{title}, by what is wanted:", "tokens  both models     large alone     small exists"]
    for row in sorted(rows, key=lambda row: (row["kind"] != kind, distance(mine, row)))[:MOST]:
        cells = [f"{'' if row['tokens'] is None else row['tokens']:<6}"]
        cells += (f"{_short(row[name] or '-'):<14}" for name in QUESTIONS)
        lines.append("  ".join([*cells, f"{row['setting']} ({row['citation']})"]))
    left = len(rows) - MOST
    return [*lines, f"{left} more: --json"] if left > 0 else lines


def _short(figure: str) -> str:
    """A figure that fits into a column."""
    for words, fewer in (("not reached by", "missed"), ("at least", "≥"), ("up to", "≤")):
        figure = figure.replace(words, fewer)
    return figure
