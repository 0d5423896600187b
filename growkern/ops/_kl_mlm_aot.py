"""The ways in which both losses launch their kernel, to be compiled without a GPU."""

from typing import Any

from growkern.ops._kl_mlm_kernel import MAX_BLOCK_V, MAX_REGISTERS, _kl_mlm_rows_kernel
from growkern.ops._launch import AotCase, tl


def aot_cases() -> list[AotCase]:
    """Both passes at once on float32 logits, as the linear loss launches them, and one by one."""
    ways = [
        ("linear, bf16 gradient", "fp32", "bf16", 1, (0.5, 0.0, 0.0), (True, True, False)),
        ("linear, two teachers, capped", "fp32", "bf16", 2, (0.5, 30.0, 30.0), (True, True, True)),
        ("linear, no teacher", "fp32", "bf16", 0, (1.0, 0.0, 0.0), (True, True, False)),
        ("forward", "bf16", "bf16", 1, (1.0, 0.0, 0.0), (True, False, False)),
        ("backward", "bf16", "bf16", 1, (0.5, 0.0, 0.0), (False, True, False)),
    ]
    cases = []
    for name, logits, grad, K, maths, steps in ways:
        signature: dict[str, Any] = {
            "student_ptr": f"*{logits}",
            "teacher_ptrs": (f"*{logits}",) * K,
            "labels_ptr": "*i64",
            "kind_ptr": "*i32",
            "drows_ptr": "*fp32",
            "rows_ptr": "*fp32",
            "dstudent_ptr": f"*{grad}",
            "strides": ("i32",) * (2 + K),
            "N": "i32",
            "V": "i32",
        }
        constants = {"MATHS": maths, "STEPS": steps, "ACC": tl.float32, "BLOCK_V": MAX_BLOCK_V}
        cases.append(
            AotCase(
                f"kl_mlm rows {name}",
                _kl_mlm_rows_kernel,
                signature,
                constants,
                ("N",),
                8,
                MAX_REGISTERS,
            )
        )
    return cases
