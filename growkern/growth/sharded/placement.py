"""Finds the part of a parameter that this process holds, from its DTensor placements."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from growkern.errors import GrowthError


def local_part(name: str, parameter: Tensor) -> tuple[slice, ...]:
    """The place of `local_tensor(parameter)` in the whole tensor, one slice per axis.

    Every mesh dimension that shards an axis divides it as `torch.chunk` does. If FSDP2 shards an
    axis that is tensor-parallel already, it divides the tensor-parallel part (`_StridedShard`), so
    such placements are applied last. Every part is then a contiguous range, also if sizes do not
    divide evenly.
    """
    if not isinstance(parameter, DTensor):
        return tuple(slice(0, n) for n in parameter.shape)
    mesh, coordinate = parameter.device_mesh, parameter.device_mesh.get_coordinate()
    bounds = [(0, n) for n in parameter.shape]
    if coordinate is None:
        # this rank is outside the mesh and holds nothing
        return tuple(slice(0, 0) for _ in bounds)
    shards = []
    for mesh_dim, placement in enumerate(parameter.placements):
        if placement.is_partial():
            raise GrowthError(f"{name} is placed as {placement}: replicate or shard it")
        dim = getattr(placement, "dim", None)
        if dim is not None:
            shards.append((hasattr(placement, "split_factor"), mesh_dim, int(dim)))
    for _, mesh_dim, dim in sorted(shards, key=lambda shard: shard[0]):
        first, stop = bounds[dim]
        step = -(-(stop - first) // mesh.size(mesh_dim))
        start = min(first + coordinate[mesh_dim] * step, stop)
        bounds[dim] = (start, min(start + step, stop))
    found = tuple(parameter.to_local().shape)
    if tuple(b - a for a, b in bounds) != found and 0 not in found:
        raise GrowthError(
            f"{name}: this rank holds {list(found)} of {list(parameter.shape)}, placed as "
            f"{parameter.placements}: shard it with fully_shard and parallelize_module"
        )
    return tuple(slice(a, b) for a, b in bounds)


def local_tensor(parameter: Tensor) -> Tensor:
    """This process's part of a parameter: it shares memory and is detached from autograd."""
    local = parameter.to_local() if isinstance(parameter, DTensor) else parameter
    return local.detach()


def free_gathered(model: nn.Module) -> None:
    """Free the parameters that FSDP2 has gathered, so that `model.parameters()` are the shards.

    After a forward pass, the root module keeps its parameters gathered.
    """
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


def device_of(parameters: dict[str, Tensor]) -> torch.device:
    """The device for meta parameters: that of their mesh, or the CPU."""
    for parameter in parameters.values():
        kind = parameter.device_mesh.device_type if isinstance(parameter, DTensor) else "cpu"
        if kind != "cpu":
            return torch.device(kind, torch.accelerator.current_device_index())
    return torch.device("cpu")
