"""Which layers of the source a deeper target takes, and what `portable` asks of its sizes.

Some runtimes compute what transformers reads from the config: head_dim, or the kind of a layer. A
family's table says which, in [runtimes].
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

from growkern.errors import UnfitError
from growkern.families.model import ModelSpec
from growkern.growth.options import GrowthOptions
from growkern.growth.space import maps
from growkern.growth.space.rotary import pair_step


def layers_of(small: ModelSpec, large: ModelSpec, key: str, options: GrowthOptions) -> list[int]:
    """The source layer of every target layer of a stack.

    Args:
        key: the size that counts its layers.
    """
    pick = maps.stack if options.depth == "stack" else maps.interleave
    old, new = small.size(key), large.size(key)
    period = period_of(small) if options.portable else 1
    added, over = divmod(new - old, period)
    if over:
        raise UnfitError(
            f"{small.family.config_field(key)}={new}: the kinds of layers repeat every {period}, "
            f"so portable=True takes {whole_depths(small, key, new)}"
        )
    whole, rest = divmod(old, period)
    if added and not whole:
        raise UnfitError(
            f"{small.family.config_field(key)}={old} of the source is less than one period of "
            f"{period} layers, which portable=True repeats: leave it as it is"
        )
    periods = pick(whole, whole + added) if whole else []
    layers = [period * number + i for number in periods for i in range(period)]
    return layers + list(range(old - rest, old))


def whole_depths(small: ModelSpec, key: str, new: int) -> str:
    """The numbers of layers nearest to `new` that add whole periods of their kinds."""
    old, period = small.size(key), period_of(small)
    added, over = divmod(new - old, period)
    fit = [old + period * n for n in ((added, added + 1) if over else (added,)) if n]
    return " or ".join(map(str, fit))


def inserted_in(layers: Sequence[int]) -> set[int]:
    """The target layers that repeat a source layer: in growth by identity they add nothing yet."""
    first = {layer: i for i, layer in reversed([*enumerate(layers)])}
    return {i for i, layer in enumerate(layers) if first[layer] != i}


def period_of(small: ModelSpec) -> int:
    """After how many layers the kinds of layers repeat; 1 if they do not."""
    return rule_of(small)[0]


def rule_of(small: ModelSpec) -> tuple[int, Callable[[Sequence[str]], bool]]:
    """`period_of`, and whether a list of kinds repeats as the source's does."""
    family, config = small.family, vars(small.config)
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
    return " / ".join(f"{name}={getattr(model.config, name)}" for name in fields)
