"""The CPU backend of `adamw_step`: passes a call to the compiled library (csrc/cpu/adamw.h)."""

import ctypes

import torch

from growkern.ops.adamw.factors import VECTORS, Factors, StatePart, UpdateRule
from growkern.ops.backend import native

# below this many entries a second thread costs more than it saves
PARALLEL_ELEMENTS = 1 << 15

_POINTERS = ("value", "gradient", "mean", "square", "largest", *VECTORS)
_FACTORS = ("lr", "beta1", "beta2", "eps", "weight_decay", "correction1", "correction2", "ratio")
_NUMBERS = ("type", "threads", "isa")


class AdamwArgs(ctypes.Structure):
    """struct AdamwArgs of `csrc/cpu/adamw.h`."""

    _fields_ = (
        [(name, ctypes.c_void_p) for name in _POINTERS]
        + [(name, ctypes.c_int64) for name in ("M", "N")]
        + [(name, ctypes.c_double) for name in _FACTORS]
        + [(name, ctypes.c_int32) for name in _NUMBERS]
        + [("maximize", ctypes.c_bool)]
    )


def adamw_step_on_cpu(
    part: StatePart, factors: Factors, ratio: float, rule: UpdateRule, isa: int | None = None
) -> None:
    """As `adamw_step`, with the instruction set `isa` of `native.ISA_NAMES`; None: the best."""
    lib = native.loaded()
    assert lib is not None
    tensors = [part.value, part.gradient, part.mean, part.square, part.largest]
    args = AdamwArgs(
        *(None if x is None else x.data_ptr() for x in tensors),
        *(None if x is None else x.data_ptr() for x in factors.folded.values()),
        *part.sizes(),
        *(rule.lr, rule.beta1, rule.beta2, rule.eps, rule.weight_decay),
        1 - rule.beta1**rule.step,
        1 - rule.beta2**rule.step,
        ratio,
        native.TYPES[part.value.dtype],
        torch.get_num_threads() if part.value.numel() >= PARALLEL_ELEMENTS else 1,
        lib.growkern_best_isa() if isa is None else isa,
        rule.maximize,
    )
    if lib.growkern_adamw(ctypes.byref(args)):
        raise RuntimeError(f"adamw_step: this processor has no {native.ISA_NAMES[args.isa]}")
