"""Shards a model with FSDP2, and checks models that the user has sharded.

Nothing here needs `transformers.Trainer`: in a loop of your own, call `shard` before the optimizer
is made.

FSDP2 gathers and frees parameters by groups. Each transformer block is a group. The root group
holds all the rest: embeddings, final norm and head. Tied weights must be in one group, and the
fused loss reads the weight of the head while the model runs, so both stay in the root.
"""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    fully_shard,
)
from torch.distributed.rendezvous import rendezvous
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from growkern.arguments import check_kind
from growkern.errors import GrowthError
from growkern.growth.sharded import free_gathered
from growkern.growth.source import refuse_adapters
from growkern.train.model import find_stacks
from growkern.train.sections import NO_TENSOR_PARALLELISM, DistributedOptions

_REPLICATED = (
    "is replicated by torch.distributed._composable: leave replicate out. The trainer wraps a "
    "whole model in DistributedDataParallel; in a loop of your own, wrap it yourself"
)
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


def is_sharded(model: nn.Module) -> bool:
    """Whether a model or a part of it was sharded by FSDP2."""
    return any(isinstance(module, FSDPModule) for module in model.modules())


def join_processes(device: str | None = None) -> str:
    """Start communication with the other processes, unless it was started already.

    CPU tensors are exchanged too: checkpoints and offloaded parameters need that.
    """
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    device = device or ("cpu" if accelerator is None else accelerator.type)
    if dist.is_initialized():
        return device
    backend = "gloo" if device == "cpu" else f"cpu:gloo,{device}:nccl"
    store: dist.Store
    if int(os.environ.get("WORLD_SIZE", "1")) == 1:
        store, rank, processes = dist.HashStore(), 0, 1
    else:
        store, rank, processes = next(rendezvous("env://"))
        if os.environ.get("GROUP_WORLD_SIZE") == "1":
            # torchrun keeps its store when it restarts processes, and gloo would wait for ever for
            # the addresses of the killed ones. The agents of several machines count differently
            attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
            store = dist.PrefixStore(f"attempt-{attempt}", store)
    dist.init_process_group(backend, store=store, rank=rank, world_size=processes)
    return device


def leave_processes() -> None:
    """End communication with the other processes, and its threads.

    Gloo's threads end with the last reference to their group. One that still frees a tensor while
    Python exits would abort the process.
    """
    if dist.is_initialized():
        # a trainer and its model refer to each other, and to the group
        gc.collect()
        dist.destroy_process_group()


def check_replicas(replicas: int, processes: int) -> None:
    """Check that copies of a model can share out the processes."""
    if processes % replicas:
        fitting = ", ".join(str(n) for n in range(1, processes + 1) if processes % n == 0)
        choice = f"one of {fitting}" if processes > 1 else fitting
        raise GrowthError(
            f"distributed.replicas is {replicas}, but the number of processes is {processes}: set "
            f"replicas to {choice}, or start a multiple of {replicas} processes"
        )


def make_mesh(device: str, replicas: int = 1) -> DeviceMesh:
    """The mesh of all processes: (shard,), or (replicate, shard) with several replicas."""
    processes = dist.get_world_size()
    check_replicas(replicas, processes)
    if replicas == 1:
        return init_device_mesh(device, (processes,))
    names = ("replicate", "shard")
    return init_device_mesh(device, (replicas, processes // replicas), mesh_dim_names=names)


def shard(
    model: Any, options: DistributedOptions | None = None, mesh: DeviceMesh | None = None
) -> Any:
    """Prepare a model for distributed training, in place.

    With `sharding="fsdp"` every parameter becomes a DTensor. All processes must call this, with
    the same weights or on the meta device (then fill the model with `growkern.grow_into`). Without
    a mesh, communication between them is started if it was not. With "ddp" only blocks are compiled
    and checkpointed. The trainer or your loop adds DistributedDataParallel.

    Args:
        model: of transformers.
        options: default: FSDP2 over all processes.
        mesh: default: `make_mesh` over all processes, on the accelerator if there is one.

    Returns:
        The model.

    Raises:
        GrowthError: the model is sharded already, uses PEFT, or its processes do not fit.
    """
    options = options or DistributedOptions(sharding="fsdp")
    check_kind("options", options, DistributedOptions, "growkern.DistributedOptions")
    check_kind("model", model, nn.Module, "a model of transformers")
    refuse_adapters(model, "model")
    if is_sharded(model):
        raise GrowthError(f"the {type(model).__name__} is sharded already")
    blocks = [block for stack in find_stacks(model) for block in stack]
    if options.activation_checkpointing:
        # transformers has renamed the method, and warns of the old name
        enable = getattr(model, "activation_checkpointing_enable", None)
        (enable or model.gradient_checkpointing_enable)({"use_reentrant": False})
    if options.compile_blocks:
        # the whole model would be compiled again for each depth, and fail on the fused loss
        for block in blocks:
            block.compile()
    if options.sharding == "ddp":
        return model
    if mesh is None:
        mesh = make_mesh(join_processes(), options.replicas)
    how: dict[str, Any] = {"mesh": mesh}
    if "bf16" in (options.param_dtype, options.reduce_dtype):
        how["mp_policy"] = MixedPrecisionPolicy(
            param_dtype=DTYPES[options.param_dtype], reduce_dtype=DTYPES[options.reduce_dtype]
        )
    if options.cpu_offload:
        how["offload_policy"] = CPUOffloadPolicy(pin_memory=mesh.device_type != "cpu")
    for block in blocks:
        fully_shard(block, reshard_after_forward=options.reshard_after_forward, **how)
    # the root keeps its parameters after a forward pass: the loss of a student reads the head of
    # its teacher after the teacher has run
    fully_shard(model, **how)
    # the trainer asks how to write checkpoints
    model.distributed_options = options
    return model


def prime(model: nn.Module) -> None:
    """Gather and free every group of a sharded model once.

    With `reduce_dtype` and accumulated gradients, FSDP2 otherwise fails at the first step that
    leaves out a block that has never run.
    """
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.unshard()
            module.reshard()


# --------------------------------------------------------------------- checks


def check_sharding(model: Any, role: str, *, tensor_parallel: bool = False) -> None:
    """Check that a model was sharded in a way that trains right; a whole model always is.

    With `tensor_parallel` any mesh is taken: tensor parallelism, alone or beside FSDP2, and data
    parallelism of some of the processes. The caller's loop then knows who holds which rows.
    """
    distributed = [p for p in model.parameters() if isinstance(p, DTensor)]
    if not is_sharded(model):
        if distributed and not tensor_parallel:
            raise GrowthError(f"the {role} is tensor-parallel: {NO_TENSOR_PARALLELISM}")
        return
    is_root = isinstance(model, FSDPModule)
    if not is_root:
        raise GrowthError(
            f"fully_shard was called on parts of the {role} only: call fully_shard({role}) after "
            "them, so that the other parameters are sharded too"
        )
    free_gathered(model)
    _check_ties(model, role)
    for name, p in model.named_parameters():
        if not isinstance(p, DTensor):
            raise GrowthError(
                f"{name} of the {role} is not sharded, so its gradient would not be added up over "
                "the processes: call fully_shard without ignored_params"
            )
        if all(place.is_replicate() for place in p.placements):
            raise GrowthError(f"the {role} {_REPLICATED}, or shard it with fully_shard")
        if tensor_parallel:
            continue
        *others, last = p.placements
        if not last.is_shard() or not all(place.is_replicate() for place in others):
            raise GrowthError(
                f"{name} of the {role} is placed as {p.placements}: {NO_TENSOR_PARALLELISM}"
            )
        if p.device_mesh.size() != dist.get_world_size():
            raise GrowthError(
                f"the {role} was sharded over {p.device_mesh.size()} of the "
                f"{dist.get_world_size()} processes: use a mesh of all of them"
            )


def check_split_teacher(teacher: nn.Module, student: nn.Module) -> None:
    """Refuse a teacher whose parts are on processes that each have rows of their own."""
    if isinstance(student, DistributedDataParallel):
        ranks = set(dist.get_process_group_ranks(student.process_group))
    else:
        meshes = (group.mesh_info.mesh for _, group in _groups(student))
        ranks = {rank for mesh in meshes for rank in mesh.mesh.flatten().tolist()}
    if not ranks or is_sharded(teacher):
        return
    for name, p in teacher.named_parameters():
        if isinstance(p, DTensor) and len(ranks & set(p.device_mesh.mesh.flatten().tolist())) > 1:
            raise GrowthError(
                f"{name} of the teacher is split over processes that get different rows, since the "
                "model is data-parallel on them: split the teacher over processes that share their "
                "rows, or shard it with fully_shard"
            )


def refuse_replicas(model: nn.Module, role: str) -> None:
    """Refuse a model that PyTorch's `replicate` has wrapped in DistributedDataParallel in place."""
    for module in model.modules():
        # an import of the private module may fail in a later PyTorch
        kinds = {(kind.__module__, kind.__name__) for kind in type(module).__mro__}
        if ("torch.distributed._composable.replicate", "DDP") in kinds:
            raise GrowthError(f"the {role} {_REPLICATED}")


def check_gradient_division(model: Any) -> None:
    """Check that FSDP2 averages the gradients of a sharded model over the processes."""
    for name, group in _groups(model):
        factor = getattr(group, "gradient_divide_factor", None)
        if factor not in (None, dist.get_world_size()):
            raise GrowthError(
                f"set_gradient_divide_factor({factor}) was called on {name or 'the model'}, but "
                "the loss is scaled for gradients that are averaged over the processes: leave the "
                "factor as fully_shard sets it"
            )


def _check_ties(model: Any, role: str) -> None:
    """Check that `fully_shard` has not torn tied weights apart, as PyTorch's first pass does."""
    seen: dict[int, str] = {}
    for name, group in _groups(model):
        for p in group.fsdp_params:
            # a number that PyTorch 2.9 does not give
            number = getattr(p, "_orig_param_uid", None)
            if number is None:
                continue
            if number in seen:
                raise GrowthError(
                    f"{name or role} and {seen[number] or role} share a weight, but are in groups "
                    "of their own: call fully_shard on the blocks and then on the model, or with "
                    "both in one list"
                )
            seen[number] = name


def _groups(model: nn.Module) -> Iterator[tuple[str, Any]]:
    """The groups of parameters of FSDP2, each with the name of its module: "" is the model."""
    # modules that were passed to fully_shard in one list have one state
    states: set[int] = set()
    for name, module in model.named_modules():
        if not isinstance(module, FSDPModule):
            continue
        state: Any = module._get_fsdp_state()
        if id(state) in states:
            continue
        states.add(id(state))
        groups = getattr(state, "_fsdp_param_groups", None)
        # PyTorch 2.9 has one per module, or None
        groups = [state._fsdp_param_group] if groups is None else groups
        yield from ((name, group) for group in groups if group is not None)
