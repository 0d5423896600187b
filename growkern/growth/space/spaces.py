"""Activation spaces: how a source vector sits inside a wider target vector.

A space of size n_s is embedded in n_t as x_t = E x_s and read back by P with P E = I; then

    U = E_out W P_in,    b_t = E_out b_s                                                   (1)

computes E_out (W x_s + b_s) from E_in x_s exactly. Row i of E and column i of P have one entry
each here, so a space is four vectors over the target coordinates and (1) is one gather with two
scales (`growkern.ops.expand.op`):

    W_t[i, j] = write_i read_j W[write_index_i, read_index_j]                               (2)

A norm from space A (coefficients a) to space B (coefficients c) becomes

    gamma_t = kappa c / a gamma,  beta_t = c beta,  kappa = sqrt(sum a^2 / n_t)             (3)

and is exact without touching eps when kappa = 1, which every space below arranges.

    copies    a = 1, read 1/C: the paper's function-preserving expansion; exact under a norm when
              every coordinate has the same number of copies C (under RMSNorm: see weighted)
    weighted  a = sqrt(n_t / (n_s C)): keeps the mean square whatever the counts, for RMSNorm
    extended  whole copies, then extra coordinates that carry the mean: for LayerNorm, which must
              see the same mean and, through the scale s = sqrt(n_t / (C n_s)), the same variance
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

import torch
from torch import Tensor

from growkern.growth.space import maps
from growkern.growth.space.rotary import pair_step, rotary_entries

# x F(x) with F(x) + F(-x) = 1: for these act(u) - act(-u) = u, so two units pass u through
LINEAR_PAIR_ACTIVATIONS = frozenset(
    [
        *("relu", "silu", "swish", "quick_gelu"),
        *("gelu", "gelu_new", "gelu_fast", "gelu_python", "gelu_pytorch_tanh"),
    ]
)
CARRY_UNITS = 4


@dataclass(frozen=True)
class Space:
    """One embedded activation space; vectors are (target,), indices int64, values float64.

    An index >= `source` points past the tensor: at the functionals appended to a written axis
    (see `growth.tensors.extras`), one per entry of `signs`, or at the units that carry them.
    """

    source: int
    write_index: Tensor
    write: Tensor
    read_index: Tensor
    read: Tensor
    signs: tuple[float, ...] = ()
    carry_units: bool = False
    free_extra: bool = False

    @property
    def target(self) -> int:
        return len(self.write)

    @property
    def is_extra(self) -> Tensor:
        """Coordinates beyond the copies, (target,) bool."""
        return self.write_index >= self.source

    @property
    def extra_signs(self) -> Tensor:
        """Sign of every extra coordinate, (extra,) float64."""
        index = self.write_index[self.is_extra] - self.source
        return torch.tensor(self.signs, dtype=torch.float64)[index]

    @property
    def kappa(self) -> float:
        """Root mean square of the target per that of the source under a norm, (3)."""
        rows = torch.where(self.is_extra, 0.0, self.write)
        return math.sqrt(rows.square().sum().item() / self.target)

    def noise(self, amount: float) -> Tensor | None:
        """Relative noise per read coordinate that cancels over the copies, or None.

        Copies r = 0 .. C-1 of one coordinate share a random number xi (see `expand`); with
        weights n_r that are distinct and each other's opposites, sum_r (1/C) (1 + n_r xi) = 1
        stays exact, to the last bit where 2/C of a weight is a number of the target's dtype.
        """
        copy = self.read_index < self.source
        copy &= ~self.is_extra
        index = self.read_index[copy]
        if not len(index):
            return None
        count = maps.counts(index, self.source)
        rank = maps.rank_in_group(index).double()
        # count - 1 - 2 rank is whole: r and C-1-r are opposites in every dtype
        weight = (count - 1 - 2 * rank) / (count - 1).clamp(min=1)
        result = torch.zeros(self.target, dtype=torch.float64)
        result[copy] = amount * weight
        if self.free_extra:
            # nothing is read there: any value is exact
            result[self.is_extra] = amount
        return result if bool(result.any()) else None


def copies(index: Tensor, source: int, split: Tensor | None = None) -> Space:
    """Plain duplication. `split`: relative deviation of every copy's share, 0 on average."""
    share = 1 / maps.counts(index, source)
    if split is not None:
        share = share * (1 + split)
    return Space(source, index, torch.ones(len(index), dtype=torch.float64), index, share)


def weighted(index: Tensor, source: int, split: Tensor | None = None) -> Space:
    """Duplication with a = sqrt(n_t / (n_s C)): the mean square is kept for any counts."""
    plain = copies(index, source, split)
    a = (len(index) / (source * maps.counts(index, source))).sqrt()
    return replace(plain, write=a, read=plain.read / a)


def carry_signs(extra: int) -> list[float]:
    """+1/4, -1/4, ... with sum 0 (an odd number ends -1/2, 1/4, 1/4); one alone cannot.

    A quarter, not one: the error grows with the square, and float32 still resolves it.
    """
    signs = [0.25 if k % 2 == 0 else -0.25 for k in range(extra)]
    if extra % 2 and extra > 1:
        signs[-3:] = [-0.5, 0.25, 0.25]
    return signs


def extended(source: int, target: int) -> Space:
    """floor(n_t / n_s) copies and extra coordinates, scaled so that the variance is kept."""
    count, extra = divmod(target, source)
    scale = math.sqrt(target / (count * source))
    index = maps.cyclic(source, target)
    is_extra = torch.arange(target) >= count * source
    signs = carry_signs(extra)
    distinct = tuple(sorted(set(signs)))
    write_index = index.clone()
    write_index[is_extra] = source + torch.tensor([distinct.index(s) for s in signs])
    read = torch.full((target,), 1 / (count * scale), dtype=torch.float64)
    read[is_extra] = 0.0
    write = torch.full((target,), scale, dtype=torch.float64)
    return Space(source, write_index, write, index, read, distinct)


def normed(stream: Space, split: Tensor | None = None) -> Space:
    """What a pre-norm puts out: copies with coefficient 1, zeros at extra coordinates."""
    copy = ~stream.is_extra
    plain = copies(stream.read_index[copy], stream.source, None if split is None else split[copy])
    # readers' weights at the zeros are free: give them the size of their neighbours
    share = torch.full((stream.target,), plain.read.mean().item(), dtype=torch.float64)
    share[copy] = plain.read
    ones = torch.ones(stream.target, dtype=torch.float64)
    return replace(stream, write=ones, read=share, free_extra=True)


def tied_output(stream: Space, scale: float = 1.0) -> Space:
    """k P^T: with logits = W E^T h / k, the norm under the head must put out k P^T h."""
    return replace(
        stream,
        write=torch.where(stream.is_extra, 0.0, scale * stream.read),
        read=stream.write / scale,
        free_extra=True,
    )


def outer_product(heads: Space, entries: Space) -> Space:
    """Whole heads, each embedded entry by entry in a larger head."""
    width = entries.source

    def joined(a: Tensor, b: Tensor) -> Tensor:
        return (a[:, None] * width + b).reshape(-1)

    return Space(
        source=heads.source * width,
        write_index=joined(heads.write_index, entries.write_index),
        write=torch.kron(heads.write, entries.write),
        read_index=joined(heads.read_index, entries.read_index),
        read=torch.kron(heads.read, entries.read),
    )


def direct_sum(pieces: Sequence[Space]) -> Space:
    """The entries of several spaces, one space after another."""
    first = [0, *accumulate(piece.source for piece in pieces)]
    moved = list(zip(pieces, first, strict=False))
    return Space(
        source=first[-1],
        write_index=torch.cat([piece.write_index + start for piece, start in moved]),
        write=torch.cat([piece.write for piece in pieces]),
        read_index=torch.cat([piece.read_index + start for piece, start in moved]),
        read=torch.cat([piece.read for piece in pieces]),
    )


def within_head(
    source: int,
    target: int,
    part: str,
    *,
    rotary: tuple[int, int] = (0, 0),
    divided: bool = True,
) -> Space:
    """The entries of one head in a larger head: scores and values stay what they were.

    Queries and keys keep their products if only one of them is zero at the new entries: keys are,
    queries hold copies there, so that both learn. In front of a norm both are zero. Scores are
    divided by the root of head_dim, which the queries make up for.

    Args:
        part: "value" (copies), "query", "key", or "before_norm" for both of them.
        rotary: R of source and target. The first R entries turn, i and i + R / 2 by
            theta ** (-2 i / R); pairs go where the target's turn alike (`pair_step`), the other
            entries after the target's pairs.
        divided: scores are divided by the root of head_dim.
    """
    index = maps.cyclic(source, target)
    if part == "value" or source == target:
        return copies(index, source)
    old, new = map(rotary_entries, rotary)
    pair = torch.arange(old // 2) * (pair_step(*rotary) or 1)
    place = torch.cat([pair, pair + new // 2, torch.arange(source - old) + new])
    index[place] = torch.arange(source)
    is_old = torch.zeros(target, dtype=torch.bool).index_fill_(0, place, True)
    gain = math.sqrt(target / source) if part == "before_norm" or divided else 1.0
    gain = 1.0 if part == "key" else gain
    kept = is_old.double() * gain
    write = torch.full_like(kept, gain) if part == "query" else kept
    return Space(source, index, write, index, is_old.double() / gain)


def with_carry_units(index: Tensor, source: int, split: Tensor | None = None) -> Space:
    """Copies, but the last four units are two +- pairs that pass two functionals through."""
    index = index[:-CARRY_UNITS]
    body = copies(index, source, split)
    carry = torch.tensor([source, source, source + 1, source + 1])
    coefficient = torch.tensor([1.0, -1.0, 1.0, -1.0], dtype=torch.float64)
    return Space(
        source=source,
        write_index=torch.cat([index, carry]),
        write=torch.cat([body.write, coefficient]),
        read_index=torch.cat([index, carry]),
        read=torch.cat([body.read, coefficient]),
        carry_units=True,
    )


def signed_split(index: Tensor, rng: torch.Generator, where: Tensor | None = None) -> Tensor:
    """Random relative deviations, zero-sum over the copies of a coordinate, (target,) float64.

    Signed on purpose: AdamW's first step looks at signs only, so shares that are all positive
    move the copies alike. Bounded by 2, so that no share exceeds 3/C.

    `where`: the coordinates that are copies, (target,) bool; the others get 0.
    """
    if where is not None:
        result = torch.zeros(len(index), dtype=torch.float64)
        result[where] = signed_split(index[where], rng)
        return result
    size = int(index.max()) + 1
    draw = 2 * torch.rand(len(index), generator=rng, dtype=torch.float64) - 1
    count = torch.bincount(index, minlength=size).double()
    mean = torch.zeros(size, dtype=torch.float64).index_add_(0, index, draw) / count.clamp(min=1)
    centred = draw - mean[index]
    largest = torch.zeros(size, dtype=torch.float64)
    largest = largest.scatter_reduce(0, index, centred.abs(), "amax", include_self=True)
    reach = 1 + torch.rand(size, generator=rng, dtype=torch.float64)
    scale = torch.where(largest > 0, reach / largest.clamp(min=1e-12), 0.0)
    return centred * scale[index]
