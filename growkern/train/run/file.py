"""The settings of a training run, read from a TOML file and checked.

The sections of the file and their keys:

    [model]        path, tokenizer, generator               (path: not with [growth])
    [data]         train, validation or dataset, split, ...; objective, sequence_length, ...
    [training]     steps, batch_size, accumulation, learning_rate, warmup_steps, ...
    [optimizer]    rewarm_steps, rewarm_peak, muon_lr, adjust_lr_fn, ...       (optional)
    [output]       directory, report_to, tensorboard
    [two_stage]    layers_per_block, stage1_steps, seed, embeddings            (optional)
    [inheritance]  rate, end_step, temperature, divergence, teacher_weights, ...  (optional)
    [growth]       source, sizes, method, symmetry, moments, optimizer, ...    (optional)
    [distributed]  sharding, replicas, param_dtype, activation_checkpointing, ...  (optional)
    [loss]         row_weights, and how labels count, see `LossOptions`        (optional)
    [teacher]      paths, cache, or url and k                                  (with inheritance)
    [trainer]      any argument of `transformers.TrainingArguments` that is not here  (optional)

    [[generation]]  sections of one of several runs, see `load_runs`           (optional)

Paths are relative to the folder of the file.
"""

import reprlib
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any, ClassVar, Literal

from growkern.arguments import (
    MOST_NUMPY_SEED,
    NOT_NEGATIVE,
    POSITIVE,
    Limit,
    between,
    check_fields,
    check_steps,
)
from growkern.errors import GrowthError
from growkern.train.dataset.options import MOST, DataSection
from growkern.train.distributed.shard import DistributedOptions
from growkern.train.growth import GrowthStep, check_order
from growkern.train.loss import InheritanceSchedule, LossOptions, Taught
from growkern.train.model import ModelSection, TwoStageConfig
from growkern.train.optimizer import OptimizerChoice, OptimizerOptions, check_choice
from growkern.train.rules import check
from growkern.train.run.tables import read_tables
from growkern.train.toml import to_dataclass
from growkern.train.topk_teacher.teacher import TeacherSection

Schedule = Literal["linear", "cosine", "constant_with_warmup", "warmup_stable_decay"]


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
            that was just grown is also evaluated before its first step.
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
        teacher, number = self.teacher, None
        if teacher is not None and teacher.is_model:
            number = len(teacher.directories)
        by_source = bool(teacher and teacher.names)
        check("teachers", Taught(self.inheritance, teacher is not None, by_source, number))
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
    before it (Knowledge Inheritance, Qin et al. 2022, "over generations").
    """
    path = Path(path)
    runs: list[Run] = []
    tables = read_tables(path)
    for number, of_run in enumerate(tables, start=1):
        try:
            runs.append(to_dataclass(Run, of_run, str(path)))
        except GrowthError as error:
            if len(tables) == 1:
                raise
            raise GrowthError(f"generation {number}: {error}") from error
    return runs
