"""What other software, generation and growkern's optimizers make of the target.

Some runtimes compute sizes, or the kind of a layer, that transformers reads from the config. A
family's table says which, in [runtimes].
"""

from __future__ import annotations

from collections.abc import Iterator

from growkern.families.family import inner
from growkern.growth.history import forgotten
from growkern.growth.plan.blueprint import Blueprint
from growkern.growth.space.layers import (
    computed_head_dim,
    is_undeclared,
    period_of,
    rule_of,
    whole_depths,
)

PORTABLE = "portable=True (--portable)"

# its grouped products read rows of whole 16 bytes
GROUPED_MULTIPLE = 8


def portability(plan: Blueprint) -> tuple[str, ...]:
    """What to know before the target generates, trains or is loaded elsewhere, as sentences."""
    parts = (
        _code,
        _older_keys,
        _kinds,
        _head_dim,
        _scale,
        _vocabulary,
        _cache,
        _experts,
        _chosen,
        _lost,
    )
    return tuple(line for part in parts for line in part(plan))


def _code(plan: Blueprint) -> Iterator[str]:
    """Code that comes with the model."""
    if getattr(plan.small.config, "auto_map", None):
        yield (
            "config.json names code of its own (auto_map): growkern does not run it, and takes the "
            f"model for a {plan.small.family.model_type} of transformers"
        )


def _older_keys(plan: Blueprint) -> Iterator[str]:
    """Keys that describe layers; see `growkern.families.older`."""
    family, keys = plan.small.family, plan.source.keys
    before = {**vars(plan.small.text), **inner(keys, family.under)}
    config, changed, gone = vars(plan.large.text), [], []
    for key in family.older:
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
    """Lists of the kinds of layers whose period is lost, and the nearest depths that keep it."""
    small, (key, *_) = plan.small, plan.small.family.stacks.values()
    period, keeps = rule_of(small)
    for name in small.family.per_layer:
        if keeps(getattr(plan.large.text, name, None) or ()):
            continue
        line = f"{name} no longer repeats every {period} layers"
        if small.family.runtimes.get("layers"):
            wrong = f"{_named(plan, 'layers')} wrong outputs"
            line += f": {wrong}, as the kind of a layer follows from its number there"
        if small.size(key) >= period:
            depths = whole_depths(small, key, plan.large.size(key), period_of(small))
            field = small.family.config_field(key)
            line += f"; {field}={depths} adds whole periods"
        yield line


def _named(plan: Blueprint, fact: str) -> str:
    """The runtimes of a fact, as the beginning of a clause."""
    names = plan.small.family.runtimes.get(fact, ())
    return f"{' and '.join(names)} {'gives' if len(names) == 1 else 'give'}"


def _head_dim(plan: Blueprint) -> Iterator[str]:
    model = plan.large
    if is_undeclared(model):
        yield (
            f"head_dim={model.head_dim()} is not {computed_head_dim(model)}: "
            f"{_named(plan, 'head_dim')} wrong outputs or an error, as "
            f"{model.family.model_type} has no head_dim there; {PORTABLE} keeps them equal"
        )


def _scale(plan: Blueprint) -> Iterator[str]:
    field, (small, large) = plan.small.family.attention.field, (plan.small, plan.large)
    if field is None:
        return
    old, new = (getattr(m.text, field) for m in (small, large))
    if old == small.head_dim() and new != large.head_dim():
        yield (
            f"{field}={new} is not head_dim={large.head_dim()}: {_named(plan, 'scale')} wrong "
            f"outputs, as it takes head_dim; {PORTABLE} makes them equal, which rounds weights"
        )


def _vocabulary(plan: Blueprint) -> Iterator[str]:
    old, new = plan.layout.sizes("vocab")
    if old != new:
        yield (
            f"if the tokenizer has fewer than {new} tokens, add tokens to it: some converters "
            "refuse a vocabulary that is larger than the tokenizer's"
        )
        yield (
            f"rows from {old} on are new. A token with a lower id takes a row of the source: if "
            "the source's tokenizer did not use this id, that row is untrained"
        )


def _cache(plan: Blueprint) -> Iterator[str]:
    if plan.large.short_cache:
        field, layers = plan.large.short_cache
        yield (
            f"transformers makes its cache of keys and values for {field}={layers} layers, too few "
            "for the decoder: the target gets use_cache=False, which makes generation slower; grow "
            f"{field} too to keep the cache"
        )


def _experts(plan: Blueprint) -> Iterator[str]:
    """Experts of a size that the fast products of transformers do not take in 16 bits."""
    large = plan.large
    tensors = [t for t in large.tensors if len(t.axes) == 3 and large.is_of_experts(t)]
    sizes = {size for tensor in tensors for size in large.shapes[tensor.name][1:]}
    if odd := sorted(size for size in sizes if size % GROUPED_MULTIPLE):
        yield (
            f"the experts' matrices have sides of {', '.join(map(str, odd))}: in 16 bits "
            "transformers runs them only with experts_implementation='eager', which is slow; "
            f"multiples of {GROUPED_MULTIPLE} run fast"
        )


def _chosen(plan: Blueprint) -> Iterator[str]:
    """What `portable` chose."""
    if not plan.options.portable:
        return
    chosen = []
    if plan.small.family.runtimes.get("head_dim"):
        chosen.append(f"head_dim={plan.large.head_dim()} is {computed_head_dim(plan.large)}")
    if (period := period_of(plan.small)) > 1:
        chosen.append(f"layers are added in periods of {period}")
    if plan.small.turning:
        chosen.append("rope_theta stays")
    if field := plan.small.family.attention.field:
        chosen.append(f"{field}={getattr(plan.large.text, field)}")
    yield f"portable: {'; '.join(chosen) or 'nothing to choose in this family'}"


def _lost(plan: Blueprint) -> Iterator[str]:
    """A growth of the source without a record."""
    if (lost := plan.source.history.lost) and not plan.options.is_baseline:
        yield forgotten(lost)
