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

Paths are relative to the folder of the file.
"""

from __future__ import annotations

import functools
import reprlib
import typing
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, fields, is_dataclass
from difflib import get_close_matches
from importlib.util import find_spec
from pathlib import Path
from typing import Any, ClassVar, Literal, get_args

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
from growkern.files import convert, matching_files, read_toml, to_dataclass
from growkern.growth.options import GrowthKeywords, refuse_by_config
from growkern.growth.source import config_directory, config_of, is_hub_name, refuse_other_names
from growkern.train.model import TwoStageConfig
from growkern.train.rules import check
from growkern.train.sections import (
    MOST,
    DataSection,
    DistributedOptions,
    GrowthStep,
    InheritanceSchedule,
    LossOptions,
    ModelSection,
    OptimizerChoice,
    OptimizerOptions,
    check_choice,
    check_order,
)
from growkern.train.topk_teacher import check_url

# how each section names its checkpoint, and what else that is called
CHECKPOINTS = {
    "model": 'path = "DIRECTORY"',
    "growth": 'source = "DIRECTORY"',
    "teacher": 'paths = ["DIRECTORY"]',
}
CALLED = ("path", "paths", "source", "model", "teacher", "checkpoint", "directory", "name")
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
        return (self.growth,) if isinstance(self.growth, GrowthStep) else self.growth or ()

    @property
    def first_growth(self) -> GrowthStep | None:
        """The growth at the start, if there is one."""
        return next((growth for growth in self.growths if not growth.at_step), None)

    @property
    def later_growths(self) -> tuple[GrowthStep, ...]:
        """The growths inside the run."""
        return tuple(growth for growth in self.growths if growth.at_step)


# ------------------------------------------------------------------------- reading


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
    tables = read_toml(path)
    generations = tables.pop("generation", None)
    if generations is None:
        return [_run_of(_with_teacher(tables), path)]
    if not isinstance(generations, list) or not all(isinstance(x, dict) for x in generations):
        raise GrowthError(f"{path}: write [[generation]], with one such table for each run")
    runs: list[dict[str, Any]] = []
    for number, changes in enumerate(generations, start=1):
        merged = {**tables, **changes}
        for name, section in changes.items():
            if isinstance(section, dict) and isinstance(tables.get(name), dict):
                merged[name] = {**tables[name], **section}
        if "inheritance" in changes and runs and (before := _directory(runs[-1])):
            merged.setdefault("teacher", {"paths": [before]})
        elif "inheritance" in changes:
            merged = _with_teacher(merged)
        if directory := _directory(merged):
            merged["output"] = {**merged["output"], "directory": f"{directory}/generation-{number}"}
        runs.append(merged)
    return _of_each(runs, path)


def _with_teacher(tables: dict[str, Any]) -> dict[str, Any]:
    """The tables of a run. One that inherits and grows at its start learns from what it grows."""
    growth = tables.get("growth")
    first: Any = growth[0] if isinstance(growth, list) and growth else growth
    source = first.get("source") if isinstance(first, dict) else None
    # a revision is not in the names of teachers
    if "inheritance" not in tables or not isinstance(source, str) or "revision" in first:
        return tables
    return {"teacher": {"paths": [source]}, **tables}


def _of_each(runs: Sequence[dict[str, Any]], path: Path) -> list[Run]:
    """The runs of these tables. A fault of some alone names the generation."""
    made, faults = [], {}
    for number, tables in enumerate(runs, start=1):
        try:
            made.append(_run_of(tables, path))
        except GrowthError as error:
            faults[number] = error
    for number, fault in faults.items():
        if len(faults) == len(runs) and len({*map(str, faults.values())}) == 1:
            raise fault
        raise GrowthError(f"generation {number}: {fault}") from fault
    return made


def _directory(tables: dict[str, Any]) -> str | None:
    """The output directory; None if it is missing or of another type."""
    output = tables.get("output")
    directory = output.get("directory") if isinstance(output, dict) else None
    return directory if isinstance(directory, str) else None


def _run_of(tables: dict[str, Any], path: Path) -> Run:
    """The run of these tables, in which the sizes of a growth may stand beside its other keys."""
    # with a growth at the start, [model] may be left out
    tables = {"model": {}, **tables}
    growth = tables.get("growth")
    if isinstance(growth, dict):
        tables["growth"] = _with_sizes(growth, path, "growth")
    elif isinstance(growth, list):
        tables["growth"] = [_with_sizes(x, path, f"growth[{i}]") for i, x in enumerate(growth)]
    _check_keys(tables, path)
    return to_dataclass(Run, tables, str(path))


def _sections(tables: dict[str, Any]) -> Iterator[tuple[str, str, dict[str, Any]]]:
    """Each section, its place in messages, and its table. Several growths are a list."""
    for section, value in tables.items():
        several = isinstance(value, list)
        for i, table in enumerate(value if several else [value]):
            if isinstance(table, dict):
                yield section, f"{section}[{i}]" if several else section, table


def _with_sizes(table: Any, path: Path, place: str) -> Any:
    """A table of a growth with the sizes that stand beside its other keys put into `sizes`."""
    if not isinstance(table, dict) or not isinstance(table.get("sizes", {}), dict):
        return table
    names = keys()["growth"]
    # a size of a wrong type is still one; other unknown keys are typing errors
    known = GrowthKeywords.__annotations__.keys() - names
    sizes = {k: v for k, v in table.items() if k in known or (k not in names and type(v) is int)}
    # an error then names the key that the file has
    convert(sizes, typing.get_type_hints(GrowthStep)["sizes"], str(path), place)
    rest = {k: v for k, v in table.items() if k not in sizes}
    return {**rest, "sizes": {**rest.get("sizes", {}), **sizes}}


def _check_keys(tables: dict[str, Any], path: Path) -> None:
    """Refuse keys that belong to another section, or call a checkpoint by another name."""
    known = keys()
    others = {name: its for name, its in known.items() if name != "growth"}
    for section, place, table in _sections(tables):
        for key in (key for key in table if key not in known.get(section, table)):
            start, own = f"{path}: [{place}] has no key {reprlib.repr(key)}", _like(key, others)
            if section in CHECKPOINTS and key in CALLED:
                raise GrowthError(f"{start}: give {CHECKPOINTS[section]}")
            if own:
                raise GrowthError(f"{start}: it is a section of its own, [{own}]")
            named = [
                f"[{name}] as {like!r}" if like != key else f"[{name}]"
                for name, like in [(name, _like(key, its)) for name, its in others.items()]
                if like
            ]
            is_known = any(key in its for its in others.values())
            if is_known and not get_close_matches(key, known[section]):
                raise GrowthError(f"{start}: it belongs to {' or '.join(named)}")


def _like(key: str, names: Collection[str]) -> str | None:
    """The name that is a key, or its singular or plural."""
    return next((form for form in (key, f"{key}s", key.removesuffix("s")) if form in names), None)


@functools.cache
def keys() -> dict[str, frozenset[str]]:
    """The keys of each section, but of [trainer], whose keys transformers knows."""
    found = {}
    for name, kind in typing.get_type_hints(Run).items():
        classes = [x for x in (kind, *get_args(kind)) if isinstance(x, type) and is_dataclass(x)]
        if classes:
            found[name] = frozenset(x.name for x in fields(classes[0]))
    return found


def check_paths(runs: Sequence[Run], base: Path) -> None:
    """Check that the models and texts of runs exist, but those that the runs make.

    Args:
        base: folder that the paths are relative to.
    """
    made = [base / run.output.directory for run in runs]
    for run in runs:
        taught = run.teacher.directories if run.teacher else ()
        for name in (run.model.path, *(growth.source for growth in run.growths), *taught):
            if name is None or any((base / name).is_relative_to(output) for output in made):
                continue
            place = base / name
            if not place.exists():
                refuse_other_names(name)
            if place.exists() or not is_hub_name(name, base):
                config_directory(place)
        for growth in run.growths:
            if growth.source:
                refuse_by_config(config_of(base / growth.source), growth, growth.sizes)
        for key, sets in (("train", run.data.train), ("validation", run.data.validation)):
            for name, patterns in sets.items() if isinstance(sets, dict) else [("", sets)]:
                for pattern in patterns:
                    matching_files(base, pattern, f"data.{key}{'.' * bool(name)}{name}")
