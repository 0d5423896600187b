"""Decides which links in a checkpoint directory may be followed.

A link in a downloaded checkpoint could end at any file of its user. growkern would publish that
file with the grown model.
"""

from __future__ import annotations

import os
from pathlib import Path

from growkern.errors import GrowthError


def root_of(directory: Path) -> Path:
    """The directory that links may not leave: the checkpoint, or its repository in a Hub cache."""
    real = directory.resolve()
    # models--ORG--NAME/snapshots/REVISION holds links into models--ORG--NAME/blobs
    if real.parent.name == "snapshots" and (real.parents[1] / "blobs").is_dir():
        return real.parents[1]
    return real


def stays_in(file: Path, directory: Path) -> bool:
    """Whether a path below a directory, with all links followed, ends inside its root."""
    try:
        return file.resolve().is_relative_to(root_of(directory))
    except (OSError, RuntimeError):
        # links in a circle
        return False


def refuse_links_out(file: Path, directory: Path) -> None:
    """Refuse a file that a link leads out of the checkpoint."""
    if not stays_in(file, directory):
        raise GrowthError(
            f"{file} links to {os.path.realpath(file)}, outside of the checkpoint: replace the "
            "link by the file itself"
        )
