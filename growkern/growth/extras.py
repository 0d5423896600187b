"""What extra coordinates copy: rows made from the source where a LayerNorm's width is uneven.

    written axis     the functional f_t = (1/n) 1 + delta e_t w of its rows, one per sign e_t, where
                     w = (gamma - mean(gamma)) / n belongs to the norm the vector enters  (1)
    first FFN matrix the rows 1/n and w, read by the carry units                          (2)
    second FFN matrix the columns that add them to the extra coordinates                  (3)

A carrying norm then multiplies extra coordinate k by 1 / (delta e_k): it leaves as the mean of the
norm's output.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from growkern.growth.plan import GrowthPlan
from growkern.growth.tasks import Task

# rows of a source that are summed at a time: its float64 copy stays small beside it
ROWS_AT_ONCE = 1024


def made_rows(
    plan: GrowthPlan,
    task: Task,
    name: str,
    read: Callable[[str], Tensor],
    extra: Sequence[bool],
) -> Tensor:
    """What a block is gathered from: the source tensor `name`, or what is made from it.

    `extra`: per axis, whether the block's target entries are extra ones.
    """
    weight = read_or_make(plan, task, name, read)
    if not any(extra):
        return weight
    kinds = []
    for axis in task.tensor.axes:
        role, _, space = axis.partition(":")
        kinds.append((role, "" if "|" in space or not space else space))
    layout, size = plan.layout, plan.layout.stream_sizes[0]
    signs = torch.tensor(layout.space("stream").signs, dtype=torch.float64)
    delta, w = plan.options.carry, _carried_weight(plan, task, read)
    mean = torch.full((size,), 1 / size, dtype=torch.float64)
    result = weight
    for dim, (role, space) in enumerate(kinds):
        if not extra[dim]:
            continue
        if role == "read":
            # (3), for the copies and for the extra rows
            copied = extra == (False, True)
            ones, carried = torch.ones(len(signs), dtype=torch.float64), delta * signs
            columns = torch.stack([ones, carried], 1)
            made = torch.zeros(weight.shape[0], 2, dtype=torch.float64) if copied else columns
            return made.to(weight.dtype)
        if layout.family.spaces[space].kind == "stream":
            result = _weighted_sums(mean + delta * signs[:, None] * w, weight, dim)
        elif weight.ndim == 1:
            result = weight.new_zeros(2)
        else:
            result = torch.stack([mean, w]).to(weight.dtype)
    return result


def read_or_make(plan: GrowthPlan, task: Task, name: str, read: Callable[[str], Tensor]) -> Tensor:
    """A source tensor, or the identity it stands for where the source has none."""
    if name != "identity":
        return read(name)
    sizes = [plan.layout.family.axis_size(plan.source.config, a) for a in task.tensor.axes]
    return torch.eye(*sizes, dtype=plan.source.dtype)


def _weighted_sums(functionals: Tensor, weight: Tensor, dim: int) -> Tensor:
    """(1): weighted sums over axis `dim` of a tensor, one per functional, in its dtype."""
    rows = weight.movedim(dim, 0)
    total = torch.zeros(len(functionals), *rows.shape[1:], dtype=torch.float64)
    for first in range(0, len(rows), ROWS_AT_ONCE):
        chunk = slice(first, first + ROWS_AT_ONCE)
        total += torch.tensordot(functionals[:, chunk], rows[chunk].double(), dims=1)
    return total.movedim(0, dim).to(weight.dtype)


def _carried_weight(plan: GrowthPlan, task: Task, read: Callable[[str], Tensor]) -> Tensor:
    """w of (1) for the norm this tensor's vector enters, (n,) float64; 0 where none carries."""
    size = plan.layout.stream_sizes[0]
    if task.into is None or not plan.layout.is_carried:
        return torch.zeros(size, dtype=torch.float64)
    gamma = read(f"{task.into}.weight").double()
    return (gamma - gamma.mean()) / size
