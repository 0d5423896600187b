"""Chooses and makes the optimizer of a run, by the options of [optimizer] in a run file.

A model that was grown trains with `GrowthAdamW`. With "muon", the matrices of the blocks train with
Muon and everything else with AdamW, or with `GrowthMuon` and `GrowthAdamW` after growth.
"""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Collection, Mapping
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from transformers import Trainer, TrainingArguments
from transformers.training_args import OptimizerNames

from growkern.errors import GrowthError, GrowthWarning, warn
from growkern.growth.history import History, history_of
from growkern.growth.optimizer import (
    HALF_WEIGHTS,
    CombinedOptimizer,
    GrowthAdamW,
    GrowthMuon,
    Muon,
    groups_of,
    products,
)
from growkern.growth.plan import GrowthPlan
from growkern.growth.record import growth_plan_of, misfit
from growkern.train.model import find_stacks, is_experts
from growkern.train.rules import ADAMW, check
from growkern.train.sections import OptimizerOptions


class OptimizerMaker:
    """Chooses and makes the optimizer of a run.

    Args:
        choice: "auto" takes `GrowthAdamW` for a model that was grown, unless `args.optim` or
            `options` ask for another optimizer than AdamW.

    Attributes:
        plan: the growth whose factors the optimizer uses; None trains without factors.
    """

    plan: GrowthPlan | None = None
    _why = ""

    def __init__(
        self,
        choice: str,
        own: OptimizerOptions | None,
        args: TrainingArguments,
        options: Mapping[str, Any],
        *,
        grows: bool,
    ) -> None:
        self.own, self._choice, self._args = own or OptimizerOptions(), choice, args
        self._name, self._grows = OptimizerNames(args.optim).value, grows
        brings = ((x, options.get(x)) for x in ("optimizers", "optimizer_cls_and_kwargs"))
        # the keyword argument that brings an optimizer
        self._given = next((name for name, x in brings if x is not None and x[0] is not None), "")
        # what asks for another optimizer than PyTorch's AdamW
        own_name = "" if args.optim in ADAMW else f"args.optim is {self._name!r}"
        self._other = f"{self._given} is given" if self._given else own_name

    def check(self, model: Any, *, sharded: bool) -> None:
        """Refuse settings that make no optimizer, or none that can train the model.

        Args:
            sharded: whether every process holds a part of each parameter.
        """
        facts = {"sharded": sharded and not self._given, "other": self._other}
        check("arguments' optimizer", choice=self._choice, optim=self._name, **facts)
        if not self._given:
            self._check_arguments()
        plan, _ = self._growth_of(model)
        follows = plan is not None and not plan.options.is_baseline
        check(
            "model's optimizer",
            choice=self._choice,
            model=type(model).__name__,
            stacks=find_stacks(model),
            rewarms=self.own.rewarm_steps,
            known=plan is not None,
            in_parts=any(history_of(part) != History() for part in model.children()),
            grown=follows or (self._grows and not self._other),
        )

    def _check_arguments(self) -> None:
        """Check that the arguments make an optimizer."""
        args, start = self._args, f"optim is {self._name!r}, which cannot be used"
        try:
            kind, settings = Trainer.get_optimizer_cls_and_kwargs(args)
        except (ImportError, ValueError, TypeError, NotImplementedError) as error:
            why = " ".join(str(error).split())
            # GaLore, APOLLO and LOMO look at the model, which Trainer passes later
            if "model" in why:
                return
            raise GrowthError(f"{start}: {why}") from error
        try:
            kind([nn.Parameter(torch.zeros(1, device=args.device))], **settings)
        except (ValueError, TypeError) as error:
            why = " ".join(str(error).split())
            defaults = {field.name: field.default for field in dataclasses.fields(args)}
            named = ("adam_beta1", "adam_beta2", "adam_epsilon", "optim_args")
            changed = [f"{x} = {v!r}" for x in named if (v := getattr(args, x)) != defaults[x]]
            given = f" with {', '.join(changed)}" if changed else ""
            raise GrowthError(f"{start}{given}: {why}") from error

    def take_model(self, model: Any) -> None:
        """Choose the optimizer of a model."""
        plan, lost = self._growth_of(model)
        if lost:
            name = "Muon and AdamW" if self._choice == "muon" else "AdamW"
            warn(f"trains with {name}, because {lost}")
        # random weights have no source whose steps the copies could take
        self.plan = None if plan is None or plan.options.is_baseline else plan
        if self._choice != "auto":
            self._why = f"optimizer is {self._choice!r}"
        elif self.plan is not None:
            changes = self.plan.size_changes().items()
            sizes = (f"{name} {old} -> {new}" for name, (old, new) in changes if old != new)
            self._why = f"the model was grown ({', '.join(sizes)})"
        elif plan is not None:
            self._why = f"method {plan.options.method!r} begins with random weights"
        else:
            self._why = lost or self._other or "the model was not grown"

    def described(self) -> str:
        """The optimizer of the model, and of those that it grows to inside the run, and why."""

        def name(prefix: str) -> str:
            if self._choice == "muon":
                return f"{prefix}Muon for the matrices of the blocks, {prefix}AdamW for all else"
            return self._name if self._other else f"{prefix}AdamW"

        now = f"{name('Growth' if self.plan else '')}, because {self._why}"
        follows = self._grows and self.plan is None and self._choice != "adamw" and not self._other
        return f"{now}; {name('Growth')} once it has grown" if follows else now

    def _growth_of(self, model: Any) -> tuple[GrowthPlan | None, str]:
        """The growth that the steps of a model may follow, or why they cannot if it was grown."""
        if self._choice == "adamw" or self._other:
            return None, ""
        plan, lost = None, ""
        try:
            plan = growth_plan_of(model)
        except GrowthError as error:
            lost = str(error)
        if plan is not None and (name := misfit(plan, model)):
            plan, lost = None, f"{name} is not as growth made it"
        if lost and self._choice == "growth-adamw":
            raise GrowthError(lost)
        return plan, lost

    def make(self, model: Any, decays: Collection[str]) -> Optimizer | None:
        """The optimizer of a model; None if it is the one that Trainer makes from the arguments.

        Args:
            decays: names of the parameters that decay.
        """
        plan, own, args = self.plan, self.own, self._args
        groups = groups_of(model, decays, args.weight_decay)
        if self._choice != "muon":
            return None if plan is None else _adamw(groups, plan, own, args)
        matrices = _block_matrices(model)

        def part(*, held: bool) -> list[dict[str, Any]]:
            chosen = [[x for x in g["params"] if (x[0] in matrices) is held] for g in groups]
            return [g | {"params": x} for g, x in zip(groups, chosen, strict=True) if x]

        adamw, held = _adamw(part(held=False), plan, own, args), part(held=True)
        names = ("momentum", "nesterov", "ns_steps", "adjust_lr_fn")
        settings: dict[str, Any] = {
            "lr": args.learning_rate if own.muon_lr is None else own.muon_lr,
            **{name: getattr(own, name) for name in names},
        }
        muon = Muon(held, **settings) if plan is None else GrowthMuon(held, plan, **settings)
        # the first group's rate is the one in the log
        return CombinedOptimizer(adamw, muon)

    def products(self, model: Any) -> int:
        """FLOPs of Muon's own products in a full step of a model; 0 with another optimizer."""
        if self._choice != "muon":
            return 0
        shapes = {name: p.shape for name, p in model.named_parameters()}
        return sum(products(shapes[x], self.own.ns_steps) for x in _block_matrices(model))


def _adamw(
    groups: list[dict[str, Any]],
    plan: GrowthPlan | None,
    own: OptimizerOptions,
    args: TrainingArguments,
) -> Optimizer:
    """AdamW, or `GrowthAdamW` with the settings that Trainer would give to AdamW."""
    if plan is None:
        kind, settings = Trainer.get_optimizer_cls_and_kwargs(args)
        made: Optimizer = kind(groups, **settings)
        return made
    with warnings.catch_warnings():
        # the trainer has said so itself, with the setting that changes it
        warnings.filterwarnings("ignore", HALF_WEIGHTS, GrowthWarning)
        return GrowthAdamW(
            groups,
            plan,
            lr=args.learning_rate,
            betas=(args.adam_beta1, args.adam_beta2),
            eps=args.adam_epsilon,
            rewarm_steps=own.rewarm_steps,
            rewarm_peak=own.rewarm_peak,
        )


def _block_matrices(model: Any) -> set[str]:
    """The names of the matrices in the blocks, without tables such as T5's position biases."""
    inside = {
        id(p)
        for stack in find_stacks(model)
        for module in stack.modules()
        if not isinstance(module, nn.Embedding)
        for p in module.parameters(recurse=False)
        # experts have stacked biases too
        if p.ndim == (3 if is_experts(module) else 2)
    }
    return {name for name, p in model.named_parameters() if id(p) in inside}


def plan_of_steps(optimizer: Optimizer) -> GrowthPlan | None:
    """The growth whose factors an optimizer applies to its steps; None: it applies none."""
    parts = optimizer.optimizers if isinstance(optimizer, CombinedOptimizer) else (optimizer,)
    matched = (part.plan for part in parts if isinstance(part, GrowthAdamW) and part.matched)
    return next(matched, None)


def bare(optimizer: Any) -> Optimizer:
    """The optimizer inside the wrapper of accelerate."""
    inner: Optimizer = getattr(optimizer, "optimizer", optimizer)
    return inner


def products_of(optimizer: Optimizer) -> int:
    """FLOPs of the products in the step that an optimizer is about to take, of all processes.

    Parameters without a gradient take no step. AdamW has no products.
    """
    parts = optimizer.optimizers if isinstance(optimizer, CombinedOptimizer) else (optimizer,)
    return sum(
        products(p.shape, group["ns_steps"])
        for part in parts
        if isinstance(part, torch.optim.Muon)
        for group in part.param_groups
        for p in group["params"]
        if p.grad is not None
    )
