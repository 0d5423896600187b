"""Resolves a run file: each name is looked up, each model opened and each setting checked once."""

from __future__ import annotations

import copy
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from transformers import TrainingArguments

from growkern.errors import GrowthError, reason
from growkern.growth.history import History
from growkern.growth.options import ROUTERS
from growkern.growth.plan import GrowthPlan, plan_growth, refuse_idle_options
from growkern.growth.source import (
    CONFIG_FILE,
    Source,
    Stamps,
    class_in,
    config_directory,
    load_model,
    located,
    open_source,
    read_config,
    scale_block,
)
from growkern.train.dataset.load import early_collator, open_data
from growkern.train.dataset.records import Reader
from growkern.train.dataset.source import DataSection, find_sources
from growkern.train.distributed.shard import check_replicas, join_processes
from growkern.train.growth import check_new_layers, later_sizes, on_meta, options_of
from growkern.train.loop.callbacks import ExpertBalancing
from growkern.train.loop.checks import TrainerSettings, check_together, choose_precision
from growkern.train.loss import check_tokenizers
from growkern.train.model import check_directory, check_fits, has_tokenizer, load_tokenizer
from growkern.train.objectives.language_modeling import Collator
from growkern.train.objectives.names import Objective, choose
from growkern.train.rules import check
from growkern.train.run.directory import check_output
from growkern.train.run.file import (
    Run,
    check_best_metric,
    checked_arguments,
    training_arguments,
)
from growkern.train.safety.checkpoints import behind_link
from growkern.train.safety.steps import StepOptions


@dataclass(frozen=True)
class Checkpoint:
    """A model that a run reads. Its config is read and checked once, long before its weights.

    Attributes:
        stamps: what was known of config.json before it was read.
    """

    directory: Path
    config: Any
    stamps: Stamps

    @classmethod
    def of(cls, directory: Path) -> Checkpoint:
        """Open a directory."""
        check_directory(directory)
        stamps = Stamps.of(config_directory(directory) / CONFIG_FILE)
        config = read_config(directory, any_family=True)
        # takes the quantisation out of the config that it is given, and the weights need it
        scale_block(copy.deepcopy(config), directory, dequantize=True)
        return cls(directory, config, stamps)

    def without_weights(self) -> Any:
        """The model on the meta device, which is enough for the checks of a run."""
        config, cls = copy.deepcopy(self.config), class_in(self.directory, self.config)
        scale_block(config, self.directory, dequantize=True)
        try:
            model = on_meta(cls.__name__, config, self.training_dtype)
        except Exception as error:
            # values in a config make classes raise all kinds of errors
            why = f"config.json makes no model: {reason(error)[:300]}"
            raise GrowthError(f"{self.directory}: {why}") from error
        # the record of its growth is there
        model.name_or_path = str(self.directory)
        return model

    def load(self, dtype: torch.dtype | None = None) -> Any:
        """The model; `dtype` is that of the checkpoint by default."""
        # a hard link or new permissions change nothing in it
        self.stamps.check(lambda: True)
        return load_model(self.directory, dtype, config=self.config)

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the weights as the config names it; float32 if it names none."""
        return self.config.dtype or torch.float32

    @property
    def training_dtype(self) -> torch.dtype:
        """The dtype in which the weights train: float32 in place of half precision."""
        return torch.float32 if self.dtype.itemsize == 2 else self.dtype


@dataclass(frozen=True)
class ResolvedRun:
    """A run whose settings were checked against each other and against its models.

    Attributes:
        base: folder that the paths in `settings` are relative to.
        model: to be trained, or to be grown at the start.
        student: the model in training, on the meta device.
        teachers: those that run in this process.
        known: the tokens that all of these know, if the student has further ones.
        data: with the objective of the model in place of "auto".
        readers: what reads the data, by its use.
        collator: makes batches of the rows.
        texts: the local files of the data, by its use.
        inputs: what else the run reads, by the names in the file: a cache may lie elsewhere
            tomorrow.
        plan: of the growth at the start.
        planned: the growths inside the run.
        arguments: of Trainer, with the settings of the optimizer.
    """

    settings: Run
    base: Path
    output: Path
    model: Checkpoint
    student: Any
    teachers: tuple[Checkpoint, ...]
    tokenizer: Any
    known: int | None
    data: DataSection
    readers: Mapping[str, Reader]
    collator: Collator
    texts: Mapping[str, list[Path]]
    inputs: Mapping[str, Path]
    plan: GrowthPlan | None
    planned: tuple[GrowthPlan, ...]
    arguments: TrainingArguments
    precision: str


def locate(base: Path, name: str, revision: str | None = None) -> Path:
    """The directory of a model: in the folder of the run file, or else downloaded from the Hub."""
    place = base / name
    if place.exists():
        # refuses a revision
        located(place, revision)
        return place
    return Path(located(name, revision))


def resolve(run: Run, base: Path, *, progress: bool = True) -> ResolvedRun:
    """Look up and open what a run names, and check all of it. Nothing is written.

    Paths in the settings are relative to `base`. Several processes all call this.
    """
    processes = int(os.environ.get("WORLD_SIZE", "1"))
    check("processes", batch=run.training.batch_size, processes=processes)
    if run.distributed is not None:
        check_replicas(run.distributed.replicas, processes)
    checked_arguments(run.trainer or {})
    sources = find_sources(run.data, base)
    texts = {name: list(source.files) if source else [] for name, source in sources.items()}
    model, source = _opened(run, base)
    names = run.teacher.directories if run.teacher else ()
    teachers = tuple(Checkpoint.of(locate(base, name)) for name in names)
    data = replace(run.data, objective=_objective(run, model))

    of_words = locate(base, *run.words)
    inputs = {run.checkpoint: model.directory}
    inputs |= {name: teacher.directory for name, teacher in zip(names, teachers, strict=True)}
    inputs |= _other_inputs(run, base, of_words)
    output = behind_link(base / run.output.directory)
    kept = [base / run.data.cache] if run.data.cache else []
    check_output(output, [*inputs.values(), *kept], texts)

    opened = {checkpoint.directory: checkpoint.config for checkpoint in (*teachers, model)}
    tokenizer = load_tokenizer(of_words, opened.get(of_words))
    plan, planned = _plans(run, source, model.training_dtype, base)
    length = run.data.sequence_length
    check_fits(model.directory, tokenizer, length, plan.target_config if plan else model.config)
    known = _known_tokens(tokenizer, teachers, length)
    readers = open_data(data, sources, tokenizer, run.loss.row_weights if run.loss else None)
    student = _student(model, plan)
    if processes > 1:
        # the arguments ask for the devices of all processes
        join_processes()
    args = training_arguments(run, output, progress=progress)
    _check_together(run, args, student, teachers)
    check_best_metric(args, run.data.validation_names)
    return ResolvedRun(
        settings=run,
        base=base,
        output=output,
        model=model,
        student=student,
        teachers=teachers,
        tokenizer=tokenizer,
        known=known,
        data=data,
        readers=readers,
        collator=early_collator(data, readers, tokenizer, run.training.seed),
        texts=texts,
        inputs=inputs,
        plan=plan,
        planned=planned,
        arguments=args,
        precision=choose_precision(args, run.training.precision),
    )


def _opened(run: Run, base: Path) -> tuple[Checkpoint, Source | None]:
    """The model that a run begins with, and the same as a source if it will grow."""
    place, growth = locate(base, run.checkpoint, run.revision), run.first_growth
    if not run.growths:
        return Checkpoint.of(place), None
    check_directory(place)
    stamps = Stamps.of(config_directory(place) / CONFIG_FILE)
    dequantize = growth is not None and options_of(growth).dequantize
    # grown values are checked, not those of the source
    source = open_source(place, allow_nonfinite=True, dequantize=dequantize)
    return Checkpoint(place, source.config, stamps), source


def _other_inputs(run: Run, base: Path, of_words: Path) -> dict[str, Path]:
    """What a run reads besides models and texts, by the names in the file."""
    growth = run.first_growth
    routers = [step.router for step in run.growths if step.router not in ROUTERS]
    named = (run.teacher and run.teacher.cache, growth and growth.optimizer, *routers)
    inputs = {run.model.tokenizer: of_words} if run.model.tokenizer else {}
    return inputs | {name: base / name for name in named if name}


def _objective(run: Run, model: Checkpoint) -> Objective:
    """The objective of a run."""
    has_targets = bool(run.data.target_column or run.data.labels_column)
    cls = class_in(model.directory, model.config)
    return choose(run.data.objective, cls, targets=has_targets)


def _student(model: Checkpoint, plan: GrowthPlan | None) -> Any:
    """The model that a run trains, on the meta device."""
    if plan is not None:
        student = on_meta(plan.large.class_name, plan.target_config, model.training_dtype)
        student.growth_plan = plan
        return student
    return model.without_weights()


def _check_together(
    run: Run, args: TrainingArguments, student: Any, teachers: Sequence[Checkpoint]
) -> None:
    """Check what a trainer checks of its arguments and callbacks; see `check_together`."""
    training, growths = run.training, run.later_growths
    if training.expert_balancing is not None:
        ExpertBalancing(training.expert_balancing).watch(student)
    settings = TrainerSettings(
        *(run.two_stage, run.inheritance, None, None, run.loss),
        *(training.optimizer, run.optimizer, growths, training.precision),
        StepOptions(training.on_nonfinite, training.save_minutes),
        planned=(),
    )
    runs = run.teacher is None or run.teacher.is_model
    models = [teacher.without_weights() for teacher in teachers] if runs else None
    facts = {"sharded": run.is_sharded, "has_length": not run.data.streaming}
    check_together(settings, student, models, args, {}, **facts)


def _known_tokens(tokenizer: Any, teachers: Sequence[Checkpoint], length: int) -> int | None:
    """The tokens that all teachers know, if the run has further ones; see `check_tokenizers`."""
    words = [_words_of(teacher) for teacher in teachers]
    for teacher, own in zip(teachers, words, strict=True):
        # the run's tokenizer may have tokens that a teacher lacks
        check_fits(teacher.directory, own, length, teacher.config)
    return check_tokenizers(tokenizer, words)


def _words_of(teacher: Checkpoint) -> Any:
    """The tokenizer of a teacher."""
    if not has_tokenizer(teacher.directory):
        raise GrowthError(
            f"the teacher {teacher.directory} has no tokenizer files, so its tokens cannot be "
            "compared with those of the run: copy the files of the teacher's tokenizer there"
        )
    return load_tokenizer(teacher.directory, teacher.config)


def _plans(
    run: Run, source: Source | None, dtype: torch.dtype, base: Path
) -> tuple[GrowthPlan | None, tuple[GrowthPlan, ...]]:
    """The growth at the start, and those inside the run, planned against each other."""
    if source is None:
        return None, ()
    first, planned = run.first_growth, None
    small, history = source.spec, source.history
    if first is not None:
        how = options_of(first.inside(base))
        planned = plan_growth(source, how, first.sizes, dtype=dtype, judged=False)
        refuse_idle_options(planned)
        small, history = planned.large, History(planned)
    growths = [growth.inside(base) for growth in run.later_growths]
    sizes = later_sizes(small, history, dtype, growths)
    check_new_layers(growths, sizes)
    return planned, tuple(size.plan for size in sizes if size.plan is not None)
