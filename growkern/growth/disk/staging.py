"""Checks of a growth's target, and the workplace beside it, `.NAME.growing`."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

from growkern.errors import GrowthError
from growkern.growth.disk.replaceable import why_kept
from growkern.publish import workplace

KIND = "growing"


def staging(target: Path, *, resume: bool) -> workplace.Workplace:
    """The workplace of a growth or a fold into `target`.

    Args:
        resume: continue the unfinished work of an interrupted run.
    """
    return workplace.Workplace(target, KIND, may_replace, resume=resume)


def sweep(target: Path) -> None:
    """Tidy up beside a target after a killed process."""
    workplace.sweep(target, KIND, may_replace)


def may_replace(directory: Path) -> bool:
    """Whether a directory is a checkpoint or empty: nothing else is ever replaced."""
    return why_kept(directory) is None


def check_target(source: Path, target: Path, overwrite: bool) -> None:
    """Refuse a target that may not be made or replaced."""
    source = source.resolve()
    if source in target.parents:
        raise GrowthError(
            f"{target} is inside the source {source} and would become part of it: give a "
            "directory beside it"
        )
    if not target.exists():
        return
    if not target.is_dir():
        raise GrowthError(f"{target} exists and is a file: give a directory")
    if source == target or target in source.parents:
        raise GrowthError(f"{target} exists and holds the source itself: give another directory")
    if why := why_kept(target):
        raise GrowthError(
            f"{target} exists and holds something other than a checkpoint, which is never "
            f"replaced: {why}: give another directory"
        )
    if not overwrite:
        raise GrowthError(f"{target} exists: give another directory or overwrite (--overwrite)")


@contextlib.contextmanager
def refusing(target: Path) -> Iterator[None]:
    """Turn the system's errors about a target into `GrowthError`, before any work is done."""
    try:
        yield
    except OSError as error:
        raise GrowthError(f"{target}: {error.strerror or error}: give another directory") from error


def check_space(target: Path, size: int) -> None:
    """`growkern.publish.workplace.check_space` for a growth."""
    workplace.check_space(target, KIND, size)
