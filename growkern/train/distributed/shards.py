"""Trains and saves models that Trainer does not: those that FSDP2 has sharded.

Trainer and accelerate neither wrap nor move a sharded model. Its gradients and its checkpoints are
handled here.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import chain
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from transformers.trainer import SCHEDULER_NAME

from growkern.growth.models import local_tensor
from growkern.growth.sharded import free_gathered
from growkern.growth.source import read_headers
from growkern.train.distributed.checkpoint import (
    Parts,
    copy_to_host,
    load_optimizer,
    load_weights,
    optimizer_parts,
    save_groups,
    weight_parts,
    write_parts,
)
from growkern.train.distributed.shard import DistributedOptions, is_sharded, prime


class Shards:
    """What a sharded model needs in a run. For other models `sharded` is False.

    Args:
        beside: frozen models that run in a step. What they gathered is freed after the backward
            pass.

    Attributes:
        async_checkpoints: whether a checkpoint of a sharded model is copied, and written while
            training continues. As in the options of `growkern.shard`; by default it is.
        copied: the parts of the last checkpoint that are to be written in the background.
    """

    def __init__(self, model: Any, beside: Sequence[Any] = ()) -> None:
        self.sharded = is_sharded(model)
        chosen: DistributedOptions = getattr(model, "distributed_options", DistributedOptions())
        self.async_checkpoints = self.sharded and chosen.async_checkpoints
        self.copied: Parts = {}
        self.in_checkpoint = False
        self._beside = [model for model in beside if is_sharded(model)]
        if self.sharded:
            prime(model)

    def prepare(self, model: Any, accelerator: Any) -> None:
        """Let accelerate add autocast to the model, and nothing else."""
        if self.sharded and not getattr(model, "_is_accelerate_prepared", False):
            accelerator.prepare_model(model, device_placement=False, evaluation_mode=True)
            # accelerate leaves alone what it has prepared
            model._is_accelerate_prepared = True

    def begin_step(self, model: Any, *, is_last: bool) -> None:
        """Let the gradients be added up at the last batch of a step."""
        if self.sharded:
            model.set_requires_gradient_sync(is_last)

    def end_step(self, model: Any, *, is_last: bool) -> None:
        """Free what a batch has gathered."""
        if self.sharded and is_last:
            # with set_reshard_after_backward(False) they are gathered still, and clipping would
            # find no gradients
            free_gathered(model)
        for frozen in self._beside:
            free_gathered(frozen)

    # --------------------------------------------------------------- checkpoints

    def load(self, model: Any, directory: Path) -> bool:
        """Load the weights of a checkpoint; False if Trainer has to."""
        if self.sharded:
            load_weights(model, directory)
            return True
        known = model.state_dict().keys()
        if not any(directory.glob("*.safetensors")) or read_headers(directory).keys() <= known:
            return False
        # transformers writes each expert by itself, and its Trainer would load none of them
        dtype = next(model.parameters()).dtype
        model.load_state_dict(type(model).from_pretrained(directory, dtype=dtype).state_dict())
        return True

    def save(
        self, model: Any, tokenizer: Any, directory: Path, write: Callable[..., Any], is_first: bool
    ) -> bool:
        """Save a sharded model; False if Trainer has to.

        For a checkpoint each process writes its part of the weights, or copies it. The first also
        writes the files that make a model directory. Elsewhere the first writes all, with `write`.
        """
        if not self.sharded:
            return False
        if not self.in_checkpoint:
            state = whole_state(model, keep=is_first)
            if is_first:
                write(str(directory), state_dict=state)
            return True
        directory.mkdir(parents=True, exist_ok=True)
        self._write(weight_parts(model), directory)
        if is_first:
            config = model.config
            config.architectures = [type(model).__name__.removeprefix("FSDP")]
            config.save_pretrained(directory)
            if model.can_generate():
                model.generation_config.save_pretrained(directory)
            if tokenizer is not None:
                tokenizer.save_pretrained(directory)
        return True

    def save_optimizer(
        self, model: Any, optimizer: Any, scheduler: Any, directory: Path, *, is_first: bool
    ) -> None:
        """Write this process's part of the optimizer's state, or copy it; the first all else."""
        self._write(optimizer_parts(model, optimizer), directory)
        if is_first:
            save_groups(optimizer, directory)
            torch.save(scheduler.state_dict(), directory / SCHEDULER_NAME)

    def _write(self, parts: Parts, directory: Path) -> None:
        if self.async_checkpoints:
            self.copied |= copy_to_host(parts)
        else:
            write_parts(parts, directory)

    @staticmethod
    def load_optimizer(model: Any, optimizer: Any, scheduler: Any, directory: Path) -> None:
        """Read what `save_optimizer` wrote; a checkpoint of the model alone has nothing."""
        if (directory / SCHEDULER_NAME).is_file():
            load_optimizer(model, optimizer, directory)
            scheduler.load_state_dict(torch.load(directory / SCHEDULER_NAME, weights_only=True))


def without_shared(result: Any, model: Any) -> Any:
    """What a load has missed, without the weights that share the memory of one that was loaded."""
    missing, state = set(result.missing_keys), model.state_dict(keep_vars=True)
    loaded = {id(value) for name, value in state.items() if name not in missing}
    absent = [name for name in result.missing_keys if id(state.get(name)) not in loaded]
    return SimpleNamespace(missing_keys=absent, unexpected_keys=result.unexpected_keys)


def all_finite(model: nn.Module) -> bool:
    """Whether no parameter holds NaN or infinity, the same answer on all processes."""
    finite = all(bool(local_tensor(p).isfinite().all()) for p in model.parameters())
    return _over_ranks(model, float(finite), dist.ReduceOp.MIN) == 1


def largest_entry(model: nn.Module) -> float:
    """The largest absolute value of all parameters, the same on all processes."""
    parts = (local_tensor(p) for p in model.parameters())
    largest = max((float(part.abs().max()) for part in parts if part.numel()), default=0.0)
    return _over_ranks(model, largest, dist.ReduceOp.MAX)


def _over_ranks(model: nn.Module, value: float, operation: Any) -> float:
    """Combine a number over the processes; a model that is not sharded is the same on all."""
    first = next(model.parameters(), None)
    if not isinstance(first, DTensor) or dist.get_world_size() == 1:
        return value
    # float32: some accelerators have no float64
    number = torch.tensor(value, dtype=torch.float32, device=first.device_mesh.device_type)
    dist.all_reduce(number, operation)
    return float(number)


def whole_state(model: nn.Module, *, keep: bool) -> dict[str, Tensor]:
    """The state dict of a sharded model with whole tensors on the CPU; tied tensors stay tied.

    All processes must call this. One tensor is gathered at a time. Without `keep` it is empty.
    """
    free_gathered(model)
    tensors = chain(model.named_parameters(remove_duplicate=False), model.named_buffers())
    names = model.state_dict().keys()
    state: dict[str, Tensor] = {}
    seen: dict[int, Tensor] = {}
    for name, tensor in tensors:
        if name not in names:
            continue
        if id(tensor) not in seen:
            gathered = tensor.detach()
            gathered = gathered.full_tensor() if isinstance(gathered, DTensor) else gathered
            seen[id(tensor)] = gathered.cpu() if keep else gathered.new_empty(0)
        state[name] = seen[id(tensor)]
    return state if keep else {}
