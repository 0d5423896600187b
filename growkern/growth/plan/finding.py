"""One statement about what a growth keeps, and statements on rounding.

Those follow the factors of every tensor (`growkern.growth.plan.axes`). They read no weights but
norms.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from growkern.growth.plan.axes import axis_maps
from growkern.growth.plan.blueprint import RANDOM, Blueprint, Task, affine_gain
from growkern.growth.plan.bounds import values_of

# measures of `growkern.verify`: the largest difference of an output over the largest output (where
# norms or positions err, at least that on random texts), the rise of the loss by tokens that the
# source does not have, and the largest difference of a weight from the inverse of the grown one
# (Frobenius norm, relative to the weight, in which every copy counts as at least the smallest
# normal number of float16)
OUTPUT_ERROR, NEW_TOKENS = "relative error", "new tokens (nats)"
WEIGHT_ERROR = "weight error"
# 16-bit copies may round in opposite directions, so their sums are off by more than eps / 2
WEIGHT_ROUNDINGS = 2.0
# A norm over n coordinates that centres meets inputs of a variance below the share s of the usual
# one with probability s^((n - 1) / 2). With few coordinates, single texts err far more than others
FEWEST = 8


@dataclass(frozen=True)
class Finding:
    """One statement about what a growth keeps.

    Attributes:
        level: "exact", "approximate" (the error is small, see `growkern.verify`) or "changed".
        what: the part of the model, or the dtype, that the statement is about.
        why: the reason.
        bound: the number that limits the growth's error in `measure`, of statements on weights and
            on new tokens. How far outputs may move, `growkern.verify` measures on the source.
        measure: the number of `growkern.verify` that `bound` limits.
        asked: True for a change that the user asked for, such as `method="aki"`.
        change: of a changed statement, the error in `measure` of all changes together, if it was
            measured on random texts.
    """

    level: str
    what: str
    why: str
    bound: float | None = None
    measure: str = OUTPUT_ERROR
    asked: bool = False
    change: float | None = None

    def line(self) -> str:
        """The statement as one line of text."""
        return f"{self.level}: {self.what} ({self.why})"


def rounding_findings(plan: Blueprint) -> list[Finding]:
    layout, dtype = plan.layout, str(plan.dtype).removeprefix("torch.")
    eps = torch.finfo(plan.dtype).eps
    bound = WEIGHT_ROUNDINGS * eps
    each = f"each weight by at most {eps / 2:.1g}; copies add up to it within {bound:.1g}"
    if plan.dtype == torch.float16:
        tiny = torch.finfo(torch.float16).tiny
        each += f"; below {tiny:.2g} the error stays that of {tiny:.2g}"
    if names := plan.narrowed_tensors:
        wide = str(plan.source.dtypes[names[0]]).removeprefix("torch.")
        all_of_it = len(names) == len(plan.source.dtypes)
        what = "the source" if all_of_it else f"{names[0]} (one of {len(names)} such tensors)"
        why = f"{what} is {wide} and is rounded to {dtype}, {each}"
        return [_rounded(plan, dtype, why, bound)]
    if plan.dtype.itemsize > 2:
        return []
    is_widened = any(
        plan.small.size(key) != plan.large.size(key)
        for key in layout.family.config.keys() - set(layout.family.stacks.values())
    )
    # norms of float16 are read
    is_random, is_read = plan.options.scheme == "paper", plan.dtype == torch.float16
    kinds = {}
    for task in plan.tasks:
        layer = task.source_layer if is_random or (is_read and task.tensor.norm) else None
        kinds[task.tensor.template, task.identity, layer, task.upper is None] = task
    rounded = [t.name for t in kinds.values() if t.source != RANDOM and _is_rounded(plan, t)]
    if rounded:
        why = f"some scaled weights are rounded to this dtype, such as {rounded[0]}, {each}"
        return [_rounded(plan, dtype, why, bound)]
    summed = "copies add up to the source's weights bit for bit"
    return [Finding("exact", dtype, summed if is_widened else "weights are copied")]


def _rounded(plan: Blueprint, dtype: str, why: str, bound: float) -> Finding:
    """The statement on weights that are rounded by at most `bound`."""
    size = plan.small.size("stream")
    if plan.small.family.norm.centres and size < FEWEST:
        why += f"; norms over {size} coordinates can make any change of that"
        return Finding("changed", dtype, why, bound, WEIGHT_ERROR)
    return Finding("approximate", dtype, why, bound, WEIGHT_ERROR)


def _is_rounded(plan: Blueprint, task: Task) -> bool:
    """True if building this tensor rounds weights.

    That is so if its copies add up to the source times a factor that rounds (`_rounds`), or if some
    of its rows are computed as sums.
    """
    centres = plan.layout.family.norm.centres
    if not task.tensor.norm:
        maps = axis_maps(plan, task)
        # rows of new tokens are sums too, but no old output depends on them. Without a mean the
        # extra coordinates are 0
        computed = zip(maps, task.tensor.axes, strict=True) if centres else ()
        if any(m.extra for m, axis in computed if ":" in axis):
            return True
        # no output depends on weights that read 0
        factors = [
            _whole(m.index[:end], m.gathered_scale[:end], m.sums is not None)
            for m, end in ((m, len(m.index) - m.free) for m in maps)
        ]
        return _rounds(factors, plan.dtype)
    entering, leaving = (plan.layout.space(name, task.source_layer) for name in task.tensor.norm)
    if centres and bool(entering.is_extra.any()):
        return True
    # the other norms around inserted blocks have gains too, but where the last one's is 1, it
    # takes them out again
    gain = leaving.write * affine_gain(plan, task)
    read = ~entering.is_extra
    if not task.tensor.is_bias:
        read &= entering.write != 0
        gain = entering.kappa * gain / entering.write
    if plan.layout.family.norm.offset(task.tensor.is_bias):
        # the stored weight is gain (1 + weight) - 1
        return bool((gain[read] != 1).any())
    index, is_split = entering.read_index[read], plan.layout.is_dual(task.tensor.norm[1])
    gain = _whole(index, gain[read], is_split and plan.options.shares_add_up)
    is_rounded = _rounds([gain], plan.dtype)
    if not is_rounded or plan.dtype != torch.float16:
        return is_rounded
    # norms are short enough to be read, and most of their weights are near 1
    weight = values_of(plan, task.source)
    scaled = None if weight is None else weight.double()[index] * gain
    return scaled is None or bool((scaled.to(plan.dtype).double() != scaled).any())


def _whole(index: torch.Tensor, factor: torch.Tensor, is_split: bool) -> torch.Tensor:
    """The factor of every target entry, or that of all copies of its source entry together.

    With `is_split`, copies are shares that add up bit for bit (`maps.take_shares`).
    """
    if not is_split:
        return factor
    size = int(index.max()) + 1
    return torch.zeros(size, dtype=factor.dtype).index_add_(0, index, factor)[index]


def _rounds(factors: list[torch.Tensor], dtype: torch.dtype) -> bool:
    """True if a weight may be rounded when it is multiplied by one factor of every vector.

    Powers of two round nothing. But the half of a number below 1.2e-4 has more digits than float16
    holds. In other dtypes such numbers are too small to matter, and numbers too large are refused.
    """
    powers = [factor[factor != 0].abs().log2() for factor in factors]
    # sums of shares are off by float64 rounding, far below the rounding of the weights
    if any(bool(((power - power.round()).abs() > 1e-12).any()) for power in powers):
        return True
    least = sum(power.round().min().item() for power in powers if len(power))
    return dtype == torch.float16 and least < 0
