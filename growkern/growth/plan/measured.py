"""What growth saved where it was measured, and what that says of a planned growth.

The figures of `measurements.toml` are printed as they are. No forecast is made from them, and no
size counts as too large: few people measured this, on other models and texts.
"""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from growkern.errors import counted
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
# what a measurement calls the method, the copies and the depth of a growth
WORDS = {
    "method": {"fpi": "FPI", "aki": "AKI", "direct_copy": "direct copy"},
    "symmetry": {
        **{"routing": "copies", "none": "equal copies", "noise": "copies with noise"},
        "split": "copies of unequal shares",
    },
    "depth": {"stack": "stacked", "interleave": "interleaved"},
}
Row = Mapping[str, Any]


def measurements(plan: Blueprint) -> tuple[dict[str, Any], ...]:
    """The measurements of growth along the axes of a plan, with `FIELDS`, None where not said."""
    axis, _ = _growth(plan)
    rows = (row for row in _file()["measurement"] if axis in ("both", row["axes"]))
    return tuple({name: row.get(name) for name in FIELDS} for row in rows)


def _growth(plan: Blueprint) -> tuple[str, float]:
    """The axis of a growth, "" if it has none, and how much larger the width or depth becomes."""
    old, new = plan.layout.stream_sizes
    layers = plan.small.family.stacks.values()
    deeper = max(plan.large.size(key) / max(plan.small.size(key), 1) for key in layers)
    axes = [name for name, by in (("width", new / old), ("depth", deeper)) if by > 1]
    return "both" if len(axes) > 1 else "".join(axes), max(new / old, deeper)


def _file() -> dict[str, Any]:
    return parse_toml(Path(__file__).with_name("measurements.toml").read_text(encoding="utf-8"))


def is_decoder(model: ModelSpec) -> bool:
    """Whether a model predicts the next token."""
    return "CausalLM" in model.class_name or model.class_name.endswith("LMHeadModel")


def model_kind(model: ModelSpec) -> str:
    """The kind of a model in `measurements.toml`; "mixture": no row is of one."""
    if model.mixtures:
        return "mixture"
    if len(model.family.stacks) > 1:
        return "encoder-decoder"
    return "decoder" if is_decoder(model) else "encoder"


def verdict(plan: Blueprint, tokens: float) -> tuple[dict[str, str], ...]:
    """What measurements near to a growth say: what is "wanted", what to "do", what was "measured".

    They are of the same kind of model, of alike tokens per parameter, and of growth in the same
    way, along the same axes by alike factors. Beyond all of them those at the most tokens answer,
    if few saved. One that saved asks for a pilot. Questions with the same answer share a row.

    Args:
        tokens: those that the target will be trained on.
    """
    kind, mine = model_kind(plan.large), tokens / plan.parameters()
    if plan.upcycling:
        return ({"wanted": "a mixture", "do": f"see {DOCS}/upcycling.md", "measured": "there"},)
    answers, (axis, times) = defaultdict(list), _growth(plan)
    of_growth = [
        row
        for row in measurements(plan)
        if row["axes"] == axis
        and _alike(row, times)
        # how it was grown
        and {*row["setting"].split(";")[0].split(", ")[1:]} in _ways(plan, axis)
    ]
    for question, (words, *_) in QUESTIONS.items():
        rows = _file()["never_grown"] if question == "loss" else of_growth
        rows = [row for row in rows if row["kind"] == kind and _figure(row, question)]
        near = [row for row in rows if distance(mine, row) <= NEAR]
        most = max((row["tokens"] or 0 for row in rows), default=math.inf)
        beyond = [row for row in rows if row["tokens"] == most < mine]
        if not near and _answer(beyond, question) == QUESTIONS[question][2]:
            near = beyond
        answers[_says(near, question)].append(words)
    return tuple(
        {"wanted": ", ".join(words), "do": do, "measured": measured}
        for (do, measured), words in answers.items()
    )


def distance(mine: float, row: Row) -> float:
    """How far the tokens per parameter of a measurement are away, as the log of their ratio."""
    return math.inf if row["tokens"] is None else abs(math.log(row["tokens"] / mine))


def _ways(plan: Blueprint, axis: str) -> list[set[str]]:
    """What a measurement may say of the way in which a plan grows along an axis."""
    options = plan.options
    given = ((words, str(getattr(options, name))) for name, words in WORDS.items())
    method, copies, depth = (words.get(value, value) for words, value in given)
    stream = set() if options.is_baseline else {"padded" if plan.layout.is_padded else copies}
    width = {method} | stream
    # some do not say how layers were added beside the width
    return {"width": [width], "depth": [{depth}]}.get(axis, [width, width | {depth}])


def _alike(row: Row, times: float) -> bool:
    """Whether a measurement grew by about a factor; also where it is not known."""
    by = max(times, TWICE) / max(row["times"] or times, TWICE)
    return abs(math.log(by)) <= NEAR_TIMES


def _figure(row: Row, question: str) -> Any:
    """What a measurement says of a question, or of the one that has the same answer."""
    return row.get(question) or row.get(ALIKE.get(question, question))


def _answer(rows: Sequence[Row], question: str) -> str:
    """What to do, as most rows saved or missed the loss, or as few of several saved."""
    signs = [_saves(_figure(row, question)) for row in rows]
    _, where_it_saves, otherwise = QUESTIONS[question]
    if 2 * signs.count(1) > len(rows):
        return where_it_saves if len(rows) > 1 else PILOT
    few = len(rows) > 2 and 4 * signs.count(1) < len(rows)
    return otherwise if few or 2 * signs.count(-1) > len(rows) else PILOT


def _says(rows: Sequence[Row], question: str) -> tuple[str, str]:
    """What to do, and how many saved, how much, and who measured."""
    if not rows:
        return PILOT, "not for such a growth at about as many tokens"
    signs = [_saves(_figure(row, question)) for row in rows]
    # of another question the share is another one
    saved = [row[question] for row, x in zip(rows, signs, strict=True) if x > 0 and row[question]]
    shares = sorted(saved, key=lambda figure: float(re.findall(r"[\d.]+", figure)[0]))
    much = ", " * bool(shares) + " to ".join(dict.fromkeys([*shares[:1], *shares[-1:]]))
    tokens = sorted({row["tokens"] for row in rows})
    at = " to ".join(f"{x:g}" for x in dict.fromkeys([tokens[0], tokens[-1]]))
    who = ", ".join(dict.fromkeys(row["citation"].split(",")[0] for row in rows))
    saved_in = f"saved in {signs.count(1)} of {counted(len(rows), 'comparison')}"
    return _answer(rows, question), f"at {at}: {saved_in}{much}, by {who}"


def _saves(figure: str) -> int:
    """1 if a figure is above 0 with its interval, -1 if below or mostly missed, otherwise 0."""
    if missed := re.fullmatch(r"not reached by (\d) of (\d)", figure):
        return -int(2 * int(missed[1]) > int(missed[2]))
    found = re.fullmatch(r"(at least |)(-?[\d.]+)%(?: ± ([\d.]+)%)?", figure)
    assert found, figure
    mean, half = float(found[2]), float(found[3] or 0)
    return int(mean > half) - int(mean < -half and not found[1])


def listed(plan: Blueprint, tokens: float) -> list[str]:
    """The nearest `MOST` measurements under a head, one line each: those of such models first."""
    if plan.upcycling:
        return []
    kind, mine, rows = model_kind(plan.large), tokens / plan.parameters(), measurements(plan)
    title = "training FLOPs that growth saved to the loss from scratch"
    if not rows:
        return [f"{title}: not measured for such a growth, neither in a paper nor by us"]

    def line(row: Row, *questions: str) -> str:
        cells = [f"{row['tokens'] or '':<6}", *(f"{_short(row[x] or '-'):<15}" for x in questions)]
        return "  ".join([*cells, f"{row['setting']} ({row['citation']})"])

    def order(row: Row) -> tuple[bool, bool, float]:
        return row["kind"] != kind, row.get("axes") != "both", distance(mine, row)

    alone = [row for row in _file()["never_grown"] if row["kind"] == kind]
    return [
        f"{title}, by what is wanted (not reached 2/3: by 2 of 3 seeds):",
        "tokens  both models      large alone      small exists",
        *(line(row, *OF_GROWTH) for row in sorted(rows, key=order)[:MOST]),
        *([f"{len(rows) - MOST} more: --json"] if len(rows) > MOST else []),
        *(alone and ["any size will do: a smaller model, never grown, saved to the same loss"]),
        *(line(row, "loss") for row in sorted(alone, key=order)),
    ]


def _short(figure: str) -> str:
    """A figure that fits into a column."""
    figure = re.sub(r"not reached by (\d) of (\d)", r"not reached \1/\2", figure)
    return figure.replace("at least", "≥").replace("up to", "≤")
