"""The steps of GrowthAdamW: fused ones against the formula in float64, and the memory of all."""

import pytest
import torch

import growkern
from growkern.growth.optimizer import adamw
from growkern.ops.adamw import step as op
from growkern.ops.adamw.factors import UpdateRule
from testbed.models import GPT2, random_model
from tests.growth.watch import Watch
from tests.ops.adamw.test_adamw import SETTINGS, changed, draw, example, factors_for, truth


@pytest.mark.parametrize("shape", [(7,), (5, 6), (3, 4, 5)])
@pytest.mark.parametrize("dtype, tolerance", [(torch.float64, 1e-13), (torch.float32, 1e-6)])
@pytest.mark.parametrize("amsgrad", [False, True])
@pytest.mark.parametrize("maximize", [False, True])
def test_fused_steps_are_those_of_the_formula(shape, dtype, tolerance, amsgrad, maximize):
    rule = UpdateRule(**SETTINGS, maximize=maximize, step=3.0)
    part, factors = example(shape, dtype, amsgrad=amsgrad), factors_for(shape, dtype, even=True)
    expected, gradient = truth(part, factors, 0.3, rule), part.gradient.clone()
    assert adamw.is_old_of(factors)
    adamw.step_fused([part], adamw.uniform_of(factors), 1.0, rule)
    for x, y in zip(changed(part), expected, strict=True):
        assert torch.allclose(x.double(), y, rtol=tolerance, atol=tolerance)
    assert torch.equal(part.gradient, gradient)


def test_tensors_that_do_not_lie_alike_are_not_fused():
    part = example((4, 5), torch.float32, amsgrad=False)
    assert adamw.can_be_fused(part)
    assert not adamw.can_be_fused(part._replace(gradient=draw(5, 4, seed=1).float().T))
    assert not adamw.can_be_fused(part._replace(gradient=part.gradient.double()))


@pytest.mark.parametrize("backend", ["reference", "cpu"])
@pytest.mark.parametrize("how, rewarm", [({"n_embd": 24}, 0), ({"n_embd": 20}, 5)])
def test_no_temporary_tensor_is_as_large_as_a_parameter(how, rewarm, backend, monkeypatch):
    monkeypatch.setattr(op, "ELEMENTS_ON_CPU", 1 << 8)
    monkeypatch.setitem(op.KERNELS, "cpu", op.KERNELS[backend])
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
    # the kernel of a CPU makes none
    assert watch.largest <= 8 * (1 << 8) and (backend == "cpu" or watch.largest)


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
