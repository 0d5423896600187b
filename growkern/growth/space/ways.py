"""The rules for experts and layers: what a larger target copies, and how often.

Experts come in whole copies of all of them, and as many times more are chosen. All copies of an
expert have equal logits, so a router that chose the expert chooses every copy of it. Their weights
add up to that of the expert wherever weights are divided by their sum, over all experts or over the
chosen ones.

A router that chooses groups of experts first looks at the best of each group. So whole groups are
copied: a copy beside its expert would count twice.

Where a bias b_e only chooses, and as many experts are chosen as before, any number of copies can
sleep. Their bias is that of their expert minus

    b > 1 + max b_e - min b_e                                                              (1)

over the experts of the layer. Scores lie in (0, 1), so every expert of the source comes before
every copy, for any input. A copy may lie in a group of copies or behind the experts of a group: the
best of a group are then the source's.

Without such a bias, copies can share the tokens of their expert, if as many are chosen as before.
Row r_e of the router becomes r_e + n_j for copy j, with n_0 = 0 and one random n_j for all experts:

    logits (r_e + n_j) x = r_e x + n_j x                                                   (2)

The copies j with the largest n_j x all come first if that is larger than the others by more than
the logits of the chosen experts differ. Then those of the source are chosen, with its weights.
Elsewhere a token reaches others, so this is no exact growth.

A `Way` adds layers. `way_of` finds it by the value of the option `depth`. Layers repeat in whole
periods of their kinds, where they have several. Some runtimes compute what
transformers reads from the config: head_dim, or the kind of a layer. A family's table says which,
in [runtimes], and `portable` keeps to that.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from typing import Any, Literal, TypeAlias

import torch
from torch import Tensor

from growkern.errors import GrowthError, UnfitError
from growkern.families import Family, ModelSpec, SpaceSpec, condition_of, is_met
from growkern.growth.options import GrowthOptions
from growkern.growth.space.spaces import pair_step

Experts: TypeAlias = Literal["whole", "asleep", "split", "ffn"]


def check_copies(small: ModelSpec, large: ModelSpec) -> None:
    """Refuse experts that are no whole copies where it matters, and quotients that shrink."""
    check_experts(small, large)
    for key in (key for key, size in small.family.config.items() if size.factors):
        if (new := large.size(key)) < (old := small.size(key)):
            raise UnfitError(f"{small.family.config[key].default} shrinks from {old} to {new}")


def _normed_units(family: Family, scales: Iterable[str | None]) -> set[str]:
    """Sizes of the inner units that norms with these scales lie over."""
    names = [str(scale) for scale in dict.fromkeys(scales) if family.is_space(scale)]
    for name in names:
        # the list grows while it is read
        names += family.spaces[name].blocks
    return {str(family.spaces[name].size) for name in names if family.spaces[name].is_inner}


def eps_factor(small: ModelSpec, large: ModelSpec) -> float:
    """kappa^2 of (3) in `growkern.growth.space.spaces`: what all norms that read one eps share.

    Units that are no whole copies are padded with zeros, so a norm over them divides by less.
    """
    family, eps, square = small.family, small.family.norm.eps, 1.0
    known = _normed_units(family, (row.scale for rows in family.tensors.values() for row in rows))
    normed = _normed_units(family, (tensor.row.scale for tensor in small.tensors))
    inner = {str(space.size) for space in family.spaces.values() if space.is_inner}
    for key in sorted(inner):
        old, new = small.size(key), large.size(key)
        if new % old and key not in known:
            field = family.config_field(key)
            raise UnfitError(
                f"{field}={new} is no multiple of the source's {old}, and the table does not say "
                f"which norm lies over these units: give its row their space as `scale`"
            )
        square *= old / new if new % old and key in normed else 1
    if small.second and small.has_tied_head:
        # a norm of theirs reads what the head does, and the tied head asks for shares there
        square = small.size("stream") / large.size("stream")
    if square != 1 and not isinstance(eps, str):
        raise UnfitError(
            f"a norm over units that are no whole copies needs eps={eps * square:.3g}, not {eps}, "
            "and no field of the config holds it"
        )
    return square


def way_of_experts(space: SpaceSpec, small: ModelSpec, size: Callable[[str], int]) -> Experts:
    """How the experts of the target come about.

    `size` gives a size of the target, or the source's if it is not known yet. Where new experts
    could share tokens, only a caller who asks for as many chosen ones as before gets that.

    Returns:
        "split": copies share the tokens of their expert, (2), as many are chosen as before.
        "asleep": they sleep instead, as a bias can do that, (1).
        "ffn": of a dense model's FFN, see `growkern.growth.space.upcycling`.
        "whole": all copies of an expert are chosen together.
    """
    if small.of_one_ffn:
        return "ffn"
    old, new = small.size(str(space.size)), size(str(space.size))
    chosen = (str(space.chosen), *space.groups[1:])
    if new == old or any(size(key) != small.size(key) for key in chosen):
        return "whole"
    if space.asleep is not None:
        return "asleep"
    return "whole" if space.groups or new % old else "split"


def keep_choice(space: SpaceSpec, small: ModelSpec, size: Callable[[str], int]) -> bool:
    """True if there are more experts and as many are chosen as before."""
    return way_of_experts(space, small, size) in ("asleep", "split")


def sleeping_map(space: SpaceSpec, small: ModelSpec, large: ModelSpec) -> tuple[Tensor, Tensor]:
    """The source's expert of every target expert, (target,) int64, and which are awake, bool.

    The source's groups come first, and its experts come first in each of them.
    """
    (old, groups), (new, more) = (_in_groups(space, model) for model in (small, large))
    group, place = torch.arange(more)[:, None], torch.arange(new)
    index = group % groups * old + place % old
    return index.flatten(), ((group < groups) & (place < old)).flatten()


def _in_groups(space: SpaceSpec, model: ModelSpec) -> tuple[int, int]:
    """How many experts each group has, and how many groups there are."""
    groups = model.size(space.groups[0]) if space.groups else 1
    return model.size(str(space.size)) // groups, groups


def depth_of_sleep(bias: Tensor) -> float:
    """b of (1), for the bias of a layer's experts."""
    return 1.01 * (1 + (bias.max() - bias.min()).item())


def copies_of(space: SpaceSpec, small: ModelSpec, large: ModelSpec) -> int:
    """How many copies of every expert the router chooses together."""
    if keep_choice(space, small, large.size):
        return 1
    return large.size(str(space.size)) // small.size(str(space.size))


def followers(
    space: SpaceSpec, model: ModelSpec, asked: Mapping[str, int] | None = None
) -> tuple[str, ...]:
    """The sizes that are multiplied like the experts. A single group may hold them all.

    If new experts sleep with the target's sizes that the user asked for, nothing follows; and
    if the user asked for as many chosen ones as before.
    """
    known = asked or {}
    size: Callable[[str], int] = lambda key: known.get(key, model.size(key))  # noqa: E731
    way = way_of_experts(space, model, size)
    if way == "asleep" or (way == "split" and str(space.chosen) in known):
        return ()
    several = bool(space.groups) and model.size(space.groups[0]) > 1
    return (str(space.chosen), *(space.groups if several else ()))


def check_experts(small: ModelSpec, large: ModelSpec) -> None:
    """Refuse experts that are no whole copies of the source's, or that are chosen in part."""
    for space in small.mixtures:
        field = small.family.config_field(str(space.size))
        old, new = (model.size(str(space.size)) for model in (small, large))
        others = (str(space.chosen), *space.groups)
        if keep_choice(space, small, large.size):
            _check_groups(space, small, large)
            continue
        if new % old:
            names = " and ".join(small.family.config_field(key) for key in others)
            raise UnfitError(
                f"{field}={new} is no multiple of the source's {old}, so some experts would have "
                "more copies than others, which changes what the router chooses; nearest sizes "
                f"that fit: {field}={new - new % old} or {new - new % old + old}. Leave out "
                f"{names}, which will fit then{_or_asleep(space, small, large)}"
            )
        if small.of_one_ffn:
            # the router chooses among copies in any number
            continue
        copied = followers(space, small)
        for key in others:
            needed = small.size(key) * (new // old if key in copied else 1)
            if (size := large.size(key)) != needed:
                raise UnfitError(
                    f"{small.family.config_field(key)}={size}: with {field}={new} it must be "
                    f"{needed}, so that the router chooses every copy of an expert or none"
                    f"{_or_asleep(space, small, large)}"
                )


def _or_asleep(space: SpaceSpec, small: ModelSpec, large: ModelSpec) -> str:
    """The end of an error message: new experts can sleep instead, if there are any."""
    grows = large.size(str(space.size)) > small.size(str(space.size))
    if space.asleep is None or small.of_one_ffn or not grows:
        return ""
    kept = (str(space.chosen), *space.groups[1:])
    fit = " and ".join(f"{small.family.config_field(key)}={small.size(key)}" for key in kept)
    return f"; or keep {fit}, and new experts sleep"


def _check_groups(space: SpaceSpec, small: ModelSpec, large: ModelSpec) -> None:
    """Refuse groups that do not keep those of the source, with new experts that sleep."""
    (old, groups), (new, more) = (_in_groups(space, model) for model in (small, large))
    field, number = small.family.config_field(str(space.size)), large.size(str(space.size))
    if number % more or new < old:
        low = max(old, number // more) * more
        raise UnfitError(
            f"{field}={number} does not fit {small.family.config_field(space.groups[0])}={more}: "
            f"new experts sleep behind the {old} of each of the source's {groups} groups; nearest "
            f"sizes that fit: {field}={low} or {low + more}"
        )


class Way:
    """A way to add layers: copies next to their layer that compute as they did there."""

    # what happens to layers, for the plan's sentence; None: new ones add nothing
    verb: str | None = "repeated"
    # new layers begin as the class draws them
    is_untrained = False

    def pick(self, old: int, new: int) -> list[int]:
        """The source layer, or period of layers, of each of `new` ones."""
        return [layer * old // new for layer in range(new)]

    def layers(self, old: int, new: int) -> list[int] | None:
        """The source layer of every target layer; None: by whole periods of `pick`."""
        return None

    def inserted(self, layers: Sequence[int], *, ahead: bool) -> set[int]:
        """The target layers that repeat a source layer and do not compute it.

        `ahead`: new layers stand before their originals, and not behind them.
        """
        return set()

    def count(self) -> int | None:
        """The number of layers that the option itself asks for."""
        return None


class Stack(Way):
    """The whole stack again, above itself, then the top layers (bert2BERT, Algorithm 1)."""

    verb = "stacked"

    def pick(self, old: int, new: int) -> list[int]:
        whole, rest = divmod(new, old)
        return [*range(old)] * whole + [*range(old - rest, old)]


class Identity(Way):
    """Blocks that add nothing yet, behind the layer that they copy, or before it."""

    verb = None

    def inserted(self, layers: Sequence[int], *, ahead: bool) -> set[int]:
        numbers = range(len(layers)) if ahead else reversed(range(len(layers)))
        return {*range(len(layers))} - {*{layers[i]: i for i in numbers}.values()}


class RandomLayers(Identity):
    """Layers as the class draws them."""

    is_untrained = True


@dataclass(frozen=True)
class Listed(Way):
    """The source layer of every target layer, as the user lists them."""

    listed: tuple[int, ...]
    verb = "arranged by a list"

    def layers(self, old: int, new: int) -> list[int] | None:
        if new != len(self.listed):
            raise GrowthError(
                f"depth lists {len(self.listed)} layers, but the target has {new}: list as many, "
                "or leave out their number"
            )
        if beyond := [layer for layer in self.listed if not 0 <= layer < old]:
            raise GrowthError(
                f"depth lists layer {beyond[0]}: the source has 0 to {old - 1}: list these"
            )
        if lost := sorted({*range(old)} - {*self.listed}):
            raise UnfitError(f"depth leaves out layer {lost[0]}, which would be lost: list it too")
        if old == new:
            raise GrowthError("depth lists the layers in another order: list more than there are")
        return [*self.listed]

    def count(self) -> int | None:
        return len(self.listed)


WAYS = {"identity": Identity(), "stack": Stack(), "interleave": Way(), "random": RandomLayers()}


def way_of(depth: Any) -> Way:
    """The way of a value of the option `depth`."""
    return Listed(depth) if isinstance(depth, tuple) else WAYS[depth]


def layers_of(small: ModelSpec, large: ModelSpec, key: str, options: GrowthOptions) -> list[int]:
    """The source layer of every target layer of the stack that `key` counts; 0 if it has none."""
    old, new = small.size(key), large.size(key)
    if not old:
        if new and not way_of(options.depth).is_untrained:
            raise GrowthError(
                f"{small.family.config_field(key)}=0: the source has no layers to copy, so "
                f"depth={options.depth!r} has none to add: give depth='random'"
            )
        return [0] * new
    if (listed := way_of(options.depth).layers(old, new)) is not None:
        return listed
    period = _period_of_kinds(small)
    whole = math.lcm(period, period_of(small))
    if options.portable or ((new - old) % whole == 0 and whole <= old):
        period = whole
    if (new - old) % period:
        raise UnfitError(
            f"{small.family.config_field(key)}={new}: the kinds of layers repeat every {period}, "
            f"so {'portable=True takes' if options.portable else 'it can be'} "
            f"{whole_depths(small, key, new, period)}"
        )
    if new > old and period > old:
        raise UnfitError(
            f"{small.family.config_field(key)}={old} of the source is less than one period of "
            f"{period} layers, which a deeper target repeats: leave it as it is"
        )
    return _repeated(small, old, new, period, options)


def _repeated(
    small: ModelSpec, old: int, new: int, period: int, options: GrowthOptions
) -> list[int]:
    """The source layer of every target layer, where whole periods of layers are repeated."""
    pick = way_of(options.depth).pick
    in_place = small.family.depth.in_place
    # the last of the layers that keep their numbers may be repeated behind itself
    kept = len(getattr(small.fields, in_place)) - 1 if in_place else 0
    kept = max(0, min(kept, old - 1))
    whole, rest = divmod(old - kept, period)
    periods = pick(whole, whole + (new - old) // period) if whole else []
    layers = [kept + period * number + i for number in periods for i in range(period)]
    return [*range(kept), *layers, *range(old - rest, old)]


def whole_depths(small: ModelSpec, key: str, new: int, period: int) -> str:
    """The numbers of layers nearest to `new` that add whole periods of their kinds."""
    old = small.size(key)
    added, over = divmod(new - old, period)
    fit = [old + period * n for n in ((added, added + 1) if over else (added,)) if n]
    return " or ".join(map(str, fit))


def _period_of_kinds(small: ModelSpec) -> int:
    """After how many layers kinds repeat that the config gives by a number."""
    fields = (condition_of(text)[1:3] for text in chain.from_iterable(small.family.kinds.values()))
    # a period of 0 means no layer
    return math.lcm(*(getattr(small.text, name) or 1 for word, name in fields if word == "every"))


def check_layer_kinds(
    small: ModelSpec, stack: str, layers: Sequence[int], options: GrowthOptions
) -> None:
    """Refuse a depth at which a layer copies one of another kind, by the layers of `layers_of`."""
    if (other := _first_other(small, layers)) is None:
        return
    layer, kind = other
    field = small.family.config_field(small.family.stacks[stack])
    old, new = small.size(small.family.stacks[stack]), len(layers)
    near = [
        depth
        for depth in sorted(range(old + 1, 2 * new), key=lambda depth: abs(depth - new))
        if _first_other(small, _repeated(small, old, depth, 1, options)) is None
    ][:2]
    fix = f"; the nearest depths that fit: {' or '.join(map(str, sorted(near)))}" if near else ""
    # the default inside a run is another one
    default = _repeated(small, old, new, 1, replace(options, depth="identity"))
    if _first_other(small, default) is None:
        fix += "; depth='identity' fits"
    raise UnfitError(
        f"{field}={new}: layer {layer} would copy layer {layers[layer]} of the source, but only "
        f"one of them is {kind} by the config ({', '.join(small.family.kinds[kind])}){fix}"
    )


def _first_other(small: ModelSpec, layers: Sequence[int]) -> tuple[int, str] | None:
    """The first target layer of another kind than its source layer, and that kind."""
    for kind, conditions in small.family.kinds.items():
        for layer, source in enumerate(layers):
            # lists and first layers follow the copied ones. A period is the same in both models
            now = all(is_met(text, layer, small.text, layers) for text in conditions)
            if now != small.kinds_of(source, len(layers))[kind]:
                return layer, kind
    return None


def period_of(small: ModelSpec) -> int:
    """After how many layers the kinds of layers repeat; 1 if they do not."""
    return repetition_of(small)[0]


def repetition_of(small: ModelSpec) -> tuple[int, Callable[[Sequence[str]], bool]]:
    """`period_of`, and whether a list of kinds repeats as the source's does."""
    family, config = small.family, vars(small.text)
    # keys that the config has may say more than its layers: the first period may not be over
    for key in sorted(family.older, key=lambda key: key.field not in config):
        value = key.value(config, config.get(key.field)) if key.is_periodic else None
        if value is not None:
            period = len(value) if isinstance(value, str) else value
            return period, partial(key.describes, value=value)
    for name in family.per_layer:
        kinds = config.get(name)
        # one value for all layers is no pattern
        kinds = kinds if isinstance(kinds, list) else ()
        period = next((n for n in range(1, len(kinds)) if kinds[n:] == kinds[:-n]), len(kinds))
        # no runtime takes a list for a pattern that does not come twice, unless it knows the family
        if 0 < period <= len(kinds) // 2 or (kinds and family.runtimes.get("layers")):
            return period, partial(_repeats, pattern=kinds, period=period)
    return 1, lambda kinds: True


def _repeats(kinds: Sequence[str], pattern: Sequence[str], period: int) -> bool:
    return all(kind == pattern[i % period] for i, kind in enumerate(kinds))


def refuse_unportable(small: ModelSpec, large: ModelSpec, options: GrowthOptions) -> None:
    """Refuse sizes that some runtime would take for others, if `portable` asks for that."""
    if not options.portable:
        return
    if is_undeclared(large):
        raise UnfitError(
            f"head_dim={large.head_dim()} is not {computed_head_dim(large)}, which portable=True "
            "needs"
        )
    if small.family.runtimes.get("eps") and eps_factor(small, large) != 1:
        raise UnfitError(
            f"{small.family.norm.eps} would change, which portable=True keeps: give whole copies"
        )
    rotary = small.turning, large.turning
    if rotary[0] != rotary[1] and pair_step(*rotary) is None:
        raise UnfitError(
            f"head_dim={large.head_dim()} would change rope_theta, which portable=True keeps: "
            "give a multiple of the source's head_dim"
        )


def is_undeclared(model: ModelSpec) -> bool:
    """True if head_dim differs from what some runtimes compute for the family."""
    if not model.family.runtimes.get("head_dim"):
        return False
    heads = model.family.query_heads[0]
    return model.size("stream") != model.size(heads) * model.head_dim(heads)


def computed_head_dim(model: ModelSpec) -> str:
    """The head_dim that these runtimes compute, for messages."""
    fields = [model.family.config_field(k) for k in ("stream", model.family.query_heads[0])]
    return " / ".join(f"{name}={getattr(model.text, name)}" for name in fields)
