"""Finds what growth saved elsewhere, along the axes of a plan: the figures of `measurements.toml`.

They are printed as they are. No forecast is made from them: few people measured this, on other
models and texts.
"""

from __future__ import annotations

from pathlib import Path

from growkern.growth.plan.blueprint import Blueprint
from growkern.package import parse_toml

FIELDS = ("axes", "figure", "setting", "citation", "date")


def measurements(plan: Blueprint) -> tuple[dict[str, str], ...]:
    """The measurements of growth along the axes of a plan, each with `FIELDS`.

    A figure is the share of the training FLOPs from scratch that growth saved at the same loss.
    Wider means a larger hidden state. Nobody measured growth of other units alone.
    """
    old, new = plan.layout.stream_sizes
    wider, deeper = new > old, deepening(plan) > 1
    axes = {"width": wider, "depth": deeper, "both": wider and deeper}
    file = Path(__file__).with_name("measurements.toml")
    rows = parse_toml(file.read_text(encoding="utf-8"))["measurement"]
    return tuple({name: row[name] for name in FIELDS} for row in rows if axes[row["axes"]])


def deepening(plan: Blueprint) -> float:
    """How many times the layers of the target are those of the source; of several stacks, most."""
    keys = plan.small.family.stacks.values()
    return max((plan.large.size(key) / plan.small.size(key) for key in keys), default=1.0)
