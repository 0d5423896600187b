"""The inverse of growth: a grown weight in the source's shape again, W = P_out U E_in.

`growkern.verify` compares the result with the source. It needs the maps of a growth alone, and
none of the code that builds tensors.

    written axis    copies are averaged, weighted with the shares of their readers
    read axis       copies are summed, weighted with the coefficients of their writers
    other axes      the leading entries are taken, as of a vocabulary

Shares sum to 1, and noise cancels in the sums. Sums are float64. Extra coordinates are left out, as
they hold nothing of the source.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from growkern.growth.record.lineage import Origin
from growkern.growth.space import Space


def inverse(origin: Origin, space_of: Callable[[str], Space], grown: Tensor) -> Tensor:
    """A grown tensor that holds copies of one source tensor, in that one's shape, float64.

    Args:
        space_of: the space of a name, in the layer of the tensor.
        grown: the target tensor, of the origin's shape. Norms have no such inverse.
    """
    x = grown.double()
    for dim, (axis, size) in enumerate(zip(origin.axes, origin.source_shape, strict=True)):
        entry, coefficient = _copies(axis, size, space_of)
        kept = coefficient.nonzero().flatten()
        across = (-1, *(1 for _ in x.shape[dim + 1 :]))
        weighted = x.index_select(dim, kept) * coefficient[kept].view(across)
        shape = (*x.shape[:dim], size, *x.shape[dim + 1 :])
        x = x.new_zeros(shape).index_add_(dim, entry[kept], weighted)
    return x / origin.factor


def _copies(axis: str, size: int, space_of: Callable[[str], Space]) -> tuple[Tensor, Tensor]:
    """Of the target entries of an axis: the source entry of each, and its weight in the sum."""
    role, _, names = axis.partition(":")
    if not names:
        return torch.arange(size), torch.ones(size, dtype=torch.float64)
    entries, weights, factors, offset = [], [], [], 0
    for space in map(space_of, names.split("|")):
        weight = space.write if role == "read" else space.read
        entries.append(torch.where(space.is_extra, 0, space.read_index + offset))
        weights.append(torch.where(space.is_extra, 0.0, weight))
        factors.append(space.scale(role))
        offset += space.source
    entry, weight, factor = torch.cat(entries), torch.cat(weights), torch.cat(factors)
    # copies of an entry give it back
    total = torch.zeros(size, dtype=torch.float64).index_add_(0, entry, factor * weight)
    return entry, weight / total[entry]
