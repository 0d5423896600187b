"""Inputs and an independent truth for the tests of both loss ops."""

import torch
from torch import Tensor
from torch.nn import functional as F

import growkern

IGNORED = -100
# the three losses
DOORS = ("logits", "hidden", "top k")
# the compiled library works on a CPU, and the tests are on the GPU where there is one
BACKENDS = ["reference", *(() if torch.cuda.is_available() else ("cpu",)), "triton"]


def make_labels(N: int, V: int, rng: torch.Generator) -> Tensor:
    """Every third row ignored; the first label is the likeliest token of `make_logits`."""
    labels_N = torch.randint(V, (N,), generator=rng, device=rng.device)
    labels_N[1::3] = IGNORED
    if N:
        labels_N[0] = V - 1
    return labels_N


def make_logits(N: int, V: int, dtype: torch.dtype, device: str, K: int = 1, seed: int = 0):
    """Student, K teachers (near and far) and labels; the largest logit comes last."""
    rng = torch.Generator(device).manual_seed(seed)
    student_NV = torch.randn(N, V, generator=rng, device=device, dtype=torch.float64)
    teachers = []
    for k in range(K):
        noise_NV = torch.randn(N, V, generator=rng, device=device, dtype=torch.float64)
        # the first teacher is close: both forms of the gradient are taken
        teachers.append((student_NV + (0.05 if k == 0 else 1.0) * noise_NV).to(dtype))
        teachers[-1][:, -1] = 6.0
    # so that the running maximum has to move in the last block
    student_NV[:, -1] = 7.0
    return student_NV.to(dtype), teachers, make_labels(N, V, rng)


def truth_of(student, teachers, labels, *, alpha, temperature=2.0, softcap=None, weights=None):
    """Mean MLM and KL on the labelled rows, from torch's own losses in float64."""
    z, *us = (x.double() for x in (student, *teachers))
    if softcap:
        z, *us = (softcap * torch.tanh(x / softcap) for x in (z, *us))
    rows = labels != IGNORED
    mlm = F.cross_entropy(z, labels, ignore_index=IGNORED, reduction="sum") / rows.sum()
    if not us:
        return (1 - alpha) * mlm
    weights = weights or [1 / len(us)] * len(us)
    log_q = F.log_softmax(z / temperature, -1)
    kl = sum(
        w * F.kl_div(log_q, F.log_softmax(u / temperature, -1), reduction="none", log_target=True)
        for w, u in zip(weights, us, strict=True)
    )
    return (1 - alpha) * mlm + alpha * temperature**2 * kl[rows].sum() / rows.sum()


def relative_error(actual: Tensor, truth: Tensor) -> float:
    """Frobenius norm of the difference over that of the truth."""
    return ((actual.double() - truth).norm() / truth.norm()).item()


def call(door, student, teacher, labels, *, k=None, **options):
    """A loss of two heads (hidden, weight, bias). For the last one k tokens are kept, or all."""
    (hidden, weight, bias), (x, w, b) = student, (*teacher, None)[:3]
    if door == "logits":
        return growkern.kl_mlm_loss(F.linear(*student), F.linear(x, w, b), labels, **options)
    if door == "hidden":
        return growkern.linear_kl_mlm_loss(
            hidden, weight, x, w, labels, student_bias=bias, teacher_bias=b, **options
        )
    with torch.autocast(x.device.type, enabled=False):
        log_p = F.linear(x.double(), w.double(), None if b is None else b.double())
        log_p = (log_p / options.get("temperature", 2.0)).log_softmax(-1)
    kept = log_p.to(torch.float64 if x.dtype == torch.float64 else torch.float32)
    kept = kept.topk(k or len(w), dim=-1)
    return growkern.topk_kl_mlm_loss(
        hidden, weight, kept.indices, kept.values, labels, student_bias=bias, **options
    )


def check_compiled(
    compiled, make, call, expect, values=((0.0, 6), (2.5, 9), (5.0, 13), (7.5, 30), (10.0, 4))
):
    """Values and gradients of `compiled` at other alphas and sizes, with nothing compiled anew.

    make(N) gives (student tensors, teachers, labels); call(compiled, student, teachers, labels, a)
    the loss; expect(student, teachers, labels, a) the eager loss and gradients.
    """
    torch._dynamo.reset()
    with torch._dynamo.config.patch(error_on_recompile=True):
        for a, N in values:
            student, teachers, labels = make(N)
            inputs = [x.detach().clone().requires_grad_() for x in student]
            loss = call(compiled, inputs, teachers, labels, a)
            grads = torch.autograd.grad(loss, inputs)
            expected = expect(student, teachers, labels, a)
            torch.testing.assert_close(loss.detach(), expected[0])
            for actual, grad in zip(grads, expected[1], strict=True):
                torch.testing.assert_close(actual, grad)
