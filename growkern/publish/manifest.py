"""Records the size and the checksum of every file in a directory, and compares them later.

Run checkpoints, the final model of a run, exports and teacher caches have such a
`manifest.json`. It is written last, so a directory that has one was written to its end. The record
of a growth is another one, which has tensors too (`growkern.growth.disk.checksums`).

Every command that deletes a directory, because something new takes its place, asks `why_kept`: it
may go if growkern recognises each file in it. A record of growkern lists the file, or its name is
one that only such a directory has. A `manifest.json` of another program is no record. One file that
is not known keeps the whole directory. The user can then delete that file by hand, and growkern
cannot bring one back.
"""

from __future__ import annotations

import json
import os
import reprlib
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path, PurePosixPath
from typing import Any

from growkern.errors import GrowthError
from growkern.files import ALGORITHM, check_format, checksum, read_json, stays_inside
from growkern.package import version

MANIFEST = "manifest.json"
# of records
FORMAT = 1
# an entry has 100 bytes. A teacher cache of 1 TB has 4,000 files; a growth has one for each tensor
MOST_BYTES = 64_000_000

# path inside the directory -> its size in bytes and its checksum
Manifest = dict[str, tuple[int, str]]


def write_manifest(
    directory: Path, known: Mapping[str, str] | None = None, beside: Iterable[Path] = ()
) -> None:
    """Record the size and the checksum of every file below a directory.

    Args:
        known: checksums of files that were computed when they were written.
        beside: files that will lie in the directory when its contents have their place.
    """
    files = {}
    for path in sorted(path for path in directory.rglob("*") if path.is_file()):
        name = path.relative_to(directory).as_posix()
        total = (known or {}).get(name) or checksum(path)
        files[name] = {"bytes": path.stat().st_size, "checksum": total}
    for path in beside:
        files[path.name] = {"bytes": path.stat().st_size, "checksum": checksum(path)}
    write_record(directory / MANIFEST, {"files": files})


def write_record(file: Path, content: Mapping[str, Any]) -> None:
    """Write a record that `read_record` reads."""
    record = {"format": FORMAT, "growkern": version(), "algorithm": ALGORITHM, **content}
    file.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")


def read_record(file: Path, what: str, keys: Mapping[str, type]) -> dict[str, Any]:
    """A record of checksums; one that is damaged, or names files elsewhere, is refused.

    `keys` are its own, with the types of their values; "files" is one of them.
    """
    record = read_json(file, MOST_BYTES, what)
    check_format(file, record, FORMAT, keys)
    given = record if isinstance(record, dict) else {}
    if wrong := [key for key, kind in keys.items() if type(given.get(key)) is not kind]:
        raise GrowthError(f"{file}: not a {what}: no {wrong[0]}")
    if outside := [name for name in given["files"] if not stays_inside(name)]:
        raise GrowthError(f"{file}: {reprlib.repr(outside[0])} is not a file of the checkpoint")
    if given.get("algorithm") != ALGORITHM:
        raise GrowthError(f"{file}: made with {given.get('algorithm')!r}, expected {ALGORITHM!r}")
    return given


def read_manifest(directory: Path) -> Manifest:
    """The recorded sizes and checksums. Files elsewhere are refused."""
    keys = {"algorithm": str, "files": dict}
    files = read_record(directory / MANIFEST, "manifest", keys)["files"]
    try:
        return {name: (int(f["bytes"]), f["checksum"]) for name, f in files.items()}
    except (OverflowError, ValueError, KeyError, TypeError) as error:
        raise GrowthError(f"{directory / MANIFEST}: not a manifest: {error!r}") from error


def damage_of(directory: Path, name: str, manifest: Manifest) -> str | None:
    """How one file differs from the manifest of its directory, as a phrase; None if it does not."""
    if name not in manifest:
        return f"{name} is not in {MANIFEST}"
    size, expected = manifest[name]
    path = directory / name
    try:
        if path.exists() and not path.is_file():
            return f"{name} is not a regular file"
        if path.stat().st_size != size:
            return f"{name} has {path.stat().st_size} of {size} bytes"
        if checksum(path) != expected:
            return f"{name} was changed"
    except FileNotFoundError:
        return f"{name} is missing"
    except OSError as error:
        return f"{name}: {error.strerror or error}"
    return None


@dataclass(frozen=True)
class Differences:
    """How a directory, or a growth, differs from what was recorded when it was written.

    Attributes:
        checked: how much was compared: "files"; of a growth, tensors of its "target" and "source".
        wrong: "file: reason", or "file: tensor" for every tensor with other bytes.
        uncovered: files that no manifest names, such as event logs; they were not compared.
    """

    checked: Mapping[str, int]
    wrong: tuple[str, ...]
    uncovered: tuple[str, ...] = ()

    @property
    def ok(self) -> bool:
        return not self.wrong


def differences(directory: Path, weights: Iterable[str] = ()) -> Differences:
    """Compare a directory with what was recorded when it was written.

    Args:
        directory: a teacher cache, an export, a checkpoint of a run, or a run.
        weights: patterns of names that a loader may read as weights. Such a file must be recorded.
    """
    checkpoints = sorted(path for path in directory.glob("checkpoint-*") if path.is_dir())
    if not (directory / MANIFEST).exists() and not checkpoints:
        raise GrowthError(
            f"{directory}: no checksums were recorded: it has no checksums.json, which a growth "
            f"writes, and no {MANIFEST}, which every other command writes; save_pretrained of a "
            "grown model writes neither: use grow_checkpoint, or compare with the source: growkern "
            "verify SRC DST"
        )
    count, wrong, seen = 0, [], set()
    for part in (directory, *checkpoints):
        names = sorted(path.name for path in part.iterdir() if path.is_file())
        of_model = [name for name in names if any(fnmatch(name, pattern) for pattern in weights)]
        if not (part / MANIFEST).exists():
            # a run that is not finished has no model yet
            if part != directory or of_model:
                wrong.append(f"{part}: {MANIFEST} is missing: its files cannot be compared")
            continue
        manifest = read_manifest(part)
        # a reader may take weights that were added for recorded ones
        compared = sorted({*manifest, *of_model})
        damage = (damage_of(part, name, manifest) for name in compared)
        wrong += [f"{part}: {phrase}" for phrase in damage if phrase is not None]
        count += len(compared)
        seen |= {part / name for name in (*compared, MANIFEST)}
    left = (path for path in directory.rglob("*") if path.is_file() and path not in seen)
    uncovered = sorted(path.relative_to(directory).as_posix() for path in left)
    return Differences({"files": count}, tuple(wrong), tuple(uncovered))


# ------------------------------------------------------- what may be replaced


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
        record = read_json(directory / MANIFEST, MOST_BYTES, "manifest")
    except GrowthError:
        return False
    return bool(record) and not (isinstance(record, dict) and record.get("algorithm") == ALGORITHM)


def _files(directory: Path) -> Iterator[Path]:
    """All files, links and empty folders, those of folders too."""
    for place, folders, files in os.walk(directory, onerror=_raise):
        links = [name for name in folders if os.path.islink(os.path.join(place, name))]
        yield from (Path(place, name) for name in sorted([*files, *links]))
        if not folders and not files and Path(place) != directory:
            yield Path(place)


def _raise(error: OSError) -> None:
    raise error
