"""Finds out how a model class initialises its tensors, for the baselines with random weights.

Standard deviations differ between classes and even between layers (GPT-2's output projections, all
of T5, the truncated normal of ModernBERT). So the class itself initialises a model on the meta
device, and this file records its calls of `torch.nn.init` instead of running them. The calls go
through a table of transformers, `initialization.TORCH_INIT_FUNCTIONS`.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Collection, Iterator
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

# the patched table belongs to transformers and is shared by all threads
_patching = threading.Lock()


@dataclass(frozen=True)
class Initial:
    """How a tensor is initialised: constant, or normal around `value`.

    Attributes:
        value: the constant, or the mean of the normal distribution.
        deviation: its standard deviation; 0 for a constant.
        cutoff: distance from the mean, in standard deviations, beyond which numbers are redrawn.
        zero_rows: rows that are set to 0 afterwards (padding tokens).
    """

    value: float
    deviation: float = 0.0
    cutoff: float = math.inf
    zero_rows: tuple[int, ...] = ()


def initial_tensors(spec: ModelSpec, needed: Collection[str]) -> dict[str, Initial]:
    """The initialisation of parameters and persistent buffers of a model, by name."""
    with torch.device("meta"):
        model = untrained_model(spec)
    every = chain(persistent_buffers(model), model.named_parameters(remove_duplicate=False))
    tensors = {name: tensor for name, tensor in every if name in needed}
    found: dict[int, Initial] = {}
    with _recorded_calls(found, {id(tensor) for tensor in tensors.values()}):
        for module in model.modules():
            module._is_hf_initialized = False
        model.initialize_weights()
    unknown = [name for name, tensor in tensors.items() if id(tensor) not in found]
    if unknown:
        raise GrowthError(
            f"{unknown[0]}: how {spec.class_name} initialises it is not known: use method='fpi'"
        )
    return {name: found[id(tensor)] for name, tensor in tensors.items()}


@contextmanager
def _recorded_calls(found: dict[int, Initial], ours: set[int]) -> Iterator[None]:
    """Record initialisation calls on our tensors in `found`; run all others.

    Args:
        found: the initialisation by `id` of the tensor; is filled.
        ours: `id` of every tensor whose calls are recorded.
    """

    def recording(name: str, run: Callable[..., Tensor]) -> Any:
        read = _READERS.get(name)

        def call(tensor: Tensor, *args: Any, **kwargs: Any) -> Tensor:
            base = tensor if tensor._base is None else tensor._base
            if id(base) not in ours:
                return run(tensor, *args, **kwargs)
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
        table.update({name: recording(name, function) for name, function in before.items()})
        try:
            yield
        finally:
            table.update(before)


def _with_row(initial: Initial, base: Tensor, row: Tensor, row_initial: Initial) -> Initial:
    """`initial` of a tensor, after one of its rows (a view) was set to 0."""
    if row_initial != Initial(0.0) or row.shape != base.shape[1:]:
        raise GrowthError(
            "the model class initialises a part of a tensor to something other than a row of "
            "zeros, which is not supported: use method='fpi'"
        )
    index = (row.storage_offset() - base.storage_offset()) // base.stride(0)
    zero_rows = (*initial.zero_rows, index)
    return Initial(initial.value, initial.deviation, initial.cutoff, zero_rows)


def _truncated(
    mean: float = 0.0, std: float = 1.0, a: float = -2.0, b: float = 2.0, **_: Any
) -> Initial:
    return Initial(mean, std, min(mean - a, b - mean) / std)


# torch.nn.init function -> the same arguments as an `Initial`
_READERS: dict[str, Callable[..., Initial]] = {
    "normal_": lambda mean=0.0, std=1.0, **_: Initial(mean, std),
    "trunc_normal_": _truncated,
    "constant_": lambda val: Initial(val),
    "zeros_": lambda: Initial(0.0),
    "ones_": lambda: Initial(1.0),
}
