"""Saves and loads sharded models and optimizers with `torch.distributed.checkpoint`.

Every process writes and reads its own parts. A checkpoint can be loaded by any number of processes.
Tensors have the names that `growkern.grow_into` and `growkern.grow_optimizer_into` read:

    weights/    <parameter>
    optimizer/  state.<parameter>.<key>
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.staging import BlockingAsyncStager
from torch.optim import Adam, AdamW, Optimizer

from growkern.errors import GrowthError
from growkern.growth.optimizer import COUNTS, GrowthAdamW
from growkern.growth.sharded import named_tensors
from growkern.growth.source import METADATA_FILE, SafeReader

WEIGHTS, OPTIMIZER, GROUPS = "weights", "optimizer", "optimizer_groups.pt"
# folder in the checkpoint -> its tensors by their names
Parts = dict[str, dict[str, Any]]


def has_weights(directory: Path) -> bool:
    """Whether a checkpoint holds the weights of a sharded model."""
    return (directory / WEIGHTS / METADATA_FILE).is_file()


def sources_of(checkpoint: Path) -> tuple[Path, Path]:
    """The directories of a checkpoint from which a model and its optimizer's state can be grown."""
    if has_weights(checkpoint):
        return checkpoint / WEIGHTS, checkpoint / OPTIMIZER
    return checkpoint, checkpoint


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
            like = kept.size == p.shape
            if key not in optimizer.state[p]:
                optimizer.state[p][key] = (
                    torch.zeros_like(p, dtype=dtype, requires_grad=False)
                    if like
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
    on_device = group["capturable"] or group["fused"]
    is_wide = torch.get_default_dtype() == torch.float64 and not group["fused"]
    count = torch.zeros(
        (),
        dtype=torch.float64 if is_wide else torch.float32,
        device=p.device if on_device else "cpu",
    )
    moments = ["exp_avg", "exp_avg_sq"] + ["max_exp_avg_sq"] * group["amsgrad"]
    return {
        **{key: count.clone() for key in counts},
        **{key: torch.zeros_like(p, memory_format=torch.preserve_format) for key in moments},
    }
