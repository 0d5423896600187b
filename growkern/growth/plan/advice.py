"""What to know about a growth beside what it keeps: notes, and options that were given in vain.

The figures of `measurements.toml` are printed as they are. No forecast is made from them: few
people measured this, on other models and texts. No warning stops a growth.

Some runtimes compute sizes, or the kind of a layer, that transformers reads from the config. A
family's table says which, in [runtimes].

Somebody who gives an option expects something of it. Most options tune one part of growth. Where
there is no such part, they are refused, as a misspelt name is. Those in `CHOICES` choose one of
several ways to grow. Scripts give one choice for many sizes, so these lead to a warning. Values
that ask for nothing, such as `symmetry="none"`, and the value that "auto" stands for are never
idle. Nor is `seed`: a script that draws nothing at random may still give one.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import NamedTuple

from growkern.errors import GrowthError, GrowthWarning, human
from growkern.families.family import inner
from growkern.files import parse_toml
from growkern.growth.history import forgotten
from growkern.growth.options import GrowthOptions
from growkern.growth.plan.blueprint import Blueprint
from growkern.growth.plan.exactness import advanced_kinds
from growkern.growth.space.rules import (
    computed_head_dim,
    is_undeclared,
    period_of,
    rule_of,
    whole_depths,
)

FIELDS = ("axes", "figure", "setting", "citation", "date")


def measurements(plan: Blueprint) -> tuple[dict[str, str], ...]:
    """The measurements of growth along the axes of a plan, each with `FIELDS`.

    A figure is the share of the training FLOPs from scratch that growth saved at the same loss.
    Wider means a larger hidden state. Nobody measured growth of other units alone.
    """
    old, new = plan.layout.stream_sizes
    wider, deeper = new > old, deepening(plan) > 1
    axes = {"width": wider, "depth": deeper, "both": wider and deeper}
    file = Path(__file__).with_name("measurements.toml")
    rows = parse_toml(file.read_text(encoding="utf-8"))["measurement"]
    return tuple({name: row[name] for name in FIELDS} for row in rows if axes[row["axes"]])


def deepening(plan: Blueprint) -> float:
    """How many times the layers of the target are those of the source; of several stacks, most."""
    keys = plan.small.family.stacks.values()
    return max((plan.large.size(key) / plan.small.size(key) for key in keys), default=1.0)


MOST_WARNINGS = 3
DU, MALLIK = "Du et al., arXiv 2405.15319", "Mallik et al., arXiv 2605.13405"
# tokens per parameter of a compute-optimal training (Hoffmann et al., arXiv 2203.15556)
CHINCHILLA = 20


class Note(NamedTuple):
    """A warning in one sentence, and the paper that it rests on."""

    text: str
    paper: str


def warnings_of(
    plan: Blueprint, tokens: float | None = None, source_tokens: float | None = None
) -> tuple[Note, ...]:
    """At most three warnings about this growth, and about training target and source on tokens."""
    found = (*_of_the_way(plan), *_of_the_training(plan, tokens, source_tokens))
    return tuple(islice(found, MOST_WARNINGS))


def _of_the_way(plan: Blueprint) -> Iterator[Note]:
    """Warnings about method, options and sizes."""
    options, name = plan.options, plan.small.class_name
    is_decoder = "CausalLM" in name or name.endswith("LMHeadModel")
    copies = any(row["most"] > 1 for row in plan.maps().values())
    if options.method == "fpi" and options.symmetry == "none" and copies:
        yield Note(
            "symmetry='none': copies get equal gradients and never become different, under Muon "
            "too",
            "Yu et al., arXiv 2602.02472",
        )
    if options.method == "aki" and is_decoder and _takes_from_the_next(plan):
        yield Note(
            "with aki, decoders start with a far higher loss than their source: 7.81 for a growth "
            "from 1.3B to 7B, where fpi kept the source's 2.97; measure it with "
            "`growkern verify --text` before you train",
            "AquilaMoE, 2024",
        )
    old, new = plan.layout.stream_sizes
    if is_decoder and new > old and plan.parameters() > 1_000_000_000:
        yield Note(
            "width made a decoder of 1.1B parameters train 1 to 18 % slower than from scratch, "
            "where stacked layers made it 49 % faster",
            DU,
        )
    if options.depth == "stack" and deepening(plan) > 4:
        yield Note(
            f"the layers grow {deepening(plan):.1f} times; stacking was best at 2 to 4 times",
            DU,
        )


def _takes_from_the_next(plan: Blueprint) -> bool:
    """True if AKI changes anything."""
    has_next = any(task.upper for task in plan.tasks)
    return has_next and (plan.options.aki == "eq16" or bool(advanced_kinds(plan)))


def _of_the_training(
    plan: Blueprint, tokens: float | None, source_tokens: float | None
) -> Iterator[Note]:
    """Warnings about the factor of the growth and about both trainings."""
    factor = plan.parameters() / plan.parameters("source")
    # embeddings grow less than the rest: twice the size is rarely 2.0 times the parameters
    if factor > 2.5:
        yield Note(
            f"the model grows to {factor:.1f} times its parameters; 2 times was most reliable, and "
            "far above it training from scratch was faster",
            MALLIK,
        )
    per = (tokens or 0) / plan.parameters()
    if per > CHINCHILLA:
        yield Note(
            f"the target sees {human(per)} tokens per parameter; gains were largest below "
            f"{CHINCHILLA} and shrank above",
            MALLIK,
        )
    per = (source_tokens or 0) / plan.parameters("source")
    if per > CHINCHILLA:
        yield Note(
            f"the source saw {human(per)} tokens per parameter; the more a source was trained, the "
            "less each further token gains",
            "Liew and Kato, arXiv 2510.06548",
        )


CHOICES = ("depth", "symmetry", "scheme")


def uses(plan: Blueprint) -> dict[str, tuple[bool, str]]:
    """Option -> whether this growth reads it, and what it is for.

    `noise` and `routing` are checked against `symmetry` when they are made.
    """
    options, family = plan.options, plan.small.family
    copied = not options.is_baseline
    layers = {family.config_field(key) for key in family.stacks.values()}
    changed = {name for name, (old, new) in plan.size_changes().items() if old != new}
    widened = copied and bool(changed - layers)
    # norms around inserted blocks have gains that undo each other
    has_units = any(task.identity in ("unit", "affine") for task in plan.tasks)
    copying = "the methods that copy, fpi and aki"
    in_width = "copies in a wider model, of the methods"

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
    """Refuse options of a user that change nothing, or warn of them. Records may have such."""
    for name, what in idle_options(plan):
        message = (
            f"{name}={getattr(plan.options, name)!r} has no effect in this growth: it is for "
            f"{what}: leave it out"
        )
        if name not in CHOICES:
            raise GrowthError(message)
        warnings.warn(message, GrowthWarning, stacklevel=4)


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
    """Keys that describe layers; see `growkern.families.fields`."""
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
