"""What other software makes of a grown directory: facts to say, and growth that avoids them.

transformers reads every size and the kind of every layer from the config. Some runtimes compute
them. A family's table says which, in [runtimes].
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial

from growkern.errors import UnfitError
from growkern.families.model import ModelSpec
from growkern.growth.options import GrowthOptions
from growkern.growth.plan.blueprint import Blueprint
from growkern.growth.space import maps
from growkern.growth.space.rotary import pair_step

PORTABLE = "portable=True (--portable)"


def portability(plan: Blueprint) -> tuple[str, ...]:
    """What to know before other software than transformers loads the target, one sentence each."""
    parts = (_older_keys, _kinds, _head_dim, _scale, _vocabulary, _chosen)
    return tuple(line for part in parts for line in part(plan))


def layers_of(small: ModelSpec, large: ModelSpec, key: str, options: GrowthOptions) -> list[int]:
    """The source layer of every target layer of a stack.

    Args:
        key: the size that counts its layers.

    Raises:
        UnfitError: with `portable`, if the new layers are no whole periods.
    """
    pick = maps.stack if options.depth == "stack" else maps.interleave
    old, new = small.size(key), large.size(key)
    period = period_of(small) if options.portable else 1
    added, over = divmod(new - old, period)
    if over:
        fit = [old + period * n for n in (added, added + 1) if n]
        raise UnfitError(
            f"{small.family.config_field(key)}={new}: the kinds of layers repeat every {period}, "
            f"so portable=True takes {' or '.join(map(str, fit))}"
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


def inserted_in(layers: Sequence[int]) -> set[int]:
    """The target layers that repeat a source layer: in growth by identity they add nothing yet."""
    return {i for i, layer in enumerate(layers) if layer in layers[:i]}


def period_of(small: ModelSpec) -> int:
    """After how many layers the kinds of layers repeat; 1 if they do not."""
    return _rule(small)[0]


def _rule(small: ModelSpec) -> tuple[int, Callable[[Sequence[str]], bool]]:
    """`period_of`, and whether a list of kinds repeats as the source's does."""
    family, config = small.family, vars(small.config)
    # keys that the config has may say more than its layers: the first period may not be over
    for key in sorted(family.older, key=lambda key: key.field not in config):
        value = key.value(config, config.get(key.field)) if key.is_periodic else None
        if value is not None:
            return value, partial(key.describes, value=value)
    for name in family.per_layer:
        kinds = config.get(name) or ()
        period = next((n for n in range(1, len(kinds)) if _repeats(kinds, kinds, n)), len(kinds))
        # no runtime takes a list for a pattern that does not come twice, unless it knows the family
        if 0 < period <= len(kinds) // 2 or (kinds and family.runtimes.get("layers")):
            return period, partial(_repeats, pattern=kinds, period=period)
    return 1, lambda kinds: True


def _repeats(kinds: Sequence[str], pattern: Sequence[str], period: int) -> bool:
    return all(kind == pattern[i % period] for i, kind in enumerate(kinds))


def refuse_unportable(small: ModelSpec, large: ModelSpec, options: GrowthOptions) -> None:
    """Refuse sizes that some runtime would take for others, if `portable` asks for that.

    Raises:
        UnfitError: head_dim is not what runtimes compute, or rope_theta would change.
    """
    if not options.portable:
        return
    if _is_undeclared(large):
        raise UnfitError(
            f"head_dim={large.head_dim()} is not {_computed(large)}, which portable=True needs"
        )
    rotary = small.turning, large.turning
    if rotary[0] != rotary[1] and pair_step(*rotary) is None:
        raise UnfitError(
            f"head_dim={large.head_dim()} would change rope_theta, which portable=True keeps: "
            "give a multiple of the source's head_dim"
        )


def _is_undeclared(model: ModelSpec) -> bool:
    """True if head_dim differs from what some runtimes compute for the family."""
    heads = model.family.query_heads[0]
    differs = model.size("stream") != model.size(heads) * model.head_dim()
    return bool(model.family.runtimes.get("head_dim")) and differs


def _computed(model: ModelSpec) -> str:
    fields = [model.family.config_field(k) for k in ("stream", model.family.query_heads[0])]
    return " / ".join(f"{name}={getattr(model.config, name)}" for name in fields)


def _older_keys(plan: Blueprint) -> Iterator[str]:
    """Keys that describe layers; see `growkern.families.older`."""
    before = {**vars(plan.small.config), **plan.source.keys}
    config, changed, gone = vars(plan.target_config), [], []
    for key in plan.small.family.older:
        old = before.get(key.field) if key.is_pattern else None
        new = None if old is None else key.value(config, old)
        if new is None and old is not None:
            gone.append(f"{key.field}={old}")
        elif new != old:
            changed.append(f"{key.field} {old} -> {new}")
    if changed:
        yield f"config.json follows the new layers: {', '.join(changed)}"
    if gone:
        yield f"left out of config.json, as no value describes the new layers: {', '.join(gone)}"


def _kinds(plan: Blueprint) -> Iterator[str]:
    period, keeps = _rule(plan.small)
    if not plan.small.family.runtimes.get("layers"):
        return
    for name in plan.small.family.per_layer:
        if not keeps(getattr(plan.target_config, name, None) or ()):
            yield (
                f"{name} no longer repeats every {period} layers: {_named(plan, 'layers')} wrong "
                "outputs, as the kind of a layer follows from its number there; "
                f"{PORTABLE} adds whole periods"
            )


def _named(plan: Blueprint, fact: str) -> str:
    """The runtimes of a fact, as the beginning of a clause."""
    names = plan.small.family.runtimes.get(fact, ())
    return f"{' and '.join(names)} {'gives' if len(names) == 1 else 'give'}"


def _head_dim(plan: Blueprint) -> Iterator[str]:
    model = plan.large
    if _is_undeclared(model):
        yield (
            f"head_dim={model.head_dim()} is not {_computed(model)}: {_named(plan, 'head_dim')} "
            f"wrong outputs or an error, as {model.family.model_type} has no head_dim there; "
            f"{PORTABLE} keeps them equal"
        )


def _scale(plan: Blueprint) -> Iterator[str]:
    field, (small, large) = plan.small.family.attention.field, (plan.small, plan.large)
    if field is None:
        return
    old, new = (getattr(m.config, field) for m in (small, large))
    if old == small.head_dim() and new != large.head_dim():
        yield (
            f"{field}={new} is not head_dim={large.head_dim()}: {_named(plan, 'scale')} wrong "
            f"outputs, as it takes head_dim; {PORTABLE} makes them equal, which rounds weights"
        )


def _vocabulary(plan: Blueprint) -> Iterator[str]:
    old, new = plan.layout.sizes("vocab")
    if old != new:
        yield (
            f"the tokenizer has no tokens for the {new - old} new rows of the vocabulary: some "
            "converters refuse a vocabulary that is larger than the tokenizer's; add tokens to it"
        )


def _chosen(plan: Blueprint) -> Iterator[str]:
    """What `portable` chose."""
    if not plan.options.portable:
        return
    chosen = []
    if plan.small.family.runtimes.get("head_dim"):
        chosen.append(f"head_dim={plan.large.head_dim()} is {_computed(plan.large)}")
    if (period := period_of(plan.small)) > 1:
        chosen.append(f"layers are added in periods of {period}")
    if plan.small.turning:
        chosen.append("rope_theta stays")
    if field := plan.small.family.attention.field:
        chosen.append(f"{field}={getattr(plan.target_config, field)}")
    yield f"portable: {'; '.join(chosen) or 'nothing to choose in this family'}"
