"""Finds sizes that fit together: other numbers of heads if none were given, and near sizes.

Models constrain their sizes in different ways. Some configs want a hidden size that is a multiple
of the heads, and grouped queries need query heads that are a multiple of the key heads and keep
every head of the source. So sizes are tried, cheapest first, until the config class takes them.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from itertools import islice
from typing import Any, TypeVar

import torch

from growkern.errors import GrowthError, UnfitError
from growkern.families import ModelSpec
from growkern.growth.models import computed_tensors
from growkern.growth.plan.blueprint import COMPUTED, Blueprint
from growkern.growth.plan.bounds import values_of
from growkern.growth.plan.target import (
    asked_sizes,
    completed,
    finish_target,
    given_target,
    sized_target,
)

Made = TypeVar("Made")
# by the names of the family's table
Sizes = dict[str, int]
# how far from a size that does not fit a near one is looked for, and how many targets are tried
REACH = 256
MOST_TRIED = 150
# never choose more than this many times the proportional number of heads
MOST_HEADS = 2


def made_to_fit(
    small: ModelSpec, dims: dict[str, int], target_config: Any, make: Callable[[ModelSpec], Made]
) -> Made:
    """Make something from the first target whose sizes fit together.

    `make` takes a target that `finish_target` has not seen yet, and may raise an UnfitError. If no
    target fits, the error is that of the sizes which follow from `dims` in proportion, with the
    nearest sizes that fit, each of which helps alone.
    """
    if target_config is not None:
        return make(given_target(small, dims, target_config))
    asked = asked_sizes(small, dims)
    first: UnfitError | None = None
    for sizes in _completions(small, asked):
        try:
            return make(_checked(small, asked, sizes))
        except UnfitError as error:
            first = first or error
    raise GrowthError(f"{first}{_nearest(small, asked, make)}") from first


def _checked(small: ModelSpec, asked: Sizes, sizes: Sizes) -> ModelSpec:
    """The target of these sizes, checked by its config class without maps and layers."""
    large = sized_target(small, asked, sizes)
    old, new = (m.size(next(iter(m.family.stacks.values()))) for m in (small, large))
    # some classes want a last layer of one kind
    layers = (*[0] * (new - 1), old - 1) if old else (0,) * new
    finish_target(small, large, layers, torch.float32)
    return large


def _completions(small: ModelSpec, asked: Sizes) -> Iterator[Sizes]:
    """All sizes, in the order in which they are tried: in proportion, then other heads."""
    sizes = completed(small, asked)
    yield sizes
    family = small.family
    if family.forces_head_dim or len(family.query_heads) != 1:
        # the number of heads follows from the hidden size
        return
    (heads,) = family.query_heads
    old, stream = small.size(heads), sizes.get("stream", small.size("stream"))
    near = old * stream / small.size("stream")
    if "kv_heads" in asked and "kv_heads" in family.config:
        near = max(near, asked["kv_heads"] * old / small.size("kv_heads"))
    counts = range(old, max(old, int(MOST_HEADS * near)) + 1)
    tried = [asked[heads]] if heads in asked else sorted(counts, key=lambda n: abs(n - near))
    for count in tried:
        kv_heads = _key_heads(small, asked, count)
        if kv_heads is None:
            yield {**sizes, heads: count}
        elif kv_heads:
            yield {**sizes, heads: count, "kv_heads": kv_heads}


def _key_heads(small: ModelSpec, asked: Sizes, count: int) -> int | None:
    """Key heads for a number of query heads; 0 if none fit, None if the family has no such size.

    Groups of the source's size come first, then as few key heads as keep every query head.
    """
    if "kv_heads" not in small.family.config:
        return None
    old, kv_old = small.size("q_heads"), small.size("kv_heads")
    group = old // kv_old
    some = [asked["kv_heads"]] if "kv_heads" in asked else range(kv_old, count + 1)
    fit = [
        # a source group needs as many target groups as hold all of its query heads
        kv
        for kv in some
        if count % kv == 0 and kv >= kv_old * -(-group // (count // kv))
    ]
    return next((kv for kv in fit if count == kv * group), fit[0] if fit else 0)


def _nearest(small: ModelSpec, asked: Sizes, make: Callable[[ModelSpec], object]) -> str:
    """The end of an error message: for every given size the nearest that fit with the others."""
    hints = []
    # what fits these does not depend on the other sizes, and the error says it
    mixtures = small.family.mixtures
    experts = {key for space in mixtures for key in (space.size, space.chosen, *space.groups)}
    for key, value in asked.items():
        if key in (*small.family.stacks.values(), *experts, "vocab"):
            continue
        below = range(value - 1, max(small.size(key), value - REACH) - 1, -1)
        near = []
        for side in (below, range(value + 1, value + REACH)):
            changed = ({**asked, key: size} for size in side)
            growing = (c for c in changed if any(c[name] != small.size(name) for name in c))
            tries = ((c, sizes) for c in growing for sizes in _completions(small, c))
            for fit, sizes in islice(tries, MOST_TRIED):
                with contextlib.suppress(GrowthError):
                    make(_checked(small, fit, sizes))
                    near.append(str(fit[key]))
                    break
        if near:
            hints.append(f"{small.family.config_field(key)}={' or '.join(near)}")
    return f"; nearest sizes that fit: {', or '.join(hints)}" if hints else ""


def check_structure(plan: Blueprint) -> None:
    """Refuse a target that lacks a tensor of the source, or has one that comes from nowhere.

    ELECTRA, for example, projects its embeddings only where their size differs from the hidden
    size, so a larger hidden size may lose the projection.
    """
    if plan.options.is_baseline:
        return
    _check_scaled(plan)
    used = {name for task in plan.tasks for name in (task.source, task.upper)}
    for tensor in plan.small.own_tensors:
        if tensor.name not in used and not tensor.row.computed:
            raise UnfitError(
                f"a {plan.large.class_name} of these sizes has no {tensor.name}: it exists only "
                f"with {tensor.row.when}, and the source's would be lost"
            )
    _check_computed(plan)
    own = {tensor.name for tensor in plan.small.own_tensors}
    for task in plan.tasks:
        if not task.is_made and task.source not in own:
            raise UnfitError(
                f"a {plan.large.class_name} of these sizes has a {task.name}, the source has none: "
                f"it exists only with {task.tensor.row.when}"
            )


def _check_computed(plan: Blueprint) -> None:
    """Refuse a source with other values than its config gives, where the target's are computed."""
    names = [t.name for t in plan.tasks if t.source == COMPUTED and t.name in plan.source.dtypes]
    truth = computed_tensors(plan.small) if names else {}
    for name in names:
        # dtypes that round alike give heads the same angles
        own, values = truth[name].to(plan.dtype), values_of(plan, name)
        if values is not None and not torch.equal(own, values.cpu().to(plan.dtype)):
            raise UnfitError(
                f"{name} would be computed anew for heads of another size, and the source's has "
                "other values than its config gives: keep head_dim"
            )


def _check_scaled(plan: Blueprint) -> None:
    """Refuse sizes that need a factor which the model cannot hold, or must not have."""
    layout, family = plan.layout, plan.small.family
    clip = family.attention.clip
    limit = None if clip is None else getattr(plan.small.text, clip, None)
    heads = [(m.head_dim(name) for m in (plan.small, plan.large)) for name in family.query_heads]
    if limit is not None and any(old != new for old, new in heads):
        raise UnfitError(
            f"head_dim cannot grow: it scales the queries, and {clip}={limit} clips them"
        )
    old, new = layout.stream_sizes
    if family.norm.has_weight or old == new:
        return
    field = family.config_field("stream")
    why = f"{field} {old} -> {new}: the norms of {family.model_type} have no weight that can scale"
    if layout.is_padded:
        raise GrowthError(f"{why} entries that are not copied: leave stream out")
    if any(layout.is_dual(name) for name in family.spaces):
        raise GrowthError(f"{why} the input of a tied head: untie it first, or keep {field}")
    if layout.is_extended or new % old:
        raise UnfitError(f"{why} extra entries: give a multiple of {old}")
