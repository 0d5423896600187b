"""Says what kind of growth a plan is, in the words that evidence is stored under."""

from __future__ import annotations

from growkern.growth.plan.advice.evidence import EARLY, LARGE_DECODER
from growkern.growth.plan.blueprint import Blueprint


def axes_of(plan: Blueprint) -> set[str]:
    """The axes of evidence along which the target is larger: "width", "depth" and "both".

    Wider means a larger hidden state. No paper and no run of ours grows other units alone.
    """
    old, new = plan.layout.stream_sizes
    found = {
        name for name, grows in (("width", new > old), ("depth", deepening(plan) > 1)) if grows
    }
    return found | {"both"} if len(found) == 2 else found


def deepening(plan: Blueprint) -> float:
    """How many times the layers of the target are those of the source; of several stacks, most."""
    keys = plan.small.family.stacks.values()
    return max((plan.large.size(key) / plan.small.size(key) for key in keys), default=1.0)


def factor_of(plan: Blueprint) -> float:
    """How many times the parameters of the target are those of the source."""
    return plan.parameters() / plan.parameters("source")


def is_decoder(plan: Blueprint) -> bool:
    """Whether the model predicts the next token."""
    return "CausalLM" in plan.small.class_name or plan.small.class_name.endswith("LMHeadModel")


def is_large_decoder(plan: Blueprint) -> bool:
    """Whether the target is as large as the decoders that lost by width in a paper."""
    return is_decoder(plan) and plan.parameters() > LARGE_DECODER


def has_equal_copies(plan: Blueprint) -> bool:
    """Whether something is copied and no copy differs from the others."""
    options = plan.options
    is_copied = any(row["most"] > 1 for row in plan.maps().values())
    return options.method == "fpi" and options.symmetry == "none" and is_copied


def ways_of(plan: Blueprint, tokens: float, source_tokens: float | None) -> set[str]:
    """The words for how the plan grows that `Saving.ways` may ask for.

    Args:
        tokens: number of tokens that the target will be trained on.
        source_tokens: number of tokens that the source was trained on. None: it may be both young
            and trained.
    """
    options = plan.options
    found = {options.method, options.depth, "padded" if plan.layout.is_padded else "copies"}
    found |= {"large decoder"} if is_large_decoder(plan) else set()
    if source_tokens is None or source_tokens < EARLY * tokens:
        found.add("young")
    if source_tokens is None or source_tokens >= EARLY * tokens:
        found.add("trained")
    return found
