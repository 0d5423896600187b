"""The spaces of one growth: every space name of a family, embedded for source and target."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from growkern.families.spec import Family, SpaceSpec
from growkern.growth import maps
from growkern.growth.options import GrowthOptions
from growkern.growth.spaces import (
    CARRY_UNITS,
    LINEAR_PAIR_ACTIVATIONS,
    Space,
    copies,
    extended,
    normed,
    signed_split,
    tied_output,
    weighted,
    with_carry_units,
)


class Layout:
    """Spaces by name and layer, built when first asked for.

    Only the paper's scheme draws its head and FFN maps anew in every layer; elsewhere the layer
    makes no difference and all layers share one space.
    """

    def __init__(
        self, family: Family, source: Any, target: Any, options: GrowthOptions, *, tied: bool
    ) -> None:
        self.family, self.source, self.target = family, source, target
        self.options, self.tied = options, tied
        self._spaces: dict[tuple[str, int | None], Space] = {}

    def space(self, name: str, layer: int | None = None) -> Space:
        key = (name, layer if self.options.scheme == "paper" else None)
        if key not in self._spaces:
            self._spaces[key] = self._build(self.family.spaces[name], key[1])
        return self._spaces[key]

    # ---- what kind of stream

    @property
    def stream_sizes(self) -> tuple[int, int]:
        family = self.family
        return family.size(self.source, "stream"), family.size(self.target, "stream")

    @property
    def is_even(self) -> bool:
        """The target's hidden size is a multiple of the source's: all counts are equal."""
        source, target = self.stream_sizes
        return target % source == 0

    @property
    def is_extended(self) -> bool:
        """The stream has extra coordinates that carry the mean."""
        layernorm = self.family.norm_kind == "layernorm"
        return layernorm and not self.is_even and self.options.scheme == "exact"

    @property
    def is_carried(self) -> bool:
        """The extra coordinates carry the mean through post-norms and FFNs."""
        return self.is_extended and self.family.norm_placement == "post" and not self.why_no_carry

    @property
    def why_no_carry(self) -> str | None:
        """Why the mean cannot be carried past a post-norm's FFN, or None."""
        activation = getattr(self.source, str(self.family.activation), None)
        spare = self.family.size(self.target, "ffn") - self.family.size(self.source, "ffn")
        if self.options.carry == 0:
            return "carry=0"
        if spare < CARRY_UNITS:
            field = self.family.config_field("ffn")
            return f"{field} must grow by at least {CARRY_UNITS} (it grows by {spare})"
        if activation not in LINEAR_PAIR_ACTIVATIONS:
            return f"the activation {activation!r} passes nothing through linearly"
        return None

    # ---- building

    def _build(self, spec: SpaceSpec, layer: int | None) -> Space:
        build = {
            "stream": self._stream,
            "normed": self._normed,
            "tied_output": self._tied_output,
            "heads": self._heads,
            "units": self._units,
        }[spec.kind]
        return build(spec, layer)

    def _index(self, spec: SpaceSpec, layer: int | None, source: int, target: int) -> Tensor:
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
        self, name: str, layer: int | None, index: Tensor, where: Tensor | None = None
    ) -> Tensor | None:
        if self.options.symmetry != "split":
            return None
        return signed_split(index, maps.generator(self.options.seed, "split", name, layer), where)

    def _stream(self, spec: SpaceSpec, _layer: int | None) -> Space:
        source, target = self.stream_sizes
        if self.is_extended:
            # a pre-norm turns the extra coordinates into zeros before anything reads them
            free = self.family.norm_placement == "pre"
            return extended(source, target, free_extra=free)
        # one residual map for the whole model: every layer adds to the same stream
        index = self._index(spec, None, source, target)
        split = self._split(spec.name, None, index)
        rms = self.family.norm_kind == "rmsnorm" and self.options.scheme == "exact"
        return (weighted if rms else copies)(index, source, split)

    def _normed(self, spec: SpaceSpec, _layer: int | None) -> Space:
        stream = self.space(str(spec.of))
        split = self._split(spec.name, None, stream.read_index, ~stream.is_extra)
        return normed(stream, split)

    def _tied_output(self, spec: SpaceSpec, layer: int | None) -> Space:
        if self.tied or spec.untied is None:
            return tied_output(self.space(str(spec.of)))
        return self.space(spec.untied, layer)

    def head_maps(self, layer: int | None) -> dict[str, Tensor]:
        """Source head of every target head, by the name of the head count."""
        family, source, target = self.family, self.source, self.target
        sizes = [family.size(c, "q_heads") for c in (source, target)]
        if "kv_heads" in family.config:
            kv = [family.size(c, "kv_heads") for c in (source, target)]
            if kv != sizes:
                q_map, kv_map = maps.grouped_heads(sizes[0], kv[0], sizes[1], kv[1])
                return {"q_heads": q_map, "kv_heads": kv_map}
        spec = SpaceSpec("heads", "heads", heads="q_heads")
        head_map = self._index(spec, layer, sizes[0], sizes[1])
        return {"q_heads": head_map, "kv_heads": head_map}

    def _heads(self, spec: SpaceSpec, layer: int | None) -> Space:
        heads = str(spec.heads)
        head_dim = self.family.head_dim(self.source)
        head_map = self.head_maps(layer)[heads]
        count = self.family.size(self.source, heads)
        split = self._split(spec.name, layer, head_map)
        # one share per head: the dims of a head belong together
        split = None if split is None else split.repeat_interleave(head_dim)
        return copies(maps.heads_to_units(head_map, head_dim), count * head_dim, split)

    def _units(self, spec: SpaceSpec, layer: int | None) -> Space:
        source = self.family.space_size(self.source, spec.name)
        target = self.family.space_size(self.target, spec.name)
        if spec.size == "stream":
            # a norm may lead from here into the dual of the stream: same copies, same order
            index = self.space("stream").read_index
        else:
            index = self._index(spec, layer, source, target)
        if spec.size == "ffn" and self.is_carried:
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
        new = torch.arange(space.target) >= space.source
        new &= space.write_index < space.source
        if spec.kind != "heads" or "kv_heads" not in self.family.config:
            return new
        head_dim = self.family.head_dim(self.source)
        kv_source = self.family.size(self.source, "kv_heads")
        kv_target = self.family.size(self.target, "kv_heads")
        heads = self.family.size(self.target, str(spec.heads))
        group = torch.arange(heads) // (heads // kv_target)
        return (group >= kv_source).repeat_interleave(head_dim)
