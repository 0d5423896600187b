"""`adamw_step` on every backend, and PyTorch's fused kernel, against the formula in float64."""

import itertools

import pytest
import torch

from growkern.errors import GrowthError
from growkern.ops.adamw import step as op
from growkern.ops.adamw.factors import Factors, StatePart, UpdateRule
from growkern.ops.adamw.on_cpu import adamw_step_on_cpu
from growkern.ops.adamw.on_triton import adamw_step_on_triton
from growkern.ops.backend import native
from growkern.ops.backend.launch import HAS_TRITON

SETTINGS = {"lr": 1e-2, "beta1": 0.9, "beta2": 0.99, "eps": 1e-3, "weight_decay": 0.1}


def draw(*shape, seed):
    rng = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=rng, dtype=torch.float64)


def example(shape, dtype, *, amsgrad):
    part = [draw(*shape, seed=1), draw(*shape, seed=2), draw(*shape, seed=3)]
    part += [draw(*shape, seed=k).square() for k in ((4, 5) if amsgrad else (4,))]
    return StatePart(*(x.to(dtype) for x in part))


def factors_for(shape, dtype, *, even):
    """One vector per axis; `even`: all numbers of a vector are the same."""
    dtype = torch.float64 if dtype == torch.float64 else torch.float32

    def vectors(seed):
        found = []
        for dim, n in enumerate(shape):
            vector = draw(n, seed=seed + dim).abs() + 0.25
            vector = vector[:1].expand(n) if even else vector
            found.append(vector.reshape([-1 if d == dim else 1 for d in range(len(shape))]))
        return tuple(x.to(dtype) for x in found)

    old = tuple(x > (0.0 if even else 0.8) for x in vectors(30))
    centre = (draw(*shape, seed=40).to(dtype),) if len(shape) == 1 and not even else ()
    return Factors(vectors(10), vectors(20), old, centre)


EXAMPLES = ((example, {"amsgrad": False}), (factors_for, {"even": False}))


def truth(part, factors, ratio, rule):
    """One step in float64, entry by entry: the new weight, m, v and the largest v."""
    p, g, m, v, *largest = (x.double() for x in part.tensors())
    u, e, old = torch.ones_like(p), torch.ones_like(p), torch.ones_like(p, dtype=torch.bool)
    for a, b, c in zip(factors.lr, factors.eps, factors.old, strict=True):
        u, e, old = u * a, e * b, old & c
    g = -g if rule.maximize else g
    m = rule.beta1 * m + (1 - rule.beta1) * g
    v = rule.beta2 * v + (1 - rule.beta2) * g * g
    top = [torch.maximum(largest[0], v)] if largest else []
    root = ((top or [v])[0] / (1 - rule.beta2**rule.step)).sqrt() + rule.eps * e
    centre = factors.centre[0].double() if factors.centre else 0
    step = u * m / (1 - rule.beta1**rule.step) / root + rule.weight_decay * (p - centre)
    share = torch.where(old, torch.ones_like(p), ratio)
    return [p - rule.lr * share * step, m, v, *top]


def changed(part):
    """All tensors that a step writes."""
    return [part.value, part.mean, part.square, *part.tensors()[4:]]


def way(name):
    """A step by one backend: its name, with the instruction set on a CPU."""
    if name.startswith("cpu"):
        isa = int(name.removeprefix("cpu "))
        return lambda *args: adamw_step_on_cpu(*args, isa=isa)
    return {"triton": adamw_step_on_triton, "reference": op.step_in_blocks}[name]


WAYS = ["reference", *(f"cpu {isa}" for isa in native.available_isas())]
WAYS += ["triton"] if HAS_TRITON else []


# bfloat16 has 8 binary digits, and is rounded once
TOLERANCES = [(torch.float64, 1e-13), (torch.float32, 1e-6), (torch.bfloat16, 2**-8)]


# a piece of the CPU kernel has 8192 columns, a block of the Triton kernel 4 x 512
@pytest.mark.parametrize("shape", [(7,), (8200,), (5, 6), (1, 6), (9, 517), (2, 8200), (3, 4, 5)])
@pytest.mark.parametrize("dtype, tolerance", TOLERANCES)
@pytest.mark.parametrize("amsgrad", [False, True])
@pytest.mark.parametrize("maximize", [False, True])
@pytest.mark.parametrize("name", WAYS)
def test_steps_follow_the_formula(shape, dtype, tolerance, amsgrad, maximize, name, monkeypatch):
    if (name != "reference" and len(shape) > 2) or (name == "triton" and dtype == torch.float64):
        return check_refused(shape, dtype, name)
    rule = UpdateRule(**SETTINGS, maximize=maximize, step=3.0)
    part, factors = example(shape, dtype, amsgrad=amsgrad), factors_for(shape, dtype, even=False)
    expected, gradient = truth(part, factors, 0.3, rule), part.gradient.clone()
    monkeypatch.setattr(op, "ELEMENTS_ON_CPU", 8)
    way(name)(part, factors, 0.3, rule)
    for x, y in zip(changed(part), expected, strict=True):
        assert torch.allclose(x.double(), y, rtol=tolerance, atol=1e-6)
    assert torch.equal(part.gradient, gradient)


@pytest.mark.parametrize("name", WAYS)
@pytest.mark.parametrize("same", list(itertools.product([False, True], repeat=3)))
@pytest.mark.parametrize("ratio", [0.3, 1.0])
def test_columns_that_share_a_factor(name, same, ratio):
    """The CPU kernel folds their vectors into those of the rows."""
    part, factors = (make((5, 300), torch.float32, **how) for make, how in EXAMPLES)
    rule = UpdateRule(**SETTINGS, maximize=False, step=3.0)
    vectors = (factors.lr, factors.eps, factors.old)
    found = [
        (rows, columns[:, :1].expand(1, 300)) if is_same else (rows, columns)
        for (rows, columns), is_same in zip(vectors, same, strict=True)
    ]
    factors = Factors(*found)
    expected = truth(part, factors, ratio, rule)
    way(name)(part, factors, ratio, rule)
    for x, y in zip(changed(part), expected, strict=True):
        assert torch.allclose(x.double(), y, rtol=1e-6, atol=1e-6)


def check_refused(shape, dtype, name):
    part, factors = example(shape, dtype, amsgrad=False), factors_for(shape, dtype, even=False)
    rule = UpdateRule(**SETTINGS, maximize=False, step=1.0)
    with pytest.raises(GrowthError, match="does not do this operation"):
        op.adamw_step(part, factors, 1.0, rule, backend=name.split()[0])


def test_the_fastest_backend_that_does_the_tensors_is_taken(monkeypatch):
    seen = []
    for name in op.KERNELS:
        monkeypatch.setitem(op.KERNELS, name, lambda *_, name=name: seen.append(name))
    rule = UpdateRule(**SETTINGS, maximize=False, step=1.0)
    part = example((4, 5), torch.float32, amsgrad=False)
    factors = factors_for((4, 5), torch.float32, even=False)
    across = part._replace(gradient=draw(5, 4, seed=1).float().T)
    half = StatePart(*(x.half() for x in part.tensors()))
    empty = StatePart(*(x[:0] for x in part.tensors()))
    for one in (part, across, half, empty):
        op.adamw_step(one, factors, 1.0, rule)
    assert seen == ["cpu" if native.loaded() else "reference", "reference", "reference"]


@pytest.mark.parametrize("threads", [1, 3])
def test_threads_share_the_pieces(threads):
    shape = (3, 16500)
    rule = UpdateRule(**SETTINGS, maximize=False, step=2.0)
    parts = [example(shape, torch.float32, amsgrad=True) for _ in range(2)]
    factors, before = factors_for(shape, torch.float32, even=False), torch.get_num_threads()
    if native.loaded() is None:
        pytest.skip(native.reason())
    torch.set_num_threads(threads)
    try:
        adamw_step_on_cpu(parts[0], factors, 1.0, rule)
    finally:
        torch.set_num_threads(before)
    expected = truth(parts[1], factors, 1.0, rule)
    for x, y in zip(changed(parts[0]), expected, strict=True):
        assert torch.allclose(x.double(), y, rtol=1e-6, atol=1e-6)
