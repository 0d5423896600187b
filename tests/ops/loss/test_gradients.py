"""Gradients by torch.func, by forward-mode AD and in half precision: right, or the loss says so."""

import warnings

import pytest
import torch
from torch.autograd import forward_ad
from torch.autograd.functional import jacobian
from torch.func import grad, jacfwd, jvp, vjp, vmap
from torch.fx.experimental.proxy_tensor import make_fx

import growkern
from growkern import GrowthError
from growkern.ops.loss import kl_mlm_loss as module
from tests.ops.loss.loss_inputs import BACKENDS

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
LOSSES = ("logits", "hidden", "weight", "bias", "topk")
N, V, H, H_TEACHER = 6, 11, 5, 4


def numbers(*shape, seed):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE)


def loss_of(name, backend, reduction="mean"):
    """A loss as a function of one tensor, that tensor, and a direction."""
    options = {"backend": backend, "reduction": reduction, "temperature": 2.0}
    labels = torch.arange(N, device=DEVICE) % V
    labels[1] = -100
    teacher = numbers(N, V, seed=1)
    x_NH, weight_VH, bias_V = (numbers(*s, seed=2) for s in ((N, H), (V, H), (V,)))
    heads = {"hidden": x_NH, "weight": weight_VH, "bias": bias_V, "topk": x_NH}
    start = heads.get(name, numbers(N, V, seed=3))
    direction = numbers(*start.shape, seed=4)
    t_NH, t_VH = numbers(N, H_TEACHER, seed=5), numbers(V, H_TEACHER, seed=6)
    logprobs, ids = teacher.log_softmax(-1).topk(4)

    def call(p):
        if name == "logits":
            return growkern.kl_mlm_loss(p, teacher, labels, **options)
        if name == "topk":
            return growkern.topk_kl_mlm_loss(p, weight_VH, ids, logprobs, labels, **options)
        given = {"hidden": x_NH, "weight": weight_VH, "bias": bias_V, name: p}
        return growkern.linear_kl_mlm_loss(
            given["hidden"], given["weight"], t_NH, t_VH, labels,
            student_bias=given["bias"], **options,
        )  # fmt: skip

    return call, start, direction


def gradient(call, at):
    """The gradient by backward, which other tests compare with float64."""
    at = at.clone().requires_grad_()
    return torch.autograd.grad(call(at), at)[0]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", LOSSES)
def test_grad_and_vjp_are_those_of_backward(name, backend):
    call, at, _ = loss_of(name, backend)
    expected = gradient(call, at)
    assert expected.abs().max() > 1e-3
    assert torch.equal(grad(call)(at), expected)
    value, pull = vjp(call, at)
    assert torch.equal(value, call(at))
    assert torch.equal(pull(torch.tensor(2.0, device=DEVICE))[0], 2 * expected)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", LOSSES)
def test_vjp_of_the_loss_of_every_row(name, backend):
    call, at, _ = loss_of(name, backend, reduction="none")
    upstream = numbers(N, seed=7)
    expected = gradient(lambda p: (call(p) * upstream).sum(), at)
    _, pull = vjp(call, at)
    assert torch.equal(pull(upstream)[0], expected)


@pytest.mark.parametrize("name", LOSSES)
def test_the_reference_has_every_derivative(name):
    call, at, direction = loss_of(name, "reference")
    expected = gradient(call, at)
    slope = (expected * direction).sum()
    assert torch.allclose(jvp(call, (at,), (direction,))[1], slope, rtol=1e-5)
    assert torch.allclose(jacfwd(call)(at), expected, atol=1e-6)
    curve = jvp(grad(call), (at,), (direction,))[1]
    twice = gradient(lambda p: (grad(call)(p) * direction).sum(), at)
    assert torch.allclose(curve, twice, atol=1e-5)
    both = vmap(call)(torch.stack([at, 2 * at]))
    assert torch.allclose(both, torch.stack([call(at), call(2 * at)]), rtol=1e-5)


@pytest.mark.parametrize("backend", BACKENDS[1:])
@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_kernels_refuse_forward_mode(name, backend, reduction):
    """They returned a tangent of 0."""
    call, at, direction = loss_of(name, backend, reduction)
    with pytest.raises(GrowthError, match=r"no forward-mode derivative.*backend='reference'"):
        jvp(call, (at,), (direction,))
    with pytest.raises(GrowthError, match="no forward-mode derivative"):
        jacfwd(call)(at)
    for p in (at, at.clone().requires_grad_()):
        with forward_ad.dual_level(), pytest.raises(GrowthError, match="no forward-mode"):
            call(forward_ad.make_dual(p, direction))
    # a tangent of another tensor is no reason to refuse
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(direction, direction)
        total = call(at).sum() + dual.sum()
        assert torch.allclose(forward_ad.unpack_dual(total).tangent, direction.sum())


@pytest.mark.parametrize("backend", BACKENDS[1:])
@pytest.mark.parametrize("name", LOSSES)
def test_kernels_refuse_batches_and_second_derivatives(name, backend):
    call, at, direction = loss_of(name, backend)
    with pytest.raises(GrowthError, match=r"batched by torch.vmap.*reduction='none'"):
        vmap(call)(torch.stack([at, at]))
    with pytest.raises(GrowthError, match="differentiated once only"):
        grad(lambda p: grad(call)(p).square().sum())(at)
    with pytest.raises(GrowthError, match="no forward-mode derivative"):
        jvp(grad(call), (at,), (direction,))


@pytest.mark.parametrize("backend", BACKENDS[1:])
@pytest.mark.parametrize("name", LOSSES)
def test_kernels_refuse_batches_of_gradients(name, backend):
    """PyTorch said only that the op has no batching rule."""
    call, at, _ = loss_of(name, backend, reduction="none")
    refused = pytest.raises(GrowthError, match=r"no batch of gradients.*backend='reference'")
    with refused:
        jacobian(call, at, vectorize=True)
    at = at.clone().requires_grad_()
    loss = call(at)
    with refused:
        torch.autograd.grad(loss, at, torch.eye(N, device=DEVICE), is_grads_batched=True)


@pytest.mark.parametrize("name", ["logits", "hidden", "topk"])
def test_compiled_code_refuses_forward_mode_too(name):
    call, at, direction = loss_of(name, BACKENDS[1])
    torch._dynamo.reset()
    inside = torch.compile(lambda p: jvp(call, (p,), (direction,))[1], backend="aot_eager")
    with pytest.raises(GrowthError, match="backend='reference'"):
        inside(at)
    outside = torch.compile(call, backend="aot_eager")
    with pytest.raises(GrowthError, match="backend='reference'"):
        jvp(outside, (at,), (direction,))


# ---------------------------------------------------------- half precision


def near_heads(drift):
    """Student and teacher, (hidden, weight) each in float64, that differ by a relative `drift`."""
    N, V, H, H_TEACHER = 64, 2000, 96, 64
    rng = torch.Generator().manual_seed(1)

    def draw(*shape):
        return torch.randn(*shape, generator=rng, dtype=torch.float64)

    t_NH, t_VH = draw(N, H_TEACHER), draw(V, H_TEACHER) * 3 / H_TEACHER**0.5
    index = torch.arange(H) % H_TEACHER
    copies = torch.bincount(index)[index]
    weight_VH = t_VH[:, index] / copies * (1 + drift * draw(V, H))
    return (t_NH[:, index], weight_VH), (t_NH, t_VH), torch.randint(V, (N,), generator=rng)


def relative_error(actual, expected):
    return ((actual.double() - expected).norm() / expected.norm()).item()


@pytest.mark.parametrize("dtype, least", [(torch.bfloat16, 0.3), (torch.float16, 0.03)])
def test_half_logits_are_warned_of_once(dtype, least):
    (x_NH, weight_VH), (t_NH, t_VH), labels = near_heads(1e-2)
    logits, teacher = x_NH @ weight_VH.T, t_NH @ t_VH.T

    def gradient(dtype):
        z = logits.to(dtype).requires_grad_()
        loss = growkern.kl_mlm_loss(z, teacher.to(dtype), labels, alpha=1.0, reduction="sum")
        return torch.autograd.grad(loss, z)[0]

    module._warn_once_of_half.cache_clear()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        truth = gradient(torch.float64)
        assert relative_error(gradient(torch.float32), truth) <= 1e-4
        # no teacher, nothing to lose
        growkern.kl_mlm_loss(logits.to(dtype), None, labels, alpha=0.0)
    with pytest.warns(UserWarning, match=r"Use linear_kl_mlm_loss") as caught:
        found = gradient(dtype)
    assert caught[0].filename == __file__
    assert relative_error(found, truth) > least
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        gradient(dtype)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_compiled_code_warns_of_half_logits_too(dtype):
    logits, teacher = numbers(N, V, seed=1).to(dtype), numbers(N, V, seed=2).to(dtype)
    labels = torch.arange(N, device=DEVICE)
    torch._dynamo.reset()
    compiled = torch.compile(
        lambda z, t: growkern.kl_mlm_loss(z, t, labels), fullgraph=True, backend="aot_eager"
    )
    module._warn_once_of_half.cache_clear()
    with pytest.warns(UserWarning, match=r"Use linear_kl_mlm_loss"):
        compiled(logits.requires_grad_(), teacher).backward()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        compiled(logits, teacher)


@pytest.mark.parametrize("mode", ["real", "fake"])
def test_a_tracer_sees_the_ops(mode):
    """Without one the function behind an op is called, which leaves no trace."""
    inputs = (*(numbers(N, V, seed=s) for s in (0, 1)), torch.arange(N, device=DEVICE))
    graph = make_fx(lambda *x: growkern.kl_mlm_loss(*x), tracing_mode=mode)(*inputs).graph
    names = " ".join(str(node.target) for node in graph.nodes)
    assert "checked_labels" in names and "kl_mlm_rows" in names


@pytest.mark.parametrize("reduction", ["mean", "none"])
@pytest.mark.parametrize("name", ["kl_mlm_loss", "linear_kl_mlm_loss", "topk_kl_mlm_loss"])
def test_jacobians_are_refused_in_one_line_or_right(name, reduction):
    """`jacrev` batches the gradients by `torch.vmap`; row by row it works."""
    rng = torch.Generator().manual_seed(0)
    hidden, weight, other = (torch.randn(n, 8, generator=rng).double() for n in (6, 12, 6))
    labels, logits = torch.arange(6), other @ weight.T
    given = {
        "kl_mlm_loss": [logits],
        "linear_kl_mlm_loss": [other, weight],
        "topk_kl_mlm_loss": [*reversed(logits.log_softmax(-1).topk(4))],
    }[name]

    def loss(x, backend=None):
        student = [x @ weight.T] if name == "kl_mlm_loss" else [x, weight]
        options = {"reduction": reduction, "backend": backend}
        return getattr(growkern, name)(*student, *given, labels, **options)

    with pytest.raises(growkern.GrowthError, match=r"torch\.vmap"):
        torch.func.jacrev(loss)(hidden)
    expected = torch.func.jacrev(lambda x: loss(x, "reference"))(hidden)
    torch.testing.assert_close(torch.func.jacrev(loss, chunk_size=1)(hidden), expected)
