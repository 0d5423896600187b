"""Reads files that strangers may have written, and writes files that are whole or not there.

A file is written beside its place and renamed, so that readers see all of it or none of it, also
after a crash. TOML tables become dataclasses, checked against the types of the fields.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import gc
import glob
import json
import os
import re
import reprlib
import secrets
import stat
import sys
import types
import typing
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping
from itertools import islice
from pathlib import Path, PurePosixPath
from typing import Any, Literal, TypeVar, Union

from growkern.arguments import PLAIN
from growkern.errors import GrowthError, nearest

T = TypeVar("T")

# a run file has about 2,000 bytes; long lists of text files may be given as patterns
MOST_TOML_BYTES = 256_000
# TOML has integers of 64 bits
INTEGERS = range(-(1 << 63), 1 << 63)
# of checksums of files, which are read in blocks
ALGORITHM, BLOCK = "xxh3_128", 1 << 24

# names that a pattern of text files may match; listing them takes half a second
MOST_NAMES = 100_000
# bytes of a file's name
MOST_NAME = 256
# the beginning of a file that Git LFS puts in the place of a large one
LFS_POINTER = b"version https://git-lfs"


def read_bounded(file: Path, most_bytes: int, what: str) -> bytes:
    """All bytes of a regular file; one of more than `most_bytes` is refused unread.

    `what` is the file's kind, for messages: "config".
    """
    size, data = regular_size(file), b""
    try:
        if size <= most_bytes:
            with file.open("rb") as opened:
                # it may grow meanwhile; Python reserves memory for all bytes that it is asked for
                data = opened.read(size + 1)
    except OSError as error:
        raise GrowthError(f"{file}: {error.strerror or error}") from error
    if size > most_bytes:
        raise GrowthError(f"{file}: {size} bytes, more than any {what} has ({most_bytes})")
    if len(data) > size:
        raise GrowthError(f"{file}: it grew while it was read: try again when it is complete")
    refuse_pointer(file, data[: len(LFS_POINTER)], what)
    return data


def refuse_pointer(file: Path, head: bytes, what: str) -> None:
    """Refuse a pointer of Git LFS by the first bytes of a file, 8 or more."""
    if len(head) >= 8 and LFS_POINTER.startswith(head):
        raise GrowthError(
            f"{file} is a pointer of Git LFS, not the {what}: run `git lfs pull` in {file.parent}"
        )


def regular_size(file: Path) -> int:
    """The size of a file in bytes; a pipe or a device could make the process wait for ever."""
    try:
        state = file.stat()
    except (OSError, ValueError) as error:
        # ValueError: a null byte in the name
        raise GrowthError(f"{file}: {getattr(error, 'strerror', error)}") from error
    if not stat.S_ISREG(state.st_mode):
        raise GrowthError(f"{file}: not a regular file")
    return state.st_size


def text_of(file: Path) -> str:
    """A text of 1 MB or less; "" if there is none that can be read."""
    try:
        is_small = file.is_file() and file.stat().st_size <= 1_000_000
        return file.read_text(encoding="utf-8") if is_small else ""
    except (OSError, ValueError):
        return ""


def read_json(file: Path, most_bytes: int, what: str) -> Any:
    """The content of a JSON file; the arguments are those of `read_bounded`."""
    try:
        return parse_json(read_bounded(file, most_bytes, what))
    except GrowthError:
        raise
    except ValueError as error:
        raise GrowthError(f"{file}: not valid JSON: {error}") from error


def check_format(file: Path, record: Any, known: int, keys: Collection[str]) -> None:
    """Refuse a file's record without a format, or in another one than this version's, `known`.

    What has neither a format nor all `keys` of one is no record: that is left to other checks.
    """
    if not isinstance(record, dict):
        return
    if type(number := record.get("format")) is int and number == known:
        return
    if "format" not in record and not record.keys() >= set(keys):
        return
    wrong = f"is {reprlib.repr(record['format'])}" if "format" in record else "is missing"
    writer = record.get("growkern")
    name = "the version that wrote it"
    if isinstance(writer, str) and writer:
        name = f"growkern {reprlib.repr(writer)[1:-1]}"
    raise GrowthError(
        f"{file}: its format {wrong}, and this version of growkern reads {known}: use {name}"
    )


def parse_json(data: bytes) -> Any:
    """The value of a JSON text.

    A ValueError says that it is not UTF-8, not JSON, or that an object has a name twice.
    """
    try:
        with no_collections():
            value = json.loads(data.decode(), object_pairs_hook=_unique)
    except RecursionError as error:
        raise ValueError(str(error)) from None
    if rb"\ud" in data or rb"\uD" in data:
        # half of a pair of UTF-16 stands for no character, and cannot be written again
        json.dumps(value, ensure_ascii=False).encode()
    return value


def parse_toml(text: str) -> dict[str, Any]:
    """The table of a TOML text, on Python 3.10 too."""
    # here, because `import growkern` must stay quick
    if sys.version_info >= (3, 11):
        import tomllib
    else:
        import tomli as tomllib
    return tomllib.loads(text)


def toml_text(table: dict[str, Any]) -> str:
    """The text of a family's table as TOML."""
    values = table | {"tensors": None} | {f"tensors.{k}": v for k, v in table["tensors"].items()}
    lines = toml_lines({k: v for k, v in values.items() if not isinstance(v, dict)})
    for name in (k for k, v in values.items() if isinstance(v, dict)):
        lines += ["", f"[{name}]", *toml_lines(values[name])]
    return "\n".join(lines) + "\n"


def toml_lines(table: Mapping[str, Any]) -> list[str]:
    """The keys and values of a table as lines of TOML, without those that are None."""
    return [f"{_toml_key(k)} = {_toml_value(v)}" for k, v in table.items() if v is not None]


def _toml_key(key: str) -> str:
    return key if re.fullmatch(r"[A-Za-z0-9_-]+", key) else _toml_value(key)


def _toml_value(value: Any) -> str:
    if isinstance(value, Mapping):
        return "{ " + ", ".join(toml_lines(value)) + " }"
    if isinstance(value, (list, tuple)):
        return "[" + ", ".join(map(_toml_value, value)) + "]"
    # JSON strings, numbers and booleans are valid TOML, except for DEL
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")


def stays_inside(name: str) -> bool:
    """Whether a path that a file names lies below the directory that it belongs to."""
    path = PurePosixPath(name)
    is_printable = name.isprintable() and len(name.encode()) < MOST_NAME
    return is_printable and bool(path.parts) and not path.is_absolute() and ".." not in path.parts


@contextlib.contextmanager
def no_collections() -> Iterator[None]:
    """No garbage collection: with a million new objects it takes longer than the parser."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """A JSON object without repeated names: readers disagree on which of them counts."""
    table = dict(pairs)
    if len(table) < len(pairs):
        ((name, _),) = Counter(name for name, _ in pairs).most_common(1)
        raise ValueError(f"{name!r} is given twice")
    return table


# what an interrupted `write_whole` leaves beside its file
PARTIAL = ".{name}.*.part"
READABLE = stat.S_IRUSR | stat.S_IRGRP | stat.S_IROTH


def write_whole(file: Path, write: Callable[[Path], Any]) -> None:
    """Write a file under a temporary name beside it, sync it to disk, then rename it.

    `write` writes the contents to the path it is given. Several processes may write the same file
    at once: each has a temporary file of its own. After an error `file` is as it was, and nothing
    is left.
    """
    partial = file.with_name(f".{file.name}.{secrets.token_hex(4)}.part")
    try:
        partial.touch()
        mode = partial.stat().st_mode
        write(partial)
        # safetensors makes its files unreadable for other users
        partial.chmod(mode)
        sync(partial)
        partial.replace(file)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise


def sync(path: Path) -> None:
    """Return when a file, or the names in a directory, are on disk.

    After an OSError nothing written since the last successful sync is safe, even if another sync
    succeeds: Linux reports a failure once and forgets the data.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sync_tree(directory: Path) -> None:
    """`sync` for all of a new directory, made readable for those who may read new files."""
    probe = directory / f".{secrets.token_hex(4)}.part"
    probe.touch()
    readers = probe.stat().st_mode & READABLE
    probe.unlink()
    for path in directory.rglob("*"):
        if path.is_file() and not path.is_symlink():
            # safetensors makes its files unreadable for other users
            path.chmod(stat.S_IMODE(path.stat().st_mode) | readers)
        sync(path)
    sync(directory)


def read_all(file: int, out: memoryview, at: int) -> None:
    """Fill `out` from byte `at` of a file on; the system may give the bytes in several bites."""
    done = 0
    while done < len(out):
        count = os.preadv(file, [out[done:]], at + done)
        if not count:
            raise OSError(errno.EIO, f"it ends at byte {at + done}")
        done += count


def write_all(file: int, data: bytes | memoryview, at: int | None = None) -> None:
    """Write all bytes, from byte `at` of a file on; None: where it stands.

    The system may take them in several bites. After an error some are there.
    """
    view, done = memoryview(data), 0
    while done < len(view):
        rest = view[done:]
        count = os.write(file, rest) if at is None else os.pwrite(file, rest, at + done)
        if not count:
            raise OSError(errno.EIO, "the disk takes no more bytes")
        done += count


def matching_files(base: Path, pattern: str, key: str = "text") -> list[Path]:
    """The regular files whose names match a pattern, sorted; "**" matches folders of any depth.

    A relative pattern begins in the folder `base`. Brackets and stars in the own name of that are
    no pattern. If a file has the very name of the pattern, it is the only one. The key is that of
    the pattern, for messages.
    """
    escaped, shown = Path(glob.escape(str(base))) / pattern, base / pattern
    exact = glob.glob(glob.escape(str(shown)))
    names = exact or list(islice(glob.iglob(str(escaped), recursive=True), MOST_NAMES + 1))
    if len(names) > MOST_NAMES:
        raise GrowthError(
            f"{key}: {shown} matches more than {MOST_NAMES} names: give a narrower one"
        )
    files = [Path(name) for name in sorted(names) if Path(name).is_file()]
    if not files:
        raise GrowthError(f"{key}: no file matches {shown}")
    return files


def copy_file(file: Path, copy: Path) -> str:
    """Copy the contents of a file, read once; the checksum of what was read."""
    with copy.open("wb") as opened:
        return checksum(file, opened.write)


def checksum(path: Path, use: Callable[[bytes], Any] | None = None) -> str:
    """The checksum of a file, 32 hexadecimal digits; `use` gets each block that is read."""
    # here: GPU machines that only run benchmarks may lack it
    import xxhash

    digest = xxhash.xxh3_128()
    with path.open("rb") as file:
        while block := file.read(BLOCK):
            digest.update(block)
            if use is not None:
                use(block)
    return digest.hexdigest()


def read_toml(path: Path) -> dict[str, Any]:
    """Parse a TOML file."""
    if path.is_dir():
        raise GrowthError(f"{path} is a directory: give a file of settings (TOML)")
    if not path.exists():
        raise GrowthError(
            f"{path.absolute()}: no such file: give a file of settings (TOML), such as one of "
            "examples/run_files"
        )
    try:
        return parse_toml(read_bounded(path, MOST_TOML_BYTES, "run file").decode())
    except (ValueError, RecursionError) as error:
        why = str(error).removeprefix(f"{path}: ")
        raise GrowthError(f"cannot read {path} as TOML: {why}") from error


def to_dataclass(cls: type[T], table: dict[str, Any], file: str, key: str = "") -> T:
    """Make a dataclass from a table. Fields that are dataclasses are made from the inner tables.

    Error messages name the file and the dotted key of the table in it.
    """
    place = f"{file}: [{key}]" if key else file
    fields = {field.name: field for field in dataclasses.fields(cls)}  # type: ignore[arg-type]
    hints = typing.get_type_hints(cls)
    kinds = {name: hints[name] for name in fields}
    for name in table:
        if name not in kinds:
            raise GrowthError(f"{place} has no key {reprlib.repr(name)}{nearest(name, kinds)}")
    missing = [n for n, f in fields.items() if n not in table and f.default is dataclasses.MISSING]
    if missing:
        raise GrowthError(f"{place} lacks {', '.join(map(repr, missing))}")
    values = {
        name: convert(value, kinds[name], file, f"{key}.{name}" if key else name)
        for name, value in table.items()
    }
    try:
        return cls(**values)
    except GrowthError as error:
        raise GrowthError(f"{place}: {error}") from error


def convert(value: Any, kind: Any, file: str, key: str, described: str = "") -> Any:
    """Convert a TOML value to the type of its field, `described` in an error message."""
    origin, options = typing.get_origin(kind), typing.get_args(kind)
    if origin in (types.UnionType, Union):
        # TOML has no null: the value of an optional key always has another type
        kinds = [option for option in options if option is not types.NoneType]
        is_list = isinstance(value, list)
        fitting = [option for option in kinds if (typing.get_origin(option) is tuple) == is_list]
        described = " or ".join(map(_describe, kinds))
        return convert(value, (fitting or kinds)[0], file, key, described)
    if kind is Any:
        return value
    if dataclasses.is_dataclass(kind) and isinstance(kind, type) and isinstance(value, dict):
        return to_dataclass(kind, value, file, key)
    if origin is Literal and isinstance(value, str):
        # the dataclass checks it
        return value
    if origin is tuple and isinstance(value, list):
        return tuple(convert(item, options[0], file, f"{key}[{i}]") for i, item in enumerate(value))
    if type(value) is int and value not in INTEGERS:
        raise GrowthError(f"{file}: {key} is {reprlib.repr(value)}: an integer has 64 bits")
    if origin is dict and isinstance(value, dict):
        return {
            name: convert(item, options[1], file, f"{key}.{name}") for name, item in value.items()
        }
    if kind is float and type(value) is int:
        return float(value)
    if isinstance(kind, type) and type(value) is kind:
        return value
    given = f"{reprlib.repr(value)} ({type(value).__name__})"
    must = described or _describe(kind)
    if isinstance(value, str) and must.startswith("a list, each a text"):
        must += f": write [{reprlib.repr(value)}]"
    raise GrowthError(f"{file}: {key} is {given}: it must be {must}")


def _describe(kind: Any) -> str:
    if typing.get_origin(kind) is tuple:
        return f"a list, each {_describe(typing.get_args(kind)[0])}"
    if typing.get_origin(kind) is dict:
        return "a table"
    if typing.get_origin(kind) is Literal:
        return " or ".join(map(repr, typing.get_args(kind)))
    return "a table" if dataclasses.is_dataclass(kind) else PLAIN[kind]
