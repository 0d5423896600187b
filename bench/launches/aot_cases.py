"""The launches of the library's Triton kernels that matter, to be compiled without a GPU."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

from growkern.ops.adamw import on_triton as adamw
from growkern.ops.adamw.factors import VECTORS
from growkern.ops.backend import EXACT, tl
from growkern.ops.expand.call import COL_NOISE, COL_ROUTING, NO_NOISE
from growkern.ops.expand.many import N_FIELDS, expand_many_kernel
from growkern.ops.expand.on_triton import (
    GATHER,
    LINES_AT_ONCE,
    block_of,
    expand_kernel,
    lines_kernel,
)
from growkern.ops.loss.linear import linear_op
from growkern.ops.loss.rows import once_on_triton as once
from growkern.ops.loss.rows.on_triton import MAX_REGISTERS, lanes_of, most_columns
from growkern.ops.loss.rows.state import Maths, Steps
from growkern.ops.loss.rows.triton_kernel import kl_mlm_rows_kernel
from growkern.ops.loss.topk.tail_on_triton import tail_gradient_kernel

# of a large matrix, and with its rows in shared memory
WHOLE = 4096
EXPAND_BLOCK, WHOLE_BLOCK = block_of(8192), block_of(8192, WHOLE)
EXPAND_WARPS = EXPAND_BLOCK.pop("num_warps")
assert WHOLE_BLOCK.pop("num_warps") == EXPAND_WARPS


class AotCase(NamedTuple):
    """One launch of a kernel, which `bench.aot` compiles ahead of time.

    Pointers and integers are multiples of 16, as the launcher finds them, unless `unaligned` names
    them.

    Attributes:
        signature: the type of every run-time argument: "*bf16", "i32", "fp32", or a tuple of such
            types. In a tuple, None and 1 mean these constants.
        constexprs: the value of every other argument: constants in capitals, strides that are 1,
            pointers that are None.
        unaligned: arguments that are not multiples of 16.
        maxnreg: the most registers of a thread. None: the compiler decides.
        options: all others that the launch gives the compiler.
        narrow: why loads in the inner loop are narrower than 16 bytes. Empty: they must be 16.
        traffic: the least bytes that cross the device's memory for an element of a block. None:
            all bytes that are asked for.
        padded: whether rows begin at multiples of 16 bytes for any vocabulary.
        archs: the architectures that launch it; empty: all.
    """

    name: str
    kernel: Any
    signature: dict[str, Any]
    constexprs: dict[str, Any]
    unaligned: tuple[str, ...] = ()
    num_warps: int = 4
    maxnreg: int | None = None
    options: Mapping[str, Any] = MappingProxyType({})
    narrow: str = ""
    traffic: float | None = None
    narrow_stores: str = ""
    padded: bool = False
    archs: tuple[str, ...] = ()


def expand_cases() -> list[AotCase]:
    """The launches of growing a large model: FPI and AKI, with noise or routing; rows alone."""
    cases = []
    for dtype, acc in (("bf16", "fp32"), ("fp32", "fp32"), ("fp64", "fp64")):
        x, index, factor = f"*{dtype}", "*i64", f"*{acc}"
        fpi = {
            "sources": (x, None),
            "maps": (index, index),
            "scales": (None, factor),
            "noise": (None, None, None),
            "out_ptr": x,
            "strides": ("i32", "i32", 1, "i32", 1),
            "shape": ("i32",) * 4,
        }
        aki = {"sources": (x, x), "scales": (factor, factor)}
        rows = {"maps": (index, None), "scales": (factor, None)}
        size = {"bf16": 2, "fp32": 4, "fp64": 8}[dtype]
        constants: dict[str, Any] = {"ACC": getattr(tl, acc.replace("fp", "float")), "LARGER": 1.0}
        noisy = {"noise": (factor, "*i32", "*i32")}
        routed = {"noise": ("*i32", "*i32", "*i32")}
        ways = (
            ("FPI", fpi, NO_NOISE),
            ("FPI, noise", fpi | noisy, COL_NOISE),
            ("FPI, routing", fpi | {"scales": (None, None)} | routed, COL_ROUTING),
            ("FPI, routing, row scale", fpi | {"scales": (factor, None)} | routed, COL_ROUTING),
            ("AKI, noise", fpi | aki | noisy, COL_NOISE),
            ("AKI, routing", fpi | aki | {"scales": (None, None)} | routed, COL_ROUTING),
            ("rows", fpi | rows, NO_NOISE),
        )
        # float64 is for tests
        for name, signature, noise in ways[: 1 if dtype == "fp64" else None]:
            # as `whole_of` decides
            whole = WHOLE if name.startswith("FPI") and size <= 4 else 0
            block = WHOLE_BLOCK if whole else EXPAND_BLOCK
            narrow = "" if whole or name == "rows" else GATHER
            case = AotCase(
                f"expand {name} {dtype}", expand_kernel, signature,
                constants | block | {"NOISE": noise, "WHOLE": whole},
                # twice as wide: four elements written for each one read
                (), EXPAND_WARPS, None, EXACT, narrow, 1.25 * size,
            )  # fmt: skip
            cases.append(case)
    return cases


def lines_cases() -> list[AotCase]:
    """One call with routing, and a work list."""
    numbers = {"n": "i32", "n_copies": "i32", "offset": "i32", "seed_hi": "i32", "seed_lo": "i32"}
    ways = (("", "*i32", "*i64", None), (" of a work list", None, None, "*i64"))
    return [
        AotCase(
            f"expand lines{name}",
            lines_kernel,
            {"key_ptr": "*i32", "mult_ptr": "*i32", "packed_ptr": packed, "copies_ptr": copies}
            | {"table_ptr": table, **numbers},
            {"BLOCK_N": LINES_AT_ONCE},
            tuple(numbers),
            options=EXACT,
            narrow="a program has 256 lines, two for each thread",
            narrow_stores="a program has 256 lines, two for each thread",
        )
        for name, packed, copies, table in ways
    ]


def expand_many_cases() -> list[AotCase]:
    """The launches of growing a model in bfloat16."""
    like = ("*bf16", "*bf16", "*i64", "*fp32", "*i32")
    signature: dict[str, Any] = {"table_ptr": "*i64", "call_ptr": "*i32", "like": like}
    constants = {"ACC": tl.float32, "N_FIELDS": N_FIELDS}
    constants |= EXPAND_BLOCK | {"LARGER": 1.0}
    return [
        AotCase(
            f"expand many {name} bf16",
            expand_many_kernel,
            signature,
            constants | {"UPPER": upper, "NOISE": noise, "SCALED": scaled, "WIDE": True},
            num_warps=EXPAND_WARPS,
            options=EXACT,
            narrow=GATHER,
            traffic=2.5,
        )
        for name, upper, noise, scaled in (
            ("FPI", False, NO_NOISE, True),
            ("FPI, noise", False, COL_NOISE, True),
            ("FPI, routing", False, COL_ROUTING, False),
            ("FPI, routing, scaled", False, COL_ROUTING, True),
            ("AKI, noise", True, COL_NOISE, True),
            ("AKI, routing", True, COL_ROUTING, False),
        )
    ]


def adamw_cases() -> list[AotCase]:
    """With and without amsgrad."""
    cases = []
    for name, amsgrad in (("adamw", False), ("adamw amsgrad", True)):
        signature = {
            "tensors": ("*fp32",) * 4 + (("*fp32",) if amsgrad else (None,)),
            "rows": ("*fp32",) * adamw.ROW_VECTORS,
            "cols": ("*fp32",) * (len(VECTORS) - adamw.ROW_VECTORS),
            "numbers": ("fp32",) * 8,
            **{"M": "i32", "N": "i32"},
        }
        constants = {"AMSGRAD": amsgrad, "MAXIMIZE": False}
        constants |= {"BLOCK_M": adamw.BLOCK_M, "BLOCK_N": adamw.BLOCK_N}
        cases.append(AotCase(name, adamw.adamw_kernel, signature, constants))
    return cases


def scale_cases() -> list[AotCase]:
    """dW of a bfloat16 head."""
    signature = {"x_ptr": "*bf16", "factor_ptr": "*fp32", "n": "i32"}
    return [
        AotCase(
            "scale bf16", linear_op.scale_kernel, signature, {"BLOCK_N": linear_op.SCALED_BLOCK}
        )
    ]


def rows_cases() -> list[AotCase]:
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
            "strides": ("i32",) * (3 + K),
            "V": "i32",
        }
        widths = {"fp64": 2, "fp32": 4, "bf16": 8}
        at_once = max(widths[logits], widths[grad] if steps.grad else 0, 8 if bias else 0)
        constants = {"MATHS": maths.of_kernels(), "STEPS": (*steps, parts), "ACC": ACC}
        block = most_columns(ACC)
        constants |= {"BLOCK_V": block, "LANES": lanes_of(block, 8, at_once)}
        # the bias of a column stays in the cache from row to row
        traffic = 18.0 if bias else None
        case = AotCase(
            f"kl_mlm rows {name}", kl_mlm_rows_kernel, signature, constants, (), 8,
            MAX_REGISTERS, traffic=traffic, padded=name.startswith("linear"),
        )  # fmt: skip
        cases.append(case)
    return cases


def once_cases() -> list[AotCase]:
    """Rows of 128256 columns that are read once, which is off: with a teacher, and labels alone."""
    ways = (("bf16 gradient", 1, 2.0), ("bf16 gradient, T 1", 1, 1.0), ("no teacher", 0, 1.0))
    return [
        AotCase(
            f"kl_mlm once {name}",
            once.rows_once_kernel,
            {
                "logit_ptrs": ("*fp32",) * (1 + K),
                "labels_ptr": "*i64",
                "kind_ptr": "*i32",
                "drows_ptr": "*fp32",
                "shared": ("*fp32", "*i32"),
                "state_ptr": "*fp32",
                "grad_ptr": "*bf16",
                "strides": ("i32",) * (3 + K),
                **{"N": "i32", "V": "i32"},
            },
            {"MATHS": Maths(T).of_kernels(), "S": 16, "BLOCK_V": once.PART, "PHASE": 0},
            num_warps=8,
            maxnreg=once.REGISTERS[K],
            options={"launch_cooperative_grid": True},
            traffic=6.0 + 4 * K,
            narrow_stores="a program stores seven sums of its part, one at a time",
            archs=("sm_90",),
        )
        for name, K, T in ways
    ]


def tail_cases() -> list[AotCase]:
    """As the op launches it: plain, on float64 logits, and with every option of the kernel."""
    ways = [
        ("bf16 gradient", tl.float32, "fp32", "bf16", Maths(2.0)),
        ("temperature 1", tl.float32, "fp32", "bf16", Maths()),
        ("fp64 logits", tl.float64, "fp64", "fp32", Maths(2.0)),
        ("every option", tl.float32, "fp32", "fp32", Maths(2.0, 30.0, label_smoothing=0.1)),
    ]
    return [
        AotCase(
            f"topk_kl_mlm tail {name}",
            tail_gradient_kernel,
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
            {"MATHS": maths.of_kernels(), "ACC": ACC, "BLOCK_V": most_columns(ACC)},
            ("N",),
            8,
            MAX_REGISTERS,
            padded=True,
        )
        for name, ACC, logits, grad, maths in ways
    ]


def listed() -> list[AotCase]:
    """The launches of every kernel."""
    lists = (adamw_cases, scale_cases, expand_many_cases, expand_cases, lines_cases, rows_cases)
    return [case for cases in (*lists, once_cases, tail_cases) for case in cases()]
