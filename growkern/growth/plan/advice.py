"""What to know about a growth beside what it keeps: warnings, other software and idle options.

A family's table says in [runtimes] what other software computes where transformers reads it.

Options that tune a part of growth are refused where there is no such part. Those in `CHOICES`
choose a way to grow. Scripts give one choice for many sizes, so these lead to a warning. Values
that ask for nothing, such as `symmetry="none"`, and what "auto" stands for are never idle. Nor is
`seed`: a script that draws nothing at random may still give one.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator
from pathlib import Path

from growkern.errors import GrowthError, warn
from growkern.families import ModelSpec, inner
from growkern.files import read_json
from growkern.growth.history import forgotten
from growkern.growth.options import IS_FOR, PADDED, GrowthOptions, no_effect
from growkern.growth.plan.blueprint import Blueprint
from growkern.growth.plan.exactness import advanced_kinds
from growkern.growth.plan.measured import is_decoder
from growkern.growth.plan.target import expert_sides, unread_in
from growkern.growth.source import config_directory
from growkern.growth.space import (
    computed_head_dim,
    is_undeclared,
    period_of,
    repetition_of,
    whole_depths,
)

# the largest files of tokenizers have 40 MB
TOKENIZER, MOST_BYTES = "tokenizer.json", 200_000_000


def warnings_of(plan: Blueprint) -> Iterator[str]:
    """What papers say against a method, in a growth that it is of."""
    options = plan.options
    copies = any(row["most"] > 1 for row in plan.maps().values())
    takes = any(task.upper for task in plan.tasks)
    if options.method == "fpi" and options.symmetry == "none" and copies:
        yield (
            "symmetry='none': copies get equal gradients and never become different, under Muon "
            "too (Yu et al., arXiv 2602.02472)"
        )
    elif is_decoder(plan.small) and takes and (options.aki == "eq16" or advanced_kinds(plan)):
        yield (
            "with aki, decoders start with a far higher loss than their source: 7.81 for a growth "
            "from 1.3B to 7B, where fpi kept the source's 2.97; measure it with "
            "`growkern verify --text` before you train (AquilaMoE, 2024)"
        )


CHOICES = ("depth", "symmetry", "scheme")


def uses(plan: Blueprint) -> dict[str, tuple[bool, str]]:
    """Option -> whether this growth reads it, and what it is for.

    Those that depend on other options alone are checked when they are made.
    """
    options, family, layout = plan.options, plan.small.family, plan.layout
    copied = not options.is_baseline
    layers = {family.config_field(key) for key in family.stacks.values()}
    changed = {name for name, (old, new) in plan.size_changes().items() if old != new}
    widened = copied and bool(changed - layers)
    # norms around inserted blocks have gains that undo each other
    has_units = any(task.identity in ("unit", "affine") for task in plan.tasks)
    becoming = "dense models that become mixtures"
    wide = "copies in a wider model, of the methods fpi and aki"
    gains = "inserted identity blocks in models with norms behind blocks"
    return {
        "stream": (layout.is_padded, "a larger hidden size: the hidden size stays"),
        "carry": (layout.uses_carry, PADDED),
        "maps": (widened and options.scheme == "exact", f"{wide}, scheme='exact'"),
        "identity_gain": (copied and has_units, gains),
        "depth": (bool(changed & layers), "new layers, and their number stays"),
        "symmetry": (options.symmetry == "none" or widened, wide),
        "scheme": (copied, "the methods fpi and aki"),
        **dict.fromkeys(("router", "drop"), (plan.upcycling is not None, becoming)),
    }


def idle_options(plan: Blueprint) -> Iterator[tuple[str, str]]:
    """The options that were given and that nothing in this growth reads, and what they are for."""
    options = plan.options
    # a stream is "copies" wherever it is not asked to be padded
    auto = GrowthOptions(method=options.method, scheme=options.scheme, stream="copies")
    for name, (is_read, what) in uses(plan).items():
        default = getattr(GrowthOptions, name)
        default = getattr(auto, name) if default == "auto" else default
        if getattr(options, name) != default and not is_read:
            yield name, what


def refuse_idle_options(plan: Blueprint) -> None:
    """Refuse options of a user that change nothing, or warn of them. Records may have such."""
    for name, what in idle_options(plan):
        message = no_effect(plan.options, name, IS_FOR.format(what))
        if name not in CHOICES:
            raise GrowthError(message)
        warn(message)


# What sizes have to divide by: its name, and the smallest and the largest number that anything asks
# for; 0: none is the largest. Products in FP8 take sides of 16, and its scales are of 128 x 128
# weights. Weights that share a scale are 32 (MLX) to 256 (K-quants) of a row
DIVISORS = {
    "tensor_parallel": ("tensor parallel", 2, 0),
    "expert_parallel": ("expert parallel", 2, 0),
    "vocabulary": ("vocabulary", 2, 1024),
    "fp8_block": ("FP8 blocks", 16, 128),
    "group_size": ("group size", 32, 256),
}
STREAMS = ("stream", "normed", "tied_output")


def divides(plan: Blueprint) -> dict[str, tuple[int, int]]:
    """The largest number that the sizes of source and target divide by, for each use.

    Returns:
        - "tensor_parallel": processes that share heads and FFN units equally.
        - "expert_parallel": processes that share the experts equally. Only for mixtures.
        - "vocabulary": processes that share the rows of embeddings equally. Some runtimes pad them.
        - "fp8_block": the sides of square blocks with one scale, in the layers' matrices.
        - "group_size": weights with one scale, in the rows of these matrices.
    """
    both = [_sides(model) for model in (plan.small, plan.large)]
    return {
        kind: (math.gcd(most, *both[0][kind].values()), math.gcd(most, *both[1][kind].values()))
        for kind, (*_, most) in DIVISORS.items()
        if both[1][kind]
    }


def _sides(model: ModelSpec) -> dict[str, dict[str, int]]:
    """For each of `DIVISORS`, the sizes that have to divide by it, by their config fields."""
    family, sides = model.family, {kind: dict[str, int]() for kind in DIVISORS}
    if "vocab" in family.config:
        sides["vocabulary"][family.config_field("vocab")] = model.size("vocab")
    for tensor in (t for t in model.own_tensors if t.layer is not None):
        parts = zip(tensor.axes, model.shapes[tensor.name], strict=True)
        named = [(*axis.partition(":")[::2], side) for axis, side in parts if ":" in axis]
        # of spaces side by side, the first one stands for all
        axes = [(way, family.spaces[names.split("|")[0]], side) for way, names, side in named]
        is_router = len(axes) == 2 and axes[0][1].kind == "experts"
        if is_router or all(way == "write" for way, *_ in axes):
            continue
        writes_stream = any(way == "write" and x.kind in STREAMS for way, x, _ in axes)
        for way, space, side in axes:
            key = str(space.heads or space.size or "stream")
            size, field = model.size(key), family.config_field(key)
            if space.kind == "experts":
                sides["expert_parallel"][field] = size
                continue
            name = field if side == size else f"{field} x {side / size:g}"
            sides["fp8_block"][name] = side
            if way == "read":
                sides["group_size"][name] = side
            if space.kind == "heads" or (space.kind == "units" and way == "read" and writes_stream):
                sides["tensor_parallel"][field] = size
    return sides


def _divides_less(plan: Blueprint) -> Iterator[str]:
    """The uses for which the target's sizes divide by less than the source's."""
    for kind, (old, new) in divides(plan).items():
        name, least, _ = DIVISORS[kind]
        # heads of 12 are shared by 3 and 6 processes too
        if lost := [n for n in range(least, old + 1) if old % n == 0 and new % n]:
            odd = [field for field, size in _sides(plan.large)[kind].items() if size % old]
            yield (
                f"no {name} {', '.join(map(str, lost))}, which the source's sizes allow: make "
                f"{' and '.join(odd)} divide by {old}"
            )


def portability(plan: Blueprint) -> Iterator[str]:
    """What to know before the target generates, trains or is loaded elsewhere, as sentences."""
    small, large = plan.small, plan.large
    if getattr(small.config, "auto_map", None):
        yield (
            "config.json names code of its own (auto_map): growkern does not run it, and takes the "
            f"model for a {small.family.model_type} of transformers"
        )
    kind = plan.source.keys.get("model_type", small.config.model_type)
    if kind != small.config.model_type:
        own = small.config.model_type
        yield f"model_type {kind} is unknown: read as {own} by its class {small.class_name}"
    yield from _staying(plan)
    yield from _older_keys(plan)
    if count := len(small.second_layers):
        yield (
            f"layers that predict a second token grow in files ({count}), behind the last layer. "
            "vLLM and SGLang find them by the number of layers"
        )
    if unread := [f"{n} {getattr(small.text, n)} -> 0" for n in unread_in(small)]:
        yield (
            "layers that predict a second token are left out, as the model's class does not load "
            f"them: {', '.join(unread)} in config.json"
        )
    yield from _kinds(plan)
    yield from _heads(plan)
    yield from _tied(plan)
    if large.family.runtimes.get("renormalised") and large.family.dense:
        field = str(large.family.dense.renormalised)
        if getattr(large.text, field):
            yield (
                f"{field}=True: {_named(plan, 'renormalised')} wrong outputs, as they do not "
                f"divide the weights of chosen experts by their sum in a {large.family.model_type}"
            )
    if large.family.runtimes.get("eps") and small.norm_epsilon != large.norm_epsilon:
        why = f"{_named(plan, 'eps')} wrong outputs, as some norms do not read it"
        yield f"{large.family.norm.eps} changes: {why}"
    yield from _vocabulary(plan)
    if large.short_cache:
        field, layers = large.short_cache
        yield (
            f"transformers makes its cache of keys and values for {field}={layers} layers, too few "
            "for the decoder: the target gets use_cache=False, which makes generation slower; grow "
            f"{field} too to keep the cache"
        )
    # its grouped products read rows of whole 16 bytes
    if odd := sorted(size for size in expert_sides(large) if size % 8):
        yield (
            f"the experts' matrices have sides of {', '.join(map(str, odd))}: in 16 bits "
            "transformers runs them only with experts_implementation='eager', which is slow; "
            "multiples of 8 run fast"
        )
    yield from _divides_less(plan)
    if (lost := plan.source.history.lost) and not plan.options.is_baseline:
        yield forgotten(lost)


def _vocabulary(plan: Blueprint) -> Iterator[str]:
    old, new = plan.layout.sizes("vocab")
    if (tokens := len(token_ids(plan.source.directory))) > new > 0:
        yield (
            f"the tokenizer has {tokens} ids for a vocabulary of {new}, with which train and eval "
            f"refuse the model: give it the tokenizer that it was trained with, or grow "
            f"{plan.small.family.config_field('vocab')} to {tokens}"
        )
    if old != new:
        yield (
            f"if the tokenizer has fewer than {new} tokens, add tokens to it: some converters "
            "refuse a vocabulary that is larger than the tokenizer's"
        )
        yield (
            f"rows from {old} on are new. A token with a lower id takes a row of the source: if "
            "the source's tokenizer did not use this id, that row is untrained"
        )


def token_ids(directory: Path | None) -> dict[str, int]:
    """The ids of tokens in the tokenizer.json of a checkpoint; none if they are not known."""
    # it is refused where the tokenizer is used
    with contextlib.suppress(ValueError, OSError, KeyError, TypeError, AttributeError):
        if directory is not None:
            read = read_json(config_directory(directory) / TOKENIZER, MOST_BYTES, "tokenizer")
            words = read["model"]["vocab"]
            if isinstance(words, list):
                words = {word: number for number, (word, _) in enumerate(words)}
            return words | {token["content"]: token["id"] for token in read["added_tokens"]}
    return {}


def _staying(plan: Blueprint) -> Iterator[str]:
    """The sizes of attention and FFNs that stay, though the stream grows."""
    small, family, (old, new) = plan.small, plan.small.family, plan.layout.stream_sizes
    kinds = (s for s in family.spaces.values() if s.kind in ("heads", "units"))
    keys = {str(space.heads or space.size) for space in kinds} & {*family.growable} - {"stream"}
    stay = [k for k in family.config if k in keys and 0 < small.size(k) == plan.large.size(k)]
    if old == new or not stay:
        return
    names = {key: family.config_field(key) for key in stay}
    stream = family.config_field("stream")
    line = f"{stream} grows, and {', '.join(f'{names[k]}={small.size(k)}' for k in stay)} stay"
    options = " ".join(f"--{name.replace('_', '-')}" for name in names.values())
    line += f": to grow them, give {options}"
    steps = [old // math.gcd(old, small.size(key)) for key in family.query_heads if key in stay]
    if steps and new % (step := math.lcm(*steps)):
        near = [size for size in (new // step * step, new // step * step + step) if size > old]
        line += f"; heads follow where {stream} is {' or '.join(map(str, near))}"
    yield line


def _older_keys(plan: Blueprint) -> Iterator[str]:
    """Keys that describe layers; see `growkern.families.spec.OlderKey`."""
    family, keys = plan.small.family, plan.source.keys
    before = {**vars(plan.small.text), **inner(keys, family.under)}
    values = {}
    for key in family.older:
        if key.is_pattern and (old := before.get(key.field)) is not None:
            values[key.field] = old, key.value(vars(plan.large.text), old)
    changed = [f"{n} {old} -> {new}" for n, (old, new) in values.items() if new not in (old, None)]
    gone = [f"{name}={old}" for name, (old, new) in values.items() if new is None]
    if changed:
        yield f"config.json follows the new layers: {', '.join(changed)}"
    if gone:
        yield f"left out of config.json, as no value describes the new layers: {', '.join(gone)}"


def _kinds(plan: Blueprint) -> Iterator[str]:
    """Lists of the kinds of layers whose period is lost, and the nearest depths that keep it."""
    small, (key, *_) = plan.small, plan.small.family.stacks.values()
    period, keeps = repetition_of(small)
    for name in small.family.per_layer:
        if keeps(getattr(plan.large.text, name, None) or ()):
            continue
        line = f"{name} no longer repeats every {period} layers"
        if small.family.runtimes.get("layers"):
            wrong = f"{_named(plan, 'layers')} wrong outputs"
            line += f": {wrong}, as the kind of a layer follows from its number there"
        if small.size(key) >= period:
            depths = whole_depths(small, key, plan.large.size(key), period_of(small))
            line += f"; {small.family.config_field(key)}={depths} adds whole periods"
        yield line


def _tied(plan: Blueprint) -> Iterator[str]:
    """A body whose config ties a head that it lacks: the growth keeps the body's outputs alone."""
    family, (old, new) = plan.small.family.whole, plan.layout.stream_sizes
    heads = [name for name, other in family.classes.items() if "lm" in other.heads]
    is_body = not family.classes[plan.small.class_name].heads
    has_tied = any(space.kind == "tied_output" for space in family.spaces.values())
    if is_body and has_tied and heads and old != new and plan.large.config.tie_word_embeddings:
        yield (
            f"{plan.small.class_name} has no head, and what it computes is kept. {heads[0]} would "
            "read other logits from these files, as its head is tied to the embeddings: to grow "
            f'that one, write "architectures": ["{heads[0]}"] into the source\'s config.json'
        )


def _named(plan: Blueprint, fact: str) -> str:
    """The runtimes of a fact, as the beginning of a clause."""
    names = plan.small.family.runtimes.get(fact, ())
    return f"{' and '.join(names)} {'gives' if len(names) == 1 else 'give'}"


def _heads(plan: Blueprint) -> Iterator[str]:
    """Sizes of heads, and what scores are divided by, that runtimes compute otherwise."""
    small, large, portable = plan.small, plan.large, "portable=True (--portable)"
    if is_undeclared(large):
        yield (
            f"head_dim={large.head_dim()} is not {computed_head_dim(large)}: "
            f"{_named(plan, 'head_dim')} wrong outputs or an error, as "
            f"{large.family.model_type} has no head_dim there; {portable} keeps them equal"
        )
    if field := small.family.attention.field:
        old, new = (getattr(model.text, field) for model in (small, large))
        if old == small.head_dim() and new != large.head_dim():
            yield (
                f"{field}={new} is not head_dim={large.head_dim()}: {_named(plan, 'scale')} wrong "
                f"outputs, as it takes head_dim; {portable} makes them equal, which rounds weights"
            )
