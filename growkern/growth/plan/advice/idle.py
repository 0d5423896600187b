"""Finds options of a growth that were given in vain: nothing in that growth reads them.

Somebody wrote such an option and expects something of it. Most options tune one part of growth.
Where there is no such part, they are refused, as a misspelt name is. Those in `CHOICES` choose one
of several ways to grow. Scripts give one choice for many sizes, so these lead to a warning.

Values that ask for nothing, such as `symmetry="none"`, and the value that "auto" stands for are
never idle. Nor is `seed`: a script that draws nothing at random may still give one.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator

from growkern.errors import GrowthError, GrowthWarning
from growkern.growth.options import GrowthOptions
from growkern.growth.plan.blueprint import Blueprint

CHOICES = ("depth", "symmetry", "scheme")


def uses(plan: Blueprint) -> dict[str, tuple[bool, str]]:
    """Option -> whether this growth reads it, and what it is for.

    `noise` and `routing` are checked against `symmetry` when they are made.
    """
    options, family = plan.options, plan.small.family
    copied, layers = (
        not options.is_baseline,
        {family.config_field(k) for k in family.stacks.values()},
    )
    changed = {name for name, (old, new) in plan.size_changes().items() if old != new}
    widened = copied and bool(changed - layers)
    # norms around inserted blocks have gains that undo each other
    has_units = any(task.identity in ("unit", "affine") for task in plan.tasks)
    copying, in_width = (
        "the methods that copy, fpi and aki",
        "copies in a wider model, of the methods",
    )
    becoming = "dense models that become mixtures"
    return {
        "stream": (plan.layout.is_padded, "a larger hidden size: the hidden size stays"),
        "carry": (
            plan.layout.uses_carry,
            "models with LayerNorm whose stream gets extra coordinates",
        ),
        "aki": (options.method == "aki", "method='aki'"),
        "noise": (copied, copying),
        "routing": (copied, copying),
        "maps": (widened and options.scheme == "exact", f"{in_width} fpi and aki, scheme='exact'"),
        "identity_gain": (
            copied and has_units,
            "inserted identity blocks in models with norms behind blocks",
        ),
        "depth": (bool(changed & layers), "new layers, and their number stays"),
        "symmetry": (options.symmetry == "none" or widened, f"{in_width} fpi and aki"),
        "scheme": (copied, "the methods fpi and aki"),
        **dict.fromkeys(("router", "drop"), (plan.small.dense is not None, becoming)),
    }


def idle_options(plan: Blueprint) -> Iterator[tuple[str, str]]:
    """The options that were given and that nothing in this growth reads, and what they are for."""
    options = plan.options
    auto = GrowthOptions(method=options.method, scheme=options.scheme, stream="copies")
    for name, (is_read, what) in uses(plan).items():
        default = getattr(GrowthOptions, name)
        default = getattr(auto, name) if default == "auto" else default
        # a stream is "copies" wherever it is not asked to be padded
        if getattr(options, name) != default and not is_read:
            yield name, what


def refuse_idle_options(plan: Blueprint) -> None:
    """Refuse options that change nothing, or warn of them.

    Records of such growths exist, so only calls of users are checked.
    """
    for name, what in idle_options(plan):
        message = (
            f"{name}={getattr(plan.options, name)!r} has no effect in this growth: it is for "
            f"{what}: leave it out"
        )
        if name not in CHOICES:
            raise GrowthError(message)
        warnings.warn(message, GrowthWarning, stacklevel=4)
