"""Warns about choices that a paper found to work badly; no warning stops a growth."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice

from growkern.growth.plan.advice.measured import deepening
from growkern.growth.plan.blueprint import Blueprint

MOST_WARNINGS = 3
# tokens per parameter of a compute-optimal training (Hoffmann et al., arXiv 2203.15556)
CHINCHILLA = 20


def warnings_of(
    plan: Blueprint, tokens: float | None = None, source_tokens: float | None = None
) -> tuple[str, ...]:
    """At most three warnings about this growth, one sentence each, with their papers.

    Args:
        tokens: those that the target will be trained on, if they are known.
        source_tokens: those that the source was trained on, if they are known.
    """
    found = (*_of_the_way(plan), *_of_the_training(plan, tokens, source_tokens))
    return tuple(islice(found, MOST_WARNINGS))


def _of_the_way(plan: Blueprint) -> Iterator[str]:
    """Warnings about method, options and sizes."""
    options, name = plan.options, plan.small.class_name
    is_decoder = "CausalLM" in name or name.endswith("LMHeadModel")
    copies = any(row["most"] > 1 for row in plan.maps().values())
    if options.method == "fpi" and options.symmetry == "none" and copies:
        yield (
            "symmetry='none': copies get equal gradients and never become different, under Muon "
            "too (Yu et al., arXiv 2602.02472)"
        )
    if options.method == "aki" and is_decoder and any(task.upper for task in plan.tasks):
        yield (
            "with aki, decoders start with a far higher loss than their source: 7.81 for a growth "
            "from 1.3B to 7B, where fpi kept the source's 2.97 (AquilaMoE, 2024); measure it with "
            "`growkern verify --text` before you train"
        )
    old, new = plan.layout.stream_sizes
    if is_decoder and new > old and plan.parameters() > 1_000_000_000:
        yield (
            "width made a decoder of 1.1B parameters train 1 to 18 % slower than from scratch, "
            "where stacked layers made it 49 % faster (Du et al., arXiv 2405.15319)"
        )
    if options.depth == "stack" and deepening(plan) > 4:
        yield (
            f"the layers grow {deepening(plan):.1f} times; stacking was best at 2 to 4 times "
            "(Du et al., arXiv 2405.15319)"
        )


def _of_the_training(
    plan: Blueprint, tokens: float | None, source_tokens: float | None
) -> Iterator[str]:
    """Warnings about the factor of the growth and about both trainings."""
    factor = plan.parameters() / plan.parameters("source")
    # embeddings grow less than the rest: twice the size is rarely 2.0 times the parameters
    if factor > 2.5:
        yield (
            f"the model grows to {factor:.1f} times its parameters; 2 times was most reliable, and "
            "far above it training from scratch was faster (Mallik et al., arXiv 2605.13405)"
        )
    per = (tokens or 0) / plan.parameters()
    if per > CHINCHILLA:
        yield (
            f"the target sees {per:.3g} tokens per parameter; gains were largest below "
            f"{CHINCHILLA} and shrank above (Mallik et al., arXiv 2605.13405)"
        )
    per = (source_tokens or 0) / plan.parameters("source")
    if per > CHINCHILLA:
        yield (
            f"the source saw {per:.3g} tokens per parameter; the more a source was trained, the "
            "less each further token gains (Liew and Kato, arXiv 2510.06548)"
        )
