"""The ways in which the top-k loss launches its kernel, to be compiled without a GPU."""

from typing import Any

from growkern.ops._kl_mlm_launch import MAX_BLOCK_V, MAX_REGISTERS
from growkern.ops._launch import AotCase
from growkern.ops._topk_kl_mlm_kernel import _topk_rows_kernel


def aot_cases() -> list[AotCase]:
    """Gradient and sums as the op launches them; with few entries, with many, capped."""
    ways = [
        ("k 64, bf16 gradient", "bf16", 64, (0.5, 0.0), (True, False)),
        ("k 1024, parts", "bf16", 1024, (0.5, 0.0), (True, True)),
        ("k 64, capped, parts", "bf16", 64, (1.0, 30.0), (True, True)),
        ("k 256, no gradient", "fp32", 256, (1.0, 0.0), (False, True)),
    ]
    cases = []
    for name, grad, block, maths, steps in ways:
        signature: dict[str, Any] = {
            "student_ptr": "*fp32",
            "teacher_ptrs": ("*i64", "*fp32", "*fp32"),
            "labels_ptr": "*i64",
            "kind_ptr": "*i32",
            "drows_ptr": "*fp32",
            "rows_ptr": "*fp32",
            "dstudent_ptr": f"*{grad}",
            "strides": ("i32",) * 2,
            "N": "i32",
            "V": "i32",
            "k": "i32",
        }
        constants = {"MATHS": maths, "STEPS": steps, "BLOCKS": (MAX_BLOCK_V, block)}
        case = AotCase(
            f"topk_kl_mlm rows {name}", _topk_rows_kernel, signature, constants, ("N", "k"), 8,
            MAX_REGISTERS,
        )  # fmt: skip
        cases.append(case)
    return cases
