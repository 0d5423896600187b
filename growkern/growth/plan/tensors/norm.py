"""The weight or bias of a norm, by (3) of `growkern.growth.space.spaces`.

    gamma_t = kappa c / a gamma,   beta_t = c beta                                         (1)

Extra coordinates and the norms around inserted blocks have rules of their own.
"""

from __future__ import annotations

import dataclasses
import math

import torch
from torch import Tensor

from growkern.growth.plan.axes import AxisMap, axis_maps
from growkern.growth.plan.blueprint import Part
from growkern.growth.plan.bounds import values_of
from growkern.growth.plan.tensors.gather import Gather, on_cpu, rounds, whole
from growkern.growth.space import Space, partial_sums, take_shares
from growkern.growth.stored import Read
from growkern.ops import expand as ops


class Norm(Gather):
    """A norm of the source, between copies."""

    has_inverse = False

    @property
    def names(self) -> tuple[str, ...]:
        """The spaces that the norm reads and writes."""
        return self.task.tensor.norm or ()

    @property
    def spaces(self) -> list[Space]:
        return [self.plan.layout.space(name, self.task.source_layer) for name in self.names]

    @property
    def is_bias(self) -> bool:
        return self.task.tensor.is_bias

    @property
    def factor(self) -> float:
        """In the last norm of inserted blocks it also restores their input's size."""
        if self.task.identity != "affine" or self.is_bias:
            return super().factor
        return self._kept_size / self.plan.options.identity_gain

    @property
    def _kept_size(self) -> float:
        """The weight with which a norm keeps an input of size `identity_gain`."""
        return math.sqrt(self.plan.options.identity_gain**2 + self.plan.small.norm_epsilon)

    @property
    def is_shared(self) -> bool:
        """True if the output enters a tied head by shares that add up."""
        return self.plan.options.shares_add_up and self.plan.layout.is_dual(self.names[1])

    def build(self, read: Read, part: Part, out: Tensor, work: ops.Work) -> None:
        # short vectors, which are computed on the CPU for any device
        out.copy_(self.values(on_cpu(read), work.backend if out.is_cpu else None)[part])

    def needs(self, part: Part) -> None:
        return None

    def values(self, read: Read, backend: str | None) -> Tensor:
        """The whole vector in the plan's dtype."""
        task, offset, gain = self.task, self.offset, self.factor
        value = read(task.source)
        # some models multiply by 1 + weight: scale the sum in float64, as rounding it loses digits
        value = value.double() + offset if offset else value.to(self.plan.sum_dtype(value))
        index, scale, value = self._gather(value)
        exact = offset != 0 or gain != 1
        dtype = torch.float64 if exact else self.plan.dtype
        from_next, upper = self._from_next_layer(), None
        if task.upper is not None and bool(from_next.any()):
            # AKI takes whole heads from the next layer's norm
            upper, index = read(task.upper).to(value.dtype) + offset, index + len(value) * from_next
        sums = None
        if not exact and self.is_shared:
            sums = partial_sums(index, scale, ~self.spaces[0].is_extra)
        built = ops.expand(
            value,
            rows=index,
            row_scale=scale if sums is None else None,
            upper=upper,
            out_dtype=dtype,
            backend=backend,
        )
        if sums is not None:
            take_shares(built, 0, *sums)
        return (built * gain - offset).to(self.plan.dtype) if exact else built

    def _from_next_layer(self) -> Tensor:
        """Which target entries AKI takes from the next layer, (n,) bool."""
        if self.task.upper is None or self.plan.options.aki != "unit":
            return torch.zeros(self.task.shape, dtype=torch.bool)
        return self.plan.layout.next_layer_units(self.names[1])

    def _gather(self, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Index and scale over the target, (n,) each, and the vector that they gather from."""
        layout, row, (entering, leaving) = self.plan.layout, self.task.tensor.row, self.spaces
        index, scale = entering.read_index, leaving.write
        if not self.is_bias:
            # a coordinate that is always 0 may have any weight: a copy's weight trains like a copy
            inverse = torch.where(entering.write == 0, 1.0, 1 / entering.write)
            scale = entering.kappa * torch.where(entering.write == 0, 1.0, leaving.write) * inverse
        extra = entering.is_extra
        if not bool(extra.any()):
            return index, scale, value
        scale, appended = torch.where(extra, 0.0, scale), torch.ones(1, dtype=torch.float64)
        carries = layout.is_carried and row.extra == "carry"
        if row.extra == "free" or not layout.family.norm.centres:
            # the centred input is 0 here, so any weight is exact; take the copies' mean, since a
            # weight of 0 would block the gradient
            copies = (entering.kappa * leaving.write / entering.write)[~extra]
            scale[extra] = 0.0 if self.is_bias else copies.mean()
        elif self.is_bias and (carries or not layout.is_carried):
            appended = value.double().mean()[None]
            index, scale[extra] = torch.where(extra, len(value), index), leaving.write[extra]
        elif carries:
            signs = entering.extra_signs
            # the signs of a single extra coordinate do not sum to 0, which shifts the mean
            centred = signs - signs.sum() / entering.target
            scale[extra] = entering.kappa / (self.plan.options.carry * centred)
            index = torch.where(extra, len(value), index)
        return index, scale, torch.cat([value, appended.to(value.dtype)])

    def rounds(self) -> bool:
        plan, (entering, leaving) = self.plan, self.spaces
        if plan.layout.family.norm.centres and bool(entering.is_extra.any()):
            return True
        # the other norms around inserted blocks have gains too, but where the last one's is 1, it
        # takes them out again
        gain = leaving.write * self.factor
        read = ~entering.is_extra
        if not self.is_bias:
            read &= entering.write != 0
            gain = entering.kappa * gain / entering.write
        if self.offset:
            # the stored weight is gain (1 + weight) - 1
            return bool((gain[read] != 1).any())
        index = entering.read_index[read]
        gain = whole(index, gain[read], self.is_shared)
        is_rounded = rounds([gain], plan.dtype)
        if not is_rounded or plan.dtype != torch.float16:
            return is_rounded
        # norms are short enough to be read, and most of their weights are near 1
        weight = values_of(plan, self.task.source)
        scaled = None if weight is None else weight.double()[index] * gain
        return scaled is None or bool((scaled.to(plan.dtype).double() != scaled).any())

    # ---- optimizers: (3) of `growth.optimizer.moments`

    def rates(self) -> list[AxisMap]:
        (rate,), entering = axis_maps(self.plan, self.task), self.spaces[0]
        if self.is_bias:
            return [rate]
        share = torch.where(entering.write == 0, 0.0, entering.kappa / entering.write)
        return [dataclasses.replace(rate, scale=rate.scale * share)]

    def gradients(self, power: int = 1) -> list[AxisMap]:
        (gradient,), entering = super().gradients(), self.spaces[0]
        scale = gradient.scale
        if not self.is_bias:
            scale = scale * entering.write / entering.kappa
            scale = torch.where(entering.is_extra, 0.0, scale)
        return [dataclasses.replace(gradient, scale=scale**power)]

    def pull(self) -> Tensor | None:
        if self.is_bias or self.is_new or not self.offset:
            return None
        (rate,) = self.rates()
        # u is 0 where the norm's input is 0; there `_gather` scales by kappa
        return torch.where(rate.scale == 0, self.spaces[0].kappa, rate.scale)


class InsertedNorm(Norm):
    """A norm around inserted blocks, which only normalises, or adds nothing."""

    holds, is_new = "", True

    def values(self, read: Read, backend: str | None) -> Tensor:
        dtype, is_bias = self.plan.dtype, self.is_bias
        if self.task.identity == "zero":
            # where nothing enters, any weight adds 0, and lets the matrix below learn
            free = 0.0 if is_bias or self.plan.layout.family.norm.centres else 1.0
            return torch.where(self.spaces[0].is_extra, free - self.offset, -self.offset).to(dtype)
        # only the first norm of a chain normalises, to the size K = `identity_gain`. The norms of
        # inserted blocks must return their input unchanged: sqrt(K^2 + eps) does, up to eps
        is_first = (self.task.tensor.stack, self.task.tensor.layer) not in self.plan.inserted
        gain = self.plan.options.identity_gain if is_first else self._kept_size
        return torch.full(self.task.shape, 0.0 if is_bias else gain, dtype=dtype)
