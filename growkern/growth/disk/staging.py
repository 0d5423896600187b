"""Checks a growth's target, makes the workplace beside it, and says what may be replaced.

A directory may be replaced if it is a checkpoint: a model's config is in it, and every file is one
that growkern recorded when it wrote the directory, or has one of the names that transformers or
sentence-transformers give to weights, tokenizers and the like.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator
from pathlib import Path, PurePosixPath

from growkern.bounded import read_json
from growkern.errors import GrowthError
from growkern.growth.disk.sentence import CONFIG_FILE
from growkern.growth.history import CARD_FILE, CHECKSUMS_FILE, LINEAGE_FILE
from growkern.growth.source.formats import MODEL_FILES
from growkern.growth.source.stamps import module_folders
from growkern.publish import replaceable, workplace
from growkern.publish.manifest import MANIFEST

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


# of a config or a record
MOST_BYTES = 16_000_000
# of a model, besides weights and the files that growkern recorded. Only whole names: the user's own
# files could have any that begins or ends like these. The state of a training is not among them
KNOWN = (
    *MODEL_FILES,
    *(LINEAGE_FILE, CHECKSUMS_FILE, MANIFEST),
    # the card and the terms
    *(CARD_FILE, ".gitattributes", "LICENSE", "LICENSE.txt", "LICENSE.md", "NOTICE"),
)
SHARD = r"(-\d{5}-of-\d{5})?"
WEIGHTS = rf"(model{SHARD}\.safetensors|pytorch_model{SHARD}\.bin)(\.index\.json)?"


def why_kept(directory: Path) -> str | None:
    """Why a directory must not be deleted, as a phrase about it; None if it may be.

    A directory may be deleted if it is empty, or the directory of a checkpoint and of nothing else.
    Nothing whose name starts with `.git` is ever deleted, but for `.gitattributes`.

    Raises:
        OSError: it cannot be read.
    """
    if directory.is_symlink() or not directory.is_dir():
        return "it is no directory"
    if not any(directory.iterdir()):
        return None
    try:
        config = read_json(directory / CONFIG_FILE, MOST_BYTES, "config")
    except GrowthError:
        config = None
    if not (isinstance(config, dict) and isinstance(config.get("model_type"), str)):
        return f"it has no {CONFIG_FILE} of a model"
    modules = module_folders(directory)

    def is_known(file: PurePosixPath) -> bool:
        is_module = len(file.parts) == 2 and file.parts[0] in modules
        is_named = file.name in KNOWN or re.fullmatch(WEIGHTS, file.name) is not None
        return is_named and (len(file.parts) == 1 or is_module)

    return replaceable.why_kept(directory, "a checkpoint", is_known, CHECKSUMS_FILE, MANIFEST)
