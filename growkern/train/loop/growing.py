"""The growths of a run: at which steps the model grows, and how the larger models are built.

`GrowthStep` is [growth] of a run file and an argument of `growkern.TwoStageTrainer`. A grown model
is built in place: on the meta device, then sharded, then filled part by part.

Before each growth inside the run the trainer saves a checkpoint of the smaller model. The larger
model, its optimizer and everything else continue from that checkpoint. A run that is killed after
it and resumed takes the same way, and so gets the same bits as a run that was never interrupted.
"""

from __future__ import annotations

import contextlib
import copy
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
import transformers
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.optim.lr_scheduler import LambdaLR
from transformers import PreTrainedConfig, SchedulerType
from transformers.trainer import SCHEDULER_NAME

from growkern.errors import GrowthError, human, warn
from growkern.families import ModelSpec
from growkern.growth.disk import complete_config
from growkern.growth.history import History, history_of
from growkern.growth.models import local_tensor, materialise, restore_buffers
from growkern.growth.optimizer import grow_optimizer_into
from growkern.growth.options import DEFAULT_DEPTH, GrowthOptions
from growkern.growth.plan import GrowthPlan, plan_growth, uses, with_source
from growkern.growth.record import growth_plan_of, keep_lineage, misfit
from growkern.growth.sharded import check_into, device_of, fill, free_gathered, named_tensors
from growkern.growth.source import Source, open_source
from growkern.train.distributed.shard import shard
from growkern.train.model import ModelPart, find_stacks
from growkern.train.rules import check as check_rules
from growkern.train.safety import step_of
from growkern.train.sections import DistributedOptions, GrowthStep

# a rate below this share of its peak before is called low; the peak is looked for in so many parts
LEAST_RATE, PARTS = 0.9, 100


def are_above(plan: GrowthPlan) -> bool:
    """Whether the new layers of a growth are copies that stand above all layers before it."""
    pairs = zip(plan.layer_maps.values(), (count for count, _ in layers_around(plan)), strict=True)
    return not plan.inserted and all(made[:n] == (*range(n),) for made, n in pairs)


def rewarmed(step: int, rate: Callable[[int], float], growth: Sequence[GrowthStep]) -> float:
    """The learning rate at an optimizer step, which each growth may lower, and let rise again.

    From a growth at step g on, the rate of the schedule, a factor of the peak rate, is multiplied
    by `rate_factor`. With R `rewarm_steps` it is also multiplied by (t - g + 1) / (R + 1) at the
    steps t = g ... g + R - 1.
    """
    factor = rate(step)
    for before in growth:
        since = step - before.at_step
        factor *= before.rate_factor if since >= 0 else 1.0
        if 0 <= since < before.rewarm_steps:
            factor *= (since + 1) / (before.rewarm_steps + 1)
    return factor


def new_part(step: int, growth: GrowthStep, plan: GrowthPlan) -> ModelPart | None:
    """The part that trains after a growth while its `new_layers_steps` last; None later."""
    if step >= growth.at_step + growth.new_layers_steps:
        return None
    layers = layers_around(plan)
    return ModelPart(max(new for _, new in layers), tuple(new - old for old, new in layers))


def layers_around(plan: GrowthPlan) -> list[tuple[int, int]]:
    """The layers before and after a growth, of each stack in the order of the model."""
    keys = plan.small.family.stacks.values()
    return [(plan.small.size(key), plan.large.size(key)) for key in keys]


def plans_of_run(
    model: Any,
    growth: Sequence[GrowthStep],
    check: Callable[[Any], None] = lambda model: None,
    planned: Sequence[GrowthPlan] | None = None,
) -> list[GrowthPlan]:
    """The growths of a model during a run, from its config alone.

    Args:
        check: gets a model on the meta device after each growth, and raises a GrowthError if the
            run cannot train such a model.
        planned: the same growths, if they were planned already.
    """
    config, dtype = copy.deepcopy(model.config), next(model.parameters()).dtype
    small = ModelSpec.of(config, type(model).__name__.removeprefix("FSDP"))
    if growth:
        tensors = named_tensors(model)
        for head, owner in small.ties.items():
            # of a config alone the head would be tied
            if tensors[head] is not tensors[owner]:
                raise GrowthError(
                    f"{head} and {owner} are two tensors, which growth inside a run would tie: "
                    "grow the model before the run, with growkern grow"
                )
    return later_plans(small, history_of(model), dtype, growth, check, planned)


def plan_before(model: Any) -> GrowthPlan | None:
    """The last growth of a model, if its record can be read."""
    try:
        return growth_plan_of(model)
    except GrowthError:
        # whoever needs it says so: `train.optimizer.choose`
        return None


def later_plans(
    small: ModelSpec,
    history: History,
    dtype: torch.dtype,
    growth: Sequence[GrowthStep],
    check: Callable[[Any], None] = lambda model: None,
    planned: Sequence[GrowthPlan] | None = None,
) -> list[GrowthPlan]:
    """The growths inside a run, each planned against the one before."""
    plans: list[GrowthPlan] = []
    for number, step in enumerate(growth):
        source = _without_values(small, history, step, dtype)
        try:
            if planned is None:
                made = _planned(source, step, dtype)
            else:
                made = with_source(planned[number], source, dtype)
            model = on_meta(made.large.class_name, made.target_config, dtype)
            # what would be refused when the growth comes is refused now
            check_into(model, made)
            check(model)
        except GrowthError as error:
            which = f"growth {number + 1} of {len(growth)} inside the run, the growth at step"
            raise GrowthError(f"{which} {step.at_step}: {error}") from error
        plans.append(made)
        small, history = made.large, History(made)
    return plans


def _without_values(
    small: ModelSpec, history: History, growth: GrowthStep, dtype: torch.dtype
) -> Source:
    """The model that will grow, before it has weights."""

    def read(name: str) -> Tensor:
        raise GrowthError(f"{name} has no values before the run reaches step {growth.at_step}")

    dtypes = {name: dtype for name in small.shapes if name not in small.ties}
    return Source(small, dtypes, read, history=history)


def plan_in_run(
    source: Source, how: GrowthOptions, sizes: dict[str, Any], dtype: torch.dtype
) -> GrowthPlan:
    """The plan of a growth, without findings. A mixture that it makes trains its balance loss."""
    made = plan_growth(source, how, dict(sizes), dtype=dtype, judged=False)
    if made.options.to and hasattr(made.target_config, "router_aux_loss_coef"):
        made.target_config.output_router_logits = True
    return made


def _planned(source: Source, growth: GrowthStep, dtype: torch.dtype) -> GrowthPlan:
    """The plan of a growth, without findings."""
    made = plan_in_run(source, growth.how, growth.sizes, dtype)
    if not uses(made)["depth"][0]:
        # nobody chose the depth that growths in a run have
        made = replace(made, options=replace(made.options, depth=DEFAULT_DEPTH))
    old, new = zip(*layers_around(made), strict=True)
    before, after = (" and ".join(map(str, layers)) for layers in (old, new))
    facts = {"added": old != new and are_above(made), "before": before, "after": after}
    check_rules("new layers", step=growth, **facts)
    return made


def grown_model(
    planned: GrowthPlan,
    options: DistributedOptions,
    dtype: torch.dtype,
    mesh: DeviceMesh | None = None,
    source: Path | None = None,
) -> Any:
    """A grown model, sharded if the options say so. All processes call this.

    Args:
        planned: the growth; its source is open, unless it was planned before the run.
        source: a checkpoint of the run, inside a run.
    """
    made = planned
    if source is not None:
        # its config counts: transformers and callbacks change that of a model in training
        made = with_source(planned, open_source(source, allow_nonfinite=True), dtype)
        # not part of a checkpoint
        for name in ("_attn_implementation", "_experts_implementation"):
            setattr(made.target_config, name, getattr(planned.target_config, name))
    model = shard(on_meta(made.large.class_name, made.target_config, dtype), options, mesh)
    check_into(model, made)
    fill(model, made)
    if source is not None:
        # the checkpoint will be deleted, and a resumed run does not know it
        made_of = replace(made.source, history=planned.source.history, directory=None)
        model.growth_plan = replace(made, source=made_of)
    return model


def unfilled_model(
    class_name: str,
    config: PreTrainedConfig,
    plan: GrowthPlan | None,
    options: DistributedOptions,
    dtype: torch.dtype,
    mesh: DeviceMesh | None = None,
) -> Any:
    """A model whose weights are 0, to be loaded from a checkpoint. All processes call this.

    It has the class of the model that the run began with, unless that became a mixture.
    """
    model = shard(
        on_meta(plan.large.class_name if plan else class_name, config, dtype), options, mesh
    )
    if plan is not None:
        model.growth_plan = plan
    device = torch.device("cpu") if options.cpu_offload else device_of(named_tensors(model))
    materialise(model, device)
    restore_buffers(model)
    for tensor in named_tensors(model).values():
        # the probes of the trainer run the model before its checkpoint is loaded
        local_tensor(tensor).zero_()
    return model


def on_meta(class_name: str, config: PreTrainedConfig, dtype: torch.dtype) -> Any:
    """A model of a class of transformers without memory."""
    with torch.device("meta"):
        # transformers changes the config that it is given
        return getattr(transformers, class_name)._from_config(copy.deepcopy(config), dtype=dtype)


class Former(NamedTuple):
    """The facts about a model that the one in its place shares."""

    dtype: torch.dtype
    distribution: DistributedOptions
    mesh: DeviceMesh | None
    generation: Any
    parameters: int

    @classmethod
    def of(cls, model: Any) -> Former:
        """Look at a model for the last time, and free what it does not need any more."""
        # whoever made this model may still hold it
        model.zero_grad()
        free_gathered(model)
        parameter = next(model.parameters())
        blocks = [block for stack in find_stacks(model) for block in stack]
        return cls(
            parameter.dtype,
            # a model that is not sharded has no options, and its user may have called for these
            replace(
                getattr(model, "distributed_options", None) or DistributedOptions(),
                activation_checkpointing=any(
                    getattr(module, "gradient_checkpointing", False) for module in model.modules()
                ),
                compile_blocks=any(block._compiled_call_impl is not None for block in blocks),
            ),
            parameter.device_mesh if isinstance(parameter, DTensor) else None,
            model.generation_config if model.can_generate() else None,
            sum(p.numel() for p in model.parameters()),
        )


class GrowthInRun:
    """The growths of a run, and how far the model in memory has grown.

    Attributes:
        grown: how many of them the model in memory has behind it.
        plans: of the growths.
        source: the checkpoint of the smaller model from which the model in memory was just grown.
        ends_here: whether this part of the run ends because the model will grow.
    """

    def __init__(self, steps: Sequence[GrowthStep], model: Any) -> None:
        self.steps, self.grown = tuple(steps), 0
        self.source: Path | None = None
        self.ends_here = self._stops = False
        self.plans: list[GrowthPlan] = []
        self._began, self._parameters = 0.0, 0
        first = getattr(model, "growth_plan", None)
        # of random weights, which the method "random" makes, nothing has grown
        self._first = {} if first and first.options.method == "random" else _changes(first)
        self._class_name = type(model).__name__.removeprefix("FSDP")

    def plan(
        self,
        model: Any,
        check: Callable[[Any], Any],
        planned: Sequence[GrowthPlan] | None = None,
    ) -> None:
        """Plan every growth against the model that the run has until then; see `plans_of_run`."""
        if self.steps:
            self._start = copy.deepcopy(model.config), plan_before(model)
            self.plans = plans_of_run(model, self.steps, check, planned)

    @property
    def since(self) -> int:
        """The step at which the model in memory grew; 0: that of the start."""
        return self.steps[self.grown - 1].at_step if self.grown else 0

    def grown_at(self, checkpoint: Path | None) -> int:
        """How many growths the model of a checkpoint has behind it; None is the start."""
        step = 0 if checkpoint is None else step_of(checkpoint)
        return sum(growth.at_step < step for growth in self.steps)

    def is_due(self, step: int) -> bool:
        """Whether the model grows after so many steps."""
        return self.grown < len(self.steps) and step == self.steps[self.grown].at_step

    def end_part(self, control: Any, step: int, *, evaluates: bool) -> None:
        """Let Trainer log, save and maybe evaluate, if the model grows after this step."""
        # Trainer asks again when an epoch ends with the step
        if self.is_due(step) and not self.ends_here:
            self.ends_here = True
            control.should_log = control.should_save = True
            control.should_evaluate |= evaluates

    @contextlib.contextmanager
    def stop(self, control: Any) -> Iterator[None]:
        """Let Trainer end this part of the run, around what it does after a step or an epoch.

        A callback that ends the run there, or did so before, has precedence over the growth.
        """
        if self.ends_here and self._stops:
            control.should_training_stop = False
        yield
        self._stops = self.ends_here = self.ends_here and not control.should_training_stop
        control.should_training_stop |= self._stops

    def unfilled(self, grown: int, old: Former) -> Any:
        """A model of the size after so many growths, whose weights are 0."""
        plan = self.plans[grown - 1] if grown else None
        parts = (plan.target_config, plan) if plan else self._start
        model = unfilled_model(self._class_name, *parts, old.distribution, old.dtype, old.mesh)
        self.grown = grown
        return model

    def grow(self, checkpoint: Path, old: Former) -> Any:
        """The next larger model, grown from a checkpoint of the smaller one."""
        self._began, self._parameters = time.monotonic(), old.parameters
        planned = self.plans[self.grown]
        model = grown_model(planned, old.distribution, old.dtype, old.mesh, checkpoint)
        self.grown, self.source = self.grown + 1, checkpoint
        return model

    def described(self, parameters: int) -> str:
        """The growth that was just made, in words; `parameters`: of the larger model."""
        changes = _changes(self.plans[self.grown - 1]).items()
        sizes = ", ".join(f"{name} {old} -> {new}" for name, (old, new) in changes)
        counts = f"{human(self._parameters)} -> {human(parameters)} parameters"
        seconds = time.monotonic() - self._began
        return f"the model grew: {sizes}; {counts}; in {seconds:.1f} s"

    def event(self, history: Sequence[Mapping[str, Any]]) -> dict[str, float]:
        """What the first log line after a growth says of it; {} for any other line.

        Growth 0 is that at the start of the run.

        Args:
            history: the lines before.
        """
        lines = [line for line in history if "loss" in line]
        changes = _changes(self.plans[self.grown - 1]) if self.grown else self._first
        known = any(line.get("growth") == self.grown for line in lines) if self.grown else lines
        if known or not changes:
            return {}
        last = lines[-1] if lines else {}
        sizes = {f"growth/{name}": new for name, (_, new) in changes.items()}
        before = {"growth/loss_before": last.get("label_loss", last["loss"])} if last else {}
        # the smaller model, which the run may not have, and then the larger one
        found = [x["eval_loss"] for x in history if x["step"] == self.since and "eval_loss" in x]
        ends = ("growth/eval_loss_before", "growth/eval_loss_after")[not self.grown :]
        losses = zip(ends, found[-len(ends) :], strict=True) if len(found) >= len(ends) else ()
        return {"growth": self.grown, **sizes, **before, **dict(losses)}

    def load_optimizer(self, model: Any, optimizer: Any, scheduler: Any) -> None:
        """Grow the optimizer's state with the model, and continue the schedule."""
        assert self.source is not None
        step = self.steps[self.grown - 1]
        if step.grows_moments:
            grow_optimizer_into(model, optimizer, self.source, moments=str(step.moments))
        scheduler.load_state_dict(torch.load(self.source / SCHEDULER_NAME, weights_only=True))
        # the state of an optimizer would bring its rates along
        for group, rate in zip(optimizer.param_groups, scheduler.get_last_lr(), strict=True):
            group["lr"] = rate

    def part(self, step: int) -> ModelPart | None:
        """The part that trains while only new layers do; None: the whole model."""
        if not self.grown:
            return None
        return new_part(step, self.steps[self.grown - 1], self.plans[self.grown - 1])

    def rewarm(self, scheduler: Any, name: Any) -> None:
        """Let the learning rate rise again after each growth that asks for it, or scale it.

        Warns of a schedule that has fallen before a growth: it rises no more, and new layers learn
        slowly.
        """
        if isinstance(scheduler, LambdaLR) and not self.grown:
            warn_of_low_rate(self.steps, scheduler.lr_lambdas[0], SchedulerType(name).value)
        if not any(growth.rewarm_steps or growth.rate_factor != 1 for growth in self.steps):
            return
        check_rules("schedule", by_step=isinstance(scheduler, LambdaLR), kind=name)
        scheduler.lr_lambdas = [
            partial(rewarmed, rate=rate, growth=self.steps) for rate in scheduler.lr_lambdas
        ]


def _changes(plan: GrowthPlan | None) -> dict[str, tuple[Any, Any]]:
    """The sizes that a growth changes, before and after it."""
    sizes = plan.size_changes() if plan else {}
    return {name: (old, new) for name, (old, new) in sizes.items() if old != new}


def warn_of_low_rate(steps: Sequence[GrowthStep], rate: Any, name: str) -> None:
    """Warn if the rate, a function of the step, is below its peak when a model grows."""
    for growth in steps:
        peak = max(rate(growth.at_step * part // PARTS) for part in range(PARTS + 1))
        if rate(growth.at_step) < LEAST_RATE * peak:
            warn(
                f"the growth at step {growth.at_step} comes when schedule {name!r} has fallen to "
                f"{rate(growth.at_step) / peak:.0%} of its peak: what is new then learns slowly; "
                "give schedule 'warmup_stable_decay' and grow before its decay"
            )


def complete_directory(model: Any, directory: Path) -> None:
    """Write what belongs beside the weights of a model, beyond what transformers writes.

    That is a complete config, and the record of growths.
    """
    known = getattr(model, "growth_plan", None)
    complete_config(directory, known and known.source, getattr(model, "config", None))
    plan = plan_before(model)
    if plan is not None and misfit(plan, model) is None:
        keep_lineage(history_of(model), directory)
