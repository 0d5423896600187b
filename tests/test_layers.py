"""The shape of the source: imports point one way, and the house numbers hold."""

import ast
import functools
import importlib
from collections.abc import Callable, Iterable, Iterator
from graphlib import CycleError, TopologicalSorter
from pathlib import Path
from typing import Any

import pytest

import growkern
from growkern.families.family import NORM_KINDS
from growkern.rooms import doors

PACKAGE = Path(growkern.__file__).parent
ROOT = PACKAGE.parent
MODULES = sorted(PACKAGE.rglob("*.py"))
# everything of ours, by its dotted name
OURS = {
    ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): path
    for folder in ("growkern", "testbed", "bench", "tests", "examples")
    for path in sorted((ROOT / folder).rglob("*.py"))
}

# each part may import itself and the ones before it
PARTS = {
    "growkern": (
        *("rooms", "errors", "arguments", "files", "package", "publish"),
        *("ops", "families", "growth", "train", "plot", "cli", "__main__"),
    ),
    "growkern.ops": ("backend", "adamw", "expand", "loss"),
    "growkern.ops.loss": (
        *("rows", "linear", "topk", "kl_mlm_loss", "linear_kl_mlm_loss", "topk_kl_mlm_loss"),
    ),
    "growkern.growth": (
        *("options", "history", "models", "stored", "source", "outputs", "space", "own_modules"),
        *("plan", "disk", "record", "sharded", "optimizer", "grow", "own_table", "draft", "freeze"),
    ),
    "growkern.train": (
        *("file_rules", "rules", "sections", "model", "distributed", "optimizer", "objectives"),
        *("dataset", "loss", "topk_teacher", "safety", "evaluation", "loop", "run"),
    ),
    "growkern.plot": ("figure", "curves", "roles", "losses"),
}
# the same of what is not installed
ROOMS = ("growkern", "examples", "testbed", "bench", "tests")


# rooms whose `__init__` names what others may use
WITH_DOORS = (
    *("families", "plot", "publish", "growth/draft", "growth/source", "growth/space"),
    *("growth/plan", "growth/disk", "growth/record", "growth/optimizer"),
    *("ops/adamw", "ops/backend", "ops/expand", "ops/loss"),
    *("train/dataset", "train/distributed", "train/evaluation", "train/loop", "train/loss"),
    *("train/model", "train/objectives", "train/run", "train/safety", "train/topk_teacher"),
)

# what renames: files and directories that appear whole, and checkpoints in a run's own directory
RENAMING = (
    *("files.py", "publish/calls.py", "publish/workplace.py"),
    *("train/safety/checkpoints.py", "train/safety/staging.py"),
)

LINE_CHARACTERS = 100
FUNCTION_LINES = 60
FILE_LINES = 600
ARGUMENTS = 14


def layer_of(path: Path) -> str:
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


@functools.cache
def nodes(path: Path) -> tuple[ast.AST, ...]:
    """Everything in the syntax of a file."""
    return tuple(ast.walk(ast.parse(path.read_text())))


def imported_names(path: Path) -> Iterator[str]:
    """Absolute dotted names of everything the module imports, at any depth of its code."""
    package = path.relative_to(ROOT).parts[:-1]
    for node in nodes(path):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            above = package[: len(package) - node.level + 1] if node.level else ()
            module = ".".join((*above, *filter(None, [node.module])))
            yield from (f"{module}.{alias.name}" for alias in node.names)


def functions(path: Path) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    for node in nodes(path):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield node


def docstring_lines(node: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    first = node.body[0]
    return first.end_lineno - first.lineno + 1 if ast.get_docstring(node) is not None else 0


def where(path: Path, node: ast.AST) -> str:
    return f"{path.relative_to(PACKAGE.parent)}:{node.lineno}"


def by_name(path: Path) -> str:
    return str(path.relative_to(PACKAGE))


def dotted(room: str) -> str:
    return f"growkern.{room}".replace("/", ".")


@functools.cache
def doors_of(room: str) -> dict[str, str]:
    return doors(str(PACKAGE / room / "__init__.py"))


def of_each(places: Iterable[Path | str]) -> Callable[[Callable[[Any], None]], Callable[[], None]]:
    """Decorate a test of one place. It becomes one test of all: 2,600 tests cost half a minute."""

    def decorate(test: Callable[[Any], None]) -> Callable[[], None]:
        def of_all() -> None:
            for place in places:
                try:
                    test(place)
                except AssertionError as error:
                    raise AssertionError(f"{place}: {error}") from error

        of_all.__name__, of_all.__doc__ = test.__name__, test.__doc__
        return of_all

    return decorate


def imported_modules(name: str) -> set[str]:
    """The modules of ours that a module imports, at any depth of its code."""
    found = set()
    for imported in imported_names(OURS[name]):
        parent = imported.rpartition(".")[0]
        found |= {imported if imported in OURS else parent} & OURS.keys()
    return found - {name}


def part_of(name: str, layer: str) -> str | None:
    """The part of a layer that a module lies in."""
    if not name.startswith(f"{layer}."):
        return None
    return name.removeprefix(f"{layer}.").split(".")[0]


def test_nothing_imports_in_a_circle():
    try:
        TopologicalSorter({name: imported_modules(name) for name in OURS}).prepare()
    except CycleError as error:
        pytest.fail(" -> ".join(error.args[1]))


@pytest.mark.parametrize("layer", PARTS)
def test_parts_of_a_layer_import_one_way(layer):
    order = PARTS[layer]
    for name in OURS:
        part = part_of(name, layer)
        assert part in (*order, None), f"{name}: add {part} to PARTS at its place"
        for imported in imported_modules(name) if part else ():
            below = part_of(imported, layer) or order[0]
            assert order.index(below) <= order.index(part), f"{name} must not import {imported}"


@of_each(OURS)
def test_rooms_import_one_way_what_is_there(name):
    for imported in imported_names(OURS[name]):
        room, other = name.split(".")[0], imported.split(".")[0]
        if other in ROOMS:
            assert ROOMS.index(other) <= ROOMS.index(room), f"{name} must not import {imported}"
            # a module, or a name in one; what a package holds is asked of it
            parent, _, last = imported.rpartition(".")
            known = parent in OURS and OURS[parent].stem != "__init__"
            known = known or imported in OURS or hasattr(importlib.import_module(parent), last)
            assert known, f"{name}: no {imported}"


@of_each(MODULES)
def test_outsiders_use_only_the_doors_of_a_room(path):
    """Those are what its `__init__` names, and a function that has the name of its module."""
    for name in imported_names(path):
        module, _, last = name.rpartition(".")
        for room in WITH_DOORS:
            inside = by_name(path).startswith(f"{room}/")
            if inside or layer_of(path) == "__init__" or not module.startswith(dotted(room)):
                continue
            is_door = module == dotted(room) and last in doors_of(room)
            assert is_door or module.endswith(f".{last}"), f"{by_name(path)} must not take {name}"


@of_each([name for name in OURS if not name.startswith(("growkern", "tests"))])
def test_others_take_what_has_a_door_through_it(name):
    """A test may name the module that it is about."""
    for imported in imported_names(OURS[name]):
        module, _, last = imported.rpartition(".")
        behind = [x for x in WITH_DOORS if module.startswith(f"{dotted(x)}.")]
        known = {name: place for room in behind for name, place in doors_of(room).items()}
        assert known.get(last) != module, f"{name} must take {last} through the door of {behind}"


@pytest.mark.parametrize("room", WITH_DOORS)
def test_every_door_is_used_and_opens(room):
    used = {name for path in MODULES for name in imported_names(path)}
    package = importlib.import_module(dotted(room))
    for name, module in doors(package.__file__).items():
        assert f"{dotted(room)}.{name}" in used, f"nothing uses the door {name}: take it away"
        assert getattr(package, name) is getattr(importlib.import_module(module), name)
    with pytest.raises(AttributeError, match="no_such_door"):
        package.no_such_door  # noqa: B018


@of_each([name for name in OURS if not name.startswith("tests")])
def test_private_names_stay_in_their_module(name):
    """A module that others do not use is private by its folder, not by its name."""
    assert not OURS[name].stem.startswith("_") or OURS[name].stem.endswith("__")
    for imported in imported_names(OURS[name]):
        last = imported.rpartition(".")[2]
        is_ours = imported.split(".")[0] in ("growkern", "bench", "examples")
        is_private = last.startswith("_") and not last.endswith("__")
        assert not (is_ours and is_private), f"{name} must not import {imported}"


def test_norms_are_asked_for_facts_and_not_for_their_kind():
    """A new kind is then one entry of NORM_KINDS."""
    for path in MODULES:
        if by_name(path) == "families/family.py":
            continue
        named = {x.value for x in nodes(path) if isinstance(x, ast.Constant)} & NORM_KINDS.keys()
        assert not named, f"{by_name(path)} compares {named}: add a field to NormKind"


BENCH = [path for name, path in OURS.items() if name.startswith("bench.")]
COMPILED = sorted(path for path in (ROOT / "csrc").rglob("*") if path.is_file())


@of_each(COMPILED)
def test_house_numbers_of_compiled_code(path):
    lines = path.read_text().splitlines()
    assert len(lines) <= FILE_LINES, f"{len(lines)} lines, split it by purpose"
    # ruff looks at those of Python
    long = [number for number, line in enumerate(lines, 1) if len(line) > LINE_CHARACTERS]
    assert not long, f"lines {long} have more than {LINE_CHARACTERS} characters"


@of_each([*MODULES, *BENCH])
def test_house_numbers(path):
    lines = path.read_text().splitlines()
    assert len(lines) <= FILE_LINES, f"{len(lines)} lines, split it by purpose"
    for node in functions(path):
        length = node.end_lineno - node.lineno + 1 - docstring_lines(node)
        assert length <= FUNCTION_LINES, f"{where(path, node)} {node.name}: {length} lines"
        # the options of a public function or a command are its documentation: only what every
        # caller has to pass counts there
        is_ours = path.is_relative_to(PACKAGE)
        options = node.name in growkern.__all__ or (is_ours and layer_of(path) == "cli")
        named = [] if options else node.args.kwonlyargs
        count = len(node.args.posonlyargs + node.args.args + named)
        assert count <= ARGUMENTS, f"{where(path, node)} {node.name}: {count} args"


@of_each(MODULES)
def test_little_is_renamed(path):
    """A rename may replace what somebody else put there."""
    if by_name(path) in RENAMING:
        return
    for node in nodes(path):
        if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
            continue
        # of a path; that of a text takes two, that of dataclasses keywords
        of_path = node.func.attr == "replace" and len(node.args) == 1 and not node.keywords
        by_os = ast.unparse(node.func) in ("os.replace", "shutil.move")
        renames = of_path or by_os or node.func.attr in ("rename", "renames", "renameat2")
        assert not renames, f"{where(path, node)}: {ast.unparse(node)}"
