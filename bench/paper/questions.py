"""The three questions that a saving may answer, and models of one size that are never grown.

With s the FLOPs of the small model, g those that the grown one then needs to the loss where
training from scratch ends, w those of training from scratch, and b those that the best fixed size
needs to that loss:

    family   (s + w - s - g) / (s + w)    small and large are both wanted
    size     (w - s - g) / w              only the large one is wanted, and nothing is there
    loss     (b - s - g) / b              any size will do
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import cache
from itertools import groupby
from typing import NamedTuple

from bench.paper.compare import Row, interval, is_early, saved
from bench.paper.jobs import SOURCE
from bench.paper.models import Size
from bench.paper.plans import TABLES, lines_of
from bench.paper.settings import Setting
from growkern.plot.curves import first_crossing

QUESTIONS = {"family": "a family", "size": "a given size", "loss": "a given loss"}
# what runs share whose losses may be compared
SHARED = (
    *("family", "text", "vocab", "batch", "length", "dropout", "precision"),
    *("validation_tokens", "validation_passes", "schedule", "optimizer"),
)
Runs = Sequence[Row]


class Share(NamedTuple):
    """A share of FLOPs that is saved; `bound`: "≥" or "≤" if the shortest run tells no more."""

    value: float
    bound: str = ""


@cache
def _settings(size: str) -> dict[str, Setting]:
    """Every setting of the tables at a size, by its name."""
    lines = [line for name in TABLES for line in lines_of(name, size) or ()]
    kinds = [(x.setting, x.setting.for_source, x.setting.for_scratch) for x in lines]
    return {setting.name: setting for three in kinds for setting in three}


def fixed_sizes(
    setting: Setting, seed: int, rows: Mapping[str, Row]
) -> dict[Size, list[tuple[float, float]]]:
    """The FLOPs and losses at the ends of all comparable runs of one size, from random weights.

    Returns:
        Size -> its runs by FLOPs; of several with as many FLOPs the best one.
    """
    settings = _settings(setting.name.split("-")[0])
    found: dict[Size, list[tuple[float, float]]] = {}
    for row in rows.values():
        other = settings.get(row.get("setting", ""))
        if other is None or row["seed"] != seed or row["system"] not in (SOURCE, "scratch"):
            continue
        size = other.source if row["system"] == SOURCE else other.target
        if not size.experts and all(getattr(other, x) == getattr(setting, x) for x in SHARED):
            found.setdefault(size, []).append((row["flops"][-1], row["losses"][-1]))
    return {
        size: [min(same) for _, same in groupby(sorted(ends), lambda end: end[0])]
        for size, ends in found.items()
    }


def alone(
    setting: Setting, size: Size, seed: int, base: Runs, rows: Mapping[str, Row]
) -> Share | None:
    """What a size that is never grown saves to the loss where a baseline ends.

    Returns:
        NaN if it does not get there; None if it was not run.
    """
    ends = fixed_sizes(setting, seed, rows).get(size)
    if ends is None:
        return None
    spent = first_crossing(*zip(*ends, strict=True), base[-1]["losses"][-1])
    if spent is None:
        return Share(math.nan)
    return Share(1 - spent / base[-1]["flops"][-1], "≥" if spent == ends[0][0] else "")


def share(question: str, runs: Runs, best: Share, base: Runs) -> Share:
    """What runs save by a question; `best`: what the best fixed size saves. NaN: not reached."""
    bound = "≥" if is_early(runs, base) else ""
    if question == "loss":
        left = 1 - saved(runs, base, with_source=True)
        return Share(1 - left / (1 - best.value), bound or ("≤" if best.bound else ""))
    if question == "size":
        return Share(saved(runs, base, with_source=True), bound)
    source = (runs[-1]["source flops"] - base[-1]["source flops"]) / base[-1]["flops"][-1]
    return Share(saved(runs, base) / (1 + source), bound)


def best_alone(setting: Setting, seed: int, base: Runs, rows: Mapping[str, Row]) -> Share:
    """What the best smaller size saves that was run, or 0, if the large one is best."""
    large = setting.target
    shares = [
        alone(setting, size, seed, base, rows)
        for size in fixed_sizes(setting, seed, rows)
        if size != large and size.layers <= large.layers and size.width <= large.width
    ]
    found = [x for x in shares if x is not None and not math.isnan(x.value)]
    return max([*found, Share(0.0)])


def text_of(shares: Sequence[Share], seeds: int) -> str:
    """The mean in per cent over the seeds with its interval or its bound, in words."""
    if not shares:
        return "not run"
    missed = sum(math.isnan(x.value) for x in shares)
    if missed:
        return f"not reached by {missed} of {len(shares)}"
    values, bounds = [100 * x.value for x in shares], {x.bound for x in shares} - {""}
    if bounds:
        # of a bound from both sides nothing is known
        mean = sum(values) / len(values)
        return "not known" if len(bounds) > 1 else f"{bounds.pop()} {mean:.1f}%"
    few = f" ({len(values)} seed)" if len(values) < seeds else ""
    return f"{interval(values, 1)}%{few}"
