"""Checks a growth's target, makes the workplace beside it, and says what may be replaced.

A directory may be replaced if it is a checkpoint that growkern wrote: its record lists every file
but the card, whose last line tells whether anybody edited it. `save_pretrained` of a grown model
records a lineage only, which stands for the files that it writes. A model of another program has no
record and is never replaced.
"""

from __future__ import annotations

import contextlib
import hashlib
import re
from collections.abc import Iterator
from pathlib import Path, PurePosixPath

from growkern.errors import GrowthError
from growkern.files import read_json
from growkern.growth.disk.checksum_record import read_checksums
from growkern.growth.history import (
    CARD_FILE,
    CHECKSUMS_FILE,
    LINEAGE_FILE,
    MOST_LINEAGE_BYTES,
    NEEDED,
)
from growkern.publish import manifest, workplace
from growkern.publish.manifest import recorded_in

KIND = "growing"


def staging(target: Path, *, resume: bool) -> workplace.Workplace:
    """The workplace of a growth into `target`; `resume` continues unfinished work."""
    return workplace.Workplace(target, KIND, may_replace, resume=resume)


def delete_staging(target: Path) -> None:
    """Tidy up beside a target after a killed process."""
    workplace.delete_leftovers(target, KIND, may_replace)


def may_replace(directory: Path) -> bool:
    """Whether a directory is a checkpoint of growkern or empty: nothing else is ever replaced."""
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
            f"{target} exists and holds something other than a checkpoint of growkern, which "
            f"is never replaced: {why}: give another directory"
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


# what `save_pretrained` of a grown model writes beside its lineage, which lists no files
SAVED = re.compile(
    r"config\.json|generation_config\.json|lineage\.json"
    r"|model(-\d{5}-of-\d{5})?\.safetensors|model\.safetensors\.index\.json"
)


def why_kept(directory: Path) -> str | None:
    """Why a directory must not be deleted, as a phrase about it; None if it may be.

    A directory may be deleted if it is empty, or if growkern recorded that it wrote it and every
    file in it. Nothing whose name starts with a dot is ever deleted.
    """
    if directory.is_symlink() or not directory.is_dir():
        return "it is no directory"
    if not any(directory.iterdir()):
        return None
    recorded = recorded_in(directory) | _with_checksums(directory)
    # of a record that lists files, the lineage is one
    is_grown = LINEAGE_FILE not in recorded and _is_grown(directory)
    if not (recorded or is_grown):
        return (
            "no record in it says that growkern wrote it, as in a model of another program (move "
            "it away by hand)"
        )

    def is_known(file: PurePosixPath) -> bool:
        if str(file) == CARD_FILE:
            return is_unedited(read_card(directory / CARD_FILE))
        return is_grown and SAVED.fullmatch(str(file)) is not None

    return manifest.why_kept(directory, "a checkpoint", is_known, recorded)


def _with_checksums(directory: Path) -> set[str]:
    """The files that a growth recorded, and its record."""
    try:
        return {*read_checksums(directory / CHECKSUMS_FILE)["files"], CHECKSUMS_FILE}
    except GrowthError:
        return set()


def _is_grown(directory: Path) -> bool:
    """Whether a lineage of growkern is there."""
    try:
        lineage = read_json(directory / LINEAGE_FILE, MOST_LINEAGE_BYTES, "lineage")
    except GrowthError:
        return False
    return isinstance(lineage, dict) and {"format", *NEEDED} <= lineage.keys()


# a card is read into memory
MOST_CARD_BYTES = 1_000_000
# the last line of a card that growkern wrote: the checksum of the lines above it
STAMP = "<!-- growkern rewrites this file as long as nobody edits it: {} -->\n"
STAMPED = re.compile(f"(.*\n){re.escape(STAMP).replace(re.escape('{}'), '([0-9a-f]{64})')}", re.S)


def stamped(text: str) -> str:
    """A card with the line that tells `is_unedited` whether it was edited since."""
    return text + STAMP.format(hashlib.sha256(text.encode()).hexdigest())


def is_unedited(text: str) -> bool:
    """Whether a card is as growkern wrote it."""
    match = STAMPED.fullmatch(text)
    return match is not None and stamped(match[1]) == text


def read_card(file: Path) -> str:
    """A card; "" if there is none that can be read."""
    try:
        is_small = file.is_file() and file.stat().st_size <= MOST_CARD_BYTES
        return file.read_text(encoding="utf-8") if is_small else ""
    except (OSError, ValueError):
        return ""
