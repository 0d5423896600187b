"""Chooses the optimizer of a run: a model that was grown trains with `GrowthAdamW`."""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Mapping, Sequence
from typing import Any, get_args

import torch
from torch import nn
from transformers import Trainer, TrainingArguments
from transformers.training_args import OptimizerNames

from growkern.errors import GrowthError, GrowthWarning, nearest
from growkern.growth.optimizer.adamw import GrowthAdamW, decay_groups
from growkern.growth.plan.growth_plan import GrowthPlan
from growkern.growth.record.recorded import growth_plan_of
from growkern.train.config import OptimizerChoice
from growkern.train.distributed.shard import is_sharded

# the AdamW of PyTorch, in the names of transformers
ADAMW = (OptimizerNames.ADAMW_TORCH, OptimizerNames.ADAMW_TORCH_FUSED)
# they treat every number on its own, so they train a part of a tensor as they train the whole
ON_SHARDS = (*ADAMW, OptimizerNames.SGD, OptimizerNames.ADAGRAD, OptimizerNames.RMSPROP)


def check_optimizer(args: TrainingArguments, *, sharded: bool) -> None:
    """Check that the optimizer which `args` name can be made, and can train the model.

    Args:
        args: of the trainer.
        sharded: whether every process holds a part of each parameter.

    Raises:
        GrowthError: its package is missing, its settings are wrong, or it needs whole parameters.
    """
    name = OptimizerNames(args.optim).value
    if sharded and args.optim not in ON_SHARDS:
        raise GrowthError(
            f"optim is {name!r}, which needs whole parameters or was not tested with parts of "
            f"them: use {', '.join(one.value for one in ON_SHARDS)}, or sharding = 'ddp'"
        )
    try:
        kind, settings = Trainer.get_optimizer_cls_and_kwargs(args)
    except (ImportError, ValueError, TypeError, NotImplementedError) as error:
        why = " ".join(str(error).split())
        # GaLore, APOLLO and LOMO look at the model, which Trainer passes later
        if "model" in why:
            return
        raise GrowthError(f"optim is {name!r}, which cannot be used: {why}") from error
    try:
        kind([nn.Parameter(torch.zeros(1, device=args.device))], **settings)
    except (ValueError, TypeError) as error:
        why = " ".join(str(error).split())
        given = _changed(args, ("adam_beta1", "adam_beta2", "adam_epsilon", "optim_args"))
        raise GrowthError(f"optim is {name!r}, which cannot be used{given}: {why}") from error


def _changed(args: TrainingArguments, names: Sequence[str]) -> str:
    """Those of the named arguments that are not the defaults, to be put into a message."""
    defaults = {field.name: field.default for field in dataclasses.fields(args)}
    changed = {name: getattr(args, name) for name in names}
    given = [f"{name} = {v!r}" for name, v in changed.items() if v != defaults[name]]
    return f" with {', '.join(given)}" if given else ""


def plan_of_optimizer(
    model: Any, choice: str, args: TrainingArguments, options: Mapping[str, Any]
) -> GrowthPlan | None:
    """The growth whose factors `GrowthAdamW` will use; None trains with Trainer's optimizer.

    Args:
        model: in training.
        choice: "auto" takes `GrowthAdamW` for a model that was grown, unless `args.optim` or
            `options` ask for another optimizer than AdamW.
        args: of the trainer.
        options: the other keyword arguments of `transformers.Trainer`.

    Raises:
        GrowthError: an unknown choice, or "growth-adamw" for a model that was not grown, or not to
            its present shapes, or beside another optimizer; or see `check_optimizer`.
    """
    if choice not in get_args(OptimizerChoice):
        allowed = get_args(OptimizerChoice)
        raise GrowthError(f"optimizer is {choice!r}{nearest(choice, allowed)}")
    if not _given(options):
        check_optimizer(args, sharded=is_sharded(model))
    other = _other_optimizer(args, options)
    if choice == "adamw" or (choice == "auto" and other):
        return None
    if other:
        raise GrowthError(f"optimizer is 'growth-adamw', but {other}: give one of them")
    try:
        plan = growth_plan_of(model)
        if plan is not None:
            _check_fits(model, plan)
    except GrowthError as error:
        if choice == "growth-adamw":
            raise
        warnings.warn(f"trains with AdamW, because {error}", GrowthWarning, stacklevel=3)
        return None
    if plan is None and choice == "growth-adamw":
        raise GrowthError(
            "optimizer is 'growth-adamw', but the model was not grown: load it from the directory "
            "that growkern wrote, with its lineage.json, or set optimizer to 'adamw'"
        )
    # random weights have no source whose steps the copies could take
    return None if plan is None or plan.options.is_baseline else plan


def _check_fits(model: Any, plan: GrowthPlan) -> None:
    """Refuse a plan of other shapes: layers or tokens may have been added since."""
    for name, p in model.named_parameters():
        if tuple(p.shape) != plan.large.shapes.get(name):
            raise GrowthError(f"{name} is not as growth made it")


def _other_optimizer(args: TrainingArguments, options: Mapping[str, Any]) -> str:
    """What asks for another optimizer than PyTorch's AdamW; empty if nothing does."""
    given = _given(options)
    if given:
        return f"{given} is given"
    return "" if args.optim in ADAMW else f"args.optim is {OptimizerNames(args.optim).value!r}"


def _given(options: Mapping[str, Any]) -> str:
    """The keyword argument that brings an optimizer; empty if none does."""
    for name in ("optimizers", "optimizer_cls_and_kwargs"):
        given = options.get(name)
        if given is not None and given[0] is not None:
            return name
    return ""


def growth_optimizer(model: Any, plan: GrowthPlan, args: TrainingArguments) -> GrowthAdamW:
    """`GrowthAdamW` with the settings that Trainer would give to AdamW."""
    return GrowthAdamW(
        decay_groups(model, args.weight_decay),
        plan,
        lr=args.learning_rate,
        betas=(args.adam_beta1, args.adam_beta2),
        eps=args.adam_epsilon,
    )
