"""Half precision beside a close teacher: which gradients are right, and which warn."""

import warnings

import pytest
import torch

import growkern
from growkern.ops.loss import kl_mlm_loss as module

N, V, H, H_TEACHER = 64, 2000, 96, 64


def near_heads(drift):
    """Student and teacher, (hidden, weight) each in float64, that differ by a relative `drift`."""
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


@pytest.mark.parametrize("drift, without_scaler", [(1e-3, 0.01), (1e-4, 0.1)])
def test_float16_gradients_need_a_loss_scaler_and_nothing_else(drift, without_scaler):
    student, teacher, labels = near_heads(drift)
    student, teacher = ([x.half() for x in head] for head in (student, teacher))

    def gradients(scale, dtype=torch.float16, **options):
        heads = [x.to(dtype).requires_grad_() for x in student]
        loss = growkern.linear_kl_mlm_loss(
            *heads, *(x.to(dtype) for x in teacher), labels, alpha=1.0, temperature=2.0, **options
        )
        return [x.double() / scale for x in torch.autograd.grad(loss * scale, heads)]

    truth = gradients(1.0, torch.float64, backend="reference")
    for scale in (1024.0, 65536.0):
        for found, expected in zip(gradients(scale), truth, strict=True):
            assert relative_error(found, expected) <= 5e-3
    # the gradient that is handed over underflows
    assert relative_error(gradients(1.0)[1], truth[1]) > without_scaler


@pytest.mark.parametrize("dtype, least", [(torch.bfloat16, 0.3), (torch.float16, 0.03)])
def test_half_logits_are_warned_of_once(dtype, least):
    (x_NH, weight_VH), (t_NH, t_VH), labels = near_heads(1e-2)
    logits, teacher = x_NH @ weight_VH.T, t_NH @ t_VH.T

    def gradient(dtype):
        z = logits.to(dtype).requires_grad_()
        loss = growkern.kl_mlm_loss(z, teacher.to(dtype), labels, alpha=1.0, reduction="sum")
        return torch.autograd.grad(loss, z)[0]

    module._warn_of_half.cache_clear()
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
