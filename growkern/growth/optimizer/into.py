"""Grow the state of Adam into an optimizer that is built: every process its own parts, no others.

The target's parameters may be DTensors. A part of a moment has the same bits however the moment
is cut (`optimizer.moments`), so that nothing is whole anywhere and nobody waits, unless the
source's state itself is spread over the ranks of this job.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from growkern.errors import GrowthError
from growkern.growth.optimizer.checks import check_entries, check_moments
from growkern.growth.optimizer.file import read_optimizer
from growkern.growth.optimizer.moments import MOMENTS, grow_moment, starts_at_zero
from growkern.growth.optimizer.state import (
    State,
    grown_step,
    known_names,
    moments_in,
    reader_of,
    source_entry,
    state_by_name,
)
from growkern.growth.plan.blueprint import Task
from growkern.growth.plan.growth_plan import GrowthPlan
from growkern.growth.sharded.grow_into import named_tensors, unwrapped
from growkern.growth.sharded.placement import local_part, local_tensor
from growkern.growth.source.files import METADATA_FILE


@torch.no_grad()
def grow_optimizer_into(
    model: Any,
    optimizer: torch.optim.Optimizer,
    source: Any,
    *,
    plan: GrowthPlan | None = None,
    moments: str = "grow",
) -> None:
    """Give the optimizer of a grown model, sharded or not, the grown state of its source's.

    Call it after `growkern.grow_into(model, ...)` and with the optimizer made after that. Each
    process computes the state of what it holds, bit for bit that part of what
    `growkern.grow_optimizer` makes. From files nothing is communicated; DTensors of this job are
    gathered one source tensor at a time, for which all its ranks have to call.

    Args:
        model: the grown model, as in `growkern.grow_into`.
        optimizer: `torch.optim.Adam`, `AdamW` or `growkern.GrowthAdamW` over parameters of the
            model. Its groups and their settings stay, its state is replaced.
        source: the state dict of the source's optimizer, as in `growkern.grow_optimizer`; or the
            path of the Trainer's `optimizer.pt` or its directory; or of a checkpoint of
            `torch.distributed.checkpoint`, saved by any number of ranks, that holds what
            `get_optimizer_state_dict` gave, alone or beside the model.
        plan: the growth of the weights; default the model's `growth_plan`.
        moments: "grow", "old_slices" or "reset", as in `growkern.grow_optimizer`.

    Raises:
        GrowthError: another optimizer, one of another model, a file that cannot be read, NaN, Inf
            or a negative mean of squares in what this process grows. The file's checksums are not
            compared, which would take reading all of it.

    Source: as `growkern.grow_optimizer`.
    """
    check_moments(moments)
    model = unwrapped(model)
    plan = plan or getattr(model, "growth_plan", None)
    if plan is None:
        raise GrowthError("the model has no growth_plan; call growkern.grow_into first, or give it")
    targets = list(_targets(plan, model, optimizer))
    state = _open_state(plan, source)
    _check_kind(optimizer, state)
    grown = {}
    for number, (task, parameter) in enumerate(targets):
        entry = _part_of_entry(plan, task, parameter, state, moments)
        if entry:
            grown[number] = entry
    # PyTorch decides where a step count lives and in which dtype a moment is kept
    optimizer.load_state_dict({**optimizer.state_dict(), "state": grown})


def _part_of_entry(
    plan: GrowthPlan, task: Task, parameter: Tensor, state: State, moments: str
) -> dict[str, Tensor]:
    """State of one target parameter, as far as this process holds the parameter."""
    source = source_entry(task, state)
    if not source:
        return {}
    is_zero, part = starts_at_zero(plan, task, moments), local_part(task.name, parameter)
    entry = {"step": grown_step(task, source, is_zero)}
    for key in moments_in(source):
        entry[key] = torch.zeros_like(parameter, memory_format=torch.preserve_format)
        if is_zero:
            continue
        local, read = local_tensor(entry[key]), reader_of(state, key)
        out = local if local.device.type == "cpu" else None
        built = grow_moment(plan, task, read, key=key, moments=moments, part=part, out=out)
        if out is None:
            local.copy_(built)
    return entry


# ------------------------------------------------------------------- checks


def _targets(
    plan: GrowthPlan, model: Any, optimizer: torch.optim.Optimizer
) -> Iterator[tuple[Task, Tensor]]:
    """The optimizer's parameters in its order, each with what it is made of."""
    tasks = {task.name: task for task in plan.tasks}
    named = {id(p): name for name, p in named_tensors(model).items() if name in tasks}
    for parameter in (p for group in optimizer.param_groups for p in group["params"]):
        if id(parameter) not in named:
            raise GrowthError(
                f"the optimizer has a parameter {list(parameter.shape)} that is none of the "
                "model's; make it after fully_shard and grow_into"
            )
        task = tasks[named[id(parameter)]]
        if tuple(parameter.shape) != task.shape:
            raise GrowthError(
                f"{task.name} is {list(parameter.shape)}, the plan's is {list(task.shape)}"
            )
        yield task, parameter


def _open_state(plan: GrowthPlan, source: Any) -> State:
    """The source's state by the names of its parameters."""
    if not isinstance(source, (str, Path)):
        return state_by_name(plan, source)[1]
    path = Path(source)
    if (path / METADATA_FILE).is_file():
        from growkern.growth.source.distributed import read_distributed_optimizer

        stored = read_distributed_optimizer(path, known_names(plan))
        check_entries(plan, stored)
        return stored
    return state_by_name(plan, read_optimizer(path))[1]


def _check_kind(optimizer: torch.optim.Optimizer, state: State) -> None:
    kind = type(optimizer).__name__
    if not isinstance(optimizer, (torch.optim.Adam, torch.optim.AdamW)):
        raise GrowthError(f"the optimizer is a {kind}; growkern grows the state of Adam and AdamW")
    largest = list(MOMENTS)[-1]
    has = any(largest in entry for entry in state.values())
    for group in optimizer.param_groups:
        if state and bool(group["amsgrad"]) != has:
            raise GrowthError(
                f"the optimizer's amsgrad is {group['amsgrad']}, the source's state "
                f"{'has' if has else 'lacks'} {largest}; make it with amsgrad={has}"
            )
