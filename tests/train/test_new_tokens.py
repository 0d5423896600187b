"""Teachers that lack the student's last tokens, against plain PyTorch in float64.

Shape letters used in this file: N rows, H width, V tokens of the student, A of the teacher.
"""

import pytest
import torch
from torch.nn import functional as F

import growkern
from growkern.errors import GrowthError
from tests.ops.loss.loss_inputs import BACKENDS, IGNORED, relative_error

N, H, V, A, PADDED = 7, 8, 30, 23, 32
DIVERGENCES = {
    "forward": lambda p, q: (p.exp() * (p - q)).sum(-1),
    "reverse": lambda p, q: (q.exp() * (q - p)).sum(-1),
}
LABELS = torch.tensor([3, A, IGNORED, A - 1, V - 1, 0, 7])
TAUGHT = torch.tensor([1, 0, 1, 1, 0, 1, 0]).bool()  # of the last row the context is unknown


def truth_of(z, u, *, alpha, temperature, divergence):
    mlm = F.cross_entropy(z[:, :V], LABELS, ignore_index=IGNORED)
    p, q = ((x[:, :A] / temperature).log_softmax(-1) for x in (u, z))
    kl = DIVERGENCES[divergence](p, q)[TAUGHT].mean()
    return (1 - alpha) * mlm + alpha * temperature**2 * kl


def heads(dtype=torch.float32):
    torch.manual_seed(0)
    hidden, weight = torch.randn(N, H), torch.randn(PADDED, H)
    teacher = hidden + 0.1 * torch.randn(N, H), weight[:A] + 0.1 * torch.randn(A, H)
    return [x.to(dtype) for x in (hidden, weight, *teacher)]


def losses_of(hidden, weight, x, w, options, **tiles):
    """The three losses, each with the student's tensors as leaves."""
    temperature = options["temperature"]
    logprobs, ids = (x @ w.T / temperature).log_softmax(-1).topk(A)
    rows = LABELS.to(hidden.device)
    return {
        "logits": growkern.kl_mlm_loss(hidden @ weight.T, x @ w.T, rows, **options),
        "linear": growkern.linear_kl_mlm_loss(hidden, weight, x, w, rows, **options, **tiles),
        "topk": growkern.topk_kl_mlm_loss(hidden, weight, ids, logprobs, rows, **options, **tiles),
    }


@pytest.mark.parametrize("divergence", DIVERGENCES)
@pytest.mark.parametrize("backend", BACKENDS)
def test_the_kl_is_over_the_tokens_that_the_teacher_knows(backend, divergence):
    device = "cuda" if torch.cuda.is_available() else "cpu"
    maths = {"alpha": 0.4, "temperature": 2.0, "divergence": divergence}
    hidden, weight, x, w = (t.to(device) for t in heads())
    wide = [t.double().cpu().requires_grad_() for t in (hidden, weight)]
    truth = truth_of(wide[0] @ wide[1].T, x.double().cpu() @ w.double().cpu().T, **maths)
    expected = torch.autograd.grad(truth, wide)
    # what the row without a teacher has for its context is in the mask; new labels are not
    options = {
        **maths, "backend": backend, "vocab_size": V, "teacher_vocab_size": A,
        "kl_rows": (TAUGHT | (LABELS >= A)).to(device),
    }  # fmt: skip
    for tiles in ({}, {"vocab_tile": 9}):
        student = [t.clone().requires_grad_() for t in (hidden, weight)]
        for loss in losses_of(*student, x, w, options, **tiles).values():
            found = torch.autograd.grad(loss, student)
            assert loss.item() == pytest.approx(truth.item(), rel=1e-5)
            for one, other in zip(found, expected, strict=True):
                assert relative_error(one.cpu(), other) < 1e-5
            assert not found[1][V:].any()


def test_new_tokens_leave_the_kl_of_an_exactly_grown_student_at_0():
    hidden, weight, *_ = heads(torch.float64)
    options = {"alpha": 0.5, "temperature": 1.0, "teacher_vocab_size": A, "return_parts": True}
    for loss, parts in losses_of(hidden, weight, hidden, weight[:A], options).values():
        assert abs(parts.kl.item()) < 1e-12
        mlm = F.cross_entropy(hidden @ weight.T, LABELS, ignore_index=IGNORED).item()
        assert (loss.item(), parts.mlm.item()) == pytest.approx((mlm / 2, mlm))


def test_a_teacher_that_is_narrower_than_it_is_said_to_be_is_refused():
    hidden, weight, x, w = heads()
    with pytest.raises(GrowthError, match=rf"teacher_vocab_size={A + 1}, but .* \[{A}\] columns"):
        growkern.linear_kl_mlm_loss(hidden, weight, x, w, LABELS, teacher_vocab_size=A + 1)
    with pytest.raises(GrowthError, match=r"or teacher_vocab_size if the student has more tokens"):
        growkern.linear_kl_mlm_loss(hidden, weight, x, w, LABELS)
