"""The factors of `growth_lr_multipliers` for the parts of parameters that this process holds."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from growkern.errors import GrowthError
from growkern.growth.optimizer.checks import check_planned_shape
from growkern.growth.optimizer.moments import EntryFactors
from growkern.growth.sharded.placement import local_part


def factors_of(factors: Mapping[str, EntryFactors], name: str, p: Tensor) -> EntryFactors:
    """The factors of this process's part of a parameter, on its device.

    They are float64 for parameters in float64, and float32 for all others: bfloat16 cannot
    represent a third.

    Args:
        factors: of all parameters of the grown model, by name.
        name: the parameter's name; wrappers of `torch.compile` and DistributedDataParallel may add
            to it.
        p: the parameter, maybe a DTensor.
    """
    name = name.replace("_orig_mod.", "").removeprefix("module.")
    if name not in factors:
        raise GrowthError(
            f"the plan has no parameter {name}: pass the parameters of the grown model"
        )
    found = factors[name]
    shape = tuple(max(n) for n in zip(*(v.shape for v in found.lr), strict=True))
    check_planned_shape(name, p.shape, shape)
    part = local_part(name, p)
    device = p.to_local().device if isinstance(p, DTensor) else p.device
    dtype = torch.float64 if p.dtype == torch.float64 else torch.float32

    def here(vectors: tuple[Tensor, ...], dtype: torch.dtype) -> tuple[Tensor, ...]:
        cut = (v.swapaxes(0, d)[part[d]].swapaxes(0, d) for d, v in enumerate(vectors))
        return tuple(v.to(device, dtype) for v in cut)

    return EntryFactors(
        here(found.lr, dtype),
        here(found.eps, dtype),
        here(found.old, torch.bool),
        here(found.centre, dtype),
        found.muon,
    )
