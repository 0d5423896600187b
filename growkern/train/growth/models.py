"""Builds grown models in place: on the meta device, then sharded, then filled part by part."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import transformers
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from transformers import PreTrainedConfig

from growkern.errors import GrowthError
from growkern.families.model import ModelSpec
from growkern.growth.models import materialise, restore_buffers
from growkern.growth.options import GrowthOptions
from growkern.growth.plan.growth_plan import GrowthPlan, plan_growth
from growkern.growth.sharded.grow_into import grow_into, named_tensors
from growkern.growth.sharded.placement import device_of, local_tensor
from growkern.growth.source.source import Source
from growkern.train.distributed.options import DistributedOptions
from growkern.train.distributed.shard import shard
from growkern.train.growth.step import GrowthStep
from growkern.train.sub_model import Part


@dataclass(frozen=True)
class Size:
    """A size that a model has during a run.

    Attributes:
        config: of the model.
        plan: of the growth to this size; None for the model that the run begins with.
    """

    config: PreTrainedConfig
    plan: GrowthPlan | None


def new_part(step: int, growth: GrowthStep, size: Size) -> Part | None:
    """The part that trains after a growth while its `new_layers_steps` last; None later.

    Args:
        step: counted from 0.
        growth: the last one.
        size: to which the model grew.
    """
    if step >= growth.at_step + growth.new_layers_steps:
        return None
    layers = layers_of(size)
    return Part(max(new for _, new in layers), tuple(new - old for old, new in layers))


def layers_of(size: Size) -> list[tuple[int, int]]:
    """The layers before and after the growth to a size, of each stack in the order of the model."""
    if size.plan is None:
        raise ValueError("a run begins with this size, without a growth")
    keys = size.plan.small.family.stacks.values()
    return [(size.plan.small.size(key), size.plan.large.size(key)) for key in keys]


def sizes_of_run(model: Any, growth: Sequence[GrowthStep]) -> list[Size]:
    """The sizes of a model during a run, from its config alone.

    Args:
        model: that the run begins with.
        growth: inside the run, in order.

    Raises:
        GrowthError: the sizes of a growth do not fit the model.
    """
    name = type(model).__name__.removeprefix("FSDP")
    dtype = next(model.parameters()).dtype
    sizes = [Size(copy.deepcopy(model.config), getattr(model, "growth_plan", None))]
    if growth:
        _refuse_own_head(model, name)
    for one in growth:
        try:
            planned = _plan_of_config(sizes[-1].config, name, one, dtype)
        except GrowthError as error:
            raise GrowthError(f"the growth at step {one.at_step}: {error}") from error
        sizes.append(Size(planned.target_config, planned))
    return sizes


def _refuse_own_head(model: Any, class_name: str) -> None:
    """Refuse a head of its own whose config calls it tied: a config alone makes one that is tied.

    Raises:
        GrowthError: the model has one.
    """
    found = named_tensors(model)
    for head, owner in ModelSpec.of(model.config, class_name).ties.items():
        if found[head] is not found[owner]:
            raise GrowthError(
                f"{head} and {owner} are two tensors, which growth inside a run would tie: grow "
                "the model before the run, with growkern grow"
            )


def _plan_of_config(
    config: PreTrainedConfig, class_name: str, growth: GrowthStep, dtype: torch.dtype
) -> GrowthPlan:
    """The plan of a growth whose source has no weights yet. It has no findings."""
    small = ModelSpec.of(config, class_name)

    def read(name: str) -> Tensor:
        raise GrowthError(f"{name} has no values before the run reaches step {growth.at_step}")

    dtypes = {name: dtype for name in small.shapes if name not in small.ties}
    source, options = Source(small, dtypes, read), GrowthOptions.split_off(growth.options())[0]
    return plan_growth(source, options, dict(growth.sizes), dtype=dtype, judged=False)


def grown_model(
    plan: GrowthPlan,
    source: Any,
    growth: GrowthStep,
    options: DistributedOptions,
    dtype: torch.dtype,
    mesh: DeviceMesh | None = None,
) -> Any:
    """A grown model, sharded if the options say so. All processes call this.

    Args:
        plan: of the growth.
        source: a checkpoint directory.
        growth: the options of the growth.
        options: of the distribution.
        dtype: of the weights.
        mesh: as in `shard`.
    """
    model = shard(_on_meta(plan.large.class_name, plan.target_config, dtype), options, mesh)
    grow_into(model, source, **growth.options())
    return model


def unfilled_model(
    class_name: str,
    size: Size,
    options: DistributedOptions,
    dtype: torch.dtype,
    mesh: DeviceMesh | None = None,
) -> Any:
    """A model whose weights are 0, to be loaded from a checkpoint. All processes call this.

    Args:
        class_name: in transformers.
        size: of the model.
        options: of the distribution.
        dtype: of the weights.
        mesh: as in `shard`.
    """
    model = shard(_on_meta(class_name, size.config, dtype), options, mesh)
    if size.plan is not None:
        model.growth_plan = size.plan
    device = torch.device("cpu") if options.cpu_offload else device_of(named_tensors(model))
    materialise(model, device)
    restore_buffers(model)
    for tensor in named_tensors(model).values():
        # the probes of the trainer run the model before its checkpoint is loaded
        local_tensor(tensor).zero_()
    return model


def _on_meta(class_name: str, config: PreTrainedConfig, dtype: torch.dtype) -> Any:
    with torch.device("meta"):
        cls = getattr(transformers, class_name)
        # transformers changes the config that it is given
        return cls._from_config(copy.deepcopy(config), dtype=dtype)
