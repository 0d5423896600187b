"""The rules for experts: whole copies of all of them, and as many times more are chosen.

All copies of an expert have equal logits, so a router that chose the expert chooses every copy of
it. Their weights add up to that of the expert wherever weights are divided by their sum, over all
experts or over the chosen ones.

A router that chooses groups of experts first looks at the best of each group. So whole groups are
copied: a copy beside its expert would count twice.
"""

from __future__ import annotations

from growkern.errors import UnfitError
from growkern.families.family import Dense
from growkern.families.model import ModelSpec
from growkern.families.spec import Row, SpaceSpec
from growkern.growth.options import GrowthOptions


def is_output(row: Row) -> bool:
    """True for the matrices made of a dense FFN's that write its output."""
    return bool(row.dense) and "write:stream" in row.axes


def adds_nothing(row: Row, options: GrowthOptions) -> bool:
    """True for the matrices of experts that are beside those which compute the dense FFN."""
    return bool(row.dense) and (len(row.axes) > 2) == (options.shared_expert == "dense")


def output_scale(view: ModelSpec, row: Row) -> float:
    """The factor of an `is_output` matrix that a dense model becomes.

    Each of c experts that an FFN was split into has a weight of 1/c, and the model may multiply
    their outputs with a factor.
    """
    own = view.family.dense or Dense(())
    if len(row.axes) == 2:
        return 1 / own.shared
    factor = 1.0 if own.routed is None else getattr(view.fields, own.routed)
    return float(view.size(str(view.family.mixtures[0].size)) / factor)


def check_copies(small: ModelSpec, large: ModelSpec) -> None:
    """Refuse experts and units of which some would have more copies than others, where it matters.

    That is so before a norm with an activation in front: no scale keeps what the norm divides by.
    """
    check_experts(small, large)
    for key in (key for key, size in small.family.config.items() if size.factors):
        if (new := large.size(key)) < (old := small.size(key)):
            raise UnfitError(f"{small.family.config[key].default} shrinks from {old} to {new}")
    for space in small.family.spaces.values():
        if space.kind == "units" and space.activated and space.size != "stream":
            old, new = (model.size(str(space.size)) for model in (small, large))
            if new % old:
                field = small.family.config_field(str(space.size))
                raise UnfitError(
                    f"{field}={new} is no multiple of the source's {old}, and an activation lies "
                    "before their norm, so no scale keeps what the norm divides by"
                )


def copies_of(space: SpaceSpec, small: ModelSpec, large: ModelSpec) -> int:
    """How many copies of every expert the target has."""
    return large.size(str(space.size)) // small.size(str(space.size))


def followers(space: SpaceSpec, model: ModelSpec) -> tuple[str, ...]:
    """The sizes that are multiplied like the experts. A single group may hold them all."""
    several = bool(space.groups) and model.size(space.groups[0]) > 1
    return (str(space.chosen), *(space.groups if several else ()))


def check_experts(small: ModelSpec, large: ModelSpec) -> None:
    """Refuse experts that are no whole copies of the source's, or that are chosen in part."""
    for space in small.family.mixtures:
        field = small.family.config_field(str(space.size))
        old, new = (model.size(str(space.size)) for model in (small, large))
        others = (str(space.chosen), *space.groups)
        if new % old:
            names = " and ".join(small.family.config_field(key) for key in others)
            raise UnfitError(
                f"{field}={new} is no multiple of the source's {old}, so some experts would have "
                "more copies than others, which changes what the router chooses; nearest sizes "
                f"that fit: {field}={new - new % old} or {new - new % old + old}. Leave out "
                f"{names}, which will fit then"
            )
        if small.dense:
            # its experts are one FFN: see `growkern.growth.space.upcycling`
            continue
        copied = followers(space, small)
        for key in others:
            needed = small.size(key) * (new // old if key in copied else 1)
            if (found := large.size(key)) != needed:
                raise UnfitError(
                    f"{small.family.config_field(key)}={found}: with {field}={new} it must be "
                    f"{needed}, so that the router chooses every copy of an expert or none"
                )
