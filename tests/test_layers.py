"""The shape of the source: imports point one way, and the house numbers hold."""

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import growkern

PACKAGE = Path(growkern.__file__).parent
MODULES = sorted(PACKAGE.rglob("*.py"))

# each layer may import itself and the ones before it
LAYERS = ("errors", "ops", "families", "growth", "train", "plot", "info", "demo", "cli", "__main__")

# what a layer may import that is neither ours nor the standard library; the others are free
THIRD_PARTY = {
    "errors": set(),
    "ops": {"torch", "triton"},
    "families": {"tomli"},
    "__init__": set(),
}

FUNCTION_LINES = 60
FILE_LINES = 300
ARGUMENTS = 14


def layer_of(path: Path) -> str:
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def imported_names(path: Path) -> Iterator[str]:
    """Absolute dotted names of everything the module imports, at any depth of its code."""
    package = ("growkern", *path.relative_to(PACKAGE).parts[:-1])
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            above = package[: len(package) - node.level + 1] if node.level else ()
            module = ".".join((*above, *filter(None, [node.module])))
            yield from (f"{module}.{alias.name}" for alias in node.names)


def functions(path: Path) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield node


def docstring_lines(node: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    first = node.body[0]
    return first.end_lineno - first.lineno + 1 if ast.get_docstring(node) is not None else 0


def where(path: Path, node: ast.AST) -> str:
    return f"{path.relative_to(PACKAGE.parent)}:{node.lineno}"


def by_name(path: Path) -> str:
    return str(path.relative_to(PACKAGE))


@pytest.mark.parametrize("path", MODULES, ids=by_name)
def test_imports_point_one_way(path):
    layer = layer_of(path)
    if layer == "__init__":  # the package's door: it may name every layer
        return
    assert layer in LAYERS, f"{by_name(path)} is in no layer: add it to LAYERS at its place"
    allowed = LAYERS[: LAYERS.index(layer) + 1]
    for name in imported_names(path):
        root, *rest = name.split(".")
        if root == "growkern" and rest:
            assert rest[0] in allowed, f"{by_name(path)} ({layer}) must not import {name}"
    # `import growkern` is for its version and place; anything else would hide the layer meant
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Attribute) and ast.unparse(node.value) == "growkern":
            assert node.attr in ("__version__", "__path__"), f"{where(path, node)} {node.attr}"


@pytest.mark.parametrize("path", MODULES, ids=by_name)
def test_low_layers_import_few_packages(path):
    allowed = THIRD_PARTY.get(layer_of(path))
    if allowed is None:
        return
    for name in imported_names(path):
        root = name.split(".")[0]
        known = root == "growkern" or root in sys.stdlib_module_names or root in allowed
        assert known, f"{by_name(path)} must not import {root}"


@pytest.mark.parametrize("path", MODULES, ids=by_name)
def test_house_numbers(path):
    lines = path.read_text().splitlines()
    assert len(lines) <= FILE_LINES, f"{by_name(path)}: {len(lines)} lines, split it by purpose"
    for node in functions(path):
        length = node.end_lineno - node.lineno + 1 - docstring_lines(node)
        assert length <= FUNCTION_LINES, f"{where(path, node)} {node.name}: {length} lines"
        # the options of a public function or a command are its documentation: only what every
        # caller has to pass counts there
        options = node.name in growkern.__all__ or layer_of(path) == "cli"
        counted = node.args.posonlyargs + node.args.args
        counted = counted if options else counted + node.args.kwonlyargs
        assert len(counted) <= ARGUMENTS, f"{where(path, node)} {node.name}: {len(counted)} args"


@pytest.mark.parametrize("path", MODULES, ids=by_name)
def test_functions_are_annotated(path):
    """mypy skips the body of a function without annotations; Triton kernels are the exception."""
    for node in functions(path):
        decorators = " ".join(map(ast.unparse, node.decorator_list))
        if "jit" in decorators or "register_fake" in decorators:  # a fake repeats its op's types
            continue
        arguments = node.args.posonlyargs + node.args.args + node.args.kwonlyargs
        annotated = node.returns or any(argument.annotation for argument in arguments)
        assert annotated, f"{where(path, node)} {node.name} has no annotations"


@pytest.mark.parametrize("path", MODULES, ids=by_name)
def test_nothing_is_read_from_outside_the_package(path):
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            outside = "../" in node.value or node.value.startswith(
                ("/home", "/usr", "/tmp", "/opt")
            )
            assert not outside, f"{where(path, node)} names a path outside: {node.value!r}"


def test_the_reader_of_imports_sees_every_kind(monkeypatch):
    source = "import growkern.cli\ndef f():\n    from ..train import run\n    from . import spec\n"
    monkeypatch.setattr(Path, "read_text", lambda self: source)
    names = set(imported_names(PACKAGE / "families" / "not_there.py"))
    assert names == {"growkern.cli", "growkern.train.run", "growkern.families.spec"}
