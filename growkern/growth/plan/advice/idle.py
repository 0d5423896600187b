"""Finds options of a growth that were given in vain: nothing in that growth reads them.

Such an option has a value that is not its default, so somebody wrote it and expects something. What
happens depends on the kind of option:

- Most options tune one part of growth: the maps, the carrying units, the inserted blocks. Where
  there is no such part, they are refused, as a misspelt name is.
- `depth`, `symmetry` and `scheme` choose one of several ways to grow. Scripts give one choice for
  many methods and sizes, of which some do not need it. So they lead to a warning.

Values that ask for nothing, such as `symmetry="none"`, and the value that "auto" stands for are
never idle. `seed` never is: a script that draws nothing at random may still give one.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from typing import NamedTuple

from growkern.errors import GrowthError, GrowthWarning
from growkern.growth.options import GrowthOptions
from growkern.growth.plan.blueprint import Blueprint


class Use(NamedTuple):
    """When an option is read.

    Attributes:
        is_read: whether a growth reads the option.
        what: what the option is for, as the end of "it is for ...".
        is_refused: False: a warning is enough.
    """

    is_read: Callable[[Blueprint], bool]
    what: str
    is_refused: bool = True


def _is_copied(plan: Blueprint) -> bool:
    return not plan.options.is_baseline


def _layer_fields(plan: Blueprint) -> set[str]:
    family = plan.small.family
    return {family.config_field(key) for key in family.stacks.values()}


def _gets_layers(plan: Blueprint) -> bool:
    changes, layers = plan.size_changes(), _layer_fields(plan)
    return any(old != new for name, (old, new) in changes.items() if name in layers)


def _gets_wider(plan: Blueprint) -> bool:
    """Whether any size grows besides the number of layers."""
    changes, layers = plan.size_changes(), _layer_fields(plan)
    return any(old != new for name, (old, new) in changes.items() if name not in layers)


def _has_units(plan: Blueprint) -> bool:
    """Whether norms around inserted blocks have gains that undo each other."""
    roles = {task.identity for task in plan.tasks}
    return _is_copied(plan) and not roles.isdisjoint({"unit", "affine"})


def _draws_maps(plan: Blueprint) -> bool:
    return _is_copied(plan) and plan.options.scheme == "exact" and _gets_wider(plan)


def _tells_copies_apart(plan: Blueprint) -> bool:
    return plan.options.symmetry == "none" or (_is_copied(plan) and _gets_wider(plan))


# option -> when it is read; `noise` and `routing` are checked against `symmetry` when they are made
USES = {
    "stream": Use(
        lambda plan: plan.layout.is_padded, "a larger hidden size: the hidden size stays"
    ),
    "carry": Use(
        lambda plan: plan.layout.uses_carry,
        "models with LayerNorm whose stream gets extra coordinates",
    ),
    "aki": Use(lambda plan: plan.options.method == "aki", "method='aki'"),
    "noise": Use(_is_copied, "the methods that copy, fpi and aki"),
    "routing": Use(_is_copied, "the methods that copy, fpi and aki"),
    "maps": Use(_draws_maps, "copies in a wider model, of the methods fpi and aki, scheme='exact'"),
    "identity_gain": Use(_has_units, "inserted identity blocks in models with norms behind blocks"),
    "depth": Use(_gets_layers, "new layers, and their number stays", is_refused=False),
    "symmetry": Use(
        _tells_copies_apart,
        "copies in a wider model, of the methods fpi and aki",
        is_refused=False,
    ),
    "scheme": Use(_is_copied, "the methods fpi and aki", is_refused=False),
}


def idle_options(plan: Blueprint) -> Iterator[str]:
    """The names of the options that were given and that nothing in this growth reads."""
    options = plan.options
    auto = GrowthOptions(method=options.method, scheme=options.scheme, stream="copies")
    for name, use in USES.items():
        default = getattr(GrowthOptions, name)
        default = getattr(auto, name) if default == "auto" else default
        # a stream is "copies" wherever it is not asked to be padded
        if getattr(options, name) != default and not use.is_read(plan):
            yield name


def refuse_idle_options(plan: Blueprint) -> None:
    """Refuse options that change nothing, or warn of them: see the top of this file.

    Records of such growths exist, so only calls of users are checked.

    Raises:
        GrowthError: an option has no effect with this method, at these sizes or in this family.
    """
    for name in idle_options(plan):
        message = (
            f"{name}={getattr(plan.options, name)!r} has no effect in this growth: it is for "
            f"{USES[name].what}: leave it out"
        )
        if USES[name].is_refused:
            raise GrowthError(message)
        warnings.warn(message, GrowthWarning, stacklevel=4)
