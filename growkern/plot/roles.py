"""Finds out which of several runs trained the small model, and which one sets the mark."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import groupby
from pathlib import Path
from typing import Any

from growkern.growth.history import LINEAGE_FILE
from growkern.plot.curves import Curve, model_file

# settings with the names of models that a run begins with or learns from
NAMED = (("growth", "source"), ("model", "path"), ("teacher", "paths"))


def arrange(
    curves: Sequence[Curve], runs: Sequence[Path]
) -> tuple[list[Curve], list[Curve], list[Path]]:
    """Put the run that sets the mark first, and take out those of the small model.

    The mark is set by the first run of the largest size that needed no smaller one. Where sizes
    are not known, nothing is changed.

    Args:
        runs: the directory of each curve.

    Returns:
        The curves to compare, those of the small model, one for each seed, and the directories of
        the first ones. A small model that was itself made from a smaller one continues its curve.
    """
    places = dict(zip(map(id, curves), runs, strict=True))
    if not all(curve.parameters for curve in curves):
        return [*curves], [], [*runs]
    by_size = sorted(curves, key=lambda curve: curve.parameters, reverse=True)
    largest, *smaller = (list(alike) for _, alike in groupby(by_size, lambda c: c.parameters))

    def needs(curve: Curve, other: Curve) -> bool:
        return curve is not other and _needs(curve, places[id(curve)], places[id(other)])

    needing = [curve for curve in largest if any(needs(curve, other) for other in curves)]
    chain: list[list[Curve]] = []
    later = needing
    for alike in smaller:
        found = [x for x in alike if any(needs(curve, x) for curve in later)]
        if found:
            # of several setups the first
            later = [x for x in found if x.name == found[0].name]
            chain.insert(0, later)
    known = (curve for curve in largest if not (curve.is_grown or curve in needing))
    first = next(known, largest[0])
    used = [id(curve) for alike in chain for curve in alike]
    rest = [curve for curve in curves if id(curve) not in used]
    rest.sort(key=lambda curve: (curve.name != first.name, curve.parameters != first.parameters))
    small = [_joined(seed) for seed in zip(*chain, strict=False)]
    return rest, small, [places[id(curve)] for curve in rest]


def _needs(curve: Curve, run: Path, other: Path) -> bool:
    """Whether a run began with the result of another one, or learned from it."""
    if curve.from_scratch:
        return False
    parts = other.resolve().parts
    for section, key in NAMED:
        for name in _names(curve.settings.get(section), key):
            words = [word for word in Path(name).parts if word != ".."]
            if words and parts[-len(words) :] == tuple(words):
                return True
    # a model that has grown inside a run was small in the same run
    sizes = {} if curve.growths else model_file(run, LINEAGE_FILE).get("sizes", {})
    own = model_file(other, "config.json")
    return bool(sizes and own) and all(
        own.get(name) in (old, None) for name, (old, _) in sizes.items()
    )


def _names(section: Any, key: str) -> list[str]:
    """The names of models in a section of a run file."""
    if isinstance(section, list):
        return [name for one in section for name in _names(one, key)]
    value = section.get(key) if isinstance(section, Mapping) else None
    values = value.values() if isinstance(value, Mapping) else value
    return [values] if isinstance(values, str) else [*map(str, values or ())]


def _joined(curves: Sequence[Curve]) -> Curve:
    """One curve of runs of which each continues the one before."""
    whole, *others = curves
    for curve in others:
        whole = replace(
            curve,
            steps=whole.steps + curve.steps,
            flops=(*whole.flops, *(whole.flops[-1] + x for x in curve.flops)),
            losses=whole.losses + curve.losses,
        )
    return whole
