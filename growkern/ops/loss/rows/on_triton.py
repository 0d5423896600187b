"""The rows of the KL + MLM loss in Triton: launches the row kernel.

`aot_cases` lists launches that can be compiled without a GPU.

Shape letters used in this file: N rows, V vocabulary, K teachers, S numbers of a row.
"""

from typing import Any

from torch import Tensor

from growkern.ops.backend.aot import AotCase
from growkern.ops.backend.launch import acc_dtype, launch, next_power_of_2, tl
from growkern.ops.backend.tuned import launch_choice
from growkern.ops.loss.rows.state import Maths, Rows, Steps, clear
from growkern.ops.loss.rows.triton_kernel import kl_mlm_rows_kernel

# 16 elements per thread of 8 warps: enough loads in flight, and two blocks fit a multiprocessor
MAX_BLOCK_V = 4096
# left to itself ptxas aims at 80 registers on sm_80 and spills
MAX_REGISTERS = 128


def most_columns(ACC: Any) -> int:
    """Columns of a block. In float64 exp takes twenty registers beside the two per element."""
    return MAX_BLOCK_V // (4 if ACC is tl.float64 else 1)


def maths_constant(maths: Maths) -> tuple[float, ...]:
    """MATHS of the kernels: the fields of `maths`, with 1 / temperature for the temperature."""
    return tuple(maths._replace(temperature=1 / maths.temperature))


def _constants(maths: Maths, steps: Steps, parts: bool) -> dict[str, Any]:
    return {"MATHS": maths_constant(maths), "STEPS": (*steps, parts)}


def rows_on_triton(
    rows: Rows,
    state_SN: Tensor,
    steps: Steps,
    drows_SN: Tensor | None = None,
    dstudent_NV: Tensor | None = None,
) -> None:
    """Fill `state_SN` and, given the gradient of the terms, `dstudent_NV`, as `steps` says.

    Arguments as in `rows_on_cpu`.
    """
    _, _, labels_N, kind_N, vocab, maths, parts, _ = rows
    student_NV, *teachers_NV = (
        x if x.stride(-1) == 1 else x.contiguous() for x in (rows.student_NV, *rows.teachers_NV)
    )
    N = student_NV.shape[0]
    if N == 0 or vocab == 0:
        if steps.sums:
            clear(state_SN)
        return
    grad_NV = student_NV if dstudent_NV is None else dstudent_NV
    drows_SN = state_SN if drows_SN is None else drows_SN.contiguous()
    if dstudent_NV is not None and dstudent_NV.shape[1] > vocab:
        dstudent_NV[:, vocab:] = 0
    ACC = acc_dtype(student_NV)[1]
    # the linear loss takes its sums and its gradient in one launch, ready logits in two
    name = "kl_mlm_rows_at_once" if steps.sums and steps.grad else "kl_mlm_rows"
    choice = launch_choice(
        name, student_NV, vocab, BLOCK_V=most_columns(ACC), num_warps=8,
        maxnreg=MAX_REGISTERS,
    )  # fmt: skip
    choice["BLOCK_V"] = min(choice["BLOCK_V"], next_power_of_2(vocab))
    launch(
        kl_mlm_rows_kernel,
        N,
        student_NV,
        (student_NV, *teachers_NV),
        tuple(rows.biases) or (None,) * (1 + len(teachers_NV)),
        labels_N,
        kind_N,
        drows_SN,
        state_SN,
        grad_NV,
        tuple(x.stride(0) for x in (student_NV, grad_NV, *teachers_NV)),
        N,
        vocab,
        **_constants(maths, steps, parts),
        ACC=ACC,
        **choice,
    )


def aot_cases() -> list[AotCase]:
    """All steps in one launch on float32 logits, as the linear loss needs, and single steps."""
    whole, jsd = Steps(sums=True, grad=True), Steps(sums=True, diverge=True, grad=True)
    every = Maths(2.0, 30.0, 30.0, beta=0.5, label_smoothing=0.1, z_loss=1e-4)
    ways: list[tuple[Any, ...]] = [
        ("linear, bf16 gradient", "fp32", "bf16", 1, Maths(2.0), whole, False),
        ("linear, two teachers, capped", "fp32", "bf16", 2, Maths(2.0, 30.0, 30.0), whole, True),
        ("linear, fp32 gradient", "fp32", "fp32", 1, Maths(2.0), whole, False),
        ("linear, fp64 logits", "fp64", "fp32", 1, Maths(2.0), whole, False),
        ("linear, biases", "fp32", "bf16", 1, Maths(2.0), whole, False, "*bf16"),
        ("linear, no teacher", "fp32", "bf16", 0, Maths(), whole, False),
        ("linear, sums of a tail", "fp32", "bf16", 0, Maths(2.0), Steps(sums=True), True),
        ("linear, reverse", "fp32", "bf16", 1, Maths(beta=1.0), jsd, False),
        ("linear, every option", "fp32", "bf16", 1, every, jsd, True),
        ("forward", "bf16", "bf16", 1, Maths(), Steps(sums=True), False),
        ("backward", "bf16", "bf16", 1, Maths(2.0), Steps(grad=True), False),
    ]
    cases = []
    for name, logits, grad, K, maths, steps, parts, *bias in ways:
        ACC = tl.float64 if logits == "fp64" else tl.float32
        signature: dict[str, Any] = {
            "logit_ptrs": (f"*{logits}",) * (1 + K),
            "biases": (*bias, None)[:1] * (1 + K),
            "labels_ptr": "*i64",
            "kind_ptr": "*i32",
            "drows_ptr": "*fp32",
            "state_ptr": f"*{ACC}",
            "dstudent_ptr": f"*{grad}",
            "strides": ("i32",) * (2 + K),
            "N": "i32",
            "V": "i32",
        }
        constants = _constants(maths, steps, parts)
        constants |= {"ACC": ACC, "BLOCK_V": most_columns(ACC)}
        # the bias of a column stays in the cache from row to row
        traffic = 18.0 if bias else None
        case = AotCase(
            f"kl_mlm rows {name}", kl_mlm_rows_kernel, signature, constants, ("N",), 8,
            MAX_REGISTERS, traffic=traffic, padded=name.startswith("linear"),
        )  # fmt: skip
        cases.append(case)
    return cases
