"""The norms of a family: the table of norm kinds, and the [norm] section of a family's table.

Everything that growth must know about a kind of norm is a field of `NormKind`. The other modules
ask for such a field and never compare the names of kinds. A new kind is a new entry of
`NORM_KINDS`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from growkern.families.conditions import holds


@dataclass(frozen=True)
class NormKind:
    """The facts about one kind of norm, y = gamma (x - m) / sqrt(v + eps) + beta.

    Attributes:
        centres: True if m is the mean of x and v its variance. False if m is 0 and v the mean
            square of x.
        tensors: last part of the names of gamma and beta. Without one of them it is 1, or 0.
    """

    centres: bool
    tensors: tuple[str, ...]


NORM_KINDS = {
    "layernorm": NormKind(centres=True, tensors=("weight", "bias")),
    "layernorm_without_bias": NormKind(centres=True, tensors=("weight",)),
    "layernorm_without_weight": NormKind(centres=True, tensors=()),
    "rmsnorm": NormKind(centres=False, tensors=("weight",)),
}


@dataclass(frozen=True)
class Norm:
    """[norm]: the function that a family's norms compute. `growkern.families.spec` has the keys."""

    kind: str
    placement: str
    eps: str | float
    plus_one: bool = False
    bias: str | None = None

    @property
    def centres(self) -> bool:
        """True if the norm subtracts the mean."""
        return NORM_KINDS[self.kind].centres

    @property
    def has_weight(self) -> bool:
        """True if growth can change what the norm multiplies by."""
        return bool(NORM_KINDS[self.kind].tensors)

    def epsilon(self, config: Any) -> float:
        """The number that is added to the variance."""
        return self.eps if isinstance(self.eps, float) else float(getattr(config, self.eps))

    def offset(self, is_bias: bool) -> float:
        """The number that the model adds to a stored weight (or bias) before it uses it."""
        return 1.0 if self.plus_one and not is_bias else 0.0

    def tensors(self, config: Any) -> tuple[str, ...]:
        """Last part of the names of a norm's tensors: "weight", and "bias" if it has one."""
        has_bias = holds(self.bias, config)
        return tuple(t for t in NORM_KINDS[self.kind].tensors if has_bias or t != "bias")
