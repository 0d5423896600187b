"""The settings of a training run, read from a TOML file and checked.

The sections of the file and their keys:

    [model]        path, tokenizer, generator               (path: not with [growth])
    [data]         train, validation or dataset, split, ...; objective, sequence_length, ...
    [training]     steps, batch_size, accumulation, learning_rate, warmup_steps, ...
    [optimizer]    rewarm_steps, rewarm_peak, muon_lr, adjust_lr_fn, ...       (optional)
    [output]       directory, report_to, tensorboard
    [two_stage]    layers_per_block, stage1_steps, seed, embeddings            (optional)
    [inheritance]  alpha, end_step, temperature, divergence, teacher_weights, ...  (optional)
    [growth]       source, sizes, method, symmetry, moments, optimizer, ...    (optional)
    [distributed]  sharding, replicas, param_dtype, activation_checkpointing, ...  (optional)
    [loss]         row_weights, and how labels count, see `LossOptions`        (optional)
    [teacher]      paths, cache, or url and k                                  (with inheritance)
    [trainer]      any argument of `transformers.TrainingArguments` that is not here  (optional)

    [[generation]]  sections of one of several runs, see `load_runs`           (optional)

Paths are relative to the folder of the file. `TrainingArguments` are made of the sections, and of
[trainer] as they are.
"""

from __future__ import annotations

import dataclasses
import enum
import os
import reprlib
import types
import typing
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any, ClassVar, Literal, Union

import torch
from transformers import TrainingArguments, get_scheduler
from transformers.integrations.integration_utils import (
    INTEGRATION_TO_CALLBACK,
    get_available_reporting_integrations,
)

from growkern.arguments import (
    MOST_NUMPY_SEED,
    NOT_NEGATIVE,
    POSITIVE,
    Limit,
    between,
    check_fields,
    check_steps,
)
from growkern.errors import GrowthError, nearest
from growkern.files import to_dataclass
from growkern.ops.loss import LABEL_OPTIONS
from growkern.train.dataset import MOST, DataSection
from growkern.train.distributed import DistributedOptions
from growkern.train.loop import GrowthStep, check_order
from growkern.train.loss import InheritanceSchedule, LossOptions
from growkern.train.model import ModelSection, TwoStageConfig
from growkern.train.optimizer import OptimizerChoice, OptimizerOptions, check_choice
from growkern.train.rules import check
from growkern.train.run.tables import of_each, read_tables
from growkern.train.topk_teacher import check_url

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
Schedule = Literal["linear", "cosine", "constant_with_warmup", "warmup_stable_decay"]


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
        if not _fits(value, kinds[name]):
            members = _members(kinds[name])
            if members and isinstance(value, str):
                raise GrowthError(f"trainer.{name} is {value!r}{nearest(value, members)}")
            raise GrowthError(
                f"trainer.{name} is {value!r} ({type(value).__name__}): it must be "
                f"{_described(kinds[name])}"
            )
    return dict(table)


def _options(kind: Any) -> tuple[Any, ...]:
    if typing.get_origin(kind) in (types.UnionType, Union):
        return tuple(x for option in typing.get_args(kind) for x in _options(option))
    return (kind,)


def _members(kind: Any) -> list[str]:
    """The names that a field takes; none if it is no enumeration."""
    enums = [x for x in _options(kind) if isinstance(x, type) and issubclass(x, enum.Enum)]
    return [member.value for kind in enums for member in kind]


def _fits(value: Any, kind: Any) -> bool:
    """Whether a value of TOML or Python has the type of a field, as far as the field tells."""
    members = _members(kind)
    if members and isinstance(value, str):
        return value in members
    return any(_fits_one(value, option) for option in _options(kind))


def _fits_one(value: Any, kind: Any) -> bool:
    origin = typing.get_origin(kind) or kind
    if origin is Literal:
        return any(value == x and type(value) is type(x) for x in typing.get_args(kind))
    if origin is float:
        return type(value) in (int, float)
    if origin is list:
        items = typing.get_args(kind)
        return isinstance(value, list) and all(
            not items or _fits(item, items[0]) or isinstance(item, str) for item in value
        )
    # a bool is an int
    return type(value) is origin or (origin is Any)


def _described(kind: Any) -> str:
    if _members(kind):
        return f"a name, such as {_members(kind)[0]!r}"
    options = [option for option in _options(kind) if option is not types.NoneType]
    return " or ".join(getattr(option, "__name__", None) or str(option) for option in options)


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


@dataclass(frozen=True)
class TrainingSection:
    """The optimizer and its schedule, which run through both stages without a break.

    Args:
        steps: optimizer steps of both stages together.
        batch_size: blocks per micro-batch, of all processes together.
        accumulation: micro-batches per optimizer step.
        learning_rate: the peak of the schedule.
        warmup_steps: optimizer steps in which the rate rises from 0 to its peak.
        schedule: of the rate after the warm-up. With "warmup_stable_decay" it falls in the last
            steps only: [trainer] lr_scheduler_kwargs = { num_decay_steps = 1000 } says in how many.
        weight_decay: of the optimizer.
        optimizer: "auto" trains a model that was grown with `growkern.GrowthAdamW` and others with
            AdamW. "adamw" and "growth-adamw" take one of them. "muon" trains the matrices of the
            blocks with Muon and all else with AdamW, and grown models with their counterparts.
        max_grad_norm: gradients with a larger norm are scaled down to it.
        precision: of the arithmetic. Weights and optimizer state are float32 with "fp32" and with
            "bf16" (bfloat16 autocast), whatever the dtype of the checkpoint. With "pure-bf16" they
            are bfloat16 and small steps are lost.
        seed: of the data order, the masks and dropout.
        log_every: optimizer steps between two log lines.
        eval_every: optimizer steps between two evaluations; 0 evaluates at the end only. A model
            is also evaluated before its first step, and before and after a growth.
        save_every: optimizer steps between two checkpoints; 0: by save_minutes only.
        save_minutes: minutes between two checkpoints; 0: by save_every only. The end of a run
            and SIGINT and SIGTERM always save.
        keep_checkpoints: older checkpoints are deleted.
        on_nonfinite: "stop" ends the run with an error when a loss or a gradient is NaN or
            infinite. "skip" leaves out the optimizer step and counts it.
        data_workers: processes that load data; 0 loads in the training process.
        expert_balancing: speed of `growkern.ExpertBalancing`, such as 0.001, for a mixture whose
            routers have a bias that only chooses experts. It wakes experts that sleep.

    Raises:
        GrowthError: a value is out of range.
    """

    LIMITS: ClassVar[dict[str, Limit]] = {
        **dict.fromkeys(("steps", "batch_size", "accumulation"), between(1, MOST)),
        **dict.fromkeys(("log_every", "keep_checkpoints"), between(1, MOST)),
        **dict.fromkeys(("warmup_steps", "eval_every", "save_every"), between(0, MOST)),
        **dict.fromkeys(("learning_rate", "weight_decay"), NOT_NEGATIVE),
        **dict.fromkeys(("max_grad_norm", "save_minutes"), NOT_NEGATIVE),
        "expert_balancing": POSITIVE,
        "seed": between(0, MOST_NUMPY_SEED),
        # every worker is a process
        "data_workers": between(0, 1024),
    }

    steps: int
    batch_size: int = 32
    accumulation: int = 1
    learning_rate: float = 1e-4
    warmup_steps: int = 0
    schedule: Schedule = "linear"
    weight_decay: float = 0.01
    optimizer: OptimizerChoice = "auto"
    max_grad_norm: float = 1.0
    precision: Literal["fp32", "bf16", "pure-bf16"] = "fp32"
    seed: int = 0
    log_every: int = 10
    eval_every: int = 0
    save_every: int = 0
    save_minutes: float = 10.0
    keep_checkpoints: int = 2
    on_nonfinite: Literal["stop", "skip"] = "stop"
    data_workers: int = 0
    expert_balancing: float | None = None

    def __post_init__(self) -> None:
        check_fields(self, "training")
        check_steps(self.steps, {"training.warmup_steps": self.warmup_steps}, "training.steps")


def has_tensorboard() -> bool:
    """Whether TensorBoard is installed."""
    return find_spec("tensorboard") is not None


@dataclass(frozen=True)
class OutputSection:
    """The output of a run.

    Args:
        directory: for checkpoints, the trained model and the logs.
        report_to: integrations of transformers that get the logs, such as "wandb"; "none" or
            "all". None takes what `tensorboard` says.
        tensorboard: whether to write TensorBoard logs. None: if it is installed.

    Raises:
        GrowthError: the two contradict each other.
    """

    directory: str
    report_to: str | tuple[str, ...] | None = None
    tensorboard: bool | None = None

    def __post_init__(self) -> None:
        given = self.report_to
        as_list = given if isinstance(given, (list, tuple)) else (given,)
        if given is not None and not all(isinstance(name, str) for name in as_list):
            raise GrowthError(
                f"report_to is {reprlib.repr(given)}: it must be the name of an integration, such "
                'as "wandb", or a list of names'
            )
        check("output", self)

    @property
    def reports(self) -> tuple[str, ...]:
        """The names in `report_to`, or those that it stands for if it is None."""
        if self.report_to is None:
            logs = has_tensorboard() if self.tensorboard is None else self.tensorboard
            return ("tensorboard",) if logs else ()
        return (self.report_to,) if isinstance(self.report_to, str) else tuple(self.report_to)


@dataclass(frozen=True)
class TeacherSection:
    """Section [teacher] of a run file. The run's tokenizer must begin with that of the teachers.

    Args:
        paths: checkpoint directories of the teachers. Or a table of the names in `data.train` and
            one directory each: that teacher then teaches the rows of this source alone.
        cache: directory that `growkern cache-teacher` wrote.
        url: of a server of vLLM that runs the teacher, see `growkern.ServedTeacher`.
        served_model: the name of the teacher on the server, if that has several.
        k: tokens per row that the server is asked for.
        vocab_size: tokens of the teacher on the server, if the run's tokenizer has more.

    Raises:
        GrowthError: not exactly one of paths, cache and url is given, or url and k apart, or
            the url names no server.
    """

    paths: tuple[str, ...] | dict[str, str] = ()
    cache: str | None = None
    url: str | None = None
    served_model: str | None = None
    k: int | None = None
    vocab_size: int | None = None

    def __post_init__(self) -> None:
        check("teacher", self)
        if self.url is not None:
            check_url(self.url)

    @property
    def names(self) -> tuple[str, ...]:
        """The sources of the teachers; empty if each teacher teaches all rows."""
        return tuple(self.paths) if isinstance(self.paths, dict) else ()

    @property
    def directories(self) -> tuple[str, ...]:
        """The checkpoint of each teacher that runs."""
        return tuple(self.paths.values() if isinstance(self.paths, dict) else self.paths)

    @property
    def is_model(self) -> bool:
        """Whether the teachers are models that run in the training processes."""
        return bool(self.paths)


@dataclass(frozen=True)
class Run:
    """The settings of a training run, one field per section of the file."""

    model: ModelSection
    data: DataSection
    training: TrainingSection
    output: OutputSection
    two_stage: TwoStageConfig | None = None
    inheritance: InheritanceSchedule | None = None
    teacher: TeacherSection | None = None
    loss: LossOptions | None = None
    optimizer: OptimizerOptions | None = None
    growth: GrowthStep | tuple[GrowthStep, ...] | None = None
    distributed: DistributedOptions | None = None
    trainer: dict[str, Any] | None = None

    def __post_init__(self) -> None:
        if self.growths:
            check_order(self.growths, self.training.steps)
        check_choice(self.training.optimizer, self.optimizer)
        check("run", self)
        teacher = self.teacher
        check(
            "teachers",
            inheritance=self.inheritance,
            given=teacher is not None,
            by_source=bool(teacher and teacher.names),
            number=len(teacher.directories) if teacher and teacher.is_model else None,
        )
        numbers = {
            "two_stage.stage1_steps": self.two_stage.stage1_steps if self.two_stage else None,
            "inheritance.end_step": self.inheritance.end_step if self.inheritance else None,
            "optimizer.rewarm_steps": self.optimizer.rewarm_steps if self.optimizer else None,
        }
        check_steps(self.training.steps, numbers, "training.steps")

    @property
    def checkpoint(self) -> str:
        """The checkpoint directory that the run begins with: the model, or the source it grows."""
        return str(self.first_growth.source if self.first_growth else self.model.path)

    @property
    def revision(self) -> str | None:
        """The revision of that checkpoint on the Hub."""
        return self.first_growth.revision if self.first_growth else self.model.revision

    @property
    def words(self) -> tuple[str, str | None]:
        """The directory of the tokenizer, and its revision."""
        tokenizer = self.model.tokenizer
        return (tokenizer, None) if tokenizer else (self.checkpoint, self.revision)

    @property
    def is_sharded(self) -> bool:
        """Whether every process holds a part of each parameter."""
        return self.distributed is not None and self.distributed.sharding == "fsdp"

    @property
    def growths(self) -> tuple[GrowthStep, ...]:
        """All growths, in the order of their steps."""
        if isinstance(self.growth, GrowthStep):
            return (self.growth,)
        return self.growth or ()

    @property
    def first_growth(self) -> GrowthStep | None:
        """The growth at the start, if there is one."""
        return next((growth for growth in self.growths if not growth.at_step), None)

    @property
    def later_growths(self) -> tuple[GrowthStep, ...]:
        """The growths inside the run."""
        return tuple(growth for growth in self.growths if growth.at_step)


def load_run(path: str | Path) -> Run:
    """Read and check a run file of one run. Errors name the file, the key and allowed values."""
    runs = load_runs(path)
    if len(runs) > 1:
        raise GrowthError(f"{path} has {len(runs)} generations: give a file of a single run")
    return runs[0]


def load_runs(path: str | Path) -> list[Run]:
    """Read and check a run file: a single run, or one for each table `[[generation]]` in it.

    A generation has sections of its own, such as [generation.model]. Their keys are added to those
    of the file and replace them. Its output is in the folder generation-<number> of the file's
    output directory. A generation with [inheritance] and without a teacher learns from the one
    before it (Knowledge Inheritance, Qin et al. 2022, "over generations"). Any other run learns
    from the source of its growth.
    """
    path = Path(path)
    return of_each(read_tables(path), lambda tables: to_dataclass(Run, tables, str(path)))
