"""Which part of a parameter this process holds, from its DTensor placements alone."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from growkern.errors import GrowthError


def local_part(name: str, parameter: Tensor) -> tuple[slice, ...]:
    """One slice per axis of the whole tensor: what `local_tensor(parameter)` holds of it.

    Mesh dimensions divide an axis as `torch.chunk` does. Those that FSDP2 puts over a tensor-
    parallel axis divide what tensor parallelism left (`_StridedShard`), so they come last, and
    every part is one run of rows whether or not sizes divide evenly.

    Raises:
        GrowthError: a placement that holds no part of the tensor (a partial sum).
    """
    if not isinstance(parameter, DTensor):
        return tuple(slice(0, n) for n in parameter.shape)
    mesh, coordinate = parameter.device_mesh, parameter.device_mesh.get_coordinate()
    bounds = [(0, n) for n in parameter.shape]
    if coordinate is None:
        # a rank outside the mesh
        return tuple(slice(0, 0) for _ in bounds)
    shards = []
    for mesh_dim, placement in enumerate(parameter.placements):
        if placement.is_partial():
            raise GrowthError(f"{name} is placed as {placement}; replicate or shard it")
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
            f"{parameter.placements}; shard it with fully_shard and parallelize_module"
        )
    return tuple(slice(a, b) for a, b in bounds)


def local_tensor(parameter: Tensor) -> Tensor:
    """This process's part of a parameter, sharing its memory and outside autograd."""
    local = parameter.to_local() if isinstance(parameter, DTensor) else parameter
    return local.detach()


def device_of(parameters: dict[str, Tensor]) -> torch.device:
    """Where meta parameters belong: the device of the mesh they are placed on, or the CPU."""
    for parameter in parameters.values():
        kind = parameter.device_mesh.device_type if isinstance(parameter, DTensor) else "cpu"
        if kind != "cpu":
            return torch.device(kind, torch.accelerator.current_device_index())
    return torch.device("cpu")
