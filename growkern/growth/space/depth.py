"""How layers are added: which source layer every target layer copies, and what new ones do.

One class a way. `way_of` finds it by the value of the option `depth`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from growkern.errors import GrowthError, UnfitError
from growkern.growth.space import maps


class Way:
    """A way to add layers: copies next to their layer that compute as they did there."""

    # what happens to layers, for the plan's sentence; None: new ones add nothing
    verb: str | None = "repeated"
    # new layers begin as the class draws them
    is_untrained = False

    def pick(self, old: int, new: int) -> list[int]:
        """The source layer, or period of layers, of each of `new` ones."""
        return maps.interleave(old, new)

    def layers(self, old: int, new: int) -> list[int] | None:
        """The source layer of every target layer; None: by whole periods of `pick`."""
        return None

    def inserted(self, layers: Sequence[int]) -> set[int]:
        """The target layers that repeat a source layer and do not compute it."""
        return set()

    def count(self) -> int | None:
        """The number of layers that the option itself asks for."""
        return None


class Stack(Way):
    """The whole stack again, above itself (bert2BERT, Algorithm 1)."""

    verb = "stacked"

    def pick(self, old: int, new: int) -> list[int]:
        return maps.stack(old, new)


class Identity(Way):
    """Blocks that add nothing yet, behind the layer that they copy."""

    verb = None

    def inserted(self, layers: Sequence[int]) -> set[int]:
        first = {layer: i for i, layer in reversed([*enumerate(layers)])}
        return {i for i, layer in enumerate(layers) if first[layer] != i}


class Untrained(Identity):
    """Layers as the class draws them."""

    is_untrained = True


@dataclass(frozen=True)
class Listed(Way):
    """The source layer of every target layer, as the user lists them."""

    listed: tuple[int, ...]
    verb = "arranged by a list"

    def layers(self, old: int, new: int) -> list[int] | None:
        if new != len(self.listed):
            raise GrowthError(
                f"depth lists {len(self.listed)} layers, but the target has {new}: list as many, "
                "or leave out their number"
            )
        if beyond := [layer for layer in self.listed if not 0 <= layer < old]:
            raise GrowthError(
                f"depth lists layer {beyond[0]}: the source has 0 to {old - 1}: list these"
            )
        if lost := sorted({*range(old)} - {*self.listed}):
            raise UnfitError(f"depth leaves out layer {lost[0]}, which would be lost: list it too")
        if old == new:
            raise GrowthError("depth lists the layers in another order: list more than there are")
        return [*self.listed]

    def count(self) -> int | None:
        return len(self.listed)


WAYS = {"identity": Identity(), "stack": Stack(), "interleave": Way(), "random": Untrained()}


def way_of(depth: Any) -> Way:
    """The way of a value of the option `depth`."""
    return Listed(depth) if isinstance(depth, tuple) else WAYS[depth]
