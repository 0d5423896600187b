"""The steps of GrowthAdamW against the formula in float64: fused, in blocks, and their memory."""

import math

import pytest
import torch

import growkern
from growkern.growth.optimizer import steps
from growkern.growth.optimizer.moments import EntryFactors
from tests.growth.models import GPT2, random_model
from tests.growth.watch import Watch

SETTINGS = {"lr": 1e-2, "beta1": 0.9, "beta2": 0.99, "eps": 1e-3, "weight_decay": 0.1}


def draw(*shape, seed):
    rng = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=rng, dtype=torch.float64)


def example(shape, dtype, *, amsgrad):
    part = [draw(*shape, seed=1), draw(*shape, seed=2), draw(*shape, seed=3)]
    part += [draw(*shape, seed=k).square() for k in ((4, 5) if amsgrad else (4,))]
    return steps.Part(*(x.to(dtype) for x in part))


def factors_for(shape, dtype, *, even):
    """One vector per axis; `even`: all numbers of a vector are the same."""

    def vectors(seed):
        found = []
        for dim, n in enumerate(shape):
            vector = draw(n, seed=seed + dim).abs() + 0.25
            vector = vector[:1].expand(n) if even else vector
            found.append(vector.reshape([-1 if d == dim else 1 for d in range(len(shape))]))
        return tuple(x.to(dtype) for x in found)

    old = tuple(x > (0.0 if even else 0.8) for x in vectors(30))
    centre = (draw(*shape, seed=40).to(dtype),) if len(shape) == 1 and not even else ()
    return EntryFactors(vectors(10), vectors(20), old, centre)


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


@pytest.mark.parametrize("shape", [(7,), (5, 6), (1, 6), (3, 4, 5)])
@pytest.mark.parametrize("dtype, tolerance", [(torch.float64, 1e-13), (torch.float32, 1e-6)])
@pytest.mark.parametrize("amsgrad", [False, True])
@pytest.mark.parametrize("maximize", [False, True])
@pytest.mark.parametrize("way", ["fused", "blocks", "one block"])
def test_steps_are_those_of_the_formula(
    shape, dtype, tolerance, amsgrad, maximize, way, monkeypatch
):
    rule = steps.Rule(**SETTINGS, maximize=maximize, step=3.0)
    part = example(shape, dtype, amsgrad=amsgrad)
    factors = factors_for(shape, dtype, even=way == "fused")
    expected = truth(part, factors, 0.3, rule)
    monkeypatch.setattr(steps, "ELEMENTS_ON_CPU", 8 if way == "blocks" else 1 << 17)
    gradient = part.gradient.clone()
    if way == "fused":
        uniform, is_old = steps.uniform_of(factors), steps.is_old_of(factors)
        assert is_old
        steps.step_fused([part], uniform, 1.0, rule)
    else:
        steps.step_in_blocks(part, factors, 0.3, rule)
    found = [part.value, part.mean, part.square, *filter(lambda x: x is not None, part[4:])]
    for x, y in zip(found, expected, strict=True):
        assert torch.allclose(x.double(), y, rtol=tolerance, atol=tolerance)
    assert torch.equal(part.gradient, gradient)


def test_only_equal_factors_are_uniform():
    even, uneven = (factors_for((4, 5), torch.float64, even=x) for x in (True, False))
    found = steps.uniform_of(even)
    assert found.lr == pytest.approx(math.prod(x.flatten()[0].item() for x in even.lr))
    assert found.eps == pytest.approx(math.prod(x.flatten()[0].item() for x in even.eps))
    assert steps.uniform_of(uneven) is None
    assert steps.uniform_of(factors_for((4,), torch.float64, even=False)) is None
    assert steps.is_old_of(uneven) is None
    none = EntryFactors(even.lr, even.eps, (even.old[0], ~even.old[1]))
    assert steps.is_old_of(none) is False


def test_tensors_that_do_not_lie_alike_are_not_fused():
    part = example((4, 5), torch.float32, amsgrad=False)
    assert steps.can_be_fused(part)
    assert not steps.can_be_fused(part._replace(gradient=draw(5, 4, seed=1).float().T))
    assert not steps.can_be_fused(part._replace(gradient=part.gradient.double()))


@pytest.mark.parametrize("how, rewarm", [({"n_embd": 24}, 0), ({"n_embd": 20}, 5)])
def test_no_temporary_tensor_is_as_large_as_a_parameter(how, rewarm, monkeypatch):
    monkeypatch.setattr(steps, "ELEMENTS_ON_CPU", 1 << 8)
    target = growkern.grow(random_model("GPT2LMHeadModel", GPT2), **how)
    optimizer = growkern.GrowthAdamW(
        target.named_parameters(), target.growth_plan, rewarm_steps=rewarm
    )
    for p in target.parameters():
        p.grad = torch.ones_like(p)
    optimizer.step()
    known = {x.untyped_storage().data_ptr() for p in target.parameters() for x in (p, p.grad)}
    for state in optimizer.state.values():
        known |= {x.untyped_storage().data_ptr() for x in state.values()}
    with NewMemory(known) as watch:
        optimizer.step()
    assert 0 < watch.largest <= 8 * (1 << 8)


class NewMemory(Watch):
    """The largest memory that is none of the known tensors'."""

    def __init__(self, known):
        super().__init__()
        self.known, self.largest = known, 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        if isinstance(result, torch.Tensor):
            memory = result.untyped_storage()
            if memory.data_ptr() not in self.known:
                self.largest = max(self.largest, memory.nbytes())
        return result
