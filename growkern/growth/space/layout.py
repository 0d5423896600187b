"""The spaces of one growth: every space name of a family, embedded for source and target."""

from __future__ import annotations

import torch
from torch import Tensor

from growkern.families.model import ModelSpec
from growkern.families.spec import Row, SpaceSpec, holds
from growkern.growth.options import GrowthOptions
from growkern.growth.space import maps
from growkern.growth.space.spaces import (
    CARRY_UNITS,
    LINEAR_PAIR_ACTIVATIONS,
    Space,
    copies,
    direct_sum,
    extended,
    normed,
    outer_product,
    signed_split,
    tied_output,
    weighted,
    with_carry_units,
    within_head,
)

# a layer of the source: its number, with the stack's name where there are several
Layer = int | str | None


class Layout:
    """Spaces by name and layer, built when first asked for.

    Only the paper's scheme draws its head and FFN maps anew in every layer; elsewhere the layer
    makes no difference and all layers share one space.
    """

    def __init__(
        self,
        small: ModelSpec,
        large: ModelSpec,
        options: GrowthOptions,
        dtypes: tuple[torch.dtype, torch.dtype],
    ) -> None:
        """
        Args:
            small, large: source and target.
            dtypes: of the source's weights and of the target's.
        """
        self.small, self.large, self.family = small, large, small.family
        self.options, self.dtypes = options, dtypes
        self._spaces: dict[tuple[str, Layer], Space] = {}

    def space(self, name: str, layer: Layer = None) -> Space:
        key = self.key(name, layer)
        if key not in self._spaces:
            self._spaces[key] = self._build(self.family.spaces[name], key[1])
        return self._spaces[key]

    def key(self, name: str, layer: Layer) -> tuple[str, Layer]:
        """What tells this space from the others."""
        return name, layer if self.options.scheme == "paper" else None

    @property
    def turning(self) -> tuple[int, int]:
        """R of `growkern.families.spec.Attention`, of source and target."""
        return self.small.turning, self.large.turning

    # ---- what kind of stream

    def sizes(self, key: str) -> tuple[int, int]:
        """A size of [config], of source and target."""
        return self.small.size(key), self.large.size(key)

    @property
    def stream_sizes(self) -> tuple[int, int]:
        return self.sizes("stream")

    @property
    def is_even(self) -> bool:
        """The target's hidden size is a multiple of the source's: all counts are equal."""
        source, target = self.stream_sizes
        return target % source == 0

    @property
    def is_extended(self) -> bool:
        """The stream has extra coordinates that carry the mean."""
        layernorm = self.family.norm.kind == "layernorm"
        return layernorm and not self.is_even and self.options.scheme == "exact"

    @property
    def is_carried(self) -> bool:
        """The extra coordinates carry the mean through norms whose output is the stream."""
        return self.is_extended and self.family.carries and not self.why_no_carry

    @property
    def has_carry_units(self) -> bool:
        """Four FFN units carry the mean past the FFN, up to the post-norm behind it."""
        return self.is_carried and self.family.norm.placement == "post"

    @property
    def why_no_carry(self) -> str | None:
        """Why the mean cannot be carried, or None."""
        if self.options.carry == 0:
            return "carry=0"
        if not self.family.carries:
            return f"no norm of {self.family.model_type} has room to carry it"
        if self.family.norm.placement != "post":
            return None
        activation = getattr(self.small.config, str(self.family.activation), None)
        old, new = self.sizes("ffn")
        spare = new - old
        if spare < CARRY_UNITS:
            field = self.family.config_field("ffn")
            return f"{field} must grow by at least {CARRY_UNITS} (it grows by {spare})"
        if activation not in LINEAR_PAIR_ACTIVATIONS:
            return f"the activation {activation!r} passes nothing through linearly"
        return None

    # ---- building

    def _build(self, spec: SpaceSpec, layer: Layer) -> Space:
        build = {
            "stream": self._stream,
            "normed": self._normed,
            "tied_output": self._tied_output,
            "heads": self._heads,
            "head": self._head,
            "units": self._units,
            "fixed": self._fixed,
        }[spec.kind]
        return build(spec, layer)

    def _index(self, spec: SpaceSpec, layer: Layer, source: int, target: int) -> Tensor:
        if self.options.scheme == "paper":
            rng = maps.generator(
                self.options.seed, "map", spec.kind, spec.heads or spec.size, layer
            )
            return maps.uniform(source, target, rng)
        if self.options.maps == "balanced" and spec.kind != "heads":
            rng = maps.generator(self.options.seed, "map", spec.name, layer)
            return maps.balanced(source, target, rng)
        return maps.cyclic(source, target)

    def _split(
        self, name: str, layer: Layer, index: Tensor, where: Tensor | None = None
    ) -> Tensor | None:
        if self.options.symmetry != "split":
            return None
        return signed_split(index, maps.generator(self.options.seed, "split", name, layer), where)

    def _stream(self, spec: SpaceSpec, _layer: Layer) -> Space:
        source, target = self.stream_sizes
        if self.is_extended:
            return extended(source, target)
        # one residual map for the whole model: every layer adds to the same stream
        index = self._index(spec, None, source, target)
        split = self._split(spec.name, None, index)
        rms = self.family.norm.kind == "rmsnorm" and self.options.scheme == "exact"
        return (weighted if rms else copies)(index, source, split)

    def _normed(self, spec: SpaceSpec, _layer: Layer) -> Space:
        stream = self.space(str(spec.of))
        split = self._split(spec.name, None, stream.read_index, ~stream.is_extra)
        return normed(stream, split)

    def is_dual(self, name: str) -> bool:
        """A tied head reads from this space: what is written there are shares."""
        spec = self.family.spaces[name]
        return spec.kind == "tied_output" and (self.small.has_tied_head or spec.untied is None)

    def _tied_output(self, spec: SpaceSpec, layer: Layer) -> Space:
        if self.is_dual(spec.name):
            return tied_output(self.space(str(spec.of)), self.scale(spec))
        return self.space(str(spec.untied), layer)

    def scale(self, row: SpaceSpec | Row) -> float:
        """What makes up for a factor of the model that changes with the stream's size.

        The model multiplies by the root of its size, in some rounded to the weights' dtype.
        """
        if row.scale is None or not holds(row.scale_when, self.small.config):
            return 1.0
        inverse, root = row.scale.startswith("1/"), row.scale.removeprefix("1/")
        old, new = (torch.tensor(float(n), dtype=torch.float64).sqrt() for n in self.stream_sizes)
        if root.startswith("rounded"):
            old, new = (x.to(d) for x, d in zip((old, new), self.dtypes, strict=True))
        ratio = new.item() / old.item()
        return 1 / ratio if inverse else ratio

    def head_map(self, heads: str, layer: Layer) -> Tensor:
        """Source head of every target head."""
        if heads in ("q_heads", "kv_heads") and "kv_heads" in self.family.config:
            q_sizes, kv_sizes = self.sizes("q_heads"), self.sizes("kv_heads")
            if kv_sizes != q_sizes:
                q_map, kv_map = maps.grouped_heads(q_sizes[0], kv_sizes[0], q_sizes[1], kv_sizes[1])
                return q_map if heads == "q_heads" else kv_map
            # every head has its own key: one map for both
            heads = "q_heads"
        spec = SpaceSpec("heads", "heads", heads=heads)
        return self._index(spec, layer, *self.sizes(heads))

    def _heads(self, spec: SpaceSpec, layer: Layer) -> Space:
        heads = str(spec.heads)
        head_map = self.head_map(heads, layer)
        build = weighted if spec.weighted and self.options.scheme == "exact" else copies
        split = self._split(spec.name, layer, head_map)
        # one share per head: the entries of a head belong together
        whole = build(head_map, self.small.size(heads), split)
        return outer_product(whole, self._head(spec, layer))

    def _head(self, spec: SpaceSpec, _layer: Layer) -> Space:
        attention = self.family.attention
        old, new = (m.width(spec) // len(spec.parts) for m in (self.small, self.large))
        divided = attention.scale == "head_dim" and holds(attention.when, self.small.config)
        return direct_sum(
            [
                within_head(old, new, part, rotary=self.turning, divided=divided)
                for part in spec.parts
            ]
        )

    def _fixed(self, spec: SpaceSpec, _layer: Layer) -> Space:
        size = self.small.space_size(spec.name)
        return copies(torch.arange(size), size)

    def _units(self, spec: SpaceSpec, layer: Layer) -> Space:
        source = self.small.space_size(spec.name)
        target = self.large.space_size(spec.name)
        if spec.size == "stream":
            # a norm may lead from here into the dual of the stream: same copies, same order
            index = self.space("stream").read_index
        else:
            index = self._index(spec, layer, source, target)
        if spec.size == "ffn" and self.has_carry_units:
            split = self._split(spec.name, layer, index[:-CARRY_UNITS])
            return with_carry_units(index, source, split)
        return copies(index, source, self._split(spec.name, layer, index))

    # ---- advanced knowledge

    def fresh(self, name: str) -> Tensor:
        """Target units that AKI takes from the next layer, (target,) bool (Figure 14).

        Whole heads and FFN units beyond the source's. With grouped queries a group moves as one:
        a new query head under an old key head would attend with the wrong layer's keys.
        """
        space, spec = self.space(name), self.family.spaces[name]
        if spec.kind != "heads":
            new = torch.arange(space.target) >= space.source
            return new & (space.write_index < space.source)
        old, heads = self.sizes(str(spec.heads))
        number = torch.arange(heads)
        if "kv_heads" in self.family.config:
            old, groups = self.sizes("kv_heads")
            number = number // (heads // groups)
        return (number >= old).repeat_interleave(space.target // heads)
