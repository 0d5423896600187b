"""The blueprint of a growth: which source tensors every target tensor is made of.

Reads configs and file headers only, no weights. `growkern.growth.tensors` builds from it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch

from growkern.families.spec import TensorSpec
from growkern.growth.options import GrowthOptions
from growkern.growth.plan.cache import Kept
from growkern.growth.plan.initialisation import Initial, initial_tensors
from growkern.growth.plan.target import growable_fields
from growkern.growth.source.source import Source
from growkern.growth.space.layout import Layer, Layout

# what a source computes where it lacks a tensor: x and 0
MADE = ("identity", "zero")


@dataclass(frozen=True)
class Task:
    """One target tensor.

    Attributes:
        tensor: its name, axes and layer in the target.
        shape: its shape.
        source: the source tensor it comes from; "identity" or "zero" where the source has none
            and computes what that would.
        upper: the same tensor of the next source layer, where AKI mixes it in.
        source_layer: layer of `source`, or None.
        into: the source norm that the written vector enters, where the table names it.
        identity: its part in an identity block: "zero", or "unit" / "affine" for the norms that
            are taken apart so that an inserted post-norm block repeats its input.
    """

    tensor: TensorSpec
    shape: tuple[int, ...]
    source: str
    upper: str | None
    source_layer: Layer
    into: str | None
    identity: str | None

    @property
    def name(self) -> str:
        return self.tensor.name

    @property
    def is_made(self) -> bool:
        """The source has no such tensor."""
        return self.source in MADE


@dataclass(frozen=True)
class Blueprint:
    """What every target tensor is made of: the part of a plan that growth is built from.

    `growkern.growth.plan.growth_plan.GrowthPlan` adds what can be said about it: findings, cost,
    advice and tables. Functions that build tensors take a `Blueprint`.

    Attributes:
        source: the opened source.
        target_config: the target's Hugging Face config.
        options: method, depth, scheme, symmetry, seed.
        layer_maps: per stack, the source layer of every target layer.
        inserted: (stack, target layer) of the identity blocks.
        dtype: of the grown weights.
    """

    source: Source
    target_config: Any
    options: GrowthOptions
    layer_maps: Mapping[str, tuple[int, ...]]
    inserted: frozenset[tuple[str, int]]
    dtype: torch.dtype

    @cached_property
    def layout(self) -> Layout:
        source = self.source
        return Layout(
            source.family,
            source.config,
            self.target_config,
            self.options,
            tied=source.family.has_tied_head(source.config, source.class_name),
            dtypes=(source.dtype, self.dtype),
        )

    @cached_property
    def tasks(self) -> tuple[Task, ...]:
        """One task per target tensor; tied duplicates have none."""
        return tuple(make_tasks(self))

    @cached_property
    def initial_tensors(self) -> dict[str, Initial]:
        """How the target's class starts each of its tensors."""
        return initial_tensors(self.source.class_name, self.target_config)

    @cached_property
    def kept(self) -> Kept:
        """What the pieces of a tensor share while it is built."""
        return Kept()

    @property
    def narrowed(self) -> tuple[str, ...]:
        """Source tensors that hold numbers which the target's dtype has not."""
        dtypes = self.source.dtypes.items()
        return tuple(n for n, d in dtypes if torch.promote_types(d, self.dtype) != self.dtype)

    def parameters(self, which: str = "target") -> int:
        """Parameters of the "source" or "target", shared tensors counted once."""
        config = self.target_config if which == "target" else self.source.config
        shapes = self.source.family.shapes(config, self.source.class_name)
        own = {task.tensor.template for task in self.tasks}
        tensors = self.source.family.tensors(config, self.source.class_name)
        return sum(torch.Size(shapes[t.name]).numel() for t in tensors if t.template in own)

    def flops_per_token(self, which: str = "target") -> int:
        """Training FLOPs per token, 6 per weight that multiplies a vector (embeddings look up)."""
        config = self.target_config if which == "target" else self.source.config
        tensors = self.source.family.tensors(config, self.source.class_name)
        shapes = self.source.family.shapes(config, self.source.class_name)
        matrices = [t for t in tensors if any(axis.startswith("read:") for axis in t.axes)]
        return 6 * sum(torch.Size(shapes[t.name]).numel() for t in matrices)

    def size_changes(self) -> dict[str, tuple[int, int]]:
        """Config field -> (source, target) for every size that may grow."""
        family = self.source.family
        return {
            field: (family.size(self.source.config, key), family.size(self.target_config, key))
            for field, key in growable_fields(family).items()
        }

    def maps(self) -> dict[str, dict[str, int]]:
        """Per space in use: sizes, fewest and most copies of a coordinate, extra coordinates."""
        axes = {axis.partition(":")[2] for task in self.tasks for axis in task.tensor.axes}
        used = {name for names in axes for name in names.split("|")}
        found = {}
        for name in (name for name in self.source.family.spaces if name in used):
            space = self.layout.space(name, 0)
            count = space.write_index[~space.is_extra].bincount(minlength=space.source)
            found[name] = {
                "source": space.source,
                "target": space.target,
                "fewest": int(count.min()),
                "most": int(count.max()),
                "extra": int(space.is_extra.sum()),
            }
        return found


def make_tasks(blueprint: Blueprint) -> Iterator[Task]:
    """The tasks of a blueprint, in the order of the family's table; tied duplicates have none."""
    family, class_name = blueprint.source.family, blueprint.source.class_name
    shares = family.shares(blueprint.target_config)
    tensors = family.tensors(blueprint.source.config, class_name)
    sources = {(t.template, t.layer): t for t in tensors}
    for tensor in family.tensors(blueprint.target_config, class_name):
        if not (shares and tensor.tied):
            yield _task(blueprint, tensor, sources)


def _task(blueprint: Blueprint, tensor: TensorSpec, sources: dict[Any, TensorSpec]) -> Task:
    family = blueprint.source.family
    shape = tuple(family.axis_size(blueprint.target_config, axis) for axis in tensor.axes)
    layer = None if tensor.layer is None else blueprint.layer_maps[tensor.stack][tensor.layer]
    source = sources.get((tensor.template, layer))
    upper = None
    # a norm over whole heads goes with them, any other with the stream
    moves = tensor.norm is None or family.spaces[tensor.norm[1]].kind == "heads"
    if blueprint.options.method == "aki" and layer is not None and moves:
        # the last source layer has no next one: it is expanded as in FPI
        above = sources.get((tensor.template, layer + 1))
        upper = above.name if above else None
    return Task(
        tensor,
        shape,
        source=str(tensor.fallback) if source is None else source.name,
        upper=upper,
        source_layer=f"{tensor.stack}.{layer}" if tensor.stack and layer is not None else layer,
        into=tensor.into if source is None else source.into,
        identity=_identity_role(blueprint, tensor),
    )


def _identity_role(blueprint: Blueprint, tensor: TensorSpec) -> str | None:
    family, layer = blueprint.source.family, tensor.layer
    if layer is None:
        return None
    is_inserted = (tensor.stack, layer) in blueprint.inserted
    if tensor.is_one_of(family.zero_in_identity):
        return "zero" if is_inserted else None
    if tensor.is_one_of(family.inner_norms) and is_inserted:
        return "unit"
    if family.outer_norm is not None and tensor.is_one_of((family.outer_norm,)):
        if (tensor.stack, layer + 1) in blueprint.inserted:
            return "unit"
        return "affine" if is_inserted else None
    return None
