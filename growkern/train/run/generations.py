"""Checks the generations of a run file together, before any of them is trained."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import torch

from growkern.errors import GrowthError
from growkern.growth.history import History
from growkern.growth.plan import GrowthPlan
from growkern.growth.source import Source
from growkern.train.run.file import Run
from growkern.train.run.resolve import (
    has_steps_left,
    identity_of,
    is_ours,
    locate,
    other_inputs,
    plans_of,
    source_of,
    trained_dtype,
)
from growkern.train.safety import MARKER, behind_link


def check_generations(runs: Sequence[Run], base: Path, *, overwrite: bool) -> None:
    """Check each generation's settings against its directory, and those that follow from others.

    A generation that a later one began from must stay as it is: the later one reads its files, and
    would be another run without them. With `overwrite` the later one may be made again.

    Raises:
        GrowthError: a directory holds another run, or has more steps than its settings, or must
            not be deleted, or is to be trained on although a later generation began from it.
    """
    changing: dict[Path, Run] = {}
    for run in runs:
        output = behind_link(base / run.output.directory)
        # the inputs themselves may be made by generations before
        identity = {"run": identity_of(run, {}, {})["run"]}
        has_begun = (output / MARKER).is_file()
        before = next((made for made in changing if _reads(run, base, made)), None)
        if has_begun and before is not None:
            if not overwrite:
                raise GrowthError(
                    f"{output} began from the result of {before}, which therefore cannot be "
                    f"trained on to {changing[before].training.steps} steps: leave its steps as "
                    "they were, or choose another [output] directory. overwrite=True (--overwrite) "
                    f"would train it on, and delete {output} and begin it again"
                )
            identity["inputs"] = {}
        ours = is_ours(output, identity, overwrite)
        if has_begun and (not ours or has_steps_left(output, run.training)):
            changing[output] = run


def check_growths(path: Path, runs: Sequence[Run]) -> None:
    """Plan the growths of all generations, of models that need not be trained yet.

    Raises:
        GrowthError: a growth cannot be planned.
    """
    base = path.parent
    # None: not known before it is there. A model that never grows may be of any family, and is
    # not opened
    made: dict[Path, Callable[[], Source] | None] = {}
    for number, run in enumerate(runs, start=1):
        output, start = ((base / x).resolve() for x in (run.output.directory, run.checkpoint))
        opened = made[output] = made.get(start, partial(_opened, run, base))
        if start not in made and not start.exists() and any(x in start.parents for x in made):
            # a checkpoint within a run
            made[output] = None
        elif run.growths and opened is not None:
            try:
                source = opened()
                first, later = plans_of(run, source, trained_dtype(source.config), base)
            except GrowthError as error:
                raise GrowthError(f"{path}: generation {number}: {error}") from error
            *_, last = filter(None, (first, *later))
            made[output] = partial(_grown, last)


def _opened(run: Run, base: Path) -> Source:
    return source_of(run, locate(base, run.checkpoint, run.revision))


def _grown(plan: GrowthPlan) -> Source:
    """The model that a growth makes, without values."""
    large, dtype = plan.large, plan.dtype

    def read(name: str) -> torch.Tensor:
        return torch.empty(large.shapes[name], dtype=dtype, device="meta")

    dtypes = {name: dtype for name in large.shapes if name not in large.ties}
    return Source(large, dtypes, read, history=History(plan))


def _reads(run: Run, base: Path, output: Path) -> bool:
    """Whether a run reads files in the output directory of another one."""
    names = (run.checkpoint, *(run.teacher.directories if run.teacher else ()))
    paths = [base / name for name in names]
    paths += other_inputs(run, base, base / run.words[0]).values()
    return any(output.resolve() in (x, *x.parents) for x in (path.resolve() for path in paths))
