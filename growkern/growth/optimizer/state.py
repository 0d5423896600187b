"""`growkern.grow_optimizer`: grows the state of Adam, AdamW or Muon along with the weights.

The functions on names and entries also serve growth of optimizer files (`optimizer.file`) and of
sharded optimizers (`optimizer.into`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from growkern.errors import GrowthError, nearest
from growkern.families import ModelSpec
from growkern.growth.models import tie, untrained_model
from growkern.growth.optimizer import checks
from growkern.growth.optimizer.checks import MOMENTS, MUON, NO_RULE, trained
from growkern.growth.optimizer.moments import ReadEntries, grow_moment, starts_at_zero
from growkern.growth.options import check_moments
from growkern.growth.plan import GrowthPlan, PlanOfModel, Task, check_plan
from growkern.growth.source import Parts
from growkern.growth.stored import StoredTensor

State = Mapping[str, Mapping[str, Any]]
# (the source's state, task of the target parameter, moment, does it start at 0) -> the moment
MakeMoment = Callable[[State, Task, str, bool], Tensor]


@torch.no_grad()
def grow_optimizer(
    state_dict: Mapping[str, Any], plan: PlanOfModel, *, moments: str = "grow"
) -> dict[str, Any]:
    """The target's optimizer state, grown from the source's.

    Groups keep their settings, and a target parameter joins the group of its source. The state may
    be keyed by position, as in `optimizer.state_dict()`, or by name, as in
    `torch.distributed.checkpoint.state_dict.get_optimizer_state_dict`; the result has the same
    kind of keys.

    With positions, growth needs to know the parameters' names. It takes `param_names` of the
    groups, which PyTorch stores if the optimizer was made from named parameters. Otherwise a single
    group must be that of `model.parameters()`, and two groups those of `transformers.Trainer`:
    weights that decay, then norms and biases.

    Args:
        state_dict: `optimizer.state_dict()` of `torch.optim.AdamW`, of `Muon`, or of `Adam` without
            weight decay. An optimizer over some of the parameters needs their names, as in
            `Muon([(name, p), ...])`; grow each of several optimizers by itself. A Trainer's:
            `torch.load("optimizer.pt", map_location="cpu", weights_only=True)`. DTensors are
            gathered one at a time, so all ranks must call this, and each gets the whole state.
            `growkern.grow_optimizer_into` gives each rank only its part.
        plan: the growth of the weights, from `growkern.plan` or a grown model's `growth_plan`.
        moments: "grow" gives every copy its share of its source's moments;
            `moment_findings(plan)` says where this is exact. Entries without a source get 0, and
            inserted blocks start at step 0. With symmetry="split", so do weights whose copies'
            gradients do not follow from the source's moments.
            "old_slices" keeps moments and step counts only for entries that existed before. All
            others get 0, so that copies can become different. It is meant for
            `GrowthAdamW(rewarm_steps=...)`.
            "reset" discards all moments and starts at step 0. Only the groups' settings stay.

    Returns:
        A state dict for an optimizer of the target with the same groups, on the CPU.

    Raises:
        GrowthError: the state belongs to another optimizer or model, or is damaged: NaN or Inf in
            a moment, a negative mean of squares, an invalid step count. Or it is of
            `torch.optim.Adam` with weight decay, which is part of its moments.

    Source: derived from the chain rule; "old_slices" after SPARKLING (asymmetric optimizer reset).
    """

    def build(state: State, task: Task, key: str, is_zero: bool) -> Tensor:
        if is_zero:
            return torch.zeros(task.shape, dtype=source_entry(task, state)[key].dtype)
        return grow_moment(plan, task, reader_of(state, key), key=key, moments=moments)

    return grown_state(plan, state_dict, moments, build)


def grown_state(
    plan: GrowthPlan, state_dict: Mapping[str, Any], moments: str, make: MakeMoment
) -> dict[str, Any]:
    """The target's state dict, with moments made by `make`; see `grow_optimizer`."""
    check_moments(moments)
    check_plan(plan)
    names, state = state_by_name(plan, state_dict)
    checks.check_decay(state_dict, moments)
    new_state: dict[Any, dict[str, Any]] = {}
    new_groups, tasks, number = [], {task.name: task for task in plan.tasks}, 0
    for group, members in zip(state_dict["param_groups"], _target_names(plan, names), strict=True):
        keys: list[Any] = []
        for name in members:
            keys.append(name if _is_named(group) else number)
            if source := source_entry(task := tasks[name], state):
                is_zero = starts_at_zero(plan, task, moments)
                new_state[keys[-1]] = grown_step(task, source, is_zero) | {
                    key: make(state, task, key, is_zero) for key in moments_in(source)
                }
            number += 1
        new_groups.append({**group, "params": keys})
        if "param_names" in group:
            new_groups[-1]["param_names"] = list(members)
    return {**state_dict, "state": new_state, "param_groups": new_groups}


# ------------------------------------------------ one parameter's state


def source_entry(task: Task, state: State) -> Mapping[str, Any]:
    """The source's state for a target parameter; empty if the optimizer took no step with it."""
    if task.is_made:
        # the source has no such tensor: any other state tells which moments there are
        return next(iter(state.values()), {})
    return state.get(task.source, {})


def moments_in(entry: Mapping[str, Any]) -> list[str]:
    """The moments in a state, in the same order on all ranks."""
    return [key for key in MOMENTS if key in entry]


def grown_step(task: Task, entry: Mapping[str, Any], is_zero: bool) -> dict[str, Tensor]:
    """The step count of a target parameter: its source's, or 0. Muon has none."""
    if "step" not in entry:
        return {}
    step = entry["step"]
    step = checks.count_of(task.source, step.read() if isinstance(step, StoredTensor) else step)
    return {"step": torch.zeros_like(step) if is_zero else step.clone()}


def reader_of(state: State, key: str) -> ReadEntries:
    """A function that reads one moment of a source parameter.

    DTensors are gathered whole. Of stored tensors only the needed entries are read.
    """

    def read(name: str, index: Sequence[Tensor]) -> Tensor:
        value = state[name][key]
        if isinstance(value, DTensor):
            value = value.full_tensor()
        return value.cpu() if isinstance(value, Tensor) else value.read_entries(index)

    return read


@dataclass(frozen=True)
class ShownMoment:
    """One moment of a mixture's tensor, made of those of a dense model when it is read."""

    part: Parts
    tensors: tuple[Any, ...]

    @property
    def dtype(self) -> torch.dtype:
        dtype: torch.dtype = self.tensors[0].dtype
        return dtype

    def read_entries(self, index: Sequence[Tensor]) -> Tensor:
        """As of a `StoredTensor`."""
        whole = [x.full_tensor() if isinstance(x, DTensor) else x for x in self.tensors]
        whole = [x.cpu() if isinstance(x, Tensor) else x.read() for x in whole]
        return self.part.of_experts(whole)


def shown_state(plan: GrowthPlan, state: State) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """The state of the tensors that a mixture has in place of a dense model's FFN."""
    for name, part in plan.source.parts.items():
        entries = [state[own] for own in part.names if own in state]
        if len(entries) < len(part.names):
            continue
        if not part.experts:
            yield name, entries[0]
            continue
        moments = {
            key: ShownMoment(part, tuple(entry[key] for entry in entries))
            for key in moments_in(entries[0])
        }
        yield name, {**entries[0], **moments}


# -------------------------------------------------------------------- names


def decay_names(model: nn.Module) -> set[str]:
    """Parameters to which `transformers.Trainer` applies weight decay: no norms, no biases."""
    return set(transformers.Trainer.get_decay_parameter_names(None, model))


def _is_named(group: Mapping[str, Any]) -> bool:
    return bool(group["params"]) and isinstance(group["params"][0], str)


def _names(plan: GrowthPlan, groups: Sequence[Mapping[str, Any]]) -> list[list[str]]:
    """The source's parameter names, group by group; tied ones by the name used in the plan."""
    if any(_is_named(group) for group in groups):
        names = [list(group["params"]) for group in groups]
    elif groups and all("param_names" in group for group in groups):
        names = [list(group["param_names"]) for group in groups]
    else:
        names = _default_names(plan, len(groups))
    counts, expected = ([len(x) for x in y] for y in ([g["params"] for g in groups], names))
    if counts != expected:
        raise GrowthError(
            f"the optimizer's groups hold {counts} parameters, {trained(plan).class_name} has "
            f"{expected}: make the optimizer from named parameters, as in "
            "AdamW(model.named_parameters())"
        )
    known = known_names(plan)
    for name in (name for group in names for name in group):
        if name not in known:
            raise GrowthError(
                f"the optimizer has state for {name}, which {trained(plan).class_name} does not "
                f"have{nearest(name, known)}"
            )
    return [[known[name] for name in group] for group in names]


def known_names(plan: GrowthPlan) -> dict[str, str]:
    """Every name of a source parameter -> the name used in the plan; tied ones have several."""
    small = trained(plan)
    return {t.name: small.ties.get(t.name, t.name) for t in small.tensors}


def _default_names(plan: GrowthPlan, groups: int) -> list[list[str]]:
    model = _meta_model(trained(plan))
    names = [name for name, _ in model.named_parameters()]
    if groups == 1:
        return [names]
    if groups != 2:
        raise GrowthError(
            f"the optimizer has {groups} groups without param_names; growkern knows the order of "
            "the one group of model.parameters() and of the two groups of transformers.Trainer: "
            "make the optimizer from named parameters"
        )
    decays = decay_names(model)
    return [[n for n in names if n in decays], [n for n in names if n not in decays]]


def _target_names(plan: GrowthPlan, source: Sequence[Sequence[str]]) -> list[list[str]]:
    """The target's parameter names in model order, each in the group of its source."""
    group_of = {name: number for number, names in enumerate(source) for name in names}
    parts, small = plan.source.parts, trained(plan)
    first = {name: part.names[0] for name, part in parts.items()}
    sources = {task.name: first.get(task.source, task.source) for task in plan.tasks}
    by_rank: dict[int, int] = {}
    for name, number in group_of.items():
        by_rank.setdefault(min(len(small.shapes[name]), 2), number)
    grown: list[list[str]] = [[] for _ in source]
    for name, parameter in _meta_model(plan.large).named_parameters():
        name = plan.large.ties.get(name, name)
        is_made = sources[name] not in small.shapes
        # a tensor that the source lacks joins the group of its matrices, which decay, or of its
        # vectors, which do not. One of experts is a stack of matrices
        group = by_rank.get(min(parameter.ndim, 2)) if is_made else group_of.get(sources[name])
        if group is not None:
            grown[group].append(name)
    return grown


def _meta_model(spec: ModelSpec) -> Any:
    """The model on the meta device; its parameters are the parameters that an optimizer gets."""
    with torch.device("meta"):
        model = untrained_model(spec)
    tie(model, spec)
    return model


def state_by_name(
    plan: GrowthPlan, state_dict: Mapping[str, Any]
) -> tuple[list[list[str]], dict[str, Mapping[str, Any]]]:
    """The source's parameter names, group by group, and the state of those that have one."""
    checks.check_state_dict(state_dict)
    checks.check_keys(state_dict)
    groups, state = state_dict["param_groups"], state_dict["state"]
    names = _names(plan, groups)
    by_name: dict[str, Mapping[str, Any]] = {}
    for group, members in zip(groups, names, strict=True):
        for key, name in zip(group["params"], members, strict=True):
            entry = state.get(key, {})
            # PyTorch treats an empty state as no state
            if not isinstance(entry, Mapping) or entry:
                # the state of Muon looks like the momentum of SGD
                if isinstance(entry, Mapping) and MUON in entry and "ns_coefficients" not in group:
                    raise GrowthError(f"{name}: no rule for the optimizer's {MUON!r}; {NO_RULE}")
                by_name[name] = entry
    checks.check_entries(plan, by_name)
    return names, by_name | dict(shown_state(plan, by_name))
