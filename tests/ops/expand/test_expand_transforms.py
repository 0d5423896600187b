"""Derivatives of `expand` by torch.func, forward-mode AD and batches, against plain indexing."""

import pytest
import torch
from torch.autograd import forward_ad
from torch.autograd.functional import jacobian
from torch.func import grad, hessian, jacfwd, jacrev, jvp, vmap

from growkern.errors import GrowthError
from growkern.ops.backend.choose import describe_backends
from growkern.ops.expand.call import Routing
from growkern.ops.expand.expand_op import expand

BACKENDS = [b.name for b in describe_backends() if b.live and b.name in ("reference", "cpu")]
R, C, COPIES = 4, 3, 2
INDEX = torch.arange(COPIES * R) % R
UPPER_INDEX = torch.arange(2 * R)


def numbers(*shape, seed):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def plain(weight):
    return weight.index_select(0, INDEX)


def cubed(function):
    return lambda x: function(x).pow(3).sum()


@pytest.mark.parametrize("backend", BACKENDS)
def test_every_transform_is_that_of_plain_indexing(backend):
    """The tangent was 0, and torch.func.grad failed."""
    x, direction = numbers(R, C, seed=1), numbers(R, C, seed=2)

    def call(weight):
        return expand(weight, rows=INDEX, backend=backend)

    assert torch.equal(jvp(call, (x,), (direction,))[1], plain(direction))
    with forward_ad.dual_level():
        tangent = forward_ad.unpack_dual(call(forward_ad.make_dual(x, direction))).tangent
        assert torch.equal(tangent, plain(direction))
    for transform in (grad, hessian):
        assert torch.allclose(transform(cubed(call))(x), transform(cubed(plain))(x))
    truth = jacfwd(plain)(x)
    assert torch.equal(jacfwd(call)(x), truth) and torch.equal(jacrev(call)(x), truth)
    assert torch.equal(jacobian(call, x, vectorize=True), truth)
    both = torch.stack([x, direction])
    assert torch.equal(vmap(call)(both), vmap(plain)(both))
    assert torch.equal(vmap(call, in_dims=1)(both.movedim(0, 1)), vmap(plain)(both))
    assert torch.equal(jvp(call, (x[:, 0],), (direction[:, 0],))[1], plain(direction[:, 0]))


ROUTING = Routing(0, torch.stack([torch.arange(2 * R) // R, torch.full((2 * R,), 2)], 1), 3.0)
OPTIONS = {
    "scale": {"rows": INDEX, "row_scale": torch.linspace(-1, 2, 2 * R), "out_dtype": torch.float32},
    "noise": {"rows": INDEX, "row_noise": torch.linspace(-0.5, 0.5, 2 * R)},
    "routing": {"rows": INDEX, "routing": ROUTING},
    "upper": {"rows": UPPER_INDEX, "upper": numbers(R, C, seed=3)},
}


@pytest.mark.parametrize("name", OPTIONS)
def test_forward_mode_agrees_with_backward(name):
    options = OPTIONS[name]
    x, direction = numbers(R, C, seed=1), numbers(R, C, seed=2)

    def check(call):
        slopes = torch.einsum("mnrc,rc->mn", jacobian(call, x).double(), direction)
        assert slopes.abs().max() > 0.1
        assert torch.allclose(jvp(call, (x,), (direction,))[1].double(), slopes, atol=1e-6)

    check(lambda weight: expand(weight, **options))
    if name == "upper":
        check(lambda upper: expand(x, **{**options, "upper": upper}))


def test_what_has_no_derivative_is_refused():
    x, factor = numbers(R, C, seed=1), torch.ones(2 * R)
    out = torch.zeros(2 * R, C, dtype=torch.float64)
    with pytest.raises(GrowthError, match="out= has no gradient"):
        jvp(lambda weight: expand(weight, rows=INDEX, out=out), (x,), (x,))
    with pytest.raises(GrowthError, match="row_scale gets no gradient"):
        jvp(lambda scale: expand(x, rows=INDEX, row_scale=scale), (factor,), (factor,))
    with pytest.raises(GrowthError, match="takes no batch of gradients"):
        forward = {"vectorize": True, "strategy": "forward-mode"}
        jacobian(lambda weight: expand(weight, rows=INDEX), x, **forward)
