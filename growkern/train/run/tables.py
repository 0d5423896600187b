"""The tables of a run file, and the checks of them that need no PyTorch.

Importing the classes of the sections takes seconds. So their fields are read from their source, and
a wrong key, value or path is told at once.
"""

import ast
import functools
import importlib
import reprlib
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import fields, is_dataclass, make_dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Any, TypeVar, get_args

from growkern.arguments import check_fields
from growkern.errors import GrowthError, nearest
from growkern.files import matching_files, read_toml, to_dataclass
from growkern.growth.options import GrowthKeywords, refuse_by_config
from growkern.growth.source import config_directory, config_of, is_hub_name, refuse_other_names
from growkern.rooms import doors

T = TypeVar("T")
PACKAGE = Path(__file__).parents[2]
SECTIONS = Path(__file__).with_name("file.py")
# how each section names its checkpoint, and what else that is called
CHECKPOINTS = {
    "model": 'path = "DIRECTORY"',
    "growth": 'source = "DIRECTORY"',
    "teacher": 'paths = ["DIRECTORY"]',
}
CALLED = ("path", "paths", "source", "model", "teacher", "checkpoint", "directory", "name")


def read_tables(path: Path) -> list[dict[str, Any]]:
    """Read a run file: the tables of each of its runs, see `growkern.train.run.file.load_runs`.

    Raises:
        GrowthError: the file cannot be read, a key is unknown, or a value is wrong by itself.
    """
    tables = read_toml(path)
    generations = tables.pop("generation", None)
    if generations is None:
        return [_checked(_with_teacher(tables), path)]
    if not isinstance(generations, list) or not all(isinstance(x, dict) for x in generations):
        raise GrowthError(f"{path}: write [[generation]], with one such table for each run")
    runs: list[dict[str, Any]] = []
    for number, changes in enumerate(generations, start=1):
        merged = {**tables, **changes}
        for name, section in changes.items():
            if isinstance(section, dict) and isinstance(tables.get(name), dict):
                merged[name] = {**tables[name], **section}
        if "inheritance" in changes and runs and (before := _directory(runs[-1])):
            merged.setdefault("teacher", {"paths": [before]})
        elif "inheritance" in changes:
            merged = _with_teacher(merged)
        if directory := _directory(merged):
            merged["output"] = {**merged["output"], "directory": f"{directory}/generation-{number}"}
        runs.append(merged)
    return of_each(runs, lambda merged: _checked(merged, path))


def _with_teacher(tables: dict[str, Any]) -> dict[str, Any]:
    """The tables of a run. One that inherits and grows at its start learns from what it grows."""
    growth = tables.get("growth")
    first: Any = growth[0] if isinstance(growth, list) and growth else growth
    source = first.get("source") if isinstance(first, dict) else None
    # a revision is not in the names of teachers
    if "inheritance" not in tables or not isinstance(source, str) or "revision" in first:
        return tables
    return {"teacher": {"paths": [source]}, **tables}


def of_each(runs: Sequence[dict[str, Any]], make: Callable[[dict[str, Any]], T]) -> list[T]:
    """What `make` makes of the tables of each run. A fault of some alone names the generation."""
    made, faults = [], {}
    for number, tables in enumerate(runs, start=1):
        try:
            made.append(make(tables))
        except GrowthError as error:
            faults[number] = error
    for number, fault in faults.items():
        if len(faults) == len(runs) and len({*map(str, faults.values())}) == 1:
            raise fault
        raise GrowthError(f"generation {number}: {fault}") from fault
    return made


def _directory(tables: dict[str, Any]) -> str | None:
    """The output directory; None if it is missing or of another type."""
    output = tables.get("output")
    directory = output.get("directory") if isinstance(output, dict) else None
    return directory if isinstance(directory, str) else None


def _checked(tables: dict[str, Any], path: Path) -> dict[str, Any]:
    """The tables of a run, with the sizes of each growth in `sizes`. All keys are known."""
    # with a growth at the start, [model] may be left out
    tables = {"model": {}, **tables}
    growth = tables.get("growth")
    if isinstance(growth, dict):
        tables["growth"] = _with_sizes(growth)
    elif isinstance(growth, list):
        tables["growth"] = [_with_sizes(x) if isinstance(x, dict) else x for x in growth]
    _check_keys(tables, path)
    # types, and values by themselves
    to_dataclass(sections(), tables, str(path))
    return tables


def _sections(tables: dict[str, Any]) -> Iterator[tuple[str, str, dict[str, Any]]]:
    """Each section, its place in messages, and its table. Several growths are a list."""
    for section, value in tables.items():
        several = isinstance(value, list)
        for i, table in enumerate(value if several else [value]):
            if isinstance(table, dict):
                yield section, f"{section}[{i}]" if several else section, table


def _with_sizes(table: dict[str, Any]) -> dict[str, Any]:
    """A table of a growth with the sizes that stand beside its other keys put into `sizes`."""
    names = keys()["growth"]
    # a size of a wrong type is still one; other unknown keys are typing errors
    known = GrowthKeywords.__annotations__.keys() - names
    sizes = {k: v for k, v in table.items() if k in known or (k not in names and type(v) is int)}
    if not isinstance(table.get("sizes", {}), dict):
        return table
    rest = {k: v for k, v in table.items() if k not in sizes}
    return {**rest, "sizes": {**rest.get("sizes", {}), **sizes}}


def _check_keys(tables: dict[str, Any], path: Path) -> None:
    """Refuse unknown keys, and say what they may mean or which section they belong to."""
    known = keys()
    others = {name: its for name, its in known.items() if name != "growth"}
    for section, place, table in _sections(tables):
        for key in (key for key in table if key not in known.get(section, table)):
            start, own = f"{path}: [{place}] has no key {reprlib.repr(key)}", _like(key, others)
            if section in CHECKPOINTS and key in CALLED:
                raise GrowthError(f"{start}: give {CHECKPOINTS[section]}")
            if own:
                raise GrowthError(f"{start}: it is a section of its own, [{own}]")
            owners = [(name, _like(key, its)) for name, its in others.items()]
            named = [
                f"[{name}] as {like!r}" if like != key else f"[{name}]"
                for name, like in owners
                if like
            ]
            is_known = any(key in its for its in others.values())
            if is_known and not get_close_matches(key, known[section]):
                raise GrowthError(f"{start}: it belongs to {' or '.join(named)}")
            raise GrowthError(f"{start}{nearest(key, known[section])}")


def _like(key: str, names: Collection[str]) -> str | None:
    """The name that is a key, or its singular or plural."""
    forms = (key, f"{key}s", key.removesuffix("s"))
    return next((form for form in forms if form in names), None)


# ------------------------------------------------------------ classes in the source


class _Names(dict[str, Any]):
    """The names of a module of the package, each made from its lines when it is asked for.

    Modules that others have imported are not read. A class becomes a dataclass of its fields, with
    their types, defaults and limits, and without its methods.
    """

    def __init__(self, file: Path) -> None:
        super().__init__()
        self.file, self.lines = file, ast.parse(file.read_text(encoding="utf-8")).body

    def __missing__(self, name: str) -> Any:
        for line in self.lines:
            if isinstance(line, ast.ClassDef) and line.name == name:
                value = self._class(line)
            elif isinstance(line, ast.Assign) and ast.unparse(line.targets[0]) == name:
                value = self.value(line.value)
            elif isinstance(line, ast.Import) and name in [x.name for x in line.names]:
                value = importlib.import_module(name)
            elif isinstance(line, ast.ImportFrom) and (
                found := next((x.name for x in line.names if name in (x.asname, x.name)), None)
            ):
                value = _imported(str(line.module), found)
            else:
                continue
            return self.setdefault(name, value)
        raise KeyError(name)

    def value(self, node: ast.expr) -> Any:
        """The value of an expression."""
        return eval(compile(ast.Expression(node), str(self.file), "eval"), self)

    def _class(self, node: ast.ClassDef) -> Any:
        bases = tuple(self[base.id] for base in node.bases if isinstance(base, ast.Name))
        declared: list[Any] = []
        members: dict[str, Any] = {} if bases else {"LIMITS": {}}
        for line in (x for x in node.body if isinstance(x, ast.AnnAssign)):
            name = ast.unparse(line.target)
            if name == "LIMITS" and line.value:
                members[name] = self.value(line.value)
            elif not ast.unparse(line.annotation).startswith("ClassVar"):
                value = [] if line.value is None else [self.value(line.value)]
                declared.append((name, self.value(line.annotation), *value))
        calls = [x for x in ast.walk(node) if isinstance(x, ast.Call)]
        checks = [x for x in calls if ast.unparse(x.func) == "check_fields"]
        if checks:
            section = ast.literal_eval(checks[0].args[1]) if checks[0].args[1:] else ""
            members["__post_init__"] = lambda self: check_fields(self, section)
        return make_dataclass(
            node.name, declared, bases=bases, namespace=members, frozen=True, kw_only=True
        )


@functools.cache
def _names(file: Path) -> _Names:
    return _Names(file)


def _imported(module: str, name: str) -> Any:
    """A name that a module imports: of the package's training code and losses from the source."""
    if not module.startswith(("growkern.train", "growkern.ops")):
        return getattr(importlib.import_module(module), name)
    place = PACKAGE.joinpath(*module.split(".")[1:])
    if place.is_dir():
        return _imported(doors(str(place / "__init__.py"))[name], name)
    return _names(place.with_suffix(".py"))[name]


@functools.cache
def sections() -> Any:
    """`Run` of `growkern.train.run.file`, with all its sections, as a dataclass without methods."""
    return _names(SECTIONS)["Run"]


@functools.cache
def keys() -> dict[str, frozenset[str]]:
    """The keys of each section, but of [trainer], whose keys transformers knows."""
    found = {}
    for field in fields(sections()):
        kinds = (field.type, *get_args(field.type))
        classes = [kind for kind in kinds if isinstance(kind, type) and is_dataclass(kind)]
        if classes:
            found[field.name] = frozenset(x.name for x in fields(classes[0]))
    return found


# --------------------------------------------------------------------------- paths


def check_paths(runs: list[dict[str, Any]], base: Path) -> None:
    """Check that the models and texts of a run file exist, but those that its runs make.

    Args:
        runs: of `read_tables`.
        base: folder that the paths are relative to.
    """
    made = [base / directory for tables in runs if (directory := _directory(tables))]
    for tables in runs:
        for name in _checkpoints(tables):
            place = base / name
            if any(place.is_relative_to(output) for output in made):
                continue
            if not place.exists():
                refuse_other_names(name)
            if place.exists() or not is_hub_name(name, base):
                config_directory(place)
        for section, _, table in _sections(tables):
            if section == "growth" and (source := table.get("source")):
                refuse_by_config(config_of(base / source), table.get("to", ""), table["sizes"])
        for key in ("train", "validation"):
            sets = tables["data"].get(key, ())
            for name, patterns in sets.items() if isinstance(sets, dict) else [("", sets)]:
                for pattern in patterns:
                    matching_files(base, pattern, f"data.{key}{'.' * bool(name)}{name}")


def _checkpoints(tables: dict[str, Any]) -> list[str]:
    """The names of the models that a run reads."""
    named: list[str | None] = []
    for section, _, table in _sections(tables):
        paths = table.get("paths", []) if section == "teacher" else []
        named += paths.values() if isinstance(paths, dict) else paths
        named += [table.get({"model": "path", "growth": "source"}.get(section, ""))]
    return [name for name in named if name is not None]
