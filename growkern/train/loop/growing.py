"""The growths inside a run.

Before each growth the trainer saves a checkpoint of the smaller model. The larger model, its
optimizer and everything else continue from that checkpoint. A run that is killed after it and
resumed takes the same way, and so gets the same bits as a run that was never interrupted.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.optim.lr_scheduler import LambdaLR
from transformers import SchedulerType
from transformers.trainer import SCHEDULER_NAME

from growkern.errors import GrowthError, warn
from growkern.growth.disk import complete_config
from growkern.growth.history import history_of
from growkern.growth.optimizer import grow_optimizer_into
from growkern.growth.plan import GrowthPlan
from growkern.growth.record import keep_lineage, misfit
from growkern.growth.sharded import free_gathered
from growkern.train.distributed.shard import DistributedOptions
from growkern.train.distributed.shards import sources_of
from growkern.train.growth import (
    GrowthStep,
    Size,
    grown_model,
    new_part,
    plan_before,
    rewarmed,
    sizes_of_run,
    unfilled_model,
)
from growkern.train.model import ModelPart, find_stacks
from growkern.train.rules import check as check_rules
from growkern.train.safety.checkpoints import MANIFEST, step_of
from growkern.train.safety.saving import Saver

# a rate below this share of its peak before is called low; the peak is looked for in so many parts
LEAST_RATE, PARTS = 0.9, 100


class Former(NamedTuple):
    """The facts about a model that the one in its place shares."""

    dtype: torch.dtype
    distribution: DistributedOptions
    mesh: DeviceMesh | None
    generation: Any

    @classmethod
    def of(cls, model: Any) -> Former:
        """Look at a model for the last time, and free what it does not need any more."""
        # whoever made this model may still hold it
        model.zero_grad()
        free_gathered(model)
        parameter = next(model.parameters())
        blocks = [block for stack in find_stacks(model) for block in stack]
        options = getattr(model, "distributed_options", None) or DistributedOptions()
        return cls(
            parameter.dtype,
            # a model that is not sharded has no options, and its user may have called for these
            replace(
                options,
                activation_checkpointing=any(
                    getattr(module, "gradient_checkpointing", False) for module in model.modules()
                ),
                compile_blocks=any(block._compiled_call_impl is not None for block in blocks),
            ),
            parameter.device_mesh if isinstance(parameter, DTensor) else None,
            model.generation_config if model.can_generate() else None,
        )


class GrowthInRun:
    """The growths of a run, and how far the model in memory has grown.

    Attributes:
        grown: how many of them the model in memory has behind it.
        sizes: of the model, before all growths and after each of them.
        source: the checkpoint of the smaller model from which the model in memory was just grown.
        ends_here: whether this part of the run ends because the model will grow.
    """

    def __init__(self, steps: Sequence[GrowthStep], model: Any) -> None:
        self.steps, self.grown = tuple(steps), 0
        self.source: Path | None = None
        self.ends_here = self._stops = False
        self.sizes: list[Size] = []
        self._class_name = type(model).__name__.removeprefix("FSDP")

    def plan(
        self,
        model: Any,
        check: Callable[[Any], Any],
        planned: Sequence[GrowthPlan] | None = None,
    ) -> None:
        """Plan every growth against the model that the run has until then; see `sizes_of_run`."""
        if self.steps:
            self.sizes = sizes_of_run(model, self.steps, check, planned)

    def grown_at(self, checkpoint: Path | None) -> int:
        """How many growths the model of a checkpoint has behind it; None is the start."""
        step = 0 if checkpoint is None else step_of(checkpoint)
        return sum(growth.at_step < step for growth in self.steps)

    def is_due(self, step: int) -> bool:
        """Whether the model grows after so many steps."""
        return self.grown < len(self.steps) and step == self.steps[self.grown].at_step

    def end_part(self, control: Any, step: int) -> None:
        """Let Trainer save, if the model grows after this step; see `stop`."""
        # Trainer asks again when an epoch ends with the step
        if self.is_due(step) and not self.ends_here:
            self.ends_here = True
            control.should_log = control.should_save = True

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
        size = self.sizes[grown]
        model = unfilled_model(self._class_name, size, old.distribution, old.dtype, old.mesh)
        self.grown = grown
        return model

    def grow(self, checkpoint: Path, old: Former) -> Any:
        """The next larger model, grown from a checkpoint of the smaller one."""
        source, _ = sources_of(checkpoint)
        planned = self.sizes[self.grown + 1].plan
        assert planned is not None
        model = grown_model(planned, old.distribution, old.dtype, old.mesh, source)
        self.grown, self.source = self.grown + 1, checkpoint
        return model

    def event(self, history: Sequence[Mapping[str, Any]]) -> dict[str, float]:
        """What the first log line after a growth says of it; {} for any other line.

        Args:
            history: the lines before.
        """
        lines = [line for line in history if "loss" in line]
        if not self.grown or any(line.get("growth") == self.grown for line in reversed(lines)):
            return {}
        planned, last = self.sizes[self.grown].plan, lines[-1] if lines else {}
        assert planned is not None
        changes = planned.size_changes().items()
        sizes = {f"growth/{field}": new for field, (old, new) in changes if old != new}
        before = {"growth/loss_before": last.get("mlm", last["loss"])} if last else {}
        return {"growth": self.grown, **sizes, **before}

    def checkpoint(self, run: Path, step: int, saver: Saver) -> Path:
        """The checkpoint of the smaller model that the last part of the run has saved."""
        checkpoint = run / f"checkpoint-{step}"
        if not (checkpoint / MANIFEST).is_file():
            raise GrowthError(
                f"the growth at step {step} continues from {checkpoint}, which could not be "
                f"saved; {saver.last(step)}; make room, then resume: {saver.hint}"
            )
        return checkpoint

    def load_optimizer(self, model: Any, optimizer: Any, scheduler: Any) -> None:
        """Grow the optimizer's state with the model, and continue the schedule."""
        assert self.source is not None
        step = self.steps[self.grown - 1]
        if step.grows_moments:
            _, state = sources_of(self.source)
            grow_optimizer_into(model, optimizer, state, moments=str(step.moments))
        scheduler.load_state_dict(torch.load(self.source / SCHEDULER_NAME, weights_only=True))
        # the state of an optimizer would bring its rates along
        for group, rate in zip(optimizer.param_groups, scheduler.get_last_lr(), strict=True):
            group["lr"] = rate

    def part(self, step: int) -> ModelPart | None:
        """The part that trains while only new layers do; None: the whole model."""
        if not self.grown:
            return None
        return new_part(step, self.steps[self.grown - 1], self.sizes[self.grown])

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
