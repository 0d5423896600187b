"""How a model class initialises its tensors, asked of the class itself.

Deviations differ from class to class and from layer to layer (GPT-2's output projections, all of
T5, ModernBERT's cut-off normal). The class tells them: it initialises a model without memory while
its calls of the initialisation functions are noted down instead of being carried out.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch
from torch import Tensor
from transformers import initialization

from growkern.errors import GrowthError
from growkern.families.model import ModelSpec
from growkern.growth.models import persistent_buffers, untrained_model

# the functions are transformers' own table, one for all threads
_patching = threading.Lock()


@dataclass(frozen=True)
class Initial:
    """A tensor before training: `value` everywhere, or normal around it.

    Attributes:
        deviation: standard deviation of the normal; 0 for a constant.
        cutoff: what is further away is drawn again, in deviations.
        zero_rows: rows that are 0 all the same (of padding tokens).
    """

    value: float
    deviation: float = 0.0
    cutoff: float = math.inf
    zero_rows: tuple[int, ...] = ()


def initial_tensors(spec: ModelSpec) -> dict[str, Initial]:
    """Of every parameter and persistent buffer of this model.

    Raises:
        GrowthError: the class initialises one of them in no way known here.
    """
    with torch.device("meta"):
        model = untrained_model(spec)
    tensors = dict(chain(persistent_buffers(model), model.named_parameters(remove_duplicate=False)))
    found: dict[int, Initial] = {}
    with _noted(found, {id(tensor) for tensor in tensors.values()}):
        for module in model.modules():
            module._is_hf_initialized = False
        model.initialize_weights()
    unknown = [name for name, tensor in tensors.items() if id(tensor) not in found]
    if unknown:
        raise GrowthError(
            f"{unknown[0]}: how {spec.class_name} initialises it is not known; use method='fpi'"
        )
    return {name: found[id(tensor)] for name, tensor in tensors.items()}


@contextmanager
def _noted(found: dict[int, Initial], ours: set[int]) -> Iterator[None]:
    """Calls on our tensors (ids) end up in `found`, all others are carried out."""

    def noting(name: str, carry_out: Callable[..., Tensor]) -> Any:
        read = _READERS.get(name)

        def call(tensor: Tensor, *args: Any, **kwargs: Any) -> Tensor:
            base = tensor if tensor._base is None else tensor._base
            if id(base) not in ours:
                return carry_out(tensor, *args, **kwargs)
            if read is None:
                found.pop(id(base), None)
                return tensor
            initial = read(*args, **kwargs)
            if base is not tensor:
                initial = _with_row(found[id(base)], base, tensor, initial)
            found[id(base)] = initial
            return tensor

        return call

    table = initialization.TORCH_INIT_FUNCTIONS
    with _patching:
        before = dict(table)
        table.update({name: noting(name, function) for name, function in before.items()})
        try:
            yield
        finally:
            table.update(before)


def _with_row(initial: Initial, base: Tensor, row: Tensor, its: Initial) -> Initial:
    if its != Initial(0.0) or row.shape != base.shape[1:]:
        raise GrowthError("a class initialises part of a tensor in a way that is not known")
    index = (row.storage_offset() - base.storage_offset()) // base.stride(0)
    zero_rows = (*initial.zero_rows, index)
    return Initial(initial.value, initial.deviation, initial.cutoff, zero_rows)


def _truncated(
    mean: float = 0.0, std: float = 1.0, a: float = -2.0, b: float = 2.0, **_: Any
) -> Initial:
    return Initial(mean, std, min(mean - a, b - mean) / std)


# the arguments are those of torch.nn.init
_READERS: dict[str, Callable[..., Initial]] = {
    "normal_": lambda mean=0.0, std=1.0, **_: Initial(mean, std),
    "trunc_normal_": _truncated,
    "constant_": lambda val: Initial(val),
    "zeros_": lambda: Initial(0.0),
    "ones_": lambda: Initial(1.0),
}
