"""The numbers of a row have the same names, in the same order, in Python, C++ and Triton."""

import re
from pathlib import Path

import pytest

from growkern.ops.backend.launch import HAS_TRITON
from growkern.ops.loss.rows import state
from growkern.ops.loss.topk.buckets import TailFactors

CSRC = Path(__file__).parents[3] / "csrc"
HEADER = CSRC / "cpu/kl_mlm.h"
TUPLES = {
    "StudentSums": state.StudentSums._fields,
    "TeacherSums": state.TeacherSums._fields,
    "TailFactors": TailFactors._fields,
}


@pytest.mark.parametrize("name", TUPLES)
def test_enums_are_the_tuples_of_python(name):
    (body,) = re.findall(rf"enum class {name} {{([^}}]*)}}", HEADER.read_text())
    assert tuple(re.findall(r"\w+", body)) == TUPLES[name]


def test_sizes_and_kinds_are_those_of_python():
    found = dict(re.findall(r"(\w+_(?:SUMS|ROW)) = (\d+)", HEADER.read_text()))
    assert {name: int(n) for name, n in found.items()} == {
        "STUDENT_SUMS": len(state.StudentSums._fields),
        "TEACHER_SUMS": len(state.TeacherSums._fields),
        "MLM_ROW": state.MLM_ROW,
        "KL_ROW": state.KL_ROW,
    }


@pytest.mark.skipif(not HAS_TRITON, reason="Triton is not installed")
def test_constants_of_triton_are_the_tuples_of_python():
    from growkern.ops.loss.rows import triton_sums as rows
    from growkern.ops.loss.topk import tail_on_triton as tail

    def named(module, fields, prefix=""):
        names = [prefix + field.upper() for field in fields]
        return [getattr(getattr(module, name), "value", None) for name in names]

    def first(n):
        return list(range(n))

    maths = ["inv_t", *state.Maths._fields[1:]]
    assert named(rows, maths) == first(6)
    assert named(rows, [*state.Steps._fields, "parts"]) == first(4)
    assert named(rows, state.StudentSums._fields) == first(rows.STUDENT_SUMS.value) == first(8)
    assert named(rows, state.TeacherSums._fields, "T_") == first(rows.TEACHER_SUMS.value)
    assert len(state.TeacherSums._fields) == rows.TEACHER_SUMS.value
    assert named(tail, TailFactors._fields) == first(5)
    assert (rows.MLM_ROW.value, rows.KL_ROW.value) == (state.MLM_ROW, state.KL_ROW)
