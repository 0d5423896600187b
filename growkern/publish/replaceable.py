"""Says which directories may be deleted because something new takes their place.

Every command that deletes follows this rule: a directory may go if growkern recognises each file in
it. A record lists the file, or its name is one that only such a directory has. One file that is not
known keeps the whole directory. The user can then delete that file by hand, and growkern cannot
bring one back.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path, PurePosixPath

from growkern.bounded import read_json
from growkern.errors import GrowthError
from growkern.publish.manifest import MANIFEST

# of a record
MOST_BYTES = 64_000_000


def why_kept(
    directory: Path, what: str, is_known: Callable[[PurePosixPath], bool], *records: str
) -> str | None:
    """Why a directory must not be deleted, as a phrase about it; None if it may be.

    No link is followed. A record never gives away files below a name that starts with a dot.

    Args:
        directory: what it should be, or anything else.
        what: the kind of directory, for the phrase: "a teacher cache".
        is_known: whether a file, a link or an empty folder is one of that kind, by its path inside.
        records: names of files in it that list others, such as `MANIFEST`.

    Raises:
        OSError: it cannot be read.
    """
    if directory.is_symlink() or not directory.is_dir():
        return "it is no directory"
    recorded = {name for record in records for name in recorded_in(directory, record)}
    for path in _files(directory):
        file = PurePosixPath(path.relative_to(directory).as_posix())
        is_recorded = file.as_posix() in recorded and not file.parts[0].startswith(".")
        if not (is_recorded or is_known(file)):
            return f"{file} is no file of {what} (delete it or move it away by hand)"
    return None


def recorded_in(directory: Path, record: str = MANIFEST) -> set[str]:
    """The files that growkern noted when it wrote a directory; none if the record is damaged."""
    try:
        found = read_json(directory / record, MOST_BYTES, "record")
    except GrowthError:
        return set()
    files = found.get("files") if isinstance(found, dict) else None
    return {*files} if isinstance(files, dict) else set()


def _files(directory: Path) -> Iterator[Path]:
    """All files, links and empty folders, those of folders too."""
    for place, folders, files in os.walk(directory, onerror=_raise):
        links = [name for name in folders if os.path.islink(os.path.join(place, name))]
        for name in sorted([*files, *links]):
            yield Path(place, name)
        if not folders and not files and Path(place) != directory:
            yield Path(place)


def _raise(error: OSError) -> None:
    raise error
