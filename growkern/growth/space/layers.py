"""Which layers of the source a deeper target takes, and what `portable` asks of its sizes.

Some runtimes compute what transformers reads from the config: head_dim, or the kind of a layer. A
family's table says which, in [runtimes].
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from itertools import chain

from growkern.errors import GrowthError, UnfitError
from growkern.families.family import condition_of, is_met
from growkern.families.model import ModelSpec
from growkern.growth.options import GrowthOptions
from growkern.growth.space import maps
from growkern.growth.space.maps import pair_step


def layers_of(small: ModelSpec, large: ModelSpec, key: str, options: GrowthOptions) -> list[int]:
    """The source layer of every target layer of the stack that `key` counts; 0 if it has none."""
    old, new = small.size(key), large.size(key)
    if not old:
        if new and options.depth != "random":
            raise GrowthError(
                f"{small.family.config_field(key)}=0: the source has no layers to copy, so "
                f"depth={options.depth!r} has none to add: give depth='random'"
            )
        return [0] * new
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
    pick = maps.stack if options.depth == "stack" else maps.interleave
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
    conditions = chain.from_iterable(small.family.kinds.values())
    fields = (condition_of(text)[1:3] for text in conditions)
    # a period of 0 means no layer
    return math.lcm(*(getattr(small.text, name) or 1 for word, name in fields if word == "every"))


def check_kinds(
    small: ModelSpec, stack: str, layers: Sequence[int], options: GrowthOptions
) -> None:
    """Refuse a depth at which a layer copies one of another kind, by the layers of `layers_of`."""
    other = _first_other(small, layers)
    if other is None:
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


def inserted_in(layers: Sequence[int]) -> set[int]:
    """The target layers that repeat a source layer: in growth by identity they add nothing yet."""
    first = {layer: i for i, layer in reversed([*enumerate(layers)])}
    return {i for i, layer in enumerate(layers) if first[layer] != i}


def period_of(small: ModelSpec) -> int:
    """After how many layers the kinds of layers repeat; 1 if they do not."""
    return rule_of(small)[0]


def rule_of(small: ModelSpec) -> tuple[int, Callable[[Sequence[str]], bool]]:
    """`period_of`, and whether a list of kinds repeats as the source's does."""
    family, config = small.family, vars(small.text)
    # keys that the config has may say more than its layers: the first period may not be over
    for key in sorted(family.older, key=lambda key: key.field not in config):
        value = key.value(config, config.get(key.field)) if key.is_periodic else None
        if value is not None:
            return value, partial(key.describes, value=value)
    for name in family.per_layer:
        kinds = config.get(name) or ()
        shifts = range(1, len(kinds))
        period = next((n for n in shifts if kinds[n:] == kinds[:-n]), len(kinds))
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
    rotary = small.turning, large.turning
    if rotary[0] != rotary[1] and pair_step(*rotary) is None:
        raise UnfitError(
            f"head_dim={large.head_dim()} would change rope_theta, which portable=True keeps: "
            "give a multiple of the source's head_dim"
        )


def is_undeclared(model: ModelSpec) -> bool:
    """True if head_dim differs from what some runtimes compute for the family."""
    heads = model.family.query_heads[0]
    differs = model.size("stream") != model.size(heads) * model.head_dim(heads)
    return bool(model.family.runtimes.get("head_dim")) and differs


def computed_head_dim(model: ModelSpec) -> str:
    """The head_dim that these runtimes compute, for messages."""
    fields = [model.family.config_field(k) for k in ("stream", model.family.query_heads[0])]
    return " / ".join(f"{name}={getattr(model.text, name)}" for name in fields)
