"""Models whose numbers are not set yet, and models on the meta device, made real.

Real means: memory of this process's part, ties, computed buffers.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import chain
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from transformers.initialization import guard_torch_init_functions, no_init_weights

from growkern.families.model import ModelSpec


def untrained_model(spec: ModelSpec, dtype: torch.dtype | None = None) -> Any:
    """A new model with memory, or on the meta device, whose numbers are not set.

    Weights that the model ties are still tensors of their own: call its `tie_weights` if needed.
    """
    # some classes write into their config: BART's for questions sets num_labels
    config, how = copy.deepcopy(spec.config), {} if dtype is None else {"dtype": dtype}
    with no_init_weights():
        return getattr(transformers, spec.class_name)._from_config(config, **how)


def materialise(model: Any, device: torch.device | str) -> None:
    """Real memory for meta parameters, of what this process holds alone; ties are kept."""
    if not any(t.is_meta for t in chain(model.parameters(), model.buffers())):
        return
    first: dict[int, str] = {}
    shared = {
        name: first.setdefault(id(p), name)
        for name, p in model.named_parameters(remove_duplicate=False)
    }
    model.to_empty(device=device)
    for name, owner in shared.items():
        kept = model.get_parameter(owner)
        # fully_shard keeps its ties itself
        if model.get_parameter(name) is not kept:
            module, _, key = name.rpartition(".")
            setattr(model.get_submodule(module), key, kept)


def restore_buffers(model: Any) -> None:
    """Compute the buffers that no checkpoint holds, which `to_empty` left undefined."""
    with _marked_initialised(model), guard_torch_init_functions():
        for module in model.modules():
            if module._non_persistent_buffers_set:
                with _local_buffers(module):
                    model._init_weights(module)


@contextmanager
def _local_buffers(module: nn.Module) -> Iterator[None]:
    """This process's part of buffers that are DTensors: what computes them knows plain ones."""
    distributed = {k: b for k, b in module._buffers.items() if isinstance(b, DTensor)}
    module._buffers.update({k: b.to_local() for k, b in distributed.items()})
    try:
        yield
    finally:
        for name, buffer in distributed.items():
            # computed in place, or put in the place
            buffer.to_local().copy_(module.get_buffer(name))
            module._buffers[name] = buffer


@contextmanager
def _marked_initialised(model: Any) -> Iterator[None]:
    """Transformers' own mark of parameters that its initialisation leaves alone."""
    marked = [p for p in model.parameters() if not hasattr(p, "_is_hf_initialized")]
    for parameter in marked:
        parameter._is_hf_initialized = True
    try:
        yield
    finally:
        for parameter in marked:
            del parameter._is_hf_initialized


def persistent_buffers(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Names and tensors of the buffers that checkpoints hold."""
    for name, buffer in model.named_buffers(remove_duplicate=False):
        module, _, key = name.rpartition(".")
        if key not in model.get_submodule(module)._non_persistent_buffers_set:
            yield name, buffer


def in_model_order(
    shapes: dict[str, tuple[int, ...]], spec: ModelSpec, dtype: torch.dtype
) -> dict[str, tuple[int, ...]]:
    """Shapes by name, in the order in which the model itself lists its tensors."""
    with torch.device("meta"):
        names = list(untrained_model(spec, dtype).state_dict())
    return {name: shapes[name] for name in names if name in shapes} | shapes
