"""The rules for experts: whole copies of all of them, and as many times more are chosen.

All copies of an expert have equal logits, so a router that chose the expert chooses every copy of
it. Their weights add up to that of the expert wherever weights are divided by their sum, over all
experts or over the chosen ones.
"""

from __future__ import annotations

from growkern.errors import UnfitError
from growkern.families.model import ModelSpec
from growkern.families.spec import SpaceSpec


def copies_of(space: SpaceSpec, small: ModelSpec, large: ModelSpec) -> int:
    """How many copies of every expert the target has."""
    return large.size(str(space.size)) // small.size(str(space.size))


def check_experts(small: ModelSpec, large: ModelSpec) -> None:
    """Refuse experts that are no whole copies of the source's, or that are chosen in part."""
    for space in small.family.mixtures:
        field, chosen = (small.family.config_field(str(key)) for key in (space.size, space.chosen))
        old, new = (model.size(str(space.size)) for model in (small, large))
        if new % old:
            raise UnfitError(
                f"{field}={new} is no multiple of the source's {old}, so some experts would have "
                "more copies than others, which changes what the router chooses; nearest sizes "
                f"that fit: {field}={new - new % old} or {new - new % old + old}"
            )
        needed = small.size(str(space.chosen)) * copies_of(space, small, large)
        found = large.size(str(space.chosen))
        if found != needed:
            raise UnfitError(
                f"{chosen}={found}: with {field}={new} it must be {needed}, so that the router "
                "chooses every copy of an expert or none"
            )
