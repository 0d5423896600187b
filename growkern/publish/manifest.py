"""Records the size and the checksum of every file in a directory, and compares them later.

Run checkpoints, the final model of a run, exports, folded models and teacher caches have such a
`manifest.json`. It is written last, so a directory that has one was written to its end.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

from growkern.errors import GrowthError
from growkern.files import check_format, read_json, stays_inside

MANIFEST = "manifest.json"
# of the manifest
FORMAT = 1
# an entry has 100 bytes; a teacher cache of 1 TB has 4,000 files
MOST_BYTES = 16_000_000
ALGORITHM = "xxh3_128"
BLOCK = 1 << 24

# path inside the directory -> its size in bytes and its checksum
Manifest = dict[str, tuple[int, str]]


def write_manifest(
    directory: Path, known: Mapping[str, str] | None = None, beside: Iterable[Path] = ()
) -> None:
    """Record the size and the checksum of every file below a directory.

    Args:
        directory: it has no manifest yet.
        known: checksums of files that were computed when they were written.
        beside: files that will lie in the directory when its contents have their place.

    Raises:
        OSError: a file cannot be read, or the manifest cannot be written.
    """
    files = {}
    for path in sorted(path for path in directory.rglob("*") if path.is_file()):
        name = path.relative_to(directory).as_posix()
        total = (known or {}).get(name) or checksum(path)
        files[name] = {"bytes": path.stat().st_size, "checksum": total}
    for path in beside:
        files[path.name] = {"bytes": path.stat().st_size, "checksum": checksum(path)}
    record = {"format": FORMAT, "algorithm": ALGORITHM, "files": files}
    text = json.dumps(record, indent=1) + "\n"
    (directory / MANIFEST).write_text(text, encoding="utf-8")


def read_manifest(directory: Path) -> Manifest:
    """The recorded sizes and checksums.

    Raises:
        GrowthError: the manifest is missing, cannot be read, or names a file elsewhere.
    """
    file = directory / MANIFEST
    try:
        record = read_json(file, MOST_BYTES, "manifest")
    except GrowthError as error:
        raise GrowthError(f"{file}: not a manifest") from error
    check_format(file, record, FORMAT)
    try:
        result = {name: (int(f["bytes"]), f["checksum"]) for name, f in record["files"].items()}
        is_known = record["algorithm"] == ALGORITHM and all(map(stays_inside, result))
    except (OverflowError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise GrowthError(f"{file}: not a manifest") from error
    if not is_known:
        raise GrowthError(f"{file}: not a manifest of files with {ALGORITHM} checksums")
    return result


def damage_of(directory: Path, name: str, manifest: Manifest) -> str | None:
    """Compare one file with the manifest of its directory.

    Returns:
        The difference as a phrase, or None if the file is as it was written.
    """
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
    """Result of `differences`.

    Attributes:
        wrong: "file: reason" for every difference.
        uncovered: files that no manifest names, such as event logs; they were not compared.
    """

    checked: int
    wrong: tuple[str, ...]
    uncovered: tuple[str, ...]


def differences(directory: Path, weights: Iterable[str] = ()) -> Differences:
    """Compare a directory with what was recorded when it was written.

    Args:
        directory: a teacher cache, an export, a folded model, a checkpoint of a run, or a run.
        weights: patterns of names that a loader may read as weights. Such a file must be recorded.

    Raises:
        GrowthError: nothing in it was recorded, or a manifest cannot be read.
    """
    checkpoints = sorted(path for path in directory.glob("checkpoint-*") if path.is_dir())
    has_own = (directory / MANIFEST).exists()
    if not has_own and not checkpoints:
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
        found = (damage_of(part, name, manifest) for name in compared)
        wrong += [f"{part}: {phrase}" for phrase in found if phrase is not None]
        count += len(compared)
        seen |= {part / name for name in (*compared, MANIFEST)}
    left = (path for path in directory.rglob("*") if path.is_file() and path not in seen)
    uncovered = sorted(path.relative_to(directory).as_posix() for path in left)
    return Differences(count, tuple(wrong), tuple(uncovered))


def copy_file(file: Path, copy: Path) -> str:
    """Copy the contents of a file, read once.

    Returns:
        The checksum of what was read.

    Raises:
        OSError: a file cannot be read or written.
    """
    with copy.open("wb") as opened:
        return checksum(file, opened.write)


def checksum(path: Path, use: Callable[[bytes], Any] | None = None) -> str:
    """The checksum of a file, read in blocks: 32 hexadecimal digits.

    Args:
        use: called with each block.

    Raises:
        OSError: the file cannot be read.
    """
    # here: GPU machines that only run benchmarks may lack it
    import xxhash

    digest = xxhash.xxh3_128()
    with path.open("rb") as file:
        while block := file.read(BLOCK):
            digest.update(block)
            if use is not None:
                use(block)
    return digest.hexdigest()
