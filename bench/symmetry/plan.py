"""Which runs the study makes, in which order: the most informative ones first."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from bench.shared.symmetry_tables import END_RATE, LONG, LONGER, WARMUP
from bench.symmetry.models import AKI, HALF, PADDED, Model
from bench.symmetry.runs import Run

SEEDS = (11, 12, 13)
# learning rates are chosen on a seed of their own, in shorter runs
RATE_SEED, RATE_STEPS = 7, 400
RATES = (5e-4, 1e-3, 2e-3)
SMALL = (Model("gpt2", 2, 48), Model("llama", 2, 48))
LARGE = (Model("gpt2", 3, 64), Model("llama", 3, 64))
THREE_COPIES = (Model("gpt2", 2, 48, times=3),)
MASKED = (Model("bert", 2, 48), Model("bert", 3, 64))

Variant = tuple[str, float]
CONTINUED: Variant = ("continued", 0.0)
FIRST: tuple[Variant, ...] = (("noise", 0.5), ("routing", 1.0), ("routing", 2.0))
SECOND: tuple[Variant, ...] = (("split", 0.0), ("none", 0.0))
THIRD: tuple[Variant, ...] = (
    *(("routing", 1.5), ("routing", 0.5), ("routing", 3.0)),
    ("noise", 1.0),
)
NEXT_LAYER: tuple[Variant, ...] = tuple((AKI + symmetry, a) for symmetry, a in FIRST[:2])
PADDED_STREAM: tuple[Variant, ...] = ((PADDED + "routing", 1.0),)
HALF_ROUTED: tuple[Variant, ...] = ((HALF + "routing", 1.0),)
LONG_WARMUP, NO_WARMUP = 4 * WARMUP, 1

Rows = Mapping[str, Mapping[str, Any]]


def key_of(settings: Mapping[str, Any]) -> str:
    """The text that identifies a run in the file of rows."""
    names = ("model", "symmetry", "amplitude", "optimizer", "rate", "seed", "steps", "clip")
    values = [settings[name] for name in names]
    # the first rows were written before the warm-up could be chosen
    if settings.get("warmup", WARMUP) != WARMUP:
        values.append(settings["warmup"])
    return " | ".join(map(str, values))


def representative(symmetry: str) -> Variant:
    """The variant whose learning rate all variants of a symmetry share."""
    return {
        "continued": CONTINUED,
        "routing": ("routing", 1.0),
        "split": ("split", 0.0),
    }.get(symmetry, ("noise", 0.5))


def rate_runs(model: Model, symmetry: str, optimizer: str) -> list[Run]:
    """The short runs that choose a learning rate."""
    variant, optimizer = representative(symmetry), optimizer.removesuffix("-moments")
    return [Run(model, *variant, optimizer, rate, RATE_SEED, RATE_STEPS) for rate in RATES]


def chosen_rate(rows: Rows, model: Model, symmetry: str, optimizer: str) -> float | None:
    """The learning rate with the lowest loss of `rate_runs`; None if one is not done yet."""
    losses = {}
    for run in rate_runs(model, symmetry, optimizer):
        row = rows.get(key_of(run.settings()))
        if row is None:
            return None
        losses[run.rate] = row["losses"][str(RATE_STEPS)]
    return min(losses, key=losses.__getitem__)


def planned(rows: Rows) -> Iterator[Run]:
    """All runs of the study in order. Runs that are done are not left out.

    Args:
        rows: the rows so far, by `key_of`. It may grow while the runs are taken.
    """
    for block in _blocks():
        pairs = [(v, o) for v in block.variants for o in _optimizers(v[0], block.optimizers)]
        if block.rate is None:
            for model in block.models:
                for symmetry, optimizer in dict.fromkeys((v[0], o) for v, o in pairs):
                    yield from rate_runs(model, symmetry, optimizer)
        for seed in block.seeds:
            for model in block.models:
                for variant, optimizer in pairs:
                    rate = block.rate or chosen_rate(rows, model, variant[0], optimizer)
                    if rate is not None:
                        how = {"warmup": block.warmup, "steps": block.steps}
                        yield Run(model, *variant, optimizer, rate, seed, **how)


@dataclass(frozen=True)
class Block:
    """Every variant with every optimizer, for some models and seeds.

    `rate` is the learning rate of all of them; None takes the chosen ones. `warmup` and `steps`,
    those after growth, are numbers of steps.
    """

    models: Sequence[Model]
    variants: Sequence[Variant]
    optimizers: Sequence[str]
    seeds: Sequence[int]
    rate: float | None = None
    warmup: int = WARMUP
    steps: int = LONG


def _blocks() -> Iterator[Block]:
    both, moments = ("adamw", "growth"), ("adamw-moments", "growth-moments")
    first, main = (CONTINUED, *FIRST), (CONTINUED, *FIRST[:2])
    # at the rate with which the sources ended
    yield Block(SMALL, first, both, SEEDS[:1], END_RATE)
    yield Block(MASKED[:1], first, both, SEEDS[:1], END_RATE)
    yield Block(SMALL, main, both, SEEDS, END_RATE)
    yield Block(SMALL, SECOND, both, SEEDS[:1], END_RATE)
    yield Block(LARGE, main, both, SEEDS[:1], END_RATE)
    yield Block((*SMALL, MASKED[0]), FIRST[1:2], ("growth-clipped",), SEEDS[:1], END_RATE)
    yield Block(MASKED[:1], main, both, SEEDS, END_RATE)
    yield Block(MASKED[1:], main, both, SEEDS[:1], END_RATE)
    # each variant at the best of three rates
    yield Block((MASKED[0], *SMALL), main, both, SEEDS[:1])
    # one thing at a time
    yield Block(THREE_COPIES, main, both, SEEDS[:1], END_RATE)
    yield Block(SMALL[:1], (*NEXT_LAYER, *HALF_ROUTED), both, SEEDS[:1], END_RATE)
    yield Block(SMALL, main, both, SEEDS[:1], END_RATE, LONG_WARMUP)
    yield Block(SMALL, main, moments, SEEDS[:1], END_RATE)
    yield Block(SMALL[:1], THIRD, both, SEEDS[:1], END_RATE)
    yield Block(LARGE, main, both, SEEDS, END_RATE)
    yield Block(MASKED[1:], main, both, SEEDS, END_RATE)
    # the main variants at their chosen rates, and for twice as long
    yield Block(SMALL, main, both, SEEDS)
    yield Block(SMALL, main, both, SEEDS[:1], END_RATE, steps=LONGER)
    # below the lowest rate that could be chosen
    yield Block(SMALL, main, both, SEEDS[:1], RATES[0] / 2)
    yield Block(SMALL[:1], THIRD, both, SEEDS[:1])
    # without a warm-up
    yield Block(SMALL, (CONTINUED, FIRST[1]), (*both, *moments), SEEDS[:1], END_RATE, NO_WARMUP)
    # a stream of old entries and empty ones, in place of copies
    yield Block((*SMALL, MASKED[0], *LARGE), PADDED_STREAM, both, SEEDS[:1], END_RATE)
    # one thing at a time for the other families, and the larger models at the lower rate
    others = (SMALL[1], MASKED[0])
    yield Block(others, (*SECOND, *THIRD, *HALF_ROUTED, *NEXT_LAYER), both, SEEDS[:1], END_RATE)
    yield Block((*LARGE, MASKED[1]), main, both, SEEDS[:1], RATES[0])
    yield Block((*LARGE, MASKED[0]), main, moments, SEEDS[:1], END_RATE)


def _optimizers(symmetry: str, optimizers: Sequence[str]) -> Sequence[str]:
    """The optimizers of a variant: the continued source has no GrowthAdamW."""
    if symmetry == "continued":
        return [name for name in optimizers if name.startswith("adamw")]
    return optimizers
