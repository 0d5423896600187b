"""What the user asked for: one frozen value, checked before any work."""

from __future__ import annotations

import re
from dataclasses import asdict, dataclass, fields
from typing import Any

from growkern.errors import GrowthError, nearest

CHOICES = {
    "method": ("fpi", "aki", "direct_copy", "random"),
    "depth": ("stack", "interleave", "identity"),
    "scheme": ("exact", "paper"),
    "symmetry": ("auto", "noise", "split", "none"),
    "aki": ("unit", "eq16"),
    "maps": ("cyclic", "balanced"),
}


@dataclass(frozen=True)
class GrowthOptions:
    """How to grow.

    Attributes:
        method: width. `fpi` function-preserving, `aki` new heads and FFN units from the next
            layer, `direct_copy` old block in a random matrix, `random` (bert2BERT, Table 1).
        depth: `stack` (bert2BERT, Algorithm 1), `interleave` copies next to their layer,
            `identity` new blocks that add nothing (exact).
        scheme: `exact` computes the source's function to rounding where that is possible;
            `paper` is bert2BERT's Eq. 5-13 as printed.
        symmetry: how copies are told apart, else they stay equal for ever. `noise` cancelling
            noise on the weights: copies sum back to the source's weight bit for bit, also in
            bfloat16, where their number is a power of two. `split` unequal signed shares, which
            do so for any number. `none`. `auto` is `noise`, and `none` in the paper's scheme,
            which knows of neither.
        noise: size of the noise relative to each weight, at most.
        aki: `unit` whole heads and neurons (Figure 14), `eq16` output rows of every matrix.
        maps: `cyclic` contiguous copies, `balanced` random copies with equal counts.
        carry: at an uneven width extra coordinates carry the mean through a post-norm at a
            quarter of this amplitude. The error is O(carry^2): 1e-6 and less at 0.01. The norm's
            weight there is 4/carry, and a weight of 400 does not survive a learning rate of 1e-3
            (the loss of a small BERT went from 5.5 to 6.0 in 160 steps, to 5.3 at 1.0), hence the
            default. 0 turns it off.
        identity_gain: size K of what runs between the norms of inserted post-norm blocks. Each is
            off by eps K^2 / (K^2 + eps) of its input: by the norms' eps at 1, by nothing in
            float64 at 1e-8, where the weights of those norms hardly learn.
        seed: of maps, noise, shares and random weights.
    """

    method: str = "fpi"
    depth: str = "stack"
    scheme: str = "exact"
    symmetry: str = "auto"
    noise: float = 0.5
    aki: str = "unit"
    maps: str = "cyclic"
    carry: float = 1.0
    identity_gain: float = 1.0
    seed: int = 0

    def __post_init__(self) -> None:
        for name, allowed in CHOICES.items():
            value = getattr(self, name)
            if value not in allowed:
                raise GrowthError(f"{name}={value!r}{nearest(str(value), allowed)}")
        if self.symmetry == "auto":
            object.__setattr__(self, "symmetry", "none" if self.scheme == "paper" else "noise")
        for name, most in (("noise", 1.0), ("carry", 1.0)):
            if not 0 <= getattr(self, name) <= most:
                raise GrowthError(f"{name}={getattr(self, name)} is outside 0 .. {most:g}")
        if not 0 < self.identity_gain <= 1:
            raise GrowthError(f"identity_gain={self.identity_gain} is not above 0 and at most 1")

    @property
    def is_baseline(self) -> bool:
        """Starts from random weights."""
        return self.method in ("direct_copy", "random")

    @classmethod
    def split_off(cls, given: dict[str, Any]) -> tuple[GrowthOptions, dict[str, Any]]:
        """The options among keyword arguments, and what is left: the target dimensions."""
        names = {f.name for f in fields(cls)}
        options = {k: v for k, v in given.items() if k in names}
        return cls(**options), {k: v for k, v in given.items() if k not in names}

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


UNITS = {"": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}


UNITS |= {"KIB": 1 << 10, "MIB": 1 << 20, "GIB": 1 << 30, "TIB": 1 << 40}


def parse_size(name: str, value: int | str) -> int:
    """Bytes from a number, or from text such as "512MB" (10^6) or "1GiB" (2^30).

    Raises:
        GrowthError: neither of the two, or not positive.
    """
    found = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*", str(value))
    if isinstance(value, bool) or not found or found[2].upper() not in UNITS:
        raise GrowthError(f"{name}={value!r}: give bytes or a text like '512MB' or '1GiB'")
    size = int(float(found[1]) * UNITS[found[2].upper()])
    if size < 1:
        raise GrowthError(f"{name}={value!r} must be positive")
    return size
