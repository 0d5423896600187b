"""The tail's gradient in Triton.

Equations are numbered in `topk_kl_mlm_loss.py`. Shape letters used in this file: N rows, V
vocabulary.
"""

from torch import Tensor

from growkern.ops.backend.aot import AotCase
from growkern.ops.backend.launch import acc_dtype, jit, next_power_of_2, tl
from growkern.ops.backend.tuned import launch_choice
from growkern.ops.loss.rows.on_triton import MAX_REGISTERS, most_columns
from growkern.ops.loss.rows.options import Rows
from growkern.ops.loss.rows.triton_kernel import _load_logits, _zero_row


@jit
def _tail_gradient_kernel(
    student_ptr,  # (N, V)  capped already
    labels_ptr,  # (N,)
    kind_ptr,  # (N,)
    tail_ptr,  # (5, N)  as in `topk/buckets.py`
    dstudent_ptr,  # (N, V)  out, may be the memory of the logits
    strides,  # rows of student, dstudent
    N,
    V,
    MATHS: tl.constexpr,  # 1 / T, softcap (0: none), label smoothing
    ACC: tl.constexpr,
    BLOCK_V: tl.constexpr,
):
    INV_T: tl.constexpr = MATHS[0]
    CAP: tl.constexpr = MATHS[1]
    # int64: n * stride passes 2**31 at 65k rows x 32k vocabulary
    n = tl.program_id(0).to(tl.int64)
    student_ptr += n * strides[0]
    dstudent_ptr += n * strides[1]
    tail_ptr += n
    kind = tl.load(kind_ptr + n)
    if kind == 0:
        _zero_row(dstudent_ptr, V, BLOCK_V)
    else:
        label = tl.where((kind & 1) != 0, tl.load(labels_ptr + n), -1)
        m = tl.load(tail_ptr)
        factor = tl.load(tail_ptr + N)
        on_tail = tl.load(tail_ptr + 2 * N)
        at_label = tl.load(tail_ptr + 3 * N)
        everywhere = tl.load(tail_ptr + 4 * N)
        for start in range(0, V, BLOCK_V):
            v = start + tl.arange(0, BLOCK_V)
            s = _load_logits(student_ptr, v, V, 0, ACC)  # (BLOCK_V,)
            e = tl.exp(s - m)
            g = tl.where(v == label, at_label, factor * e)
            if INV_T == 1:
                g += on_tail * e
            else:
                g += on_tail * tl.exp((s - m) * INV_T)
            if MATHS[2] != 0:
                g -= everywhere
            if CAP != 0:
                g *= 1 - (s / CAP) * (s / CAP)
            # the gradient may be narrower than the logits it overwrites: all of this block is read
            # before any of it is written, and a write never reaches past the block just read
            tl.debug_barrier()
            tl.store(dstudent_ptr + v, g.to(dstudent_ptr.dtype.element_ty), mask=v < V)


def tail_gradient_on_triton(rows: Rows, tail_5N: Tensor, dstudent_NV: Tensor) -> None:
    """Write the gradient of the tail, which may overwrite the logits; rows of kind 0 get zeros.

    What comes out in the tokens' places is to be overwritten.
    """
    student_NV, _, labels_N, kind_N, V, maths, _ = rows
    if V == 0:
        return
    ACC = acc_dtype(student_NV)[1]
    choice = launch_choice(
        "topk_kl_mlm_rows", student_NV, V, BLOCK_V=most_columns(ACC), num_warps=8,
        maxnreg=MAX_REGISTERS,
    )  # fmt: skip
    choice["BLOCK_V"] = min(choice["BLOCK_V"], next_power_of_2(V))
    _tail_gradient_kernel[(len(student_NV),)](
        student_NV,
        labels_N,
        kind_N,
        tail_5N.contiguous(),
        dstudent_NV,
        (student_NV.stride(0), dstudent_NV.stride(0)),
        len(student_NV),
        V,
        MATHS=(1 / maths.temperature, maths.softcap, maths.label_smoothing),
        ACC=ACC,
        **choice,
    )


def aot_cases() -> list[AotCase]:
    """As the op launches it: plain, on float64 logits, and with all that the kernel knows."""
    ways = [
        ("bf16 gradient", tl.float32, "fp32", "bf16", (0.5, 0.0, 0.0)),
        ("temperature 1", tl.float32, "fp32", "bf16", (1.0, 0.0, 0.0)),
        ("fp64 logits", tl.float64, "fp64", "fp32", (0.5, 0.0, 0.0)),
        ("every option", tl.float32, "fp32", "fp32", (0.5, 30.0, 0.1)),
    ]
    return [
        AotCase(
            f"topk_kl_mlm tail {name}",
            _tail_gradient_kernel,
            {
                "student_ptr": f"*{logits}",
                "labels_ptr": "*i64",
                "kind_ptr": "*i32",
                "tail_ptr": f"*{logits}",
                "dstudent_ptr": f"*{grad}",
                "strides": ("i32",) * 2,
                "N": "i32",
                "V": "i32",
            },
            {"MATHS": maths, "ACC": ACC, "BLOCK_V": most_columns(ACC)},
            ("N",),
            8,
            MAX_REGISTERS,
        )
        for name, ACC, logits, grad, maths in ways
    ]
