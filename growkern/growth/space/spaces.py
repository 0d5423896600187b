"""How each activation vector of the source is placed inside a wider vector of the target.

Every weight is grown from the spaces of the two vectors that it connects. The spaces here are
chosen so that the target computes the source's function.

A source vector x_s with n_s entries becomes x_t = E x_s with n_t entries. P reads it back, so
P E = I. The weight U and the bias b_t then compute E_out (W x_s + b_s) from E_in x_s exactly:

    U = E_out W P_in,    b_t = E_out b_s                                                   (1)

Row i of E and column i of P have one nonzero entry at most. A space is therefore four vectors over
the target coordinates, and (1) is one gather with two scales (`growkern.ops.expand.expand_op`):

    W_t[i, j] = write_i read_j W[write_index_i, read_index_j]                               (2)

A norm from space A (coefficients a) to space B (coefficients c) becomes

    gamma_t = kappa c / a gamma,  beta_t = c beta,  kappa = sqrt(sum a^2 / n_t)             (3)

The norm adds eps to the variance, so (3) is exact if the target's is kappa^2 eps. Norms that read
one eps have one kappa: behind a linear map a takes any factor. It is 1, unless a norm lies over
units that were padded with zeros (`eps_factor` of `growkern.growth.space.ways`). The streams:

    copies    a = 1, read 1/C, C the number of copies. This is the paper's function-preserving
              expansion. It is exact under a norm if every coordinate has the same C.
    weighted  a = sqrt(n_t / (n_s C)). The mean square stays the same for any C, as RMSNorm needs.
    extended  whole copies, then extra coordinates: 0 under RMSNorm, the mean under LayerNorm, which
              must see the same mean. a = sqrt(n_t / (C n_s)) keeps mean square and variance.

`lineage.json` stores these vectors and `growth.record.compare` inverts them: keep both in step.

An index map is (target,) int64 with the source unit that each target unit copies. Its first
`source` entries are the identity, so the old model is the leading block of the new one. The head
maps of grouped queries are the exception: they follow their key heads.

Rotary positions rotate the first R entries of a head in pairs. Pair i rotates by
theta ** (-2 i / R) per position, so pairs of different heads may be compared by their speed.

`symmetry="split"` splits a weight into unequal shares that add up to it bit for bit. Rounding each
share by itself would leave a sum that is slightly off. Let a_1 >= a_2 >= ... >= a_C be the shares
of one source unit's copies, and let rn round to the target's dtype. Copy k gets

    u_k = rn(A_k w) - rn(A_(k-1) w),   A_k = a_1 + ... + a_k                               (4)

The sum over the copies telescopes to rn(A_C w). It is w if the shares sum to 1 and the target's
dtype can represent w. The shares of weighted copies sum to 1/a, so their weights add up to
rn(w / a).

Each difference in (4) is exact by Sterbenz's lemma (y/2 <= x <= 2y). Consecutive A_k are within a
factor of 2. While they rise, a share is at most the mean of the larger shares before it, so
A_k <= 2 A_(k-1). While they fall, A_k >= 1, and no share is below -1/C (`signed_split`).
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

import torch
from torch import Tensor

from growkern.errors import UnfitError

# act(x) = x F(x) with F(x) + F(-x) = 1. Hence act(u) - act(-u) = u: two units pass u through
LINEAR_PAIR_ACTIVATIONS = frozenset(
    [
        *("relu", "silu", "swish", "quick_gelu"),
        *("gelu", "gelu_new", "gelu_fast", "gelu_python", "gelu_pytorch_tanh"),
    ]
)
CARRY_UNITS = 4


@dataclass(frozen=True)
class Space:
    """One activation space of the source, embedded in the target.

    An index >= `source` points past the source tensor, at a row that growth computes
    (`growth.plan.tensors.extras`): one row per entry of `signs`, or one per pair of carry units.

    Attributes:
        source: size of the source's space.
        write_index: source entry of every target entry where the space is written, (target,) int64.
        write: its coefficient, the nonzero entry of that row of E, (target,) float64.
        read_index: source entry of every target entry where the space is read, (target,) int64.
        read: its share, the nonzero entry of that column of P, (target,) float64.
        signs: the distinct e of the extra coordinates, see (2) of `growth.plan.tensors.extras`.
        free_extra: True if extra coordinates hold 0, so that any weight may read them.
    """

    source: int
    write_index: Tensor
    write: Tensor
    read_index: Tensor
    read: Tensor
    signs: tuple[float, ...] = ()
    free_extra: bool = False

    @property
    def target(self) -> int:
        return len(self.write)

    def scale(self, role: str) -> Tensor:
        """The scale of every entry on an axis that writes or reads it, or is its factor."""
        return {"write": self.write, "read": self.read, "factor": torch.ones_like(self.write)}[role]

    def times(self, factor: float) -> Space:
        """The same with larger entries; what reads them divides by the factor."""
        return replace(self, write=self.write * factor, read=self.read / factor)

    def beside(self) -> Space:
        """Units that are multiplied with these: copies, also where these are 0.

        Only one factor of a product may be 0: else neither gets a gradient.
        """
        zero = self.write == 0
        free = torch.where(zero, 1.0, self.write), torch.where(zero, 0.0, self.read)
        return replace(self, write=free[0], read=free[1])

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
        """kappa of (3): root mean square of the target over that of the source."""
        rows = torch.where(self.is_extra, 0.0, self.write)
        return math.sqrt(rows.square().sum().item() / self.target)

    def fold(self) -> Tensor:
        """The matrix W that gives an embedded x back, (source, target) float64.

        W E x = x with W[i, j] = E[j, i] / sum_k E[k, i]^2. Coordinates with a negative E[j, i] are
        left out too: behind a pooling that takes the largest, they hold something else.
        """
        write = torch.where(self.is_extra, 0.0, self.write).clamp(min=0)
        index = torch.where(self.is_extra, 0, self.write_index)
        squares = torch.zeros(self.source, dtype=torch.float64).index_add(0, index, write.square())
        matrix = torch.zeros(self.source, self.target, dtype=torch.float64)
        matrix[index, torch.arange(self.target)] = write / squares[index]
        return matrix

    @property
    def copies(self) -> Tensor:
        """Per read coordinate its number among the copies of its entry, and how many there are.

        Extra coordinates, and those that nothing reads, count as only copies: (0, 1). The result is
        (target, 2) int64, as `growkern.expand` takes it for routing.
        """
        is_used = ~self.is_extra & (self.write * self.read != 0)
        is_copy = (self.read_index < self.source) & is_used
        result = torch.tensor([0, 1]).repeat(self.target, 1)
        index = self.read_index[is_copy]
        result[is_copy] = torch.stack([rank_in_group(index), counts(index, self.source).long()], 1)
        return result

    def noise(self, amount: float) -> Tensor | None:
        """Size of the noise per read coordinate, relative to each weight. It cancels over copies.

        Copies r = 0 .. C-1 of one coordinate share a random sign s (see `expand`). Their sizes n_r
        are distinct and come in pairs n, -n, so sum_r (1/C) (1 + n_r s) = 1. The copies add up bit
        for bit if the target's dtype can represent 2/C times the weight.

        Returns:
            (target,) float64, of the size `amount` at most; None if every size is 0.
        """
        number, count = self.copies.double().unbind(1)
        # count - 1 - 2 number is an integer, so copies r and C-1-r are opposite in every dtype
        result = amount * ((count - 1 - 2 * number) / (count - 1).clamp(min=1))
        return result if bool(result.any()) else None


def copies(index: Tensor, source: int, split: Tensor | None = None) -> Space:
    """Plain duplication: coefficient 1, shares that sum to 1.

    Args:
        index: source entry of every target entry, (target,) int64.
        split: relative deviation of every copy's share, from `signed_split`; None: equal shares.
    """
    share = 1 / counts(index, source)
    if split is not None:
        share = share * (1 + split)
    return Space(source, index, torch.ones(len(index), dtype=torch.float64), index, share)


def weighted(index: Tensor, source: int, split: Tensor | None = None) -> Space:
    """Duplication with a = sqrt(n_t / (n_s C)), which keeps the mean square; see `copies`."""
    plain = copies(index, source, split)
    a = (len(index) / (source * counts(index, source))).sqrt()
    return replace(plain, write=a, read=plain.read / a)


def carry_signs(extra: int) -> list[float]:
    """Coefficients +1/4, -1/4, ... of the extra coordinates; they sum to 0.

    An odd number of them ends in -1/2, 1/4, 1/4. A single one cannot sum to 0. The amplitude is 1/4
    rather than 1 because the error grows with its square, and float32 still resolves it.
    """
    signs = [0.25 if k % 2 == 0 else -0.25 for k in range(extra)]
    if extra % 2 and extra > 1:
        signs[-3:] = [-0.5, 0.25, 0.25]
    return signs


def zero_padded(source: int, target: int) -> Space:
    """Units of which those beyond the source's are 0, so that any weight may read them."""
    index, old = cyclic(source, target), (torch.arange(target) < source).double()
    return Space(source, index, old, index, torch.ones_like(old))


def extended(source: int, target: int, count: int, *, keeps_mean: bool) -> Space:
    """Whole copies, then extra coordinates, scaled to keep the mean square or the variance.

    With `keeps_mean`, the extra coordinates carry the mean of the others; else they are 0.
    """
    extra = target - count * source
    scale = math.sqrt(target / (count * source))
    index = cyclic(source, target)
    is_extra = torch.arange(target) >= count * source
    signs = carry_signs(extra) if keeps_mean else [0.0] * extra
    distinct = tuple(sorted(set(signs)))
    write_index = index.clone()
    write_index[is_extra] = source + torch.tensor([distinct.index(s) for s in signs])
    read = torch.full((target,), 1 / (count * scale), dtype=torch.float64)
    if keeps_mean:
        read[is_extra] = 0.0
    write = torch.full((target,), scale, dtype=torch.float64)
    return Space(source, write_index, write, index, read, distinct, free_extra=not keeps_mean)


def normed(stream: Space, split: Tensor | None = None) -> Space:
    """The output of a pre-norm: copies with coefficient 1, and 0 at extra coordinates.

    `split` is as in `copies`, over all of the stream's coordinates, (target,) float64.
    """
    copy = ~stream.is_extra
    plain = copies(stream.read_index[copy], stream.source, None if split is None else split[copy])
    # extra coordinates hold 0, so their readers' weights are free: choose their neighbours' size
    share = torch.full((stream.target,), plain.read.mean().item(), dtype=torch.float64)
    share[copy] = plain.read
    ones = torch.ones(stream.target, dtype=torch.float64)
    return replace(stream, write=ones, read=share, free_extra=True)


def tied_output(stream: Space, scale: float = 1.0) -> Space:
    """The space k P^T, k = `scale`, for the input of a head that is tied to the embedding.

    The tied head computes logits = W E^T h / k, so the norm below it must output k P^T h.
    """
    return replace(
        stream,
        write=torch.where(stream.is_extra, 0.0, scale * stream.read),
        read=stream.write / scale,
        free_extra=True,
    )


def outer_product(heads: Space, entries: Space) -> Space:
    """All entries of all heads: which head every head copies, and how its entries lie in it."""
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
    """Several spaces joined into one, one after another."""
    offsets = [0, *accumulate(piece.source for piece in pieces)]
    placed = list(zip(pieces, offsets, strict=False))
    return Space(
        source=offsets[-1],
        write_index=torch.cat([piece.write_index + offset for piece, offset in placed]),
        write=torch.cat([piece.write for piece in pieces]),
        read_index=torch.cat([piece.read_index + offset for piece, offset in placed]),
        read=torch.cat([piece.read for piece in pieces]),
    )


def within_head(
    source: int,
    target: int,
    part: str,
    *,
    rotary: tuple[int, int] = (0, 0),
    pairs: str = "halves",
    gain: float = 1.0,
) -> Space:
    """The entries of one head inside a larger head; attention scores and values stay the same.

    Query-key products stay the same if queries or keys are 0 at the new entries. Keys are 0 there
    and queries hold copies, so that both get gradients. Below a query or key norm both hold copies
    that keep the mean square. The weight of the key norm is then 0 there.

    Args:
        part: "value" (copies), "query", "key", or "before_norm" (queries and keys below a norm).
        rotary: R of source and target, the number of entries that rotary positions rotate. Pair i
            rotates by theta ** (-2 i / R). It is placed where the target rotates at the same speed
            (`pair_step`), the other entries after the target's pairs.
        pairs: where pair i lies, as in `growkern.families.spec.Attention`.
        gain: factor of the queries, where larger heads divide scores by a larger sqrt(head_dim).
    """
    index = cyclic(source, target)
    # queries above a norm take the gain from its weight, which has this role in the table
    gain = gain if part == "query" else 1.0
    if part == "value" or (source == target and gain == 1):
        return copies(index, source)
    old, new = map(rotary_entries, rotary)
    pair = torch.arange(old // 2) * (pair_step(*rotary) or 1)
    turning = _places(pair, new, pairs)
    place = torch.cat([turning.flatten(), torch.arange(source - old) + new])
    if old:
        # whole pairs, as some models turn pairs before the norm, and both entries need one scale
        free = torch.tensor([n for n in range(new // 2) if n not in set(pair.tolist())])
        index[_places(free, new, pairs)] = _places(torch.arange(len(free)) % (old // 2), old, pairs)
    index[place] = torch.arange(source)
    is_old = torch.zeros(target, dtype=torch.bool).index_fill_(0, place, True)
    kept = is_old.double() * gain
    write = torch.full_like(kept, gain) if part == "query" else kept
    if part == "before_norm":
        write = weighted(index, source).write
    return Space(source, index, write, index, torch.where(is_old, 1 / write, 0.0))


def _places(pair: Tensor, turning: int, pairs: str) -> Tensor:
    """Where the entries of rotary pairs lie in a head, as they follow one another, int64."""
    if pairs == "halves":
        return torch.stack([pair, pair + turning // 2]).long()
    return torch.stack([2 * pair, 2 * pair + 1], 1).long()


def with_carry_units(units: Space) -> Space:
    """FFN units, then four more in two +- pairs that pass two numbers through the FFN."""
    place = torch.tensor([0, 0, 1, 1])
    coefficient = torch.tensor([1.0, -1.0, 1.0, -1.0], dtype=torch.float64)
    # past the source's units
    return direct_sum([units, Space(0, place, coefficient, place, coefficient)])


def signed_split(index: Tensor, rng: torch.Generator, where: Tensor | None = None) -> Tensor:
    """Random relative deviations of the shares; they sum to 0 over the copies of a coordinate.

    Some shares become negative on purpose. AdamW's first step depends on gradient signs alone, so
    copies with positive shares would all move alike. Deviations are at most 2 in magnitude, so no
    share exceeds 3/C and none is below -1/C, on which (4) relies.

    Args:
        index: source entry of every target entry, (target,) int64.
        where: which coordinates are copies, (target,) bool; the others get 0. None: all.
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


# ------------------------------------------------------------------ index maps


def generator(seed: int, *key: object) -> torch.Generator:
    """A separate random generator for each purpose; the order of calls does not matter.

    Args:
        key: names what is drawn, such as ("noise", tensor name). A changed key changes the grown
            weights, so replaying an older lineage would give other bytes.
    """
    digest = hashlib.sha256(repr((seed, *key)).encode()).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest[:7], "little"))


def cyclic(source: int, target: int, parts: int = 1) -> Tensor:
    """0 .. source-1 repeated. Numbers of copies differ by one at most.

    `parts`: how many equal parts lie side by side; each repeats entries of its own.
    """
    each = source // parts
    part = torch.arange(target // parts) % each
    return (part + torch.arange(parts)[:, None] * each).flatten()


def balanced(source: int, target: int, rng: torch.Generator) -> Tensor:
    """The identity, then random permutations. Numbers of copies differ by one at most."""
    rounds = [torch.arange(source)]
    while sum(map(len, rounds)) < target:
        rounds.append(torch.randperm(source, generator=rng))
    return torch.cat(rounds)[:target]


def uniform(source: int, target: int, rng: torch.Generator) -> Tensor:
    """The identity, then random units with replacement (bert2BERT, Eq. 5)."""
    drawn = torch.randint(source, (target - source,), generator=rng)
    return torch.cat([torch.arange(source), drawn])


def grouped_heads(
    q_source: int, kv_source: int, q_target: int, kv_target: int
) -> tuple[Tensor, Tensor]:
    """Maps of query heads and of key-value heads, int64, for grouped-query attention.

    Query head h reads key head h // group, so the maps must agree:
    q_map[h] // group_source == kv_map[h // group_target]. Key heads repeat cyclically. The query
    heads of a target group cycle through the source group of its key head.
    """
    group_source, group_target = q_source // kv_source, q_target // kv_target
    kv_map = cyclic(kv_source, kv_target)
    used = [0] * kv_source
    q_map = []
    for kv in kv_map.tolist():
        for _ in range(group_target):
            q_map.append(kv * group_source + used[kv] % group_source)
            used[kv] += 1
    lost = sorted(set(range(q_source)) - set(q_map))
    if lost:
        raise UnfitError(
            f"{q_source} query / {kv_source} key-value heads cannot become {q_target} / "
            f"{kv_target}: query heads {lost} would have no copy: raise num_attention_heads or "
            f"lower num_key_value_heads so that every group keeps {group_source} query heads"
        )
    return torch.tensor(q_map), kv_map


def counts(index: Tensor, source: int) -> Tensor:
    """Per target unit, how many target units copy its source unit, (target,) float64."""
    return torch.bincount(index, minlength=source).double()[index]


def rank_in_group(index: Tensor) -> Tensor:
    """Per target unit, 0 if it is the first copy of its source unit, 1 if the second, and so on."""
    order = torch.argsort(index, stable=True)
    grouped = index[order]
    starts = torch.cat([torch.ones(1, dtype=torch.bool), grouped[1:] != grouped[:-1]])
    position = torch.arange(len(index))
    first = torch.cummax(torch.where(starts, position, torch.zeros_like(position)), 0).values
    return torch.empty_like(index).scatter_(0, order, position - first)


def rotary_entries(turning: int) -> int:
    """The number of rotated entries: `turning`, rounded up to whole pairs."""
    return turning + turning % 2


def pair_step(source: int, target: int) -> int | None:
    """The step with which pair step * i of the target rotates as fast as pair i of the source.

    `source` and `target` are R of both. None: there is no step. Pair i then stays pair i, and
    `growth.plan.target` changes rope_theta instead.
    """
    # a single pair rotates by theta ** 0 in any head, so any step will do
    return None if source > 2 and target % source else target // max(source, 1)


# ------------------------------------------------------------------ shares

# elements that are split at a time: their float32 products then stay in the CPU's cache
NUMBERS_AT_ONCE = 1 << 18


def partial_sums(index: Tensor, share: Tensor, is_copy: Tensor) -> tuple[Tensor, Tensor]:
    """A_k and A_(k-1) of (4) for every target unit, (target,) float64 each.

    Args:
        index: source unit of each target unit, (target,) int64.
        share: share of each target unit, (target,) float64.
        is_copy: which target units are copies, (target,) bool. The others keep their share: their
            A_k is the share and their A_(k-1) is 0.
    """
    upto, before = share.clone(), torch.zeros_like(share)
    order = torch.argsort(share, descending=True, stable=True)
    order = order[is_copy[order]]
    group = index[order]
    if not len(group):
        return upto, before
    rank = rank_in_group(group)
    table = torch.zeros(int(group.max()) + 1, int(rank.max()) + 1, dtype=torch.float64)
    table[group, rank] = share[order]
    sums = table.cumsum(1)
    # shares such as 1/3 sum to 1 only up to rounding
    sums = torch.where((sums - 1).abs() < 1e-12, 1.0, sums)
    upto[order] = sums[group, rank]
    before[order] = torch.where(rank > 0, sums[group, (rank - 1).clamp(min=0)], 0.0)
    return upto, before


def take_shares(weights: Tensor, dim: int, upto: Tensor, before: Tensor) -> None:
    """Apply (4) in place: along `dim`, turn copies of the source's weights into their shares.

    The operation is elementwise, so a part of a tensor gets the same bits as in the whole tensor.
    Weights above 2/3 of the dtype's largest number may overflow.

    Args:
        weights: copies of the source's weights, any shape and floating-point dtype.
        upto, before: A_k and A_(k-1) from `partial_sums`, one per entry along `dim`.
    """
    wide = torch.float64 if weights.dtype == torch.float64 else torch.float32
    shape = [1] * weights.ndim
    shape[dim] = -1
    factors = (x.to(weights.device, wide).reshape(shape) for x in (upto, before))
    rows = max(1, NUMBERS_AT_ONCE // max(1, weights[:1].numel()))
    blocks = (x.expand(weights.shape).split(rows) for x in (weights, *factors))
    for w, a, b in zip(*blocks, strict=True):
        x = w.to(wide)
        w.copy_((x * a).to(w.dtype) - (x * b).to(w.dtype))
