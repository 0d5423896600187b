"""The structures of arguments have the same fields, in the same order, in C++ and in Python."""

import ctypes
import re
from pathlib import Path

import pytest

from growkern.ops.adamw.on_cpu import AdamwArgs
from growkern.ops.expand.on_cpu import ExpandArgs
from growkern.ops.expand.on_cuda import ExpandRowsArgs, RowListsArgs
from growkern.ops.loss.linear.gemm import GemmArgs
from growkern.ops.loss.rows.on_cpu import KlMlmArgs

CSRC = Path(__file__).parents[3] / "csrc"
MIRRORED = [
    (AdamwArgs, "cpu/adamw.h"),
    (ExpandArgs, "cpu/expand.h"),
    (ExpandRowsArgs, "cuda/expand_rows.cu"),
    (RowListsArgs, "cuda/row_lists.cu"),
    (GemmArgs, "cpu/gemm.h"),
    (KlMlmArgs, "cpu/kl_mlm.h"),
]
TYPES = {
    "int64_t": ctypes.c_int64,
    "i64": ctypes.c_int64,
    "int32_t": ctypes.c_int32,
    "i32": ctypes.c_int32,
    "double": ctypes.c_double,
    "float": ctypes.c_float,
    "bool": ctypes.c_bool,
}


def fields_of(source: str, name: str) -> list[tuple[str, type]]:
    """The fields of a C++ structure, in their order, with the types that ctypes has for them."""
    text = re.sub(r"//.*", "", source)
    ((real, body),) = re.findall(
        rf"struct {name} (?:: Maths<(\w+)> )?{{(.*?)\n}};", text, re.DOTALL
    )
    fields = []
    if real:
        (base,) = re.findall(r"Real (.*?);", (CSRC / "maths.h").read_text())
        fields = [(field, TYPES[real]) for field in base.split(", ")]
    for declaration in filter(None, map(str.strip, body.split(";"))):
        first, *others = declaration.split(",")
        pointer = "*" in first
        kind = ctypes.c_void_p if pointer else TYPES[first.split()[0]]
        for declared in (first.split()[-1], *map(str.strip, others)):
            fields.append((declared, kind))
    return fields


@pytest.mark.parametrize("structure, path", MIRRORED, ids=lambda x: getattr(x, "__name__", ""))
def test_structures_have_the_same_fields(structure, path):
    fields = [(name, kind) for name, kind in structure._fields_]
    assert fields == fields_of((CSRC / path).read_text(), structure.__name__)


def test_every_structure_is_compared():
    names = {structure.__name__ for structure, _ in MIRRORED}
    sources = [path.read_text() for path in CSRC.rglob("*.[hc]*")]
    assert set(re.findall(r"struct (\w+Args)\b", "".join(sources))) == names


def test_the_reader_sees_types_and_order():
    source = "struct X {\n    const T* a;  // (2,)\n    bool b, c;\n    float d;\n};"
    one = fields_of(source, "X")
    kinds = (ctypes.c_void_p, ctypes.c_bool, ctypes.c_bool, ctypes.c_float)
    assert one == list(zip("abcd", kinds, strict=True))
