"""Makes the `TrainingArguments` of a run: of its sections, and of [trainer] as it is."""

from __future__ import annotations

import dataclasses
import enum
import os
import types
import typing
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from transformers import TrainingArguments, get_scheduler
from transformers.integrations.integration_utils import (
    INTEGRATION_TO_CALLBACK,
    get_available_reporting_integrations,
)

from growkern.arguments import check_steps, choices
from growkern.errors import GrowthError, nearest
from growkern.ops.loss import LABEL_OPTIONS
from growkern.train.rules import check
from growkern.train.run.file import OutputSection, Run, has_tensorboard

# keys of [trainer] that are keys of growkern
OWNED = {
    "output_dir": "output.directory",
    "report_to": "output.report_to",
    "max_steps": "training.steps",
    "num_train_epochs": "training.steps",
    "per_device_train_batch_size": "training.batch_size",
    "per_device_eval_batch_size": "training.batch_size",
    "auto_find_batch_size": "training.batch_size",
    "gradient_accumulation_steps": "training.accumulation",
    "learning_rate": "training.learning_rate",
    "warmup_steps": "training.warmup_steps",
    "warmup_ratio": "training.warmup_steps",
    "lr_scheduler_type": "training.schedule",
    "weight_decay": "training.weight_decay",
    "max_grad_norm": "training.max_grad_norm",
    **dict.fromkeys(("bf16", "fp16", "bf16_full_eval", "fp16_full_eval"), "training.precision"),
    **dict.fromkeys(("seed", "data_seed"), "training.seed"),
    **dict.fromkeys(("logging_steps", "logging_strategy"), "training.log_every"),
    **dict.fromkeys(("eval_steps", "eval_strategy", "do_eval"), "training.eval_every"),
    **dict.fromkeys(("save_steps", "save_strategy"), "training.save_every"),
    "save_total_limit": "training.keep_checkpoints",
    "logging_nan_inf_filter": "training.on_nonfinite",
    "dataloader_num_workers": "training.data_workers",
    **{name + end: f"loss.{name}" for name in LABEL_OPTIONS for end in ("", "_factor")},
    "torch_compile": "distributed.compile_blocks",
    **dict.fromkeys(("fsdp", "fsdp_config", "deepspeed"), "distributed.sharding"),
    "parallelism_config": "distributed.sharding",
    **dict.fromkeys(
        ("gradient_checkpointing", "gradient_checkpointing_kwargs", "activation_checkpointing"),
        "distributed.activation_checkpointing",
    ),
}
# a resumed run would lack what these leave out
REFUSED = {
    "resume_from_checkpoint": "a run is resumed by starting it again",
    "ignore_data_skip": "a resumed run reads the batches that an uninterrupted one would read",
    "save_only_model": "a run could not be resumed",
    "remove_unused_columns": "[data] names the columns that are read",
    "local_rank": "torchrun sets it",
    "disable_tqdm": "the command line and growkern.run(progress=...) say whether bars are shown",
}
# the name on PyPI where it is another one
PACKAGES = {
    "azure_ml": "azureml-core",
    "comet_ml": "comet-ml",
    "flyte": "flytekit",
}


def training_arguments(run: Run, output: Path, *, progress: bool) -> TrainingArguments:
    """The arguments of the trainer."""
    training = run.training
    evaluate = bool(run.data.validation or run.data.validation_split)
    batch_size = training.batch_size // int(os.environ.get("WORLD_SIZE", "1"))
    known: dict[str, Any] = {
        "output_dir": str(output),
        "max_steps": training.steps,
        "per_device_train_batch_size": batch_size,
        "per_device_eval_batch_size": batch_size,
        "gradient_accumulation_steps": training.accumulation,
        "learning_rate": training.learning_rate,
        "warmup_steps": training.warmup_steps,
        "lr_scheduler_type": training.schedule,
        "weight_decay": training.weight_decay,
        "max_grad_norm": training.max_grad_norm,
        "bf16": training.precision == "bf16",
        "use_cpu": not torch.accelerator.is_available(),
        "seed": training.seed,
        "data_seed": training.seed,
        "logging_steps": training.log_every,
        "logging_first_step": True,
        "eval_strategy": "steps" if evaluate else "no",
        "eval_steps": training.eval_every or training.steps,
        "save_strategy": "steps",
        "save_steps": training.save_every or training.steps,
        "save_total_limit": training.keep_checkpoints,
        "dataloader_num_workers": training.data_workers,
        "report_to": list(reports_of(run.output)) or "none",
        "disable_tqdm": not progress,
        # pinning memory gives a warning in every epoch without an accelerator
        "dataloader_pin_memory": torch.cuda.is_available(),
    }
    passed = run.trainer or {}
    try:
        args = TrainingArguments(**(known | passed))
    except (ValueError, ImportError, TypeError) as error:
        if not passed:
            raise
        why = " ".join(str(error).split())
        raise GrowthError(f"[trainer] cannot be used: {why}") from error
    check("arguments of a run", args)
    _check_steps(args)
    return args


def _check_steps(args: TrainingArguments) -> None:
    """Check arguments that Trainer would use in the middle of a run only."""
    every = args.eval_accumulation_steps
    if every is not None and every < 1:
        raise GrowthError(f"trainer.eval_accumulation_steps is {every}: it must be 1 or more")
    if args.eval_strategy == "steps":
        check_steps(args.max_steps, {"trainer.eval_delay": args.eval_delay}, "training.steps")
    optimizer = torch.optim.SGD([torch.zeros(1)], lr=args.learning_rate)
    try:
        get_scheduler(
            args.lr_scheduler_type,
            optimizer,
            num_warmup_steps=args.get_warmup_steps(args.max_steps),
            num_training_steps=args.max_steps,
            scheduler_specific_kwargs=args.lr_scheduler_kwargs,
        )
    except (ValueError, TypeError) as error:
        why = " ".join(str(error).split())
        kind = args.lr_scheduler_type
        raise GrowthError(
            f"trainer.lr_scheduler_kwargs is {args.lr_scheduler_kwargs!r}, which the schedule "
            f"{getattr(kind, 'value', kind)!r} does not take: {why}"
        ) from error


def check_best_metric(args: TrainingArguments, sets: Sequence[str]) -> None:
    """Check that evaluations give the number by which a trainer chooses its best model.

    Args:
        sets: the names of the validation data, if it has several parts.
    """
    chosen = args.metric_for_best_model
    if chosen is None or args.eval_strategy == "no":
        return
    names = ["loss", *(f"{part}_loss" for part in sets)]
    if chosen.removeprefix("eval_") not in names:
        raise GrowthError(
            f"trainer.metric_for_best_model is {chosen!r}, which an evaluation does not give"
            f"{nearest(chosen, names)}"
        )


# ------------------------------------------------------------------- [trainer]


def checked_arguments(table: Mapping[str, Any]) -> dict[str, Any]:
    """Check the keys and values of [trainer]."""
    known = {field.name for field in dataclasses.fields(TrainingArguments) if field.init}
    kinds = typing.get_type_hints(TrainingArguments)
    for name, value in table.items():
        if name in OWNED:
            raise GrowthError(f"trainer.{name} is set by {OWNED[name]}: give that instead")
        if name in REFUSED:
            raise GrowthError(f"trainer.{name} cannot be given: {REFUSED[name]}")
        if name not in known:
            near = nearest(name, known - OWNED.keys() - REFUSED.keys())
            if "did you mean" not in near:
                # there are too many to list all of them
                near = "; see transformers.TrainingArguments"
            raise GrowthError(f"[trainer] has no key {name!r}{near}")
        _check_type(name, value, kinds[name])
    return dict(table)


def _check_type(name: str, value: Any, kind: Any) -> None:
    """Refuse a value of another type than its field, as far as the field tells."""
    is_union = typing.get_origin(kind) in (types.UnionType, typing.Union)
    options = typing.get_args(kind) if is_union else (kind,)
    plain = [typing.get_origin(x) or x for x in options if x is not types.NoneType]
    enums = [x for x in plain if isinstance(x, type) and issubclass(x, enum.Enum)]
    names = [member.value for x in enums for member in x]
    if names and isinstance(value, str):
        if value not in names:
            raise GrowthError(f"trainer.{name} is {value!r}{nearest(value, names)}")
    # exact types: a bool is an int
    elif not (
        {Any, type(value)} & {*plain}
        or (float in plain and type(value) is int)
        or any(value is x for x in choices(kind))
    ):
        of_type = " or ".join(getattr(x, "__name__", str(x)) for x in plain)
        must = f"a name, such as {names[0]!r}" if names else of_type
        raise GrowthError(
            f"trainer.{name} is {value!r} ({type(value).__name__}): it must be {must}"
        )


# ------------------------------------------------------------------- reporting


def reports_of(output: OutputSection) -> tuple[str, ...]:
    """The integrations that a run reports to."""
    names = output.reports
    if names == ("none",):
        return ()
    # transformers does not list these two
    packages = {"flyte": "flytekit", "azure_ml": "azureml"}
    unlisted = (name for name, package in packages.items() if find_spec(package))
    available = {*get_available_reporting_integrations(), *unlisted}
    if names == ("all",):
        return tuple(sorted(available))
    for name in names:
        if name not in INTEGRATION_TO_CALLBACK:
            raise GrowthError(
                f"output.report_to is {name!r}{nearest(name, [*INTEGRATION_TO_CALLBACK, 'none'])}"
            )
        if name == "tensorboard" and not has_tensorboard():
            raise GrowthError(
                "TensorBoard is not installed: set output.tensorboard to false, or "
                "pip install tensorboard"
            )
        if name not in available:
            raise GrowthError(
                f"output.report_to names {name!r}, which is not installed: "
                f"pip install {PACKAGES.get(name, name)}"
            )
    return names
