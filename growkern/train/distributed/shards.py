"""Trains and saves models that Trainer does not: those that FSDP2 has sharded.

Trainer and accelerate neither wrap nor move a sharded model. Its gradients and its checkpoints are
handled here. Every process writes and reads its own parts of a checkpoint, with
`torch.distributed.checkpoint`. Any number of processes can load it. Tensors have the names that
`growkern.grow_into` and `growkern.grow_optimizer_into` read:

    weights/    <parameter>
    optimizer/  state.<parameter>.<key>
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterator, Sequence
from itertools import chain
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.staging import BlockingAsyncStager
from torch.distributed.tensor import DTensor
from torch.optim import Adam, AdamW, Optimizer
from transformers.trainer import SCHEDULER_NAME

from growkern.errors import GrowthError
from growkern.growth.models import local_tensor
from growkern.growth.optimizer import COUNTS, GrowthAdamW
from growkern.growth.sharded import free_gathered, named_tensors
from growkern.growth.source import METADATA_FILE, OPTIMIZER, WEIGHTS, SafeReader, read_headers
from growkern.train.distributed.shard import is_sharded, prime
from growkern.train.sections import DistributedOptions

GROUPS = "optimizer_groups.pt"
# folder in the checkpoint -> its tensors by their names
Parts = dict[str, dict[str, Any]]


def has_weights(directory: Path) -> bool:
    """Whether a checkpoint holds the weights of a sharded model."""
    return (directory / WEIGHTS / METADATA_FILE).is_file()


def weight_parts(model: nn.Module) -> Parts:
    """This process's parts of a model, with buffers; a tied tensor has the first of its names."""
    names: dict[int, str] = {}
    tensors = named_tensors(model)
    for name, tensor in tensors.items():
        names.setdefault(id(tensor), name)
    return {WEIGHTS: {name: tensors[name].detach() for name in names.values()}}


def optimizer_parts(model: nn.Module, optimizer: Optimizer) -> Parts:
    """This process's parts of an optimizer's state, by the names of their parameters."""
    named_tensors(model)  # the shards again, which are the optimizer's parameters
    state = {}
    for name, p in model.named_parameters():
        for key, value in optimizer.state.get(p, {}).items():
            if isinstance(value, Tensor):
                state[f"state.{name}.{key}"] = value
    return {OPTIMIZER: state}


def save_groups(optimizer: Optimizer, directory: Path) -> None:
    """Write the settings of the optimizer's parameter groups. One process does this."""
    groups = [
        {name: value for name, value in group.items() if name != "params"}
        for group in optimizer.param_groups
    ]
    torch.save(groups, directory / GROUPS)


def copy_to_host(parts: Parts) -> Parts:
    """A copy in CPU memory, which training does not change."""
    copies: Parts = BlockingAsyncStager().stage(parts)
    return copies


def write_parts(parts: Parts, directory: Path, group: dist.ProcessGroup | None = None) -> None:
    """Write this process's parts and return when they are on disk. All processes must call this.

    The processes talk in `group`. If one could not write, all raise an OSError.
    """
    for name, state in parts.items():
        # every process syncs its own files: on a network disk the first one cannot
        writer = dcp.FileSystemWriter(directory / name, sync_files=True)
        with _plain_errors():
            dcp.save(state, storage_writer=writer, process_group=group)


def load_weights(model: nn.Module, directory: Path) -> None:
    """Read this process's parts of a model in place. All processes must call this."""
    if not has_weights(directory):
        raise GrowthError(
            f"{directory} is not the checkpoint of a sharded model: it has no "
            f"{WEIGHTS}/{METADATA_FILE}"
        )
    _load(weight_parts(model), directory)


def load_optimizer(model: nn.Module, optimizer: Optimizer, directory: Path) -> None:
    """Read this process's parts of an optimizer's state. All processes must call this."""
    create_optimizer_state(optimizer)
    groups = torch.load(directory / GROUPS, weights_only=True)
    if len(groups) != len(optimizer.param_groups):
        raise GrowthError(
            f"{directory} holds an optimizer of {len(groups)} parameter groups, this one has "
            f"{len(optimizer.param_groups)}"
        )
    _make_room(model, optimizer, directory / OPTIMIZER)
    _load(optimizer_parts(model, optimizer), directory)
    for group, values in zip(optimizer.param_groups, groups, strict=True):
        group.update(values)


def _make_room(model: nn.Module, optimizer: Optimizer, directory: Path) -> None:
    """Give the optimizer the tensors that a checkpoint has and it has not.

    Only tensors that are there are loaded, and most optimizers make theirs in their first step.
    """
    with _plain_loading(directory):
        stored = SafeReader(directory).metadata.state_dict_metadata
    for name, p in model.named_parameters():
        prefix = f"state.{name}."
        for place, kept in stored.items():
            key = place.removeprefix(prefix)
            if not place.startswith(prefix) or not isinstance(kept, TensorStorageMetadata):
                continue
            dtype = kept.properties.dtype
            if key not in optimizer.state[p]:
                optimizer.state[p][key] = (
                    torch.zeros_like(p, dtype=dtype, requires_grad=False)
                    if kept.size == p.shape
                    else torch.zeros(kept.size, dtype=dtype)
                )


def _load(parts: Parts, directory: Path) -> None:
    """Fill parts with what the folders of a checkpoint hold."""
    for folder, state in parts.items():
        with _plain_loading(directory / folder), warnings.catch_warnings():
            # torch warns of it; an export runs in one process without a group
            warnings.filterwarnings("ignore", "torch.distributed is .*single process")
            reader = SafeReader(directory / folder)
            for name in state.keys() & reader.metadata.state_dict_metadata.keys():
                reader.check_filled(name)
            dcp.load(state, storage_reader=reader)


@contextlib.contextmanager
def _plain_loading(directory: Path) -> Iterator[None]:
    """While active, a failure to read becomes one line."""
    try:
        yield
    except (CheckpointException, RuntimeError, OSError, ValueError) as error:
        raise GrowthError(f"{directory} cannot be loaded: {_first_cause(error)}") from error


@contextlib.contextmanager
def _plain_errors() -> Iterator[None]:
    """While active, a failure to write on any process becomes an OSError on all of them.

    `CheckpointException` is not even an `Exception`.
    """
    try:
        yield
    except CheckpointException as error:
        cause = next(iter(error.failures.values()))[0]
        if isinstance(cause, OSError):
            raise OSError(cause.errno, cause.strerror or str(cause)) from error
        raise RuntimeError(str(cause)) from error


def _first_cause(error: BaseException) -> str:
    if isinstance(error, CheckpointException) and error.failures:
        error = next(iter(error.failures.values()))[0]
    return str(error).strip().partition("\n")[0] or type(error).__name__


@torch.no_grad()
def create_optimizer_state(optimizer: Optimizer) -> None:
    """Give each parameter that has no optimizer state the state of zero steps, and missing counts.

    Without this, a checkpoint of stage 1 lacks the parameters that no sub-model has reached yet,
    and a sharded load fills the gap with step = 1. Other optimizers than Adam, AdamW and
    GrowthAdamW are left alone: a state of zeros is not always theirs before the first step.
    """
    if type(optimizer) not in (Adam, AdamW, GrowthAdamW):
        return
    counts = COUNTS if isinstance(optimizer, GrowthAdamW) else COUNTS[:1]
    for group in optimizer.param_groups:
        for p in group["params"]:
            if not p.requires_grad:
                continue
            if not optimizer.state.get(p):
                optimizer.state[p] = _zero_state(group, p, counts)
            # a state that was grown has no count of steps since the growth
            for key in counts:
                optimizer.state[p].setdefault(key, torch.tensor(0.0))


def _zero_state(
    group: dict[str, Any], p: torch.Tensor, counts: Sequence[str]
) -> dict[str, torch.Tensor]:
    """The state that the optimizer makes for a parameter in its first step, before it counts.

    A step of length 0 would make it too. Its temporary tensors then leave gaps in the memory of a
    process that are as large as the parameters.
    """
    is_wide = torch.get_default_dtype() == torch.float64 and not group["fused"]
    count = torch.zeros(
        (),
        dtype=torch.float64 if is_wide else torch.float32,
        device=p.device if group["capturable"] or group["fused"] else "cpu",
    )
    moments = ["exp_avg", "exp_avg_sq"] + ["max_exp_avg_sq"] * group["amsgrad"]
    return {
        **{key: count.clone() for key in counts},
        **{key: torch.zeros_like(p, memory_format=torch.preserve_format) for key in moments},
    }


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
