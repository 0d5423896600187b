"""Builds the models of a run: loaded or grown, whole or sharded.

A grown model never exists whole and never on disk. It is built without memory, sharded, and each
process computes the parts that it holds. Only the first start grows: a resumed run gets memory for
its parts and loads them from its checkpoint.
"""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from growkern.growth.history import History
from growkern.growth.plan.advice.idle import refuse_idle_options
from growkern.growth.plan.growth_plan import plan_growth
from growkern.growth.source.hub import located
from growkern.growth.source.source import open_source
from growkern.train.distributed.options import DistributedOptions
from growkern.train.distributed.shard import join_processes, shard
from growkern.train.growth.models import Size, grown_model, later_sizes, options_of, unfilled_model
from growkern.train.growth.step import GrowthStep
from growkern.train.model.load import load_language_model, stored_dtype
from growkern.train.objectives.electra import ReplacedTokenDetection
from growkern.train.run.file import Run


def with_directories(run: Run, base: Path) -> Run:
    """The run with the directories of models on the Hub in place of their ids.

    Args:
        run: the settings.
        base: folder that the paths in `run` are relative to. What exists there is not looked up.

    Raises:
        GrowthError: a model on the Hub cannot be reached, or cannot be used.
    """

    def directory_of(name: str, revision: str | None = None) -> str:
        if (base / name).exists():
            # refuses a revision
            located(base / name, revision)
            return name
        return str(located(name, revision))

    def of_section(section: Any, names: tuple[str, ...], revision: str | None = None) -> Any:
        given = {name: getattr(section, name) for name in names if getattr(section, name, None)}
        places = {name: directory_of(value, revision) for name, value in given.items()}
        return replace(section, **places) if places else section

    model = of_section(run.model, ("path",), run.model.revision)
    growths = [of_section(one, ("source",), one.revision) for one in run.growths]
    teacher = run.teacher and replace(
        run.teacher, paths=tuple(map(directory_of, run.teacher.paths))
    )
    return replace(
        run,
        model=of_section(model, ("tokenizer", "generator")),
        growth=growths[0] if isinstance(run.growth, GrowthStep) else tuple(growths) or None,
        teacher=teacher,
    )


def check_growths(run: Run, base: Path) -> None:
    """Plan all growths of a run against each other, before data and models are read.

    Args:
        run: the settings.
        base: folder that the paths in `run` are relative to.

    Raises:
        GrowthError: one of them cannot be done.
    """
    if not run.growths or run.model.generator is not None:
        return
    opened, first = open_source(base / run.checkpoint), run.first_growth
    small, history, dtype = opened.spec, opened.history, _training_dtype(run, base)
    if first is not None:
        planned = plan_growth(opened, options_of(first), first.sizes, judged=False)
        refuse_idle_options(planned)
        small, history = planned.large, History(planned)
    later_sizes(small, history, dtype, run.later_growths)


def _training_dtype(run: Run, base: Path) -> torch.dtype:
    """The dtype in which weights train; half precision becomes float32."""
    stored = stored_dtype(base / run.checkpoint)
    return torch.float32 if stored.itemsize == 2 else stored


def build_model(run: Run, base: Path, *, first_start: bool) -> Any:
    """The model of a run, sharded if the run says so. All processes call this.

    Args:
        run: the settings.
        base: folder that the paths in `run` are relative to.
        first_start: False if a checkpoint will be loaded, so that nothing need be grown.

    Raises:
        GrowthError: the model cannot be loaded, grown or sharded.
    """
    options = run.distributed or DistributedOptions()
    if options.sharding == "fsdp" or int(os.environ.get("WORLD_SIZE", "1")) > 1:
        accelerator = torch.accelerator.current_accelerator()
        join_processes("cpu" if accelerator is None else accelerator.type)
    dtype = _training_dtype(run, base)
    half = dtype != stored_dtype(base / run.checkpoint)
    if run.model.generator is not None:
        pair = [
            load_language_model(base / place, dtype if half else None)
            for place in (run.model.generator, run.checkpoint)
        ]
        return ReplacedTokenDetection(*pair, shared_embeddings=run.model.shared_embeddings)
    if run.first_growth is None:
        return shard(load_language_model(base / run.checkpoint, dtype if half else None), options)
    source, growth = base / run.checkpoint, run.first_growth
    if first_start:
        return grown_model(source, growth, options, dtype)
    planned = plan_growth(open_source(source), options_of(growth), growth.sizes, judged=False)
    size = Size(planned.target_config, planned)
    return unfilled_model(planned.large.class_name, size, options, dtype)


def build_teacher(directory: Path, options: DistributedOptions | None) -> Any:
    """A teacher, spread over the processes as the student is.

    Args:
        directory: its checkpoint.
        options: of the student.
    """
    teacher = load_language_model(directory).requires_grad_(False)
    if options is None or options.sharding == "ddp":
        return teacher
    # its activations are not kept, and it is not worth compiling
    return shard(teacher, replace(options, activation_checkpointing=False, compile_blocks=False))
