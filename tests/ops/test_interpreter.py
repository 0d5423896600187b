"""The interpreter that the tests use: made quicker, and converting bfloat16 as GPUs do."""

import os
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from growkern.ops.backend.launch import HAS_TRITON, jit, launch, tl
from testbed import interpreter

pytestmark = pytest.mark.skipif(
    not HAS_TRITON or os.environ.get("TRITON_INTERPRET") != "1", reason="kernels are compiled here"
)


@jit
def twice(x):
    return tl.where(x > 1, x + x, x)


@jit
def store_twice(out, N: tl.constexpr):
    n = tl.arange(0, N)
    tl.store(out + n, twice(twice(tl.load(out + n))))


@jit
def store_converted(x, out, N: tl.constexpr):
    n = tl.arange(0, N)
    tl.store(out + n, tl.load(x + n).to(out.dtype.element_ty))


@jit
def fail(out, N: tl.constexpr):
    tl.store(out, twice(tl.load(out + tl.arange(0, N))).no_such_attribute)


def test_the_language_is_replaced_once_a_launch_and_restored(monkeypatch):
    from triton.runtime import interpreter as triton_interpreter

    assert triton_interpreter._patch_lang.__self__.__class__.__module__ == interpreter.__name__
    patch, calls = triton_interpreter._patch_builtin, []
    monkeypatch.setattr(
        triton_interpreter, "_patch_builtin", lambda *a: calls.append(a) or patch(*a)
    )
    before = tl.where, tl.load, tl.reduce, tl.tensor.sum
    for programs in (1, 3):
        out = torch.arange(4.0)
        launch(store_twice, programs, out, out, N=4)
        # 0, 1 stay; 2 and 3 are four times as large after each program
        assert out.tolist() == [0, 1, 2 * 4**programs, 3 * 4**programs]
        assert (tl.where, tl.load, tl.reduce, tl.tensor.sum) == before
        assert 0 < len(calls) <= 4
        calls.clear()


def test_a_launch_that_fails_restores_the_language():
    before, out = tl.where, torch.arange(4.0)
    with pytest.raises(Exception, match="no_such_attribute"):
        launch(fail, 1, out, out, N=4)
    assert tl.where is before
    launch(store_twice, 1, out, out, N=4)
    assert out.tolist() == [0, 1, 8, 12]


def converted(x, dtype):
    out = torch.empty_like(x, dtype=dtype)
    launch(store_converted, 1, x, x, out, N=len(x))
    return out


def test_bfloat16_is_converted_as_pytorch_does(monkeypatch):
    """All bfloat16 numbers, also subnormal ones, and float32 numbers halfway between and beside."""
    from triton.runtime import interpreter as triton_interpreter

    every = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
    wide = every.float()
    assert torch.equal(converted(every, torch.float32).view(torch.int32), wide.view(torch.int32))
    for lower in (0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF):
        near = (wide.view(torch.int32) | lower).view(torch.float32)
        found, truth = converted(near, torch.bfloat16), near.to(torch.bfloat16)
        assert torch.equal(found.isnan(), truth.isnan())
        is_number = ~truth.isnan()
        assert torch.equal(
            found.view(torch.int16)[is_number], truth.view(torch.int16)[is_number]
        ), lower
    # the interpreter's own conversion: it rounds nothing, and reads subnormal numbers wrongly
    own = triton_interpreter._convert_float.__closure__
    original = next(
        cell.cell_contents
        for cell in own
        if getattr(cell.cell_contents, "__name__", "") == "_convert_float"
    )
    monkeypatch.setattr(triton_interpreter, "_convert_float", original)
    is_subnormal = (wide != 0) & (wide.abs() < torch.finfo(torch.bfloat16).smallest_normal)
    wrong = converted(every, torch.float32) != wide
    assert torch.equal(wrong & ~wide.isnan(), is_subnormal)


def test_a_scalar_of_triton_bounds_a_loop_with_new_numpy(monkeypatch):
    """As in Triton 3.5 and 3.6: scalars are arrays of one element, which NumPy refuses as int."""
    from triton.runtime import interpreter as triton_interpreter

    class Scalar:
        handle = SimpleNamespace(data=np.array([3]))

    patched = []
    monkeypatch.setattr(triton_interpreter, "_patch_lang_tensor", lambda *a: patched.append(a))
    interpreter.allow_new_numpy()
    triton_interpreter._patch_lang_tensor(Scalar, "scope")
    assert patched == [(Scalar, "scope")] and list(range(Scalar())) == [0, 1, 2]


def test_the_tests_run_with_new_numpy():
    from triton.runtime import interpreter as triton_interpreter

    assert getattr(triton_interpreter._patch_lang_tensor, "allows_new_numpy", False)
