"""A float64 student keeps float64's digits beside teachers and labels of any dtype."""

import pytest
import torch
from torch.nn import functional as F

from growkern import kl_mlm_loss, linear_kl_mlm_loss, topk_kl_mlm_loss
from tests.ops.loss.loss_inputs import BACKENDS, relative_error

DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


def inputs(dtype, device, seed=0, K=1):
    rng = torch.Generator().manual_seed(seed)
    x = torch.randn(40, 24, generator=rng).double()
    w = torch.randn(150, 24, generator=rng).double()
    labels = torch.randint(150, (40,), generator=rng)
    labels[::5] = -100
    teachers = [(((x * (1.001 + k)).to(dtype)), ((w / (1 + k)).to(dtype))) for k in range(K)]
    move = [t.to(device) for t in (x.requires_grad_(), w.requires_grad_(), labels)]
    student = [t.detach().requires_grad_() for t in move[:2]]
    return student, move[2], [[t.to(device) for t in pair] for pair in teachers]


def truth(student, labels, teachers, alpha):
    z = student[0] @ student[1].T
    rows = labels != -100
    loss = (1 - alpha) * F.cross_entropy(z, labels, ignore_index=-100)
    for x, w in teachers:
        p = F.log_softmax(x.double() @ w.double().T, -1)
        kl = F.kl_div(F.log_softmax(z, -1), p, reduction="none", log_target=True)
        loss = loss + alpha / len(teachers) * kl[rows].sum() / rows.sum()
    return loss


def errors(loss, expected, student):
    ours, theirs = (
        torch.autograd.grad(each, student, retain_graph=True) for each in (loss, expected)
    )
    return [relative_error(a, b) for a, b in zip(ours, theirs, strict=True)]


@pytest.mark.parametrize("how", [{}, {"chunk_bytes": 20_000}, {"vocab_tile": 64}], ids=str)
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_heads(dtype, backend, how, device):
    if backend == "triton" and device == "cpu" and (how or dtype != torch.float32):
        pytest.skip("the interpreter takes 15 seconds for many launches")
    student, labels, teachers = inputs(dtype, device, K=2)
    hiddens, weights = zip(*teachers, strict=True)
    options = {"alpha": 0.7, "temperature": 1.0, "backend": backend, **how}
    loss = linear_kl_mlm_loss(*student, list(hiddens), list(weights), labels, **options)
    assert max(errors(loss, truth(student, labels, teachers, 0.7), student)) < 1e-9


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", DTYPES[:2], ids=str)
def test_logits_and_the_likeliest_tokens(dtype, backend, device):
    student, labels, teachers = inputs(dtype, device)
    # logits that are exact in either dtype
    logits = (teachers[0][0] @ teachers[0][1].T).float().to(dtype)
    p = F.log_softmax(logits.double(), -1)
    z = student[0] @ student[1].T
    kl = F.kl_div(F.log_softmax(z, -1), p, reduction="none", log_target=True)
    expected = kl[labels != -100].sum() / (labels != -100).sum()
    options = {"alpha": 1.0, "temperature": 1.0, "backend": backend}
    loss = kl_mlm_loss(z, logits, labels, **options)
    assert max(errors(loss, expected, student)) < 1e-9

    ids = torch.arange(150, device=device).expand(40, 150)
    kept = F.log_softmax(logits.double(), -1).to(dtype)
    q = kept.double().softmax(-1)
    expected = (q * (q.log() - F.log_softmax(student[0] @ student[1].T, -1)))[labels != -100]
    loss = topk_kl_mlm_loss(*student, ids, kept, labels, tail="renormalise", **options)
    found = errors(loss, expected.sum() / (labels != -100).sum(), student)
    assert max(found) < 1e-9
