"""`growkern.grow_optimizer_into`: grows Adam's state into an existing, possibly sharded optimizer.

The target's parameters may be DTensors. Each process computes only the parts that it holds, with
the same bits as in the whole moment (`optimizer.moments`). Processes communicate only if the
source's state consists of DTensors of this job.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from growkern.arguments import check_kind
from growkern.errors import GrowthError, a_kind
from growkern.growth.models import local_tensor, unwrapped
from growkern.growth.optimizer import checks
from growkern.growth.optimizer.file import (
    can_be_mapped,
    optimizer_file,
    read_optimizer,
    release_pages,
)
from growkern.growth.optimizer.moments import grow_moment, starts_at_zero
from growkern.growth.optimizer.muon import CombinedOptimizer
from growkern.growth.optimizer.state import (
    State,
    grown_step,
    known_names,
    moments_in,
    reader_of,
    shown_state,
    source_entry,
    state_by_name,
)
from growkern.growth.options import check_moments
from growkern.growth.plan import GrowthPlan, PlanOfModel, Task, check_plan
from growkern.growth.record import growth_plan_of
from growkern.growth.sharded import local_part, named_tensors
from growkern.growth.source import OPTIMIZER, Stamps, format_of, pieces_in

# the moment that Adam has with amsgrad alone
LARGEST = "max_exp_avg_sq"


@torch.no_grad()
def grow_optimizer_into(
    model: Any,
    optimizer: torch.optim.Optimizer,
    source: Any,
    *,
    plan: PlanOfModel | None = None,
    moments: str = "grow",
) -> None:
    """Fill the optimizer of a grown model, sharded or not, with the source's grown state.

    Call it after `growkern.grow_into(model, ...)`, with an optimizer that was made after that call.
    Each process computes the state of its parts of the parameters, bit for bit as in
    `growkern.grow_optimizer`. If the source's state is in files, processes do not communicate.
    DTensors of this job are gathered one source tensor at a time, so all ranks must call this.

    Args:
        model: the grown model, as in `growkern.grow_into`.
        optimizer: `torch.optim.Adam`, `AdamW` or `Muon`, or `growkern.GrowthAdamW` or `GrowthMuon`,
            over all or some parameters of the model. Its groups and their settings stay, its state
            is replaced.
        source: one of

            - the state dict of the source's optimizer, as in `growkern.grow_optimizer`;
            - the path of the Trainer's `optimizer.pt`, or of its directory;
            - the path of a checkpoint of a sharded run, or of one of
              `torch.distributed.checkpoint` with the result of `get_optimizer_state_dict`, alone or
              beside the model. Any number of ranks may have saved it.
        plan: the growth of the weights; default: `growth_plan_of(model)`.
        moments: "grow", "old_slices" or "reset", as in `growkern.grow_optimizer`.

    Raises:
        GrowthError: the optimizer is of another kind or of another model, a file cannot be read,
            or a moment of this process holds NaN, Inf or a negative mean of squares. The file's
            checksums are not compared, as that would mean reading the whole file.

    Source: as `growkern.grow_optimizer`.
    """
    check_moments(moments)
    check_kind("optimizer", optimizer, Optimizer, "the optimizer of the model")
    if isinstance(optimizer, CombinedOptimizer):
        for part in optimizer.optimizers:
            grow_optimizer_into(model, part, source, plan=plan, moments=moments)
        return
    model = unwrapped(model)
    plan = plan or growth_plan_of(model)
    if plan is None:
        raise GrowthError(
            "the model has no growth_plan: call growkern.grow_into first or give plan"
        )
    check_plan(plan)
    targets = list(_targets(plan, model, optimizer))
    used = {name for task, _ in targets for name in (task.source, task.upper)}
    path = pieces_in(Path(source), OPTIMIZER) if isinstance(source, (str, Path)) else None
    # the state may lie with the weights in a directory
    read_stored = path and format_of(path).read_optimizer
    file = optimizer_file(path) if path and not read_stored else None
    stamps = Stamps.of(file or path) if path else None
    if path and read_stored:
        stored = read_stored(path, known_names(plan))
        checks.check_entries(plan, stored)
        entries = {**stored, **dict(shown_state(plan, stored))}
    else:
        state_dict = read_optimizer(file) if file else source
        entries = state_by_name(plan, state_dict)[1]
        checks.check_decay(state_dict, moments)
    is_mapped = file is not None and can_be_mapped(file)
    # a checkpoint may hold the states of several optimizers
    state = {name: entry for name, entry in entries.items() if name in used}
    _check_kind(optimizer, state)
    grown = {}
    for number, (task, parameter) in enumerate(targets):
        entry = _part_of_entry(plan, task, parameter, state, moments)
        if entry:
            grown[number] = entry
        # the pages of the mapped file that the parameter was made of
        for name in filter(None, (task.source, task.upper)) if is_mapped else ():
            for value in state.get(name, {}).values():
                release_pages(value)
    if stamps is not None:
        stamps.check()
    # load_state_dict puts step counts and moments on the device and in the dtype PyTorch wants
    optimizer.load_state_dict({**optimizer.state_dict(), "state": grown})


def _part_of_entry(
    plan: GrowthPlan, task: Task, parameter: Tensor, state: State, moments: str
) -> dict[str, Tensor]:
    """This process's part of the state of one target parameter; empty without a source state."""
    source = source_entry(task, state)
    if not source:
        return {}
    is_zero, part = starts_at_zero(plan, task, moments), local_part(task.name, parameter)
    entry = grown_step(task, source, is_zero)
    for key in moments_in(source):
        entry[key] = torch.zeros_like(parameter, memory_format=torch.preserve_format)
        if is_zero:
            continue
        local, read = local_tensor(entry[key]), reader_of(state, key)
        out = local if local.device.type == "cpu" else None
        if out is not None and out.dtype != source[key].dtype:
            # rounded to the dtype of the source's moment first, as everywhere
            out = torch.empty_like(local, dtype=source[key].dtype)
        built = grow_moment(plan, task, read, key=key, moments=moments, part=part, out=out)
        if out is not local:
            local.copy_(built)
    return entry


def _targets(
    plan: GrowthPlan, model: Any, optimizer: torch.optim.Optimizer
) -> Iterator[tuple[Task, Tensor]]:
    """The optimizer's parameters in its order, each with its task."""
    tasks = {task.name: task for task in plan.tasks}
    named = {id(p): name for name, p in named_tensors(model).items() if name in tasks}
    for parameter in (p for group in optimizer.param_groups for p in group["params"]):
        if id(parameter) not in named:
            raise GrowthError(
                f"the optimizer has a parameter of shape {list(parameter.shape)} that the model "
                "does not have: make the optimizer after fully_shard and grow_into"
            )
        task = tasks[named[id(parameter)]]
        checks.check_planned_shape(task.name, parameter.shape, task.shape)
        yield task, parameter


def _check_kind(optimizer: torch.optim.Optimizer, state: State) -> None:
    kind = a_kind(optimizer)
    is_muon = isinstance(optimizer, torch.optim.Muon)
    if not is_muon and not isinstance(optimizer, (torch.optim.Adam, torch.optim.AdamW)):
        raise GrowthError(f"the optimizer is {kind}; {checks.NO_RULE}")
    for name, entry in state.items():
        if (checks.MUON in entry) != is_muon:
            other = "Muon" if checks.MUON in entry else "Adam"
            raise GrowthError(
                f"the optimizer is {kind}, but {name} has the state of {other}: give each "
                "optimizer the parameters that it had in the source"
            )
    has = any(LARGEST in entry for entry in state.values())
    for group in () if is_muon else optimizer.param_groups:
        if state and bool(group["amsgrad"]) != has:
            raise GrowthError(
                f"the optimizer's amsgrad is {group['amsgrad']}, the source's state "
                f"{'has' if has else 'lacks'} {LARGEST}: make it with amsgrad={has}"
            )
