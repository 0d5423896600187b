"""The output directory of a run: which run it belongs to, and whether that run is finished."""

from __future__ import annotations

import json
import shutil
import warnings
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

from growkern.bounded import read_json
from growkern.errors import GrowthError, GrowthWarning
from growkern.publish.lock import LOCK_FILE
from growkern.publish.manifest import MANIFEST
from growkern.train.safety.checkpoints import MARKER, checkpoints_in, damage
from growkern.train.safety.identity import changes
from growkern.whole import PARTIAL, write_whole

# one of the longest run files makes this much
MOST_BYTES = 1_000_000


def check_output(output: Path, models: list[Path], texts: dict[str, list[Path]]) -> None:
    """Check that the output can be a directory and holds no input, which overwriting would delete.

    Raises:
        GrowthError: it is a file, or an input lies in it.
    """
    if output.exists() and not output.is_dir():
        raise GrowthError(f"output.directory {output} is a file: choose another name")
    inputs = [*models, *(file for files in texts.values() for file in files)]
    for path in inputs:
        if output.resolve() in (path.resolve(), *path.resolve().parents):
            raise GrowthError(
                f"output.directory {output} contains {path}, which the run reads: choose another "
                "directory"
            )


def is_ours(output: Path, identity: dict[str, Any], overwrite: bool) -> bool:
    """Whether the output directory holds this run (True) or may be made new (False).

    Raises:
        GrowthError: it holds something else.
    """
    # a process that was killed at its start leaves no more than these
    begun = (LOCK_FILE, PARTIAL.format(name=MARKER))
    names = [path.name for path in output.iterdir()] if output.is_dir() else []
    if all(any(fnmatch(name, pattern) for pattern in begun) for name in names):
        return False
    marker = output / MARKER
    if not marker.is_file():
        raise GrowthError(
            f"{output} is not empty and not the directory of a run: choose another directory"
        )
    before = _marked(marker)
    if before == identity:
        return True
    if not overwrite:
        raise GrowthError(
            f"{output} holds another run ({changes(before, identity)}): undo the changes or choose "
            "another directory. --overwrite would delete its checkpoints and its model"
        )
    return False


def begin(output: Path, identity: dict[str, Any]) -> None:
    """Empty the output directory and mark it as that of this run."""
    output.mkdir(parents=True, exist_ok=True)
    for path in output.iterdir():
        # the marker last: without it the next start would refuse the rest
        if path.name not in (MARKER, LOCK_FILE):
            shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()
    text = json.dumps(identity, indent=1)
    write_whole(output / MARKER, lambda partial: partial.write_text(text, encoding="utf-8"))


def is_finished(output: Path) -> bool:
    """Whether the output directory holds the trained model, with every file as it was written.

    Raises:
        GrowthError: the model is damaged, and no checkpoint is left to make it from.
    """
    wrong = damage(output)
    if wrong is None:
        return True
    if (output / MANIFEST).is_file():
        if not checkpoints_in(output):
            raise GrowthError(
                f"{output} holds a trained model that is damaged ({wrong}) and no checkpoints: "
                "restore it, or delete the directory to train again"
            )
        warnings.warn(
            f"the trained model in {output} is damaged ({wrong}): it is made again from the last "
            "whole checkpoint",
            GrowthWarning,
            stacklevel=4,
        )
    return False


def _marked(marker: Path) -> Any:
    """The identity in the marker of a run; None if it is damaged."""
    try:
        return read_json(marker, MOST_BYTES, "run marker")
    except GrowthError:
        return None
