"""Finds the checkpoints of a run, and checks them before they are read.

PyTorch is not imported here: pictures of a run do without it.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path

from growkern.errors import GrowthError, warn
from growkern.publish import MANIFEST, damage_of, delete, move, read_manifest

# transformers' name of the file with the log, which a checkpoint has and a finished run; and the
# file in the directory of a run that gets each line at once
STATE_FILE, LOG_FILE = "trainer_state.json", "log.jsonl"
DAMAGED = "damaged-{}"


def step_of(checkpoint: Path) -> int:
    """The step at which a checkpoint was saved, from its name; the number of a generation."""
    return int(checkpoint.name.rpartition("-")[2])


def checkpoints_in(directory: Path) -> list[Path]:
    """The checkpoints of a run, the latest step first. Their contents are not checked."""
    paths = [p for p in directory.glob("checkpoint-*") if re.fullmatch(r"checkpoint-\d+", p.name)]
    return sorted(paths, key=step_of, reverse=True)


def exportable(run: Path) -> list[Path]:
    """The checkpoints of a run, the latest step first, or the one that is given itself."""
    paths = [run] if run.name.startswith("checkpoint-") else checkpoints_in(run)
    if not any(path.is_dir() for path in paths):
        last = max(run.glob("generation-*"), key=step_of, default=None)
        given = "the output directory of a run" if last is None else f"a generation, such as {last}"
        raise GrowthError(f"{run} has no checkpoint to export: give {given}")
    return paths


def last_checkpoint(directory: Path) -> Path | None:
    """The latest checkpoint that was written to its end, or None. Its contents are not checked."""
    return next((path for path in checkpoints_in(directory) if (path / MANIFEST).is_file()), None)


def behind_link(output: Path) -> Path:
    """The directory that a link leads to, as nothing in a link is ever replaced; or the path."""
    return output.resolve() if output.is_symlink() else output


def damage(directory: Path) -> str | None:
    """The first difference of a checkpoint, or of a run's directory, from its manifest, or None."""
    if not (directory / MANIFEST).exists():
        return f"{MANIFEST} is missing"
    try:
        manifest = read_manifest(directory)
    except GrowthError:
        return f"{MANIFEST} cannot be read"
    if STATE_FILE not in manifest:
        return f"{MANIFEST} is not a manifest of a checkpoint"
    faults = (damage_of(directory, name, manifest) for name in manifest)
    return next((phrase for phrase in faults if phrase is not None), None)


def first_whole(checkpoints: Iterable[Path]) -> tuple[Path | None, dict[Path, str]]:
    """The first checkpoint whose files are all as they were written, and what the others lack."""
    wrong: dict[Path, str] = {}
    for checkpoint in checkpoints:
        reason = damage(checkpoint)
        if reason is None:
            return checkpoint, wrong
        wrong[checkpoint] = reason
    return None, wrong


def newest_whole(directory: Path) -> Path | None:
    """The latest whole checkpoint of a run, or None if there are no checkpoints.

    Later ones that are damaged are renamed to `damaged-checkpoint-<step>`, with a warning.
    """
    whole, wrong = first_whole(checkpoints_in(directory))
    if whole is None and wrong:
        reasons = "; ".join(f"{path.name}: {reason}" for path, reason in wrong.items())
        raise GrowthError(
            f"no checkpoint in {directory} is whole ({reasons}): restore one, or delete the "
            "directory to start from the beginning"
        )
    for path, reason in wrong.items():
        # it is neither resumed from nor counted
        aside = path.with_name(DAMAGED.format(path.name))
        delete(aside)
        move(path, aside)
        warn(
            f"{path} is damaged ({reason}): it is now called {aside.name}, and the run resumes "
            f"from {whole and whole.name}"
        )
    return whole
