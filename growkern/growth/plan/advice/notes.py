"""Warns about choices that a paper found to work badly; no warning stops a growth."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from typing import NamedTuple

from growkern.growth.plan.advice.measured import deepening
from growkern.growth.plan.blueprint import Blueprint
from growkern.growth.plan.exactness import advanced_kinds
from growkern.printing import human

MOST_WARNINGS = 3
DU, MALLIK = "Du et al., arXiv 2405.15319", "Mallik et al., arXiv 2605.13405"
# tokens per parameter of a compute-optimal training (Hoffmann et al., arXiv 2203.15556)
CHINCHILLA = 20


class Note(NamedTuple):
    """A warning in one sentence, and the paper that it rests on."""

    text: str
    paper: str


def warnings_of(
    plan: Blueprint, tokens: float | None = None, source_tokens: float | None = None
) -> tuple[Note, ...]:
    """At most three warnings about this growth.

    Args:
        tokens: those that the target will be trained on, if they are known.
        source_tokens: those that the source was trained on, if they are known.
    """
    found = (*_of_the_way(plan), *_of_the_training(plan, tokens, source_tokens))
    return tuple(islice(found, MOST_WARNINGS))


def _of_the_way(plan: Blueprint) -> Iterator[Note]:
    """Warnings about method, options and sizes."""
    options, name = plan.options, plan.small.class_name
    is_decoder = "CausalLM" in name or name.endswith("LMHeadModel")
    copies = any(row["most"] > 1 for row in plan.maps().values())
    if options.method == "fpi" and options.symmetry == "none" and copies:
        yield Note(
            "symmetry='none': copies get equal gradients and never become different, under Muon "
            "too",
            "Yu et al., arXiv 2602.02472",
        )
    if options.method == "aki" and is_decoder and _takes_from_the_next(plan):
        yield Note(
            "with aki, decoders start with a far higher loss than their source: 7.81 for a growth "
            "from 1.3B to 7B, where fpi kept the source's 2.97; measure it with "
            "`growkern verify --text` before you train",
            "AquilaMoE, 2024",
        )
    old, new = plan.layout.stream_sizes
    if is_decoder and new > old and plan.parameters() > 1_000_000_000:
        yield Note(
            "width made a decoder of 1.1B parameters train 1 to 18 % slower than from scratch, "
            "where stacked layers made it 49 % faster",
            DU,
        )
    if options.depth == "stack" and deepening(plan) > 4:
        yield Note(
            f"the layers grow {deepening(plan):.1f} times; stacking was best at 2 to 4 times",
            DU,
        )


def _takes_from_the_next(plan: Blueprint) -> bool:
    """True if AKI changes anything."""
    has_next = any(task.upper for task in plan.tasks)
    return has_next and (plan.options.aki == "eq16" or bool(advanced_kinds(plan)))


def _of_the_training(
    plan: Blueprint, tokens: float | None, source_tokens: float | None
) -> Iterator[Note]:
    """Warnings about the factor of the growth and about both trainings."""
    factor = plan.parameters() / plan.parameters("source")
    # embeddings grow less than the rest: twice the size is rarely 2.0 times the parameters
    if factor > 2.5:
        yield Note(
            f"the model grows to {factor:.1f} times its parameters; 2 times was most reliable, and "
            "far above it training from scratch was faster",
            MALLIK,
        )
    per = (tokens or 0) / plan.parameters()
    if per > CHINCHILLA:
        yield Note(
            f"the target sees {human(per)} tokens per parameter; gains were largest below "
            f"{CHINCHILLA} and shrank above",
            MALLIK,
        )
    per = (source_tokens or 0) / plan.parameters("source")
    if per > CHINCHILLA:
        yield Note(
            f"the source saw {human(per)} tokens per parameter; the more a source was trained, the "
            "less each further token gains",
            "Liew and Kato, arXiv 2510.06548",
        )
