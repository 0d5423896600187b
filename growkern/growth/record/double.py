"""Runs models of transformers in float64, so that a real difference stands out from rounding."""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.overrides import TorchFunctionMode

from growkern.growth.models import untrained_model
from growkern.growth.source.source import Source

# parameters of a model that may be copied to float64
LARGEST = 50_000_000


class Float64(TorchFunctionMode):
    """Redirects casts to float32 to float64: models cast norms, rotary tables and softmax."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if func is torch.Tensor.float:
            return args[0].to(torch.float64)
        if func is torch.Tensor.to:
            args = tuple(torch.float64 if a is torch.float32 else a for a in args)
        if kwargs.get("dtype") is torch.float32:
            kwargs["dtype"] = torch.float64
        return func(*args, **kwargs)


def fits(source: Source) -> bool:
    """True if `in_float64` may copy this model: it is small, plain, and not spread over ranks."""
    if sum(map(_numbers, source.spec.shapes.values())) > LARGEST:
        return False
    first = source.read(next(iter(source.dtypes)))
    return not isinstance(first, DTensor) and not first.is_meta


def _numbers(shape: tuple[int, ...]) -> int:
    return int(torch.Size(shape).numel())


def in_float64(source: Source) -> Any:
    """A float64 copy of a model, in evaluation mode, on the model's device."""
    model = untrained_model(source.spec, torch.float64)
    state = {name: source.read(name).to(torch.float64) for name in source.dtypes}
    model.load_state_dict(state, strict=False, assign=True)
    model.tie_weights()
    return model.to(source.device).eval()
