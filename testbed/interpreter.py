"""Makes Triton's interpreter quicker, lets it round as GPUs do, and lets it work with new NumPy.

The interpreter replaces the functions of `triton.language` at every call of a device function, and
looks up a table of dtypes that it first makes anew. Both took half of the time of a test.

It truncates float32 to bfloat16, and it reads subnormal bfloat16 numbers as other numbers. Compiled
kernels round to nearest and read all numbers (`tests/ops/expand/test_expand_rounding.py`).
"""

import functools
import os
from collections.abc import Callable
from typing import Any

import numpy as np

from growkern.ops.backend import HAS_TRITON


def _interpreter() -> Any:
    """Triton's interpreter, if it interprets the kernels of this process."""
    if not HAS_TRITON or os.environ.get("TRITON_INTERPRET") != "1":
        return None
    from triton.runtime import interpreter

    return interpreter


class _Launch:
    """The namespaces of functions that already see the replaced language, inside one launch."""

    def __init__(self, interpreter: Any) -> None:
        self._interpreter, self._patch = interpreter, interpreter._patch_lang
        self._namespaces: set[int] = set()

    def patch(self, function: Any) -> Any:
        """As Triton's `_patch_lang`. Only the first call of a launch restores anything."""
        namespace, is_first = id(function.__globals__), not self._namespaces
        if namespace in self._namespaces:
            return self._interpreter._LangPatchScope()
        scope = self._patch(function)
        self._namespaces.add(namespace)
        if is_first:
            restore = scope.restore

            def end() -> None:
                self._namespaces.clear()
                restore()

            scope.restore = end
        return scope


def _once_per_dtype(find: Callable) -> Callable:
    """A function of a Triton dtype that keeps its results. A dtype's name tells all of it."""
    results: dict[str, Any] = {}

    @functools.wraps(find)
    def kept(dtype: Any) -> Any:
        name = dtype.name
        if name not in results:
            results[name] = find(dtype)
        return results[name]

    return kept


def make_quick() -> None:
    """Replace the slow parts of the interpreter in this process, if it interprets kernels."""
    if (interpreter := _interpreter()) is None:
        return
    if not hasattr(interpreter._patch_lang, "__self__"):
        interpreter._patch_lang = _Launch(interpreter).patch
        interpreter._get_np_dtype = _once_per_dtype(interpreter._get_np_dtype)


def _to_float32(bits: np.ndarray) -> np.ndarray:
    """bfloat16 to float32, both as bit patterns: the same number with 16 more digits."""
    return bits.astype(np.uint32) << np.uint32(16)


def _to_bfloat16(bits: np.ndarray) -> np.ndarray:
    """float32 to bfloat16, both as bit patterns: to nearest, halfway cases to even."""
    upper = bits >> np.uint32(16)
    # the largest magnitude is a NaN, which wraps around here and is replaced
    nearest = (bits + np.uint32(0x7FFF) + (upper & np.uint32(1))) >> np.uint32(16)
    is_nan = (bits & np.uint32(0x7FFFFFFF)) > np.uint32(0x7F800000)
    return np.where(is_nan, upper | np.uint32(0x40), nearest).astype(np.uint16)


def convert_as_gpus() -> None:
    """Let kernels that are interpreted convert bfloat16 as compiled ones do, in this process."""
    if (interpreter := _interpreter()) is None:
        return
    convert = interpreter._convert_float
    if getattr(convert, "as_gpus", False):
        return
    ways = {("bf16", "fp32"): _to_float32, ("fp32", "bf16"): _to_bfloat16}

    def converted(data: np.ndarray, source: Any, target: Any, rounding_mode: Any) -> np.ndarray:
        way = ways.get((source.name, target.name))
        if way is None or rounding_mode == interpreter._ir.ROUNDING_MODE.RTZ:
            return convert(data, source, target, rounding_mode)
        return way(data.view(np.dtype(f"uint{source.primitive_bitwidth}")))

    converted.as_gpus = True  # type: ignore[attr-defined]
    interpreter._convert_float = converted


def allow_new_numpy() -> None:
    """Let kernels that are interpreted use a scalar as the bound of a loop.

    Triton 3.5 and 3.6 call int() on an array with one element, which NumPy refuses from 2.4 on.
    Triton 3.7 does not. On a GPU nothing is interpreted.
    """
    if (interpreter := _interpreter()) is None:
        return
    patch = interpreter._patch_lang_tensor
    if getattr(patch, "allows_new_numpy", False):
        return

    def patched(tensor: Any, *scope: Any) -> None:
        patch(tensor, *scope)
        # the scope of Triton's own patch puts back what was there before
        tensor.__index__ = lambda self: int(self.handle.data.item())

    patched.allows_new_numpy = True  # type: ignore[attr-defined]
    interpreter._patch_lang_tensor = patched
