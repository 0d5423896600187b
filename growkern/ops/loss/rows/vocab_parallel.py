"""Heads whose columns are spread over the ranks of a process group.

Shape letters used in this file: N rows, S numbers of a row, L ranks, V vocabulary.
"""

from typing import Any, NamedTuple

import torch.distributed as dist
from torch import Tensor

from growkern.errors import GrowthError


class Shard(NamedTuple):
    """The columns of a vocabulary-parallel head on this rank."""

    group: str  # name of the process group; "": there is none
    start: int  # the first column here
    vocab: int  # columns of all ranks without padding
    each: int  # columns of one rank, rounded up: the same number on all ranks


WHOLE = Shard("", 0, 0, 0)


def check_shard(group: Any, start: int | None, vocab: int | None) -> Shard:
    """The slice of this rank in `group`, a ProcessGroup, of a number of columns of all ranks."""
    if group is None:
        raise GrowthError("vocab_start needs group=")
    if start is None or vocab is None:
        raise GrowthError(
            "group= needs vocab_start= (this rank's first column) and vocab_size= (columns of all "
            "ranks together)"
        )
    if start < 0:
        raise GrowthError(f"vocab_start must be 0 or more, got {start}")
    return Shard(group.group_name, start, vocab, -(-vocab // group.size()))


def shard_of(weight: Any) -> tuple[Any, int, int]:
    """Process group, first row here and rows of all ranks, of a DTensor (V, H) cut along V."""
    mesh, placements = weight.device_mesh, weight.placements
    if mesh.ndim != 1 or not placements[0].is_shard(0):
        raise GrowthError(
            f"a head is a DTensor with placements {placements} on {mesh}, but must be Shard(0), "
            "the vocabulary, on a mesh of one dimension: pass full_tensor() of anything else"
        )
    V = weight.shape[0]
    each = -(-V // mesh.size())
    return mesh.get_group(), min(V, mesh.get_local_rank() * each), V


def _resolved(group: Any) -> dist.ProcessGroup:
    return dist.distributed_c10d._resolve_process_group(group)


def gather(x: Tensor, group: str) -> Tensor:
    """The tensors of all ranks, (L, ...), in the order of their columns."""
    ranks = _resolved(group)
    gathered = x.new_empty(ranks.size(), *x.shape)
    dist.all_gather(list(gathered.unbind(0)), x.contiguous(), group=ranks)
    return gathered


def add_up(x: Tensor, group: str) -> None:
    """The sum over all ranks, in place."""
    dist.all_reduce(x, group=_resolved(group))


def largest(x: Tensor, group: str) -> None:
    """The maximum over all ranks, in place."""
    dist.all_reduce(x, op=dist.ReduceOp.MAX, group=_resolved(group))
