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
from growkern.package import DOCS

# the questions that a saving answers: what is wanted, and what to do where it is one, or none
QUESTIONS = {
    "family": ("both models are wanted", "grow", "train each from scratch"),
    "size": ("only the large one is wanted", "grow", "train it from scratch"),
    "existing": ("the small one exists already", "grow", "train it from scratch"),
    "loss": ("any size will do", "train a smaller one longer", "train this size from scratch"),
}
OF_GROWTH = ("family", "size", "existing")
FIELDS = (*OF_GROWTH, "tokens", "axes", "kind", "times", "setting", "citation", "date")
# a growth that saves for one of these saves for the other: the same FLOPs of two totals
ALIKE = {"family": "existing", "existing": "family"}
# tokens per parameter within this factor are alike
NEAR = math.log(1.5)
# so are growths by factors within this one, and all that grow at most twice
NEAR_TIMES, TWICE = math.log(1.4), 2.0
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
    rows = _file()["measurement"]
    return tuple({name: row.get(name) for name in FIELDS} for row in rows if axes[row["axes"]])


def _file() -> dict[str, Any]:
    return parse_toml(Path(__file__).with_name("measurements.toml").read_text(encoding="utf-8"))


def is_decoder(model: ModelSpec) -> bool:
    """Whether a model predicts the next token."""
    return "CausalLM" in model.class_name or model.class_name.endswith("LMHeadModel")


def kind_of(model: ModelSpec) -> str:
    """The kind of a model in `measurements.toml`; "mixture": no row is of one."""
    if model.mixtures:
        return "mixture"
    if len(model.family.stacks) > 1:
        return "encoder-decoder"
    return "decoder" if is_decoder(model) else "encoder"


def verdict(plan: Blueprint, tokens: float) -> tuple[str, ...]:
    """What the nearest measurements say of a growth, a line for each question.

    They are of the same kind of model, of alike tokens per parameter, and of growth by alike
    factors. Those without tokens turn a verdict to which all of them are opposed into a pilot.

    Args:
        tokens: those that the target will be trained on.
    """
    kind, mine = kind_of(plan.large), tokens / plan.parameters()
    title = (
        f"in short, at {human(mine)} tokens per parameter (saved: training FLOPs to the loss from "
        "scratch; own runs: models of at most 2 million parameters):"
    )
    if plan.upcycling:
        return (f"{title.split(' (')[0]}: a mixture beside its dense model: {DOCS}/upcycling.md",)
    lines, times, grown = [title], _times(plan), measurements(plan)
    for question, (words, *_) in QUESTIONS.items():
        rows = _file()["never_grown"] if question == "loss" else grown
        alike = [row for row in rows if row["kind"] == kind and _figure(row, question)]
        lines.append(f"  {words}: {_says(alike, question, mine, times)}")
    return tuple(lines)


def _times(plan: Blueprint) -> dict[str, float]:
    """How much larger the width and the number of layers become, and the larger of both."""
    old, new = plan.layout.stream_sizes
    layers = plan.small.family.stacks.values()
    deeper = max(plan.large.size(key) / plan.small.size(key) for key in layers)
    return {"width": new / old, "depth": deeper, "both": max(new / old, deeper)}


def distance(mine: float, row: Row) -> float:
    """How far the tokens per parameter of a measurement are away, as the log of their ratio."""
    return math.inf if row["tokens"] is None else abs(math.log(row["tokens"] / mine))


def _says(rows: Sequence[Row], question: str, mine: float, times: Mapping[str, float]) -> str:
    """The verdict of one question, and the figures it rests on."""
    nearest = min((distance(mine, row) for row in rows), default=math.inf)
    most = NEAR if nearest <= NEAR else nearest + 0.2
    near = [row for row in rows if distance(mine, row) <= most < math.inf]
    axes = {row.get("axes") for row in near}
    groups = [
        _alike([row for row in near if row.get("axes") == axis], times)
        for axis in (["both"] if "both" in axes else sorted(axes, key=str))
    ]
    others = _alike([row for row in rows if row["tokens"] is None], times)
    weighed = [row for group in groups for row in group]
    found = [_told(part, question) for part in (weighed or near, others) if part]
    said = {_weigh(group, question) for group in groups}
    # width and depth at once: as each alone, if both were measured and agree
    grows = {axis for axis in ("width", "depth") if times[axis] > 1}
    unknown = ""
    if not near:
        unknown = "at known tokens" if others else " "
    elif nearest > NEAR:
        unknown = "within a factor of 1.5"
    elif not all(groups):
        unknown = "by such a factor"
    elif not (axes & {"both", None} or axes >= grows) or len(said) > 1:
        unknown = "at once"
    if unknown:
        return f"{PILOT} ({'; '.join([f'not measured {unknown}'.strip(), *found])})"
    words = said.pop()
    if others and all(_weigh([row], question) not in (words, PILOT) for row in others):
        words = PILOT
    return f"{words} ({'; '.join(found)})"


def _alike(rows: Sequence[Row], times: Mapping[str, float]) -> list[Row]:
    """Those that grew by about the factor of a plan; also where it is not known."""

    def by(factor: float | None) -> float:
        return math.log(max(factor or 0.0, TWICE))

    return [
        row
        for row in rows
        if not row.get("times") or abs(by(row["times"]) - by(times[row["axes"]])) <= NEAR_TIMES
    ]


def _figure(row: Row, question: str) -> Any:
    """What a measurement says of a question, or of the one that has the same answer."""
    return row.get(question) or row.get(ALIKE.get(question, question))


def _weigh(rows: Sequence[Row], question: str) -> str:
    """What to do, as most rows saved, or as most missed the loss."""
    saved = sum(_saves(_figure(row, question)) > 0 for row in rows)
    missed = sum(_saves(_figure(row, question)) < 0 for row in rows)
    _, where_it_saves, otherwise = QUESTIONS[question]
    if 2 * saved > len(rows):
        return where_it_saves
    return otherwise if 2 * missed > len(rows) else PILOT


def _saves(figure: str) -> int:
    """1 if a figure is above 0 with its interval, -1 if below or mostly missed, otherwise 0."""
    if missed := re.fullmatch(r"not reached by (\d) of (\d)", figure):
        return -int(2 * int(missed[1]) > int(missed[2]))
    found = re.fullmatch(r"(at least |up to |)(-?[\d.]+)%(?: ± ([\d.]+)%)?", figure)
    assert found, figure
    mean, half = float(found[2]), float(found[3] or 0)
    if mean > half:
        return int(found[1] != "up to ")
    return -int(mean < -half and found[1] != "at least ")


def _told(rows: Sequence[Row], question: str) -> str:
    """In how many of some measurements growth saved, how much, and who measured."""
    tokens = sorted({row["tokens"] for row in rows} - {None})
    at = " to ".join(f"{x:g}" for x in dict.fromkeys([*tokens[:1], *tokens[-1:]]))
    saved = [row for row in rows if _saves(_figure(row, question).replace("up to ", "")) > 0]
    figures = [row[question].split("%")[0] for row in saved if row.get(question)]
    figures.sort(key=lambda figure: float(figure.split()[-1]))
    figures = [re.sub(r"[\d.]+", lambda x: f"{float(x[0]):.0f}", x) + "%" for x in figures]
    much = " to ".join(dict.fromkeys([*figures[:1], *figures[-1:]]))
    who = ", ".join(dict.fromkeys(row["citation"].split(",")[0] for row in rows))
    where = f"at {at}" if at else "tokens not said"
    return f"{where}: {len(saved)} of {len(rows)} saved{much and ', '}{much}, {who}"


def listed(plan: Blueprint, tokens: float) -> list[str]:
    """The nearest `MOST` measurements under a head, one line each: those of such models first."""
    rows, mine = measurements(plan), tokens / plan.parameters()
    kind, title = kind_of(plan.large), "training FLOPs that growth saved to the loss from scratch"
    if plan.upcycling:
        return []
    if not rows:
        return [f"{title}: not measured for such a growth, neither in a paper nor by us"]
    lines = [
        f"{title}, by what is wanted (not reached 2/3: by 2 of 3 seeds):",
        "tokens  both models      large alone      small exists",
    ]
    for row in sorted(rows, key=lambda row: _order(row, kind, mine))[:MOST]:
        cells = [f"{'' if row['tokens'] is None else row['tokens']:<6}"]
        cells += (f"{_short(row[name] or '-'):<15}" for name in OF_GROWTH)
        lines.append("  ".join([*cells, f"{row['setting']} ({row['citation']})"]))
    left = len(rows) - MOST
    lines += [f"{left} more: --json"] if left > 0 else []
    alone = [row for row in _file()["never_grown"] if row["kind"] == kind]
    lines += ["any size will do: a smaller model, never grown, saved to the same loss"] * bool(
        alone
    )
    for row in sorted(alone, key=lambda row: distance(mine, row)):
        lines.append(
            f"{row['tokens']:<6}  {_short(row['loss']):<15}  {row['setting']} ({row['citation']})"
        )
    return lines


def _order(row: Row, kind: str, mine: float) -> tuple[bool, bool, float]:
    """Where a measurement stands in a list: of like models first, then of both axes at once."""
    return row["kind"] != kind, row["axes"] != "both", distance(mine, row)


def _short(figure: str) -> str:
    """A figure that fits into a column."""
    figure = re.sub(r"not reached by (\d) of (\d)", r"not reached \1/\2", figure)
    return figure.replace("at least", "≥").replace("up to", "≤")
