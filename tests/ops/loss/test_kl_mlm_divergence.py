"""The terms beside forward KL and cross-entropy, through both doors and in tiles."""

import math

import pytest
import torch
from torch.nn import functional as F

import growkern
from growkern.ops.loss.rows.rows_op import ROW_FUNCTIONS
from growkern.ops.loss.rows.state import Maths, Rows, Steps, fit_to_dtype, n_numbers
from tests.ops.loss.loss_inputs import BACKENDS, IGNORED, make_logits, relative_error
from tests.ops.loss.test_linear_kl_mlm_loss import assert_same, loss_and_grads, make_heads

CASES = [
    {"divergence": "reverse"},
    {"divergence": "reverse", "temperature": 2.0},
    {"divergence": "jsd"},
    {"divergence": "jsd", "beta": 0.1, "temperature": 1.5, "softcap": 5.0},
    {"label_smoothing": 0.2},
    {"z_loss": 0.05, "softcap": 5.0},
    {"divergence": "jsd", "beta": 0.9, "label_smoothing": 0.1, "z_loss": 1e-2, "temperature": 2.0},
]
PROVIDERS = BACKENDS[1:]


def truth_of(
    z, us, labels, *, alpha, temperature=2.0, divergence="forward", beta=0.5, softcap=None,
    label_smoothing=0.0, z_loss=0.0, row_weights=None, weights=None,
):  # fmt: skip
    """Mean over the labelled rows, from torch's own losses and their definitions."""
    if softcap:
        z, *us = (softcap * torch.tanh(x / softcap) for x in (z, *us))
    rows = labels != IGNORED
    mlm = F.cross_entropy(z, labels, label_smoothing=label_smoothing, reduction="none")
    mlm = mlm + z_loss * z.logsumexp(-1) ** 2

    def kl(log_a, log_b):
        return F.kl_div(log_b, log_a, reduction="none", log_target=True).sum(-1)

    q = F.log_softmax(z / temperature, -1)
    total = 0
    for w, u in zip(weights or [1 / len(us)] * len(us), us, strict=True):
        p = F.log_softmax(u / temperature, -1)
        m = (beta * p.exp() + (1 - beta) * q.exp()).log()
        total = (
            total
            + w
            * {
                "forward": lambda p=p: kl(p, q),
                "reverse": lambda p=p: kl(q, p),
                "jsd": lambda p=p, m=m: beta * kl(p, m) + (1 - beta) * kl(q, m),
            }[divergence]()
        )
    loss = (1 - alpha) * mlm + alpha * temperature**2 * total
    loss = loss if row_weights is None else loss * row_weights
    return loss[rows].sum() / rows.sum()


def test_rounding_makes_no_divergence_negative():
    torch.manual_seed(0)
    hidden, weight, labels = torch.randn(512, 8), torch.randn(50, 8), torch.zeros(512).long()
    near = hidden * (1 + 2**-23)
    loss = growkern.linear_kl_mlm_loss(
        hidden, weight, near, weight, labels, alpha=1.0, reduction="none"
    )
    assert loss.min() == 0


@pytest.mark.parametrize("options", CASES, ids=str)
@pytest.mark.parametrize("tiles", ["whole rows", "tiles"])
@pytest.mark.parametrize("backend", BACKENDS)
def test_is_what_the_definition_says(backend, tiles, options, device):
    """Two teachers, several chunks, unequal row weights; the tiles are narrower than a row."""
    student, teachers, labels = make_heads(9, 41, 12, torch.float64, device, K=2)
    weights = torch.linspace(0, 2, 9, dtype=torch.float64, device=device)
    student = [x.requires_grad_() for x in student]
    logits = [F.linear(*head) / 4 for head in (student, *teachers)]
    teachers = [[h[0] / 4, h[1], h[2] / 4] for h in teachers]
    shared = options | {"alpha": 0.6, "row_weights": weights}
    truth = truth_of(logits[0], logits[1:], labels, weights=[0.25, 0.75], **shared)
    truth = (truth.detach(), torch.autograd.grad(truth, student))
    # the student's logits are scaled by 4 in its hidden states and bias: so are their gradients
    near = [student[0] / 4, student[1], student[2] / 4]
    given = shared | {"teacher_softcap": options.get("softcap"), "teacher_weights": [0.25, 0.75]}
    limits = {"chunk_bytes": 3 * 41 * 8 * 3} if tiles == "whole rows" else {"vocab_tile": 16}
    loss, (dx, dw, db) = loss_and_grads(near, teachers, labels, backend=backend, **given, **limits)
    assert_same((loss, (dx / 4, dw, db / 4)), truth)

    z = logits[0].detach().requires_grad_()
    scalar = truth_of(z, logits[1:], labels, weights=[0.25, 0.75], **shared)
    (dz,) = torch.autograd.grad(scalar, z)
    ours = growkern.kl_mlm_loss(z, logits[1:], labels, backend=backend, **given)
    torch.testing.assert_close(ours.detach(), scalar.detach(), rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(torch.autograd.grad(ours, z)[0], dz, rtol=1e-9, atol=1e-13)


@pytest.mark.parametrize("backend", PROVIDERS)
@pytest.mark.parametrize("divergence, beta", [("reverse", None), ("jsd", 0.5), ("jsd", 0.05)])
def test_float32_gradient_near_the_teacher(divergence, beta, backend, device):
    """Beside the teacher log(q / p) is small: nothing may be taken from 1 on the way to it."""
    teacher = make_logits(4, 3000, torch.float32, device)[0]
    labels = torch.arange(4, device=device)
    for drift in (1e-3, 0.05, 3.0):
        rng = torch.Generator(device).manual_seed(1)
        noise = torch.randn(teacher.shape, generator=rng, device=device)
        student = (teacher + drift * noise).requires_grad_()
        grads = []
        for dtype in (torch.float32, torch.float64):
            loss = growkern.kl_mlm_loss(
                student.to(dtype), teacher.to(dtype), labels, alpha=1.0, divergence=divergence,
                beta=beta, backend=backend if dtype == torch.float32 else "reference",
            )  # fmt: skip
            grads += torch.autograd.grad(loss, student)
        assert relative_error(grads[0], grads[1].double()) <= 4e-7 / min(1, drift), drift


@pytest.mark.parametrize("backend", BACKENDS)
def test_jsd_takes_tokens_that_one_side_rules_out(backend, device):
    student, teachers, labels = make_logits(4, 33, torch.float32, device)
    labels = labels.clamp(min=9)
    student[:, 2:6], teachers[0][:, 4:9] = float("-inf"), float("-inf")
    student.requires_grad_()
    loss = growkern.kl_mlm_loss(student, teachers, labels, divergence="jsd", backend=backend)
    assert loss.isfinite()
    if backend != "reference":
        (grad,) = torch.autograd.grad(loss, student)
        assert grad.isfinite().all() and (grad[:, 2:6] == 0).all()


# The interpreter is slow, and `test_is_what_the_definition_says` compares its gradients of each.
GRADCHECKS = [(p, d) for p in PROVIDERS for d in ("forward", "reverse", "jsd")]
GRADCHECKS = [(p, d) for p, d in GRADCHECKS if p != "triton" or d == "jsd"]


@pytest.mark.parametrize("backend, divergence", GRADCHECKS)
def test_gradcheck(divergence, backend, device):
    student, teachers, labels = make_heads(3, 7, 4, torch.float64, device)

    def loss(*head):
        return growkern.linear_kl_mlm_loss(
            *head[:2], *teachers[0][:2], labels, student_bias=head[2], alpha=0.4, kl_rows="all",
            temperature=1.3, divergence=divergence, label_smoothing=0.1, z_loss=0.1, vocab_tile=3,
            reduction="none", row_weights=torch.tensor([0.5, 1.0, 2.0]), backend=backend,
        )  # fmt: skip

    inputs = [x.requires_grad_() for x in student]
    assert torch.autograd.gradcheck(loss, inputs, fast_mode=True)


@pytest.mark.parametrize(
    "backend, limits, V",
    [
        ("cpu", {"vocab_tile": 500}, 1300),
        ("cpu", {"chunk_bytes": 4096}, 1300),
        ("cpu", {"vocab_tile": 1}, 9),
        ("triton", {"vocab_tile": 500}, 1300),
    ],
    ids=str,
)
def test_tiles_are_the_same_loss(backend, limits, V, device):
    """In float32, with parts, padding and rows of either kind; one column per tile at the worst."""
    device = "cpu" if backend == "cpu" else device
    student, teachers, labels = make_heads(40, V, 8, torch.float32, device)
    options = {"kl_rows": "all", "vocab_size": V - 2, "return_parts": True, "backend": backend}
    labels.clamp_(max=V - 3)
    results = []
    for given in (options, options | limits):
        inputs = [x.detach().clone().requires_grad_() for x in student]
        loss, parts = growkern.linear_kl_mlm_loss(
            *inputs[:2], *teachers[0][:2], labels, student_bias=inputs[2],
            teacher_bias=teachers[0][2], **given,
        )  # fmt: skip
        results.append((loss.detach(), torch.autograd.grad(loss, inputs), parts))
    torch.testing.assert_close(results[1][0], results[0][0])
    for name in ("mlm", "kl", "top1_agreement", "entropy"):
        torch.testing.assert_close(*(getattr(r[2], name) for r in results), msg=name)
    for a, b in zip(results[0][1], results[1][1], strict=True):
        assert relative_error(a, b.double()) <= 2e-6


@pytest.mark.parametrize("backend", BACKENDS)
def test_row_weights_leave_counts_alone_and_parts_but_for_rows_of_weight_0(backend, device):
    student, teachers, labels = make_logits(6, 9, torch.float64, device)
    weights = torch.tensor([2.0, 1, 0, 0.5, 1, 3], dtype=torch.float64, device=device)
    rows = growkern.kl_mlm_loss(student, teachers, labels, reduction="none", backend=backend)
    weighed, parts = growkern.kl_mlm_loss(
        student, teachers, labels, row_weights=weights, return_parts=True, backend=backend
    )
    torch.testing.assert_close(weighed, (rows * weights).sum() / (labels != IGNORED).sum())
    labels[weights == 0] = IGNORED
    _, plain = growkern.kl_mlm_loss(student, teachers, labels, return_parts=True, backend=backend)
    torch.testing.assert_close(parts, plain)


@pytest.mark.parametrize(
    "change, message",
    [
        ({"divergence": "kl"}, "divergence must be one of"),
        ({"beta": 0.5}, "belongs to divergence='jsd'"),
        ({"divergence": "jsd", "beta": 1.0}, "beta must lie in .0, 1.*'reverse'"),
        ({"row_weights": torch.ones(3)}, "row_weights must be"),
        ({"row_weights": torch.ones(4).requires_grad_()}, "without gradient"),
        ({"vocab_start": 0}, "needs group"),
    ],
    ids=str,
)
def test_refusals(change, message):
    labels = torch.zeros(4, dtype=torch.long)
    with pytest.raises(growkern.errors.GrowthError, match=message):
        growkern.kl_mlm_loss(torch.ones(4, 8), torch.ones(4, 8), labels, **change)


@pytest.mark.parametrize("beta", [0.0, 0.5, 0.9, 1.0])
@pytest.mark.parametrize("temperature, gap", [(1.0, 1000.0), (2.0, 1000.0), (1 / 64, 1.0)])
@pytest.mark.parametrize("backend", PROVIDERS)
def test_float16_rows_hold_every_gradient(backend, temperature, gap, beta, device):
    """The scale fits the steepest gradient, and keeps the digits of a small one.

    In the first row the student is torn between two tokens, whose logits the teacher has `gap`
    apart. The teacher of the second row is close.
    """
    z = torch.full((2, 8), -40.0, device=device)
    z[0, :2], z[1] = 0.0, torch.linspace(-0.5, 0.5, 8, device=device) * temperature
    u = z + 0.01 * temperature * torch.cos(torch.arange(8.0, device=device))
    u[0], u[0, 0] = 0.0, gap
    maths = Maths(temperature=temperature, beta=beta)
    # alpha = 1
    given = torch.tensor([[0.0] * 2, [0.5 * temperature**2] * 2], device=device)
    labels, kinds = torch.tensor([1, 3], device=device), torch.tensor([3, 3], device=device)

    def gradient(weights, dtype, logits):
        rows = Rows(logits[0], [logits[1]], labels, kinds.int(), 8, maths, False)
        state = torch.empty(n_numbers(1), 2, dtype=logits[0].dtype, device=device)
        out = torch.empty(2, 8, dtype=dtype, device=device)
        steps = Steps(sums=True, diverge=beta != 0, grad=True)
        ROW_FUNCTIONS[backend](rows, state, steps, weights.to(logits[0].dtype), out)
        return out.double()

    scaled, unscale = fit_to_dtype(given, torch.float16, maths)
    assert unscale is not None and (scaled * unscale == given).all()
    truth = gradient(given, torch.float64, (z.double(), u.double()))
    found = gradient(scaled, torch.float16, (z, u)) * unscale
    assert found.isfinite().all()
    for one, expected in zip(found, truth, strict=True):
        assert (one - expected).norm() <= 1e-3 * expected.norm()


@pytest.mark.parametrize("backend", PROVIDERS)
@pytest.mark.parametrize("beta", [0.0, 0.5])
def test_the_state_of_rows_without_a_term(backend, beta, device):
    """Their logits are not read, and their sums are those of no column."""
    logits = torch.randn(2, 3, 40, device=device)
    logits[:, 1] = torch.nan
    kinds, labels = torch.tensor([3, 0, 2], device=device), torch.tensor([4, 1, 0], device=device)
    rows = Rows(logits[0], [logits[1]], labels, kinds.int(), 40, Maths(beta=beta), False)
    state = torch.full((n_numbers(1), 3), torch.nan, device=device)
    out = torch.full((3, 40), torch.nan, device=device)
    ROW_FUNCTIONS[backend](
        rows, state, Steps(True, beta != 0, True), torch.ones(2, 3, device=device), out
    )
    assert state[:, 1].tolist() == [0, 0, 0, -math.inf, *[0] * (len(state) - 4)]
    assert (out[1] == 0).all() and out.isfinite().all()
