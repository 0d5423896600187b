"""Builds the activation spaces of one growth, by name and layer.

A family's table names the spaces (`growkern.families.spec.SpaceSpec`). This file decides how each
of them is embedded for the given source, target and options. The kinds of embeddings themselves
are in `growkern.growth.space.spaces`. A new kind needs a method of its name.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from growkern.families import ModelSpec, Row, SpaceSpec, holds, parse_scale
from growkern.growth.options import GrowthOptions
from growkern.growth.space.spaces import (
    CARRY_UNITS,
    LINEAR_PAIR_ACTIVATIONS,
    Space,
    balanced,
    copies,
    cyclic,
    direct_sum,
    extended,
    generator,
    grouped_heads,
    normed,
    outer_product,
    rank_in_group,
    signed_split,
    tied_output,
    uniform,
    weighted,
    with_carry_units,
    within_head,
    zero_padded,
)
from growkern.growth.space.upcycling import Upcycling, is_output
from growkern.growth.space.ways import keep_choice, sleeping_map

# a layer of the source: its number, or "stack.number" in models with several stacks
Layer = int | str | None


class Layout:
    """The spaces of one growth, each built on first use.

    With `scheme="paper"` every layer draws its own head and FFN maps, unless a tensor serves
    several layers (`ModelSpec.arranged_once`). Otherwise all layers share one space per name.

    Args:
        dtypes: dtype of the source's weights and of the target's weights.
        layers: per size that counts layers, the source layer of every target layer, and which
            layers were inserted.
        upcycling: how a mixture came about, if the source is a dense model.
    """

    def __init__(
        self,
        small: ModelSpec,
        large: ModelSpec,
        options: GrowthOptions,
        dtypes: tuple[torch.dtype, torch.dtype],
        layers: Mapping[str, tuple[Sequence[int], Set[int]]],
        upcycling: Upcycling | None = None,
    ) -> None:
        self.small, self.large, self.family = small, large, small.family
        self.options, self.dtypes, self.layers = options, dtypes, layers
        self.upcycling = upcycling
        self._spaces: dict[tuple[str, Layer], Space] = {}

    def space(self, name: str, layer: Layer = None) -> Space:
        """The space of this name in a source layer."""
        key = self.key(name, layer)
        if key not in self._spaces:
            spec = self.family.spaces[name]
            # the methods below are named after the kinds
            build: Callable[[SpaceSpec, Layer], Space] = getattr(self, f"_{spec.kind}")
            self._spaces[key] = build(spec, key[1])
        return self._spaces[key]

    def key(self, name: str, layer: Layer) -> tuple[str, Layer]:
        """Name and layer that identify a space; the layer is None if all layers share it."""
        space = self.family.spaces[name]
        is_shared = (space.heads or space.size) in self.small.arranged_once
        return name, layer if self.options.scheme == "paper" and not is_shared else None

    @property
    def turning(self) -> tuple[int, int]:
        """R of `growkern.families.spec.Attention`, of source and target."""
        return self.small.turning, self.large.turning

    @cached_property
    def kappa(self) -> float:
        """kappa of (3) in `growkern.growth.space.spaces`, of norms that read the config's eps."""
        old, new = self.small.norm_epsilon, self.large.norm_epsilon
        return 1.0 if old == new else math.sqrt(new / old)

    # ---- what kind of stream

    def sizes(self, key: str) -> tuple[int, int]:
        """One size of the family table's [config], of source and target; 0 if it has none."""
        if key not in self.family.config:
            return 0, 0
        return self.small.size(key), self.large.size(key)

    @property
    def stream_sizes(self) -> tuple[int, int]:
        """Hidden size of source and target."""
        return self.sizes("stream")

    @property
    def is_even(self) -> bool:
        """True if the target's hidden size is a multiple of the source's."""
        source, target = self.stream_sizes
        return target % source == 0

    @property
    def is_extended(self) -> bool:
        """True if the stream gets extra coordinates.

        The option asks for them, and so does a norm that centres at an uneven width.
        """
        if self.options.scheme == "paper":
            return False
        return self.is_padded or (self.family.norm.centres and not self.is_even)

    @property
    def is_padded(self) -> bool:
        """True if the stream has every entry of the source once, and extra coordinates."""
        source, target = self.stream_sizes
        return self.options.stream == "padded" and source != target

    @property
    def is_carried(self) -> bool:
        """True if extra coordinates carry the mean through norms that output the stream."""
        return self.uses_carry and not self.no_carry_reason

    @property
    def has_carry_units(self) -> bool:
        """True if four FFN units carry the mean through the FFN, to the post-norm behind it."""
        return self.is_carried and self.family.norm.placement == "post"

    @property
    def uses_carry(self) -> bool:
        """True if the option `carry` has an effect."""
        return self.is_extended and self.family.carries

    @property
    def no_carry_reason(self) -> str | None:
        """Why the mean cannot be carried through norms, for the findings; None if it can."""
        if self.options.carry == 0:
            return "carry=0"
        if not self.family.carries:
            return f"no norm of {self.family.model_type} can carry the mean"
        if self.family.norm.placement != "post":
            return None
        activation = getattr(self.small.text, str(self.family.activation), None)
        ffn = str(self.family.ffn)
        old, new = self.sizes(ffn)
        if new - old < CARRY_UNITS:
            field = self.family.config_field(ffn)
            return f"{field} must grow by at least {CARRY_UNITS} (it grows by {new - old})"
        if activation not in LINEAR_PAIR_ACTIVATIONS:
            return f"two units with the activation {activation!r} cannot pass a number through"
        return None

    # ---- building

    def _index(self, spec: SpaceSpec, layer: Layer, source: int, target: int) -> Tensor:
        """The index map that the options ask for, (target,) int64."""
        if self.options.scheme == "paper":
            rng = generator(self.options.seed, "map", spec.kind, spec.heads or spec.size, layer)
            return uniform(source, target, rng)
        if self.options.maps == "balanced" and spec.kind != "heads":
            # the spaces before and after an inner norm have one map
            rng = generator(self.options.seed, "map", spec.size or spec.name, layer)
            return balanced(source, target, rng)
        return cyclic(source, target)

    def _split(
        self, name: str, layer: Layer, index: Tensor, where: Tensor | None = None
    ) -> Tensor | None:
        """Deviations of the copies' shares, as `signed_split` makes them; None without "split"."""
        if self.options.symmetry != "split" or not len(index):
            return None
        return signed_split(index, generator(self.options.seed, "split", name, layer), where)

    def _stream(self, spec: SpaceSpec, _layer: Layer) -> Space:
        source, target = self.stream_sizes
        if self.is_extended:
            how: Any = {"keeps_mean": self.family.norm.centres}
            count = 1 if self.is_padded else target // source
            return extended(source, target, count, **how).times(self.kappa)
        # one map for the whole model, as every layer adds to the same residual stream
        index = self._index(spec, None, source, target)
        split = self._split(spec.name, None, index)
        keeps_square = not self.family.norm.centres and self.options.scheme == "exact"
        return (weighted if keeps_square else copies)(index, source, split).times(self.kappa)

    def _normed(self, spec: SpaceSpec, _layer: Layer) -> Space:
        stream = self.space(str(spec.of))
        return normed(stream, self._split(spec.name, None, stream.read_index, ~stream.is_extra))

    def is_dual(self, name: str) -> bool:
        """True if a tied head reads this space, so that shares are written there, not copies."""
        spec = self.family.spaces[name]
        return spec.kind == "tied_output" and (self.small.has_tied_head or spec.untied is None)

    def _tied_output(self, spec: SpaceSpec, layer: Layer) -> Space:
        if self.is_dual(spec.name):
            return tied_output(self.space(str(spec.of)), self.scale(spec))
        # layers that predict a second token read it by norms of their own, with the same eps: its
        # mean square must stay
        return self.space(str(spec.of if self.small.second else spec.untied), layer)

    def scale(self, row: SpaceSpec | Row) -> float:
        """The factor that cancels a model's own factor, a size or its root, which grows.

        Some models round that root to the dtype of their weights, so this rounds it too. The
        result is 1 if the table's row names no such factor.
        """
        if self.upcycling and isinstance(row, Row) and is_output(row):
            return self.upcycling.output_scale(self.large, row)
        if self.family.is_space(row.scale):
            return self.space(str(row.scale)).kappa
        if row.scale is None or not holds(row.scale_when, self.small.fields):
            return 1.0
        power, is_rounded, size = parse_scale(row.scale)
        old, new = torch.tensor(self.sizes(size), dtype=torch.float64) ** abs(power)
        if is_rounded:
            old, new = (x.to(d) for x, d in zip((old, new), self.dtypes, strict=True))
        ratio = new.item() / old.item()
        return ratio if power > 0 else 1 / ratio

    def head_map(self, heads: str, layer: Layer, keys: str | None = None) -> Tensor:
        """Source head of every target head, (target heads,) int64, by the size that counts them.

        `keys` counts the heads of keys, if it is not `kv_heads`.
        """
        keys = heads if heads in self.family.key_heads else keys or "kv_heads"
        if heads in ("q_heads", keys) and keys in self.family.config:
            q_sizes, kv_sizes = self.sizes("q_heads"), self.sizes(keys)
            if kv_sizes != q_sizes:
                q_map, kv_map = grouped_heads(q_sizes[0], kv_sizes[0], q_sizes[1], kv_sizes[1])
                return q_map if heads == "q_heads" else kv_map
            # every query head has its own key head, so both follow one map
            heads = "q_heads"
        return self._index(SpaceSpec("heads", "heads", heads=heads), layer, *self.sizes(heads))

    def _heads(self, spec: SpaceSpec, layer: Layer) -> Space:
        heads = str(spec.heads)
        head_map = self.head_map(heads, layer, spec.keys)
        # one share per head, as a head works as a whole
        whole = self._copies(spec, layer, head_map, self.small.size(heads))
        return outer_product(whole, self._entries(spec, layer))

    def _copies(self, spec: SpaceSpec, layer: Layer, index: Tensor, source: int) -> Space:
        """Whole heads or units, of which those that begin untrained are not read."""
        new = self._untrained(str(spec.heads or spec.size), layer, index)
        if new.any():
            count = index[~new].bincount(minlength=source)[index]
            return replace(copies(index, source), read=(~new).double() / count)
        make = weighted if spec.weighted and self.options.scheme == "exact" else copies
        return make(index, source, self._split(spec.name, layer, index))

    def _entries(self, spec: SpaceSpec, layer: Layer) -> Space:
        """The entries of one head or unit."""
        if spec.blocks:
            return direct_sum([self.space(name, layer) for name in spec.blocks])
        if spec.width:
            return copies(torch.arange(spec.width), spec.width)
        return self._head(spec, layer)

    def _head(self, spec: SpaceSpec, _layer: Layer) -> Space:
        attention = self.family.attention
        models = (self.small, self.large)
        old, new = (m.width(spec) // len(spec.parts) for m in models)
        divided = attention.scale == "head_dim" and holds(attention.when, self.small.fields)
        if attention.field is not None:
            before, after = (getattr(m.text, attention.field) for m in models)
            # it follows head_dim or stays: see `follow_heads` of `growkern.growth.plan.target`
            divided = before != after
        before, after = self.sizes(attention.divisor) if attention.divisor else (old, new)
        gain = math.sqrt(after / before) if divided else 1.0
        # where the table cuts heads into sizes of their own, those that turn never grow
        rotary = (0, 0) if attention.divisor else self.turning
        how: Any = {"rotary": rotary, "pairs": attention.pairs, "gain": gain}
        parts = {part: within_head(old, new, part, **how) for part in spec.parts}
        if "before_norm" in parts:
            parts["before_norm"] = parts["before_norm"].times(self.kappa)
        return direct_sum([parts[part] for part in spec.parts])

    def _fixed(self, spec: SpaceSpec, _layer: Layer) -> Space:
        size = self.small.space_size(spec.name)
        return copies(torch.arange(size), size)

    def _experts(self, spec: SpaceSpec, _layer: Layer) -> Space:
        # whole copies in every scheme: a router takes all copies of an expert or none
        source, target = self.sizes(str(spec.size))
        if not keep_choice(spec, self.small, self.large.size):
            return copies(cyclic(source, target), source)
        index, awake = sleeping_map(spec, self.small, self.large)
        return replace(copies(index, source), read=awake.double())

    def _layers(self, spec: SpaceSpec, layer: Layer) -> Space:
        own, inserted = self.layers[str(spec.size)]
        # of layers that add nothing, nothing is read
        new = torch.tensor([number in inserted for number in range(len(own))])
        index, source = torch.tensor(own), self.small.size(str(spec.size))
        whole = copies(index, source)
        count = index[~new].bincount(minlength=source)[index]
        whole = replace(whole, read=(~new).double() / count.clamp(min=1))
        return outer_product(whole, self._entries(spec, layer))

    def _units(self, spec: SpaceSpec, layer: Layer) -> Space:
        if spec.width or spec.blocks:
            # the map of the space that is called like the size, whose units have one entry
            units = replace(spec, name=str(spec.size), width=None, entries=None, weighted=False)
            return outer_product(self._units(units, layer), self._entries(spec, layer))
        if spec.of:
            return self.space(spec.of, layer).beside()
        source, target = self.sizes(spec.size or "stream")
        if spec.part == "key" or (spec.is_inner and target % source):
            return zero_padded(source, target)
        if spec.size == "stream":
            # a norm may connect this space to a tied head's input: same copies in the same order
            index = self.space("stream").read_index
        else:
            index = self._index(spec, layer, source, target)
        if self.has_carry_units and spec.name in self.family.carriers:
            return with_carry_units(self._copies(spec, layer, index[:-CARRY_UNITS], source))
        return self._copies(spec, layer, index, source)

    # ---- untrained heads and units (method="fresh")

    @cached_property
    def untrained_sizes(self) -> frozenset[str]:
        """The sizes whose new heads or units begin untrained.

        A head or unit must act on its own: a norm over all of them would see the new ones.
        """
        if self.options.method != "fresh":
            return frozenset()
        normed = {name for t in self.small.own_tensors if t.norm for name in t.norm}
        alone, mixed = {"q_heads", "kv_heads"}, set[str]()
        for space in self.family.spaces.values():
            key = str(space.heads or space.size)
            if space.kind == "units" and key != "stream":
                alone.add(key)
            is_zero = space.kind == "units" and space.part == "key"
            if space.name in normed or space.weighted or space.blocks or space.activated or is_zero:
                mixed.add(key)
        if mixed & {"q_heads", "kv_heads"}:
            mixed |= {"q_heads", "kv_heads"}
        return frozenset(alone - mixed)

    def _untrained(self, size: str, layer: Layer, index: Tensor) -> Tensor:
        """Which heads or units of this size begin untrained, (target,) bool.

        The first copy of each is trained. A key head serves all queries of its group.
        """
        if size not in self.untrained_sizes:
            return torch.zeros(len(index), dtype=torch.bool)
        heads = self.head_map("q_heads", layer) if size == "kv_heads" else index
        return (rank_in_group(heads) > 0).view(len(index), -1).all(1)

    def untrained_units(self, name: str) -> Tensor:
        """Entries of a space that belong to heads or units that begin untrained, (target,) bool."""
        space, spec = self.space(name), self.family.spaces[name]
        size = str(spec.heads or spec.size)
        if size not in self.untrained_sizes:
            return torch.zeros(space.target, dtype=torch.bool)
        # nothing reads any entry of theirs
        whole = (space.read == 0).view(self.large.size(size), -1).all(1)
        return whole.repeat_interleave(space.target // len(whole))

    # ---- advanced knowledge initialisation (AKI)

    def next_layer_units(self, name: str) -> Tensor:
        """Target units that AKI takes from the next source layer, (target,) bool.

        These are the whole heads and FFN units that the source did not have. With grouped queries
        a group moves as a whole, else a query head would attend to another layer's keys.

        Source: bert2BERT, Figure 14.
        """
        space, spec = self.space(name), self.family.spaces[name]
        if spec.kind != "heads" and not spec.blocks:
            return (torch.arange(space.target) >= space.source) & (space.write_index < space.source)
        old, heads = self.sizes(str(spec.heads or spec.size))
        number = torch.arange(heads)
        keys = spec.heads if spec.heads in self.family.key_heads else spec.keys or "kv_heads"
        if spec.heads and keys in self.family.config:
            old, groups = self.sizes(keys)
            number = number // (heads // groups)
        return (number >= old).repeat_interleave(space.target // heads)
