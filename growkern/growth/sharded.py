"""`growkern.grow_into`: grows into a model that is already built and perhaps sharded.

Each process computes only the parts of parameters that it holds, so no parameter exists whole and
no process waits for another. A part has the same bits as in the whole tensor
(`growkern.growth.plan.tensors.tensor`). The target may be on the meta device. Its parameters may be
DTensors: sharded, replicated or tensor-parallel.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Iterator, Mapping
from functools import partial
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, get_args

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from tqdm import tqdm

from growkern.arguments import nearest
from growkern.errors import GrowthError, a_kind
from growkern.families import read_family
from growkern.growth import models
from growkern.growth.history import GROWN_KEY
from growkern.growth.models import refuse_flattened, unwrapped
from growkern.growth.options import GrowthOptions
from growkern.growth.plan import (
    GrowthPlan,
    GrowthReport,
    Task,
    as_mixture,
    build_tensor,
    followed_fields,
    part_reader,
    plan_growth,
    refuse_idle_options,
)
from growkern.growth.record import record_when_saved
from growkern.growth.source import Source, located, open_source, refuse_unreadable
from growkern.growth.stored import (
    own_name,
    refuse_adapted,
    refuse_nonfinite,
    refuse_overflow,
    row_blocks,
)
from growkern.ops.expand import Work, work_on

if TYPE_CHECKING:
    from transformers import PreTrainedModel
    from typing_extensions import Unpack

    from growkern.growth.options import GrowthKeywords

# what to do about tensors of the growth that a model lacks
Missing = Literal["error", "skip"]


@torch.no_grad()
@models.on_cpu_by_default
def grow_into(
    model: Any,
    source: str | Path | PreTrainedModel,
    *,
    device: torch.device | str | None = None,
    allow_nonfinite: bool = False,
    missing: Missing = "error",
    revision: str | None = None,
    family: str | Path | None = None,
    backend: str | None = None,
    progress: bool = False,
    **how: Unpack[GrowthKeywords],
) -> GrowthReport:
    """Fill a larger model, which is built and perhaps sharded, with the grown weights of a source.

    Build the target from `growkern.plan(source, ...).target_config`, on the meta device if it is
    large. Shard it with `parallelize_module` and `fully_shard` as for training. Then call this in
    every process. Meta parameters and non-persistent buffers get real memory, and tied weights
    stay tied. Processes do not communicate. Each maps the source files and computes its parts of
    the parameters, with the same bits as `growkern.grow`.

    Args:
        model: a `transformers.PreTrainedModel` of the source's class, or one inside
            `torch.compile` or `DistributedDataParallel`.
        source: a checkpoint directory that every process can read, or a model in memory. The
            directory may be one of `torch.distributed.checkpoint`, saved by any number of ranks,
            with the model's config.json in it or above it. Or a model on the Hub,
            `ORGANISATION/NAME`, which is downloaded into the usual cache.
        device: device for meta parameters; default: that of their mesh, else the CPU.
        allow_nonfinite: accept NaN and Inf in the source and grow them like other values.
        missing: what to do about tensors of the growth that the model lacks. "error" refuses them.
            "skip" fills the others, as in a stage of a pipeline, whose names are those of the whole
            model. A tied weight is filled whichever of its names the stage has.
        revision: branch, tag or commit of a model on the Hub.
        family: the TOML file of a table of your own, for a model that growkern has none for.
        backend: backend of the expansion kernel, see `growkern.expand`.
        progress: show a progress bar, where stderr is a terminal.
        **how: the fields of `growkern.growth.options.GrowthOptions`. The sizes are those of
            `model`.

    Returns:
        The report, with the bytes that this process computed and the number of tensors that were
        skipped. The plan is also stored as `model.growth_plan`, and the model generates with the
        source's settings. Without skipped tensors its
        `save_pretrained` also writes `lineage.json`, as that of `grow` does, but no card.

    Raises:
        GrowthError: the source or the model cannot be used; then the model is unchanged. Or the
            source holds NaN or Inf; then some tensors of the model are already filled.
    """
    start = time.perf_counter()
    model = unwrapped(model)
    options, sizes = GrowthOptions.split_off({**how})
    if sizes:
        raise GrowthError(f"{', '.join(sizes)}: the model's own config gives the sizes")
    if missing not in get_args(Missing):
        raise GrowthError(f"missing is {missing!r}{nearest(str(missing), get_args(Missing))}")
    opened = open_source(
        located(source, revision),
        allow_nonfinite=True,
        family=None if family is None else read_family(family),
        dequantize=options.dequantize,
    )
    refuse_unreadable(opened, in_memory=True)
    grown = plan_into(model, opened, options)
    check_into(model, grown, missing)
    written = fill(
        model, grown, device=device, allow_nonfinite=allow_nonfinite, backend=backend,
        progress=progress,
    )  # fmt: skip
    skipped = len(grown.tasks) - len(_targets(grown, named_tensors(model)))
    if not skipped:
        record_when_saved(model, grown, backend, allow_nonfinite)
    directory = opened.directory or Path()
    return GrowthReport(directory, grown, written, time.perf_counter() - start, skipped=skipped)


def fill(
    model: Any,
    grown: GrowthPlan,
    *,
    device: torch.device | str | None = None,
    allow_nonfinite: bool = False,
    backend: str | None = None,
    progress: bool = False,
) -> int:
    """Carry out a plan of `plan_into`. Arguments as in `grow_into`; the bytes that it computed."""
    opened = grown.source.stored
    parameters = named_tensors(model)
    targets = _targets(grown, parameters)
    tasks = [task for task in grown.tasks if task.name in targets]
    parts = {task.name: local_part(task.name, targets[task.name]) for task in tasks}
    models.materialise(model, device or device_of(parameters))
    models.restore_buffers(model)
    targets = _targets(grown, named_tensors(model))
    for task in (task for task in tasks if task.tensor.row.keep):
        # the class may have built it in the dtype of the weights
        targets[task.name].data = targets[task.name].data.to(grown.dtype_of(task))
    written = 0
    locals_of = {task.name: models.local_tensor(targets[task.name]) for task in tasks}
    works = {
        # a CPU or a CUDA GPU computes its own parts, and the CPU those of other devices
        device: work_on(device if device.type == "cuda" else torch.device("cpu"), backend)
        for device in {x.device for x in locals_of.values()}
    }
    with tqdm(
        total=len(parts), desc="growing", unit="tensor", disable=None if progress else True
    ) as bar:
        for task in tasks:
            local = locals_of[task.name]
            work = works[local.device]
            _fill(grown, task, parts[task.name], local, backend, work)
            if not allow_nonfinite:
                check = refuse_overflow if grown.may_overflow else refuse_nonfinite
                work.then(partial(check, f"{task.name}, grown from {task.source}", local))
            written += local.nbytes
            work.then(bar.update)
        for work in works.values():
            work.run()
    opened.refuse_changed()
    if opened.generation is not None and model.can_generate():
        model.generation_config = copy.deepcopy(opened.generation)
    models.fit_cache(grown.large, model.config, getattr(model, "generation_config", None))
    model.growth_plan = grown
    setattr(model.config, GROWN_KEY, True)
    return written


def _fill(
    grown: GrowthPlan,
    task: Task,
    part: tuple[slice, ...],
    local: Tensor,
    backend: str | None,
    work: Work,
) -> None:
    """Build this process's part of a tensor; `local` is filled after `work.run()`."""
    if not local.numel():
        return
    in_place = local.device.type in ("cpu", "cuda")
    for piece, within in _pieces(part, local):
        place = local[within]
        read = part_reader(grown, task, piece, grown.source.read)
        out = place if in_place else torch.empty_like(place, device="cpu")
        build_tensor(grown, task, read=read, part=piece, out=out, backend=backend, work=work)
        if not in_place:
            work.then(partial(place.copy_, out))


def _pieces(part: tuple[slice, ...], local: Tensor) -> Iterator[tuple[tuple[slice, ...], ...]]:
    """Cut a part by rows, so that few source rows at a time are in memory.

    It yields the place of a piece in the whole tensor, and its place in `local`.
    """
    if not local.ndim or local.device.type == "cuda":
        # every piece would copy the source tensor to the GPU again
        yield part, ()
        return
    first = part[0].start
    for start, stop in row_blocks(tuple(local.shape), local.itemsize):
        yield (slice(first + start, first + stop), *part[1:]), (slice(start, stop),)


def named_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Parameters and persistent buffers by name, without the names of wrappers.

    A tied tensor appears under each of its names.
    """
    free_gathered(model)
    named = {}
    tensors = chain(
        model.named_parameters(remove_duplicate=False), models.persistent_buffers(model)
    )
    for name, tensor in tensors:
        refuse_flattened(name)
        named[own_name(name)] = tensor
    return named


def plan_into(model: Any, opened: Source, options: GrowthOptions) -> GrowthPlan:
    """The plan of `grow_into`, which reads no weights. Arguments as there."""
    parameters = named_tensors(model)
    refuse_adapted(parameters, "the model")
    opened, options = as_mixture(opened, options, {}, model.config)
    # fully_shard replaces a model's class by a subclass of it
    if opened.class_name not in (c.__name__ for c in type(model).__mro__):
        raise GrowthError(
            f"the model is {a_kind(model)}, the source a {opened.class_name}: build a "
            f"transformers.{opened.class_name}(config)"
        )
    if getattr(model.config, "quantization_config", None) is not None:
        raise GrowthError("the model is quantised: grow a full-precision model and quantise that")
    tensors = opened.spec.with_config(model.config).tensors
    dtypes: dict[torch.dtype, str] = {}
    for name in parameters.keys() - {t.name for t in tensors if t.row.keep}:
        dtypes.setdefault(parameters[name].dtype, name)
    if len(dtypes) > 1:
        named = " and ".join(f"{name} {dtype}" for dtype, name in dtypes.items())
        raise GrowthError(f"the model's parameters have several dtypes: {named}: build it in one")
    dtype = next(iter(dtypes), None)
    # findings would run the whole source in every process
    return plan_growth(opened, options, {}, model.config, dtype, judged=False)


def check_into(model: Any, grown: GrowthPlan, missing: Missing = "error") -> None:
    """Check that a model can take the weights of a growth; `missing` as in `grow_into`."""
    for field in followed_fields(grown.small.family):
        value, expected = (
            getattr(grown.small.family.text(config), field, None)
            for config in (model.config, grown.target_config)
        )
        if value != expected:
            raise GrowthError(
                f"the model was built with {field}={value}, this growth needs {expected}: build it "
                "from growkern.plan(source, ...).target_config"
            )
    refuse_idle_options(grown)
    found = _targets(grown, named_tensors(model))
    lacking = [task.name for task in grown.tasks if task.name not in found]
    if lacking and missing == "error":
        raise GrowthError(
            f"the model has no parameter {lacking[0]}: pass the whole model. grow_into fills a "
            'stage of a pipeline, with the names of the whole model, with missing="skip"'
        )


def _targets(grown: GrowthPlan, parameters: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The model's tensor for every task that it has one for. All others must be tied to these.

    Of a tied weight a stage of a pipeline may have another name than that of its task.
    """
    targets: dict[str, Tensor] = {}
    others = {
        owner: parameters[name] for name, owner in grown.large.ties.items() if name in parameters
    }
    for task in grown.tasks:
        parameter = parameters.get(task.name, others.get(task.name))
        if parameter is None:
            continue
        if tuple(parameter.shape) != task.shape:
            raise GrowthError(
                f"{task.name} has shape {list(parameter.shape)}, but its config says "
                f"{list(task.shape)}"
            )
        targets[task.name] = parameter
    for name in grown.large.untied:
        tied = next(t.tied for t in grown.large.tensors if t.name == name)
        if name in targets and targets[name] is targets.get(str(tied)):
            raise GrowthError(
                f"{name} and {tied} are two tensors in the source and one in the model: give the "
                f"model a {name} of its own, or use growkern.grow or growkern.grow_checkpoint"
            )
    for name, parameter in parameters.items():
        if name in targets:
            continue
        owner = grown.large.ties.get(name)
        if owner is None:
            raise GrowthError(f"no rule for the model's parameter {name} {list(parameter.shape)}")
        if parameter is not targets[owner]:
            raise GrowthError(
                f"{name} and {owner} are one tensor in the source and two in the model: tie them "
                "(model.tie_weights(), or assign one to the other) before fully_shard"
            )
    return targets


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
    held = tuple(parameter.to_local().shape)
    if tuple(b - a for a, b in bounds) != held and 0 not in held:
        raise GrowthError(
            f"{name}: this rank holds {list(held)} of {list(parameter.shape)}, placed as "
            f"{parameter.placements}: shard it with fully_shard and parallelize_module"
        )
    return tuple(slice(a, b) for a, b in bounds)


def free_gathered(model: nn.Module) -> None:
    """Free what FSDP2 gathered: after a forward pass the root module keeps its parameters whole."""
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
