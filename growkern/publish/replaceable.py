"""Says which directories may be deleted because something new takes their place.

Every command that deletes follows this rule: a directory may go if growkern recognises each file in
it. A record of growkern lists the file, or its name is one that only such a directory has. A
`manifest.json` of another program is no record. One file that is not known keeps the whole
directory. The user can then delete that file by hand, and growkern cannot bring one back.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Iterator
from pathlib import Path, PurePosixPath

from growkern.errors import GrowthError
from growkern.files import read_json
from growkern.publish.manifest import ALGORITHM, MANIFEST, MOST_BYTES, read_manifest


def why_kept(
    directory: Path,
    what: str,
    is_known: Callable[[PurePosixPath], bool],
    recorded: Collection[str] = (),
) -> str | None:
    """Why a directory must not be deleted, as a phrase about it; None if it may be.

    No link is followed. A record never gives away files below a name that starts with a dot.

    Args:
        directory: what it should be, or anything else.
        what: the kind of directory, for the phrase: "a teacher cache".
        is_known: whether a file, a link or an empty folder is one of that kind, by its path inside.
        recorded: paths of the files that records of growkern in it list, see `recorded_in`.

    Raises:
        OSError: it cannot be read.
    """
    if directory.is_symlink() or not directory.is_dir():
        return "it is no directory"
    is_foreign = _has_foreign_manifest(directory)
    for path in _files(directory):
        file = PurePosixPath(path.relative_to(directory).as_posix())
        is_recorded = file.as_posix() in recorded and not file.parts[0].startswith(".")
        if not (is_recorded or is_known(file)) or (is_foreign and str(file) == MANIFEST):
            return f"{file} is no file of {what} (delete it or move it away by hand)"
    return None


def recorded_in(directory: Path) -> set[str]:
    """The files that the manifest of a directory lists, and itself; none if it is not one of ours.

    A damaged manifest lists none.
    """
    try:
        return {*read_manifest(directory), MANIFEST}
    except GrowthError:
        return set()


def _has_foreign_manifest(directory: Path) -> bool:
    """Whether another program wrote the manifest. One of ours may be damaged or empty."""
    try:
        found = read_json(directory / MANIFEST, MOST_BYTES, "manifest")
    except GrowthError:
        return False
    return bool(found) and not (isinstance(found, dict) and found.get("algorithm") == ALGORITHM)


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
