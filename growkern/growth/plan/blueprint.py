"""The blueprint of a growth: from which source tensors each target tensor is built.

It is made from configs and file headers, without reading weights. `growth.plan.tensors` builds
tensors from it.
"""

from __future__ import annotations

import math
import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import groupby
from typing import Any

import torch

from growkern.families.family import growable_fields
from growkern.families.model import ModelSpec
from growkern.families.spec import TensorSpec
from growkern.growth.models import Initial, initial_tensors
from growkern.growth.options import GrowthOptions
from growkern.growth.source.source import Source
from growkern.growth.space.layout import Layer, Layout
from growkern.growth.space.rules import are_asleep

# names for tensors that no tensor of the source becomes. Without them a layer computes x (identity)
# or 0 (zero); a random one is initialised as its class does it
RANDOM = "random"
MADE = ("identity", "zero", RANDOM)
# the pieces under way belong to few tensors; a map over 30 000 entries takes 0.7 MB
MAX_ENTRIES = 32

# of a tensor: one slice per axis
Part = Sequence[slice]


@dataclass(frozen=True)
class Task:
    """How one target tensor is built.

    Attributes:
        tensor: the tensor: its name, axes and layer in the target.
        source: name of the source tensor it comes from. If the source has no such tensor:
            "identity" or "zero", which computes the same as the source without it. "random" in a
            layer that begins untrained.
        upper: name of the same tensor in the next source layer, if AKI mixes it in.
        source_layer: the layer of `source`, or None.
        into: name of the source norm that the written vector enters, if the table names one.
        factor: name of the source tensor that multiplies the written vector, if there is one.
        identity: its role in an identity block, or None. "zero": it becomes 0. "unit" and
            "affine": norms around an inserted post-norm block, split so that the block repeats
            its input.
    """

    tensor: TensorSpec
    shape: tuple[int, ...]
    source: str
    upper: str | None
    source_layer: Layer
    into: str | None
    identity: str | None
    factor: str | None = None

    @property
    def name(self) -> str:
        return self.tensor.name

    @property
    def is_made(self) -> bool:
        """True if no tensor of the source becomes this one."""
        return self.source in MADE

    @property
    def matrix(self) -> Task:
        """The same task for the tensor as a matrix: axes that never grow lie in one axis."""
        groups = self._groups()
        if groups is None:
            return self
        sizes = [math.prod(self.shape[i] for i in group) for group in groups]
        axes = [
            next((self.tensor.axes[i] for i in group if ":" in self.tensor.axes[i]), str(size))
            for group, size in zip(groups, sizes, strict=True)
        ]
        return replace(self, tensor=replace(self.tensor, axes=tuple(axes)), shape=tuple(sizes))

    def ranges(self, part: Part) -> list[range]:
        """The entries of a part of the tensor, per axis."""
        return [range(*s.indices(n)) for s, n in zip(part, self.shape, strict=True)]

    def part_of_matrix(self, part: Part) -> tuple[slice, ...]:
        """The place of a part of the tensor in `matrix`."""
        result = []
        for group in self._groups() or ():
            sizes = [self.shape[i] for i in group]
            inside = torch.arange(math.prod(sizes)).view(sizes)[tuple(part[i] for i in group)]
            entries = inside.flatten()
            result.append(slice(entries[0], entries[-1] + 1) if len(entries) else slice(0, 0))
        return tuple(result)

    def _groups(self) -> list[list[int]] | None:
        """The axes of the tensor that make each axis of `matrix`; None if it has no other axes."""
        is_space = [":" in axis for axis in self.tensor.axes]
        if len(is_space) < 3 or sum(is_space) != 1:
            return None
        first, *others = (list(g) for _, g in groupby(range(len(is_space)), is_space.__getitem__))
        return [first, [i for other in others for i in other]]


class _Entry:
    def __init__(self) -> None:
        self.lock, self.is_made, self.value = threading.Lock(), False, None


class SharedCache:
    """Values by key, for several threads; the least recently used ones are dropped.

    A pickled or deep copy starts empty: locks cannot be copied, and values can be made again.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._entries: OrderedDict[Hashable, _Entry] = OrderedDict()

    def get(self, key: Hashable, make: Callable[[], Any]) -> Any:
        """The value of this key, made by `make` on first use; other threads wait for it."""
        with self._lock:
            entry = self._entries.setdefault(key, _Entry())
            self._entries.move_to_end(key)
            if len(self._entries) > MAX_ENTRIES:
                self._entries.popitem(last=False)
        with entry.lock:
            if not entry.is_made:
                entry.value, entry.is_made = make(), True
            return entry.value

    def __reduce__(self) -> tuple[type[SharedCache], tuple[()]]:
        return SharedCache, ()


@dataclass(frozen=True)
class Blueprint:
    """How every target tensor is built. Functions that build tensors take a `Blueprint`.

    `growkern.growth.plan.growth_plan.GrowthPlan` adds findings, cost, advice and tables.

    Attributes:
        layer_maps: per stack, the source layer of every target layer.
        inserted: (stack, target layer) of the identity blocks, or of layers that begin untrained.
        dtype: of the grown weights.
    """

    source: Source
    target_config: Any
    options: GrowthOptions
    layer_maps: Mapping[str, tuple[int, ...]]
    inserted: frozenset[tuple[str, int]]
    dtype: torch.dtype

    @property
    def small(self) -> ModelSpec:
        """The source's sizes, tensors and shapes."""
        return self.source.spec

    @cached_property
    def large(self) -> ModelSpec:
        """The target's sizes, tensors and shapes."""
        return self.small.with_config(self.target_config)

    @cached_property
    def layout(self) -> Layout:
        """The activation spaces of source and target."""
        return Layout(self.small, self.large, self.options, (self.source.dtype, self.dtype))

    @cached_property
    def tasks(self) -> tuple[Task, ...]:
        """One per target tensor, in the order of the family's table; tied duplicates have none."""
        small, large = self.small, self.large
        sources = {(t.template, t.layer): t for t in small.tensors}
        mixtures = [s for s in small.family.mixtures if are_asleep(s, small, large.size)]
        # only one copy of an expert is awake, so its output is whole
        whole = {f"read:{space.name}": f"write:{space.name}" for space in mixtures}
        axes = (tuple(whole.get(axis, axis) for axis in t.axes) for t in large.own_tensors)
        own = zip(large.own_tensors, axes, strict=True)
        return tuple(_task(self, replace(t, axes=a), sources) for t, a in own)

    @cached_property
    def initial_tensors(self) -> dict[str, Initial]:
        """How the target's class initialises those of its tensors that begin untrained."""
        is_baseline = self.options.is_baseline
        needed = {task.name for task in self.tasks if is_baseline or task.source == RANDOM}
        return initial_tensors(self.large, needed)

    @cached_property
    def cache(self) -> SharedCache:
        """A cache that the pieces of a tensor share while they are built."""
        return SharedCache()

    @property
    def narrowed_tensors(self) -> tuple[str, ...]:
        """Source tensors with a dtype whose numbers the target's dtype cannot all represent."""
        dtypes, own = self.source.dtypes, {t.name: t for t in self.small.tensors}
        new = {name: dtype_of(own[name], self.dtype) for name in dtypes}
        return tuple(n for n, d in dtypes.items() if torch.promote_types(d, new[n]) != new[n])

    def dtype_of(self, task: Task) -> torch.dtype:
        """The dtype of one target tensor."""
        return dtype_of(task.tensor, self.dtype)

    @property
    def dtypes(self) -> dict[str, torch.dtype]:
        """Name -> dtype of every target tensor."""
        return {task.name: self.dtype_of(task) for task in self.tasks}

    @property
    def may_overflow(self) -> bool:
        """True if finite weights of the source may become infinite in the target."""
        # the share of a copy may be larger than the weight
        amplitude = self.options.routing if self.options.symmetry == "routing" else 0.0
        amplifies = self.options.symmetry == "split" or amplitude > 1
        return bool(self.narrowed_tensors) or amplifies or self.dtype == torch.float16

    def parameters(self, which: str = "target", *, active: bool = False) -> int:
        """Parameters of the "source" or "target", or those that a token uses. Ties count once."""
        model = self._model(which)
        own = {task.tensor.template for task in self.tasks}
        used = model.used_entries if active else lambda t: math.prod(model.shapes[t.name])
        return sum(used(t) for t in model.tensors if t.template in own)

    def flops_per_token(self, which: str = "target") -> int:
        """Training FLOPs per token: 6 per weight of a matrix or convolution that the token uses.

        Embeddings are only looked up, and attention is not counted. Layers that keep a state count
        as in `growkern.train.model.flops`.
        """
        model = self._model(which)
        used, layers = 0, {t.layer for t in model.tensors if t.layer is not None}
        for tensor in model.tensors:
            is_convolution = tensor.layer is not None and len(tensor.axes) == 3
            if is_convolution or any(axis.startswith("read:") for axis in tensor.axes):
                used += model.used_entries(tensor)
        products = (model.family.state_products(model.config, layer) for layer in layers)
        return 6 * (used + sum(p or 0 for p in products))

    def activations_per_token(self) -> int:
        """Numbers that training the target keeps per token, at least: what its layers' matrices
        read and write. Norms, dropout and attention matrices may add to it."""
        large, total, seen = self.large, 0, set()
        for tensor in large.own_tensors:
            shape = large.shapes[tensor.name]
            for axis, size in zip(tensor.axes, shape, strict=True):
                if not axis.startswith("read:") or tensor.layer is None:
                    continue
                used = large.used_entries(tensor)
                # every expert that is chosen keeps its own input
                inputs = used // math.prod(shape[1:]) if len(shape) == 3 else 1
                total += used // size
                # matrices that read the same activations keep them once
                if (key := (tensor.stack, tensor.layer, axis)) not in seen:
                    seen.add(key)
                    total += inputs * size
        return total

    def _model(self, which: str) -> ModelSpec:
        return self.large if which == "target" else self.small

    def size_changes(self) -> dict[str, tuple[int, int]]:
        """Config field -> (source, target), for every size that may grow."""
        fields = growable_fields(self.small.family)
        return {field: self.layout.sizes(key) for field, key in fields.items()}

    def maps(self) -> dict[str, dict[str, int]]:
        """Per space in use: its sizes, fewest and most copies of an entry, extra entries."""
        axes = {axis.partition(":")[2] for task in self.tasks for axis in task.tensor.axes}
        used = {name for names in axes for name in names.split("|")}
        result = {}
        for name in (name for name in self.small.family.spaces if name in used):
            space = self.layout.space(name, 0)
            count = space.write_index[~space.is_extra].bincount(minlength=space.source)
            result[name] = {
                "source": space.source,
                "target": space.target,
                "fewest": int(count.min()),
                "most": int(count.max()),
                "extra": int(space.is_extra.sum()),
            }
        return result


def dtype_of(tensor: TensorSpec, dtype: torch.dtype) -> torch.dtype:
    """The dtype of one tensor of a model in this dtype."""
    return torch.float32 if tensor.row.keep and dtype.itemsize == 2 else dtype


def _task(blueprint: Blueprint, tensor: TensorSpec, sources: dict[Any, TensorSpec]) -> Task:
    if blueprint.options.depth == "random" and (tensor.stack, tensor.layer) in blueprint.inserted:
        shape = blueprint.large.shapes[tensor.name]
        return Task(tensor, shape, RANDOM, upper=None, source_layer=None, into=None, identity=None)
    layer = None if tensor.layer is None else blueprint.layer_maps[tensor.stack][tensor.layer]
    source = sources.get((tensor.template, layer))
    upper = None
    # AKI takes whole heads and units together with their norms, but not the norms of the stream
    spaces = blueprint.large.family.spaces
    moves = tensor.norm is None or spaces[tensor.norm[1]].kind in ("heads", "units")
    if blueprint.options.method == "aki" and layer is not None and moves:
        # the last source layer has no next one and is expanded as in FPI
        above = sources.get((tensor.template, layer + 1))
        upper = above.name if above else None
    made = str(tensor.fallback)
    if made == RANDOM and blueprint.options.router == "zero":
        made = "zero"
    return Task(
        tensor,
        blueprint.large.shapes[tensor.name],
        source=made if source is None else source.name,
        upper=upper,
        source_layer=f"{tensor.stack}.{layer}" if tensor.stack and layer is not None else layer,
        into=tensor.into if source is None else source.into,
        identity=_identity_role(blueprint, tensor),
        factor=tensor.factor if source is None else source.factor,
    )


def _identity_role(blueprint: Blueprint, tensor: TensorSpec) -> str | None:
    """`Task.identity` of a tensor."""
    family, layer = blueprint.large.family, tensor.layer
    if layer is None or blueprint.options.depth == "random":
        return None
    is_inserted = (tensor.stack, layer) in blueprint.inserted
    if tensor.is_one_of(family.depth.zero):
        return "zero" if is_inserted else None
    if tensor.is_one_of(family.depth.inner_norms) and is_inserted:
        return "unit"
    if family.depth.outer_norm is not None and tensor.is_one_of((family.depth.outer_norm,)):
        if (tensor.stack, layer + 1) in blueprint.inserted:
            return "unit"
        return "affine" if is_inserted else None
    return None


def unit_gain(plan: Blueprint, task: Task) -> float:
    """The weight of a norm around inserted blocks, all entries of which are equal.

    Only the first norm of a chain normalises, to the size K = `identity_gain`. The norms of
    inserted blocks must return their input unchanged: sqrt(K^2 + eps) does, up to eps.
    """
    is_first = (task.tensor.stack, task.tensor.layer) not in plan.inserted
    return plan.options.identity_gain if is_first else _kept_size(plan)


def affine_gain(plan: Blueprint, task: Task) -> float:
    """The factor in the last norm of inserted blocks that restores their input's size; else 1."""
    if task.identity != "affine" or task.tensor.is_bias:
        return 1.0
    return _kept_size(plan) / plan.options.identity_gain


def _kept_size(plan: Blueprint) -> float:
    return math.sqrt(plan.options.identity_gain**2 + plan.small.norm_epsilon)
