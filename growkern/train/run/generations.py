"""Checks the generations of a run file together, before any of them is trained."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from growkern.errors import GrowthError
from growkern.train.run.file import Run
from growkern.train.run.resolve import has_steps_left, identity_of, is_ours, other_inputs
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
                    "they were, or choose another [output] directory. --overwrite would train it "
                    f"on, and delete {output} and begin it again"
                )
            identity["inputs"] = {}
        ours = is_ours(output, identity, overwrite)
        if has_begun and (not ours or has_steps_left(output, run.training)):
            changing[output] = run


def _reads(run: Run, base: Path, output: Path) -> bool:
    """Whether a run reads files in the output directory of another one."""
    names = (run.checkpoint, *(run.teacher.directories if run.teacher else ()))
    paths = [base / name for name in names]
    paths += other_inputs(run, base, base / run.words[0]).values()
    return any(output.resolve() in (x, *x.parents) for x in (path.resolve() for path in paths))
