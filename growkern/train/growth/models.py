"""Builds grown models in place: on the meta device, then sharded, then filled part by part."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import transformers
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from transformers import PreTrainedConfig

from growkern.errors import GrowthError
from growkern.families.model import ModelSpec
from growkern.growth.history import History, history_of
from growkern.growth.models import materialise, restore_buffers
from growkern.growth.options import GrowthOptions
from growkern.growth.plan.growth_plan import GrowthPlan, plan_growth
from growkern.growth.record.recorded import growth_plan_of
from growkern.growth.sharded import device_of, grow_into, local_tensor, named_tensors, plan_into
from growkern.growth.source.source import Source, open_source
from growkern.train.distributed.options import DistributedOptions
from growkern.train.distributed.shard import shard
from growkern.train.growth.step import GrowthStep
from growkern.train.model.sub_model import Part


@dataclass(frozen=True)
class Size:
    """A size that a model has during a run.

    Attributes:
        plan: of the growth to this size; None for the model that the run begins with.
    """

    config: PreTrainedConfig
    plan: GrowthPlan | None


def new_part(step: int, growth: GrowthStep, size: Size) -> Part | None:
    """The part that trains after a growth while its `new_layers_steps` last; None later.

    Args:
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


def sizes_of_run(
    model: Any, growth: Sequence[GrowthStep], check: Callable[[Any], None] = lambda model: None
) -> list[Size]:
    """The sizes of a model during a run, from its config alone.

    Args:
        model: that the run begins with.
        growth: inside the run, in order.
        check: gets a model on the meta device after each growth, and raises a GrowthError if the
            run cannot train such a model.

    Raises:
        GrowthError: a growth does not fit the model that the run has until then.
    """
    config, dtype = copy.deepcopy(model.config), next(model.parameters()).dtype
    small = ModelSpec.of(config, type(model).__name__.removeprefix("FSDP"))
    if growth:
        _refuse_own_head(model, small)
    start = Size(config, plan_before(model))
    return [start, *later_sizes(small, history_of(model), dtype, growth, check)]


def plan_before(model: Any) -> GrowthPlan | None:
    """The last growth of a model, if its record can be read."""
    try:
        return growth_plan_of(model)
    except GrowthError:
        # whoever needs it says so: `train.optimizer.choose`
        return None


def later_sizes(
    small: ModelSpec,
    history: History,
    dtype: torch.dtype,
    growth: Sequence[GrowthStep],
    check: Callable[[Any], None] = lambda model: None,
) -> list[Size]:
    """The sizes after each growth inside a run, each planned against the one before.

    Args:
        small: the model that the run begins with.
        history: the growths that made it.
        dtype: of the weights in training.
        growth, check: as in `sizes_of_run`.

    Raises:
        GrowthError: as in `sizes_of_run`, with the number of the growth.
    """
    sizes = []
    for number, one in enumerate(growth, start=1):
        try:
            planned = _plan_of_config(small, history, one, dtype, check)
        except GrowthError as error:
            which = f"growth {number} of {len(growth)} inside the run, the growth at step"
            raise GrowthError(f"{which} {one.at_step}: {error}") from error
        sizes.append(Size(planned.target_config, planned))
        small, history = planned.large, History(planned)
    return sizes


def _refuse_own_head(model: Any, spec: ModelSpec) -> None:
    """Refuse a head of its own whose config calls it tied: a config alone makes one that is tied.

    Raises:
        GrowthError: the model has one.
    """
    found = named_tensors(model)
    for head, owner in spec.ties.items():
        if found[head] is not found[owner]:
            raise GrowthError(
                f"{head} and {owner} are two tensors, which growth inside a run would tie: grow "
                "the model before the run, with growkern grow"
            )


def _plan_of_config(
    small: ModelSpec,
    history: History,
    growth: GrowthStep,
    dtype: torch.dtype,
    check: Callable[[Any], None],
) -> GrowthPlan:
    """The plan of a growth whose source has no weights yet. It has no findings."""

    def read(name: str) -> Tensor:
        raise GrowthError(f"{name} has no values before the run reaches step {growth.at_step}")

    dtypes = {name: dtype for name in small.shapes if name not in small.ties}
    source, options = Source(small, dtypes, read, history=history), options_of(growth)
    planned = plan_growth(source, options, dict(growth.sizes), dtype=dtype, judged=False)
    model = _on_meta(planned.large.class_name, planned.target_config, dtype)
    # what would be refused when the growth comes is refused now
    plan_into(model, source, options)
    check(model)
    return planned


def options_of(growth: GrowthStep) -> GrowthOptions:
    """The options of a growth, without its place in a run."""
    return GrowthOptions(**growth.options())


def grown_model(
    source: Any,
    growth: GrowthStep,
    options: DistributedOptions,
    dtype: torch.dtype,
    mesh: DeviceMesh | None = None,
    plan: GrowthPlan | None = None,
    planned: GrowthPlan | None = None,
) -> Any:
    """A grown model, sharded if the options say so. All processes call this.

    Args:
        source: a checkpoint directory.
        growth: the options of the growth.
        options: of the distribution.
        mesh: as in `shard`.
        plan: of a growth inside a run, made before the run.
        planned: the growth of this source, if it was planned already.
    """
    if planned is None:
        # its config counts: transformers and callbacks change that of a model in training
        how = options_of(growth)
        opened = open_source(source, dequantize=how.dequantize)
        planned = plan_growth(opened, how, growth.sizes, judged=False)
    config = planned.target_config
    if plan is not None:
        # not part of a checkpoint
        config._attn_implementation = plan.target_config._attn_implementation
    model = shard(_on_meta(planned.large.class_name, config, dtype), options, mesh)
    grow_into(model, source, **growth.options())
    if plan is not None:
        # the checkpoint will be deleted, and a resumed run does not know it
        made = model.growth_plan
        made_of = replace(made.source, history=plan.source.history, directory=None)
        model.growth_plan = replace(made, source=made_of)
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
        class_name: of the model that the run begins with. A dense one may become a mixture.
        options: of the distribution.
        mesh: as in `shard`.
    """
    name = class_name if size.plan is None else size.plan.large.class_name
    model = shard(_on_meta(name, size.config, dtype), options, mesh)
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
