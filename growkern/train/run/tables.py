"""The tables of a run file, and the checks of them that need no PyTorch.

Importing the classes of the sections takes seconds. So the names of their fields are read from
their source, and a wrong key or path is told at once.
"""

import ast
import functools
import reprlib
from collections.abc import Iterator
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from growkern.errors import GrowthError, nearest
from growkern.files import matching_files
from growkern.growth.options import GrowthKeywords
from growkern.growth.source import ID, config_directory, refuse_other_names
from growkern.rooms import doors
from growkern.train.toml import read_toml

PACKAGE = Path(__file__).parents[2]
SECTIONS = Path(__file__).with_name("file.py")


def read_tables(path: Path) -> list[dict[str, Any]]:
    """Read a run file: the tables of each of its runs, see `growkern.train.run.file.load_runs`.

    Raises:
        GrowthError: the file cannot be read, or a key is unknown.
    """
    tables = read_toml(path)
    generations = tables.pop("generation", None)
    if generations is None:
        return [_checked(tables, path)]
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
        if directory := _directory(merged):
            merged["output"] = {**merged["output"], "directory": f"{directory}/generation-{number}"}
        try:
            runs.append(_checked(merged, path))
        except GrowthError as error:
            raise GrowthError(f"generation {number}: {error}") from error
    return runs


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
    _check_places(tables, path)
    known = keys()
    for section, place, table in _sections(tables):
        for name in table:
            if section in known and name not in known[section]:
                near = nearest(name, known[section])
                raise GrowthError(f"{path}: [{place}] has no key {reprlib.repr(name)}{near}")
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


def _check_places(tables: dict[str, Any], path: Path) -> None:
    """Refuse keys that belong to another section."""
    known = {name: its for name, its in keys().items() if name != "growth"}
    for section in known.keys() & tables.keys():
        for key in tables[section] if isinstance(tables[section], dict) else ():
            if key in known and key not in known[section]:
                raise GrowthError(
                    f"{path}: [{section}] has no key {key!r}: it is a section of its own, [{key}]"
                )
            owner = next((name for name, its in known.items() if key in its), section)
            is_meant = key in known[section] or get_close_matches(key, known[section])
            if owner != section and not is_meant:
                raise GrowthError(
                    f"{path}: [{section}] has no key {key!r}: it belongs to [{owner}]"
                )


# ------------------------------------------------------------- names in the source


@functools.cache
def keys() -> dict[str, frozenset[str]]:
    """The keys of each section, but of [trainer], whose keys transformers knows."""
    tree = _parsed(SECTIONS)
    ours = {x.name for x in tree.body if isinstance(x, ast.ClassDef)} | _imported(tree).keys()
    found = {}
    for section, kind in _fields(_class(tree, "Run")).items():
        classes = [x.id for x in ast.walk(kind) if isinstance(x, ast.Name) and x.id in ours]
        if classes:
            found[section] = frozenset(_all_fields(classes[0], SECTIONS))
    return found


@functools.cache
def _parsed(file: Path) -> ast.Module:
    return ast.parse(file.read_text(encoding="utf-8"))


def _class(tree: ast.Module, name: str) -> ast.ClassDef | None:
    return next((x for x in tree.body if isinstance(x, ast.ClassDef) and x.name == name), None)


def _imported(tree: ast.Module) -> dict[str, str]:
    """The modules of the package that names are imported from."""
    lines = [x for x in tree.body if isinstance(x, ast.ImportFrom)]
    return {
        name.name: str(line.module)
        for line in lines
        for name in line.names
        if str(line.module).startswith("growkern.")
    }


def _fields(node: ast.ClassDef | None) -> dict[str, ast.expr]:
    """The fields that a dataclass declares itself, with their types."""
    declared = [x for x in (node.body if node else ()) if isinstance(x, ast.AnnAssign)]
    return {
        ast.unparse(x.target): x.annotation
        for x in declared
        if not ast.unparse(x.annotation).startswith("ClassVar")
    }


def _all_fields(name: str, file: Path) -> set[str]:
    """The fields of a dataclass that a file declares or imports, with those of its bases."""
    tree = _parsed(file)
    node = _class(tree, name)
    if node is None:
        return _all_fields(name, _file_of(name, _imported(tree)[name]))
    bases = [x.id for x in node.bases if isinstance(x, ast.Name)]
    return {*_fields(node)}.union(*(_all_fields(base, file) for base in bases))


def _file_of(name: str, module: str) -> Path:
    """The file that declares a name, which may be the door of a room."""
    place = PACKAGE.joinpath(*module.split(".")[1:])
    if place.is_dir():
        return _file_of(name, doors(str(place / "__init__.py"))[name])
    return place.with_suffix(".py")


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
            if place.exists() or not ID.fullmatch(name):
                config_directory(place)
        data = tables.get("data")
        for key in ("train", "validation"):
            sets = data.get(key, ()) if isinstance(data, dict) else ()
            for name, patterns in sets.items() if isinstance(sets, dict) else [("", sets)]:
                for pattern in patterns if isinstance(patterns, list) else ():
                    if isinstance(pattern, str):
                        matching_files(base, pattern, f"data.{key}{'.' * bool(name)}{name}")


def _checkpoints(tables: dict[str, Any]) -> list[str]:
    """The names of the models that a run reads."""
    named: list[Any] = []
    for section, _, table in _sections(tables):
        paths = table.get("paths", []) if section == "teacher" else []
        named += paths.values() if isinstance(paths, dict) else paths
        named += [table.get({"model": "path", "growth": "source"}.get(section, ""))]
    return [name for name in named if isinstance(name, str)]
