"""The interpreter that the tests use, made quicker: as Triton's own before and after a launch."""

import os

import pytest
import torch

from bench.launches import interpreter
from growkern.ops.backend.launch import HAS_TRITON, jit, launch, tl

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
