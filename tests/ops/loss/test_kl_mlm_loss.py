"""The loss on logits against the formula in float64; its options, gradients and refusals."""

import pytest
import torch
from torch import library

import growkern
from growkern.ops.loss.kl_mlm_loss import kl_mlm_loss
from growkern.ops.loss.rows.rows_op import kl_mlm_rows_backward_op, kl_mlm_rows_op
from growkern.ops.loss.rows.state import clear
from tests.ops.loss import loss_inputs
from tests.ops.loss.loss_inputs import BACKENDS, IGNORED, make_logits, relative_error
from tests.shared.numerics import assert_no_worse_than_eager

SHAPES = [(1, 8), (3, 1000), (4, 8193)]  # one block, ragged block, several blocks
OPTIONS = [
    {"alpha": 0.0},
    {"alpha": 0.3},
    {"alpha": 1.0, "temperature": 2.0},
    {"alpha": 0.6, "temperature": 2.0, "softcap": 5.0},
]
PROVIDERS = BACKENDS[1:]  # what is tested against the reference


def loss_and_grad(student, teachers, labels, **options):
    student = student.detach().clone().requires_grad_()
    if "softcap" in options:
        options["teacher_softcap"] = options["softcap"]
    loss = kl_mlm_loss(student, teachers or None, labels, **options)
    (grad,) = torch.autograd.grad(loss.sum(), student)
    return loss.detach(), grad


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("K", [1, 2])
def test_reference_is_what_torch_computes(K, options, device):
    student, teachers, labels = make_logits(5, 40, torch.float64, device, K)
    weights = [0.25, 0.75][:K] if K == 2 else None
    z = student.clone().requires_grad_()
    truth = loss_inputs.truth_of(z, teachers, labels, weights=weights, **options)
    (grad,) = torch.autograd.grad(truth, z)
    for backend in BACKENDS:
        actual = loss_and_grad(
            student, teachers, labels, teacher_weights=weights, backend=backend, **options
        )
        torch.testing.assert_close(actual[0], truth.detach(), rtol=1e-12, atol=1e-14)
        torch.testing.assert_close(actual[1], grad, rtol=1e-9, atol=1e-14)


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("N, V", SHAPES)
@pytest.mark.parametrize("backend", PROVIDERS)
def test_matches_float64(backend, N, V, dtype, options, device):
    student, teachers, labels = make_logits(N, V, dtype, device)
    in64 = (student.double(), [t.double() for t in teachers], labels)
    truth = loss_and_grad(*in64, backend="reference", **options)
    eager = loss_and_grad(student, teachers, labels, backend="reference", **options)
    actual = loss_and_grad(student, teachers, labels, backend=backend, **options)
    assert actual[0].dtype == torch.float32 and actual[1].dtype == dtype
    # the loss is a difference of logsumexps, the gradient one of probabilities
    scale = in64[0].logsumexp(-1).abs().max().item() * options.get("temperature", 2.0) ** 2
    assert_no_worse_than_eager("loss", actual[0], eager[0], truth[0], scale=scale)
    assert_no_worse_than_eager("grad", actual[1], eager[1], truth[1], scale=1.0)


# what the gradient may be off by: the CPU takes the difference of q and p in float64
DIGITS = {"triton": 1e-6, "cpu": 1e-7}


@pytest.mark.parametrize("backend", PROVIDERS)
@pytest.mark.parametrize("drift", [0.01, 0.05, 0.2])
@pytest.mark.parametrize("V, temperature, K", [(32_000, 1.0, 1), (1000, 2.0, 2)])
def test_gradient_near_the_teacher_keeps_its_digits(V, temperature, K, drift, backend, device):
    """Sums are good to 1e-7, which left alone is 1e-5 of the gradient at 1 % drift."""
    rng = torch.Generator(device).manual_seed(0)
    teacher = 3 * torch.randn(6, V, generator=rng, device=device)
    student = teacher + drift * torch.randn(teacher.shape, generator=rng, device=device)
    labels, options = torch.arange(6, device=device), {"alpha": 1.0, "temperature": temperature}
    truth = loss_and_grad(student.double(), [teacher.double()] * K, labels, **options)[1]
    actual = loss_and_grad(student, [teacher] * K, labels, backend=backend, **options)[1]
    assert (actual.double() - truth).norm() <= DIGITS[backend] * truth.norm()


@pytest.mark.parametrize("backend", PROVIDERS)
def test_label_term_has_no_cancellation(backend, device):
    student = torch.zeros(1, 9, device=device)
    student[0, 4] = 20.0
    labels = torch.tensor([4], device=device)
    _, grad = loss_and_grad(student, [], labels, alpha=0.0, backend=backend)
    rest = 8 * torch.tensor(-20.0, dtype=torch.float64).exp()
    # 1 - q[y] is 1.6e-8, under the rounding of q[y] in float32
    assert grad[0, 4].item() == pytest.approx(-(rest / (1 + rest)).item(), rel=1e-5)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("kl_rows", ["labels", "all", "mask"])
def test_kl_rows_and_counts(kl_rows, backend, device):
    student, teachers, labels = make_logits(6, 11, torch.float64, device)
    mask = torch.tensor([False, True, True, False, True, True], device=device)
    rows = {"labels": labels != IGNORED, "all": mask | True, "mask": mask}[kl_rows]
    given = mask if kl_rows == "mask" else kl_rows
    options = {"alpha": 0.4, "temperature": 1.0, "kl_rows": given, "backend": backend}
    loss, parts = kl_mlm_loss(student, teachers, labels, return_parts=True, **options)
    z, u = student.log_softmax(-1), teachers[0].log_softmax(-1)
    kl = (u.exp() * (u - z)).sum(-1)[rows].mean()
    mlm = torch.nn.functional.nll_loss(z, labels, ignore_index=IGNORED)
    torch.testing.assert_close(loss, 0.6 * mlm + 0.4 * kl)
    torch.testing.assert_close(parts.mlm, mlm)
    torch.testing.assert_close(parts.kl, kl)
    agree = (z.argmax(-1) == u.argmax(-1))[rows].double().mean()
    torch.testing.assert_close(parts.top1_agreement, agree)
    counted = rows | (labels != IGNORED)
    torch.testing.assert_close(parts.entropy, -(z.exp() * z).sum(-1)[counted].mean())


@pytest.mark.parametrize("backend", BACKENDS)
def test_top1_agreement_counts_disagreement(backend, device):
    student = torch.tensor([[0.0, 3.0, 1.0], [0.0, 1.0, 3.0]], device=device)
    teacher = torch.tensor([[0.0, 3.0, 1.0], [5.0, 1.0, 3.0]], device=device)
    labels = torch.tensor([0, 1], device=device)
    _, parts = kl_mlm_loss(student, teacher, labels, return_parts=True, backend=backend)
    assert parts.top1_agreement.item() == 0.5


@pytest.mark.parametrize("backend", BACKENDS)
def test_padded_vocabularies(backend, device):
    student, teachers, labels = make_logits(4, 20, torch.float64, device)
    labels = labels.clamp(max=16)
    plain = loss_and_grad(student[:, :17], [teachers[0][:, :17]], labels, backend=backend)
    padded = loss_and_grad(
        student, [teachers[0][:, :18]], labels, vocab_size=17, backend=backend, alpha=0.5
    )
    torch.testing.assert_close(padded[0], plain[0])
    torch.testing.assert_close(padded[1][:, :17], plain[1])
    assert (padded[1][:, 17:] == 0).all()


@pytest.mark.parametrize("backend", PROVIDERS)
def test_non_contiguous_logits(backend, device):
    student, teachers, labels = make_logits(4, 30, torch.float64, device)
    plain = loss_and_grad(student, teachers, labels, backend=backend)
    wide = torch.full((4, 60), float("nan"), dtype=torch.float64, device=device)
    wide[:, ::2] = student
    z = wide.requires_grad_()
    loss = kl_mlm_loss(z[:, ::2], teachers[0].t().contiguous().t(), labels, backend=backend)
    (grad,) = torch.autograd.grad(loss, z)
    torch.testing.assert_close(loss.detach(), plain[0])
    torch.testing.assert_close(grad[:, ::2], plain[1])


@pytest.mark.parametrize("backend", BACKENDS)
def test_edges(backend, device):
    student, teachers, labels = make_logits(4, 12, torch.float32, device)
    # nothing counts, even where the logits are NaN
    broken = torch.full_like(student, float("nan"))
    if backend != "reference":
        loss, grad = loss_and_grad(broken, teachers, labels.fill_(IGNORED), backend=backend)
        assert loss.item() == 0 and (grad == 0).all()
    loss, grad = loss_and_grad(student, teachers, torch.full_like(labels, IGNORED), backend=backend)
    assert loss.item() == 0 and (grad == 0).all()
    # no rows
    loss, grad = loss_and_grad(student[:0], [teachers[0][:0]], labels[:0], backend=backend)
    assert loss.item() == 0 and grad.shape == (0, 12)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("temperature", [1.0, 2.0])
def test_extreme_logits_and_ruled_out_tokens(temperature, backend, device):
    student, teachers, labels = make_logits(4, 33, torch.float32, device)
    teachers[0][:, 5:9] = float("-inf")
    student[0, 3], teachers[0][0, 3], student[2, 7] = 1e4, -1e4, -1e4
    options = {"temperature": temperature, "backend": backend}
    loss, grad = loss_and_grad(student, teachers, labels, **options)
    assert loss.isfinite() and grad.isfinite().all()
    truth = loss_and_grad(student.double(), [teachers[0].double()], labels, temperature=temperature)
    assert relative_error(grad, truth[1]) < 1e-6
    # both sides rule the tokens out
    student[:, 5:9] = float("-inf")
    loss, grad = loss_and_grad(student, teachers, labels.clamp(max=4), **options, alpha=1.0)
    assert loss.isfinite() and grad.isfinite().all() and (grad[:, 5:9] == 0).all()


@pytest.mark.parametrize("backend", PROVIDERS)
def test_gradcheck(backend, device):
    student, teachers, labels = make_logits(3, 11, torch.float64, device, K=2)

    def loss(z):
        return kl_mlm_loss(
            z,
            teachers,
            labels,
            alpha=0.3,
            temperature=1.7,
            softcap=6.0,
            teacher_weights=[0.2, 0.8],
            kl_rows="all",
            reduction="none",
            backend=backend,
        )

    # the interpreter takes seconds for every element by itself
    fast = {"fast_mode": backend == "triton"}
    assert torch.autograd.gradcheck(loss, (student.requires_grad_(),), **fast)


@pytest.mark.parametrize("backend", PROVIDERS)
def test_opcheck(backend, device):
    student, teachers, labels = make_logits(4, 33, torch.float32, device, K=2)
    kind = torch.tensor([3, 0, 2, 1], dtype=torch.int32, device=device)
    maths = [2.0, 0.0, 5.0, 0.3, 0.1, 1e-3]
    inputs = (student.requires_grad_(), teachers, labels, kind, 30, maths, False, "", backend)
    labels.clamp_(max=29)
    library.opcheck(kl_mlm_rows_op, inputs)
    rows, state = kl_mlm_rows_op(*inputs)
    drows = torch.ones_like(rows.detach())
    inputs = (drows, student.detach(), teachers, labels, kind, state, 30, maths, backend)
    library.opcheck(kl_mlm_rows_backward_op, inputs)


@pytest.mark.parametrize("backend", PROVIDERS)
def test_a_row_without_a_kind_has_the_state_of_no_columns(backend, device):
    """So the state is never what was in memory before, and a merge with it changes nothing."""
    student, teachers, labels = make_logits(3, 33, torch.float32, device, K=2)
    kind = torch.tensor([3, 0, 1], dtype=torch.int32, device=device)
    maths = [2.0, 0.0, 5.0, 0.3, 0.1, 1e-3]
    _, state = kl_mlm_rows_op(student, teachers, labels, kind, 33, maths, True, "", backend)
    empty = torch.empty_like(state)
    clear(empty)
    torch.testing.assert_close(state[:, 1], empty[:, 1], rtol=0, atol=0)


@pytest.mark.parametrize("kind", ["tensor", "float"])
def test_compiles_whole_and_once_for_every_alpha_and_size(kind, device, backend="aot_eager"):
    """A float alpha is one graph as well, if torch.compile is told dynamic=True."""

    def given(a):
        return torch.tensor(a / 10, device=device) if kind == "tensor" else a / 10

    loss_inputs.check_compiled(
        torch.compile(kl_mlm_loss, fullgraph=True, backend=backend, dynamic=True),
        lambda N: (lambda z, ts, y: ([z], ts, y))(*make_logits(N, 33, torch.float32, device)),
        lambda c, z, ts, labels, a: c(*z, ts, labels, alpha=given(a)),
        lambda z, ts, labels, a: [
            [x] if i else x for i, x in enumerate(loss_and_grad(*z, ts, labels, alpha=a / 10))
        ],
        [(1.0, 6), (2.5, 9), (5.0, 13), (7.5, 30), (9.0, 4)],
    )


def test_alpha_zero_reads_no_teacher_and_one_no_label(device):
    student, teachers, labels = make_logits(4, 33, torch.float32, device)
    broken = [torch.full_like(teachers[0], float("nan"))]
    assert loss_and_grad(student, broken, labels, alpha=0.0)[0].isfinite()
    loss, parts = kl_mlm_loss(student, broken, labels, alpha=0.0, return_parts=True)
    assert parts.kl is None and parts.top1_agreement is None
    torch.testing.assert_close(parts.mlm, loss)
    kl_only, _ = loss_and_grad(student, teachers, labels, alpha=1.0)
    with_parts, parts = kl_mlm_loss(student, teachers, labels, alpha=1.0, return_parts=True)
    torch.testing.assert_close(with_parts, kl_only)
    torch.testing.assert_close(parts.kl, kl_only)
    assert parts.mlm > 0


@pytest.mark.parametrize(
    "change, message",
    [
        ({"alpha": 1.5}, "alpha must lie"),
        ({"alpha": None}, "alpha must lie"),
        ({"alpha": torch.ones(2)}, "0-d tensor"),
        ({"teacher_logits": None}, "needs a teacher"),
        ({"teacher_logits": torch.ones(4, 8).requires_grad_()}, "frozen"),
        ({"teacher_logits": torch.ones(3, 8)}, "same rows"),
        ({"teacher_logits": torch.ones(4, 9)}, "vocab_size=8"),
        ({"teacher_weights": [0.5, 0.5]}, "teacher_weights must be 1"),
        ({"teacher_weights": [0.5]}, "sum to 1"),
        ({"vocab_size": 9}, "vocab_size=9"),
        ({"labels": torch.zeros(5, dtype=torch.long)}, "must match the rows"),
        ({"labels": torch.zeros(4)}, "integer"),
        ({"labels": torch.tensor([0, 1, 8, 2])}, r"row 2 is 8, outside 0\.\.7"),
        ({"labels": torch.tensor([0, -1, 8, 2])}, r"row 1 is -1, outside 0\.\.7"),
        ({"labels": torch.tensor([0, 1, 7, 2]), "vocab_size": 7}, r"row 2 is 7, outside 0\.\.6"),
        ({"ignore_index": 0.5}, "ignore_index must be an integer"),
        ({"kl_rows": "every"}, "'labels', 'all'"),
        ({"kl_rows": torch.ones(4)}, "bool mask"),
        ({"temperature": 0.0}, "temperature"),
        ({"temperature": "2"}, "temperature must be positive and finite, got '2'"),
        ({"label_smoothing": 1}, "label_smoothing must lie in"),
        ({"label_smoothing": [0.1]}, "label_smoothing must lie in"),
        ({"z_loss": float("nan")}, "z_loss must be 0 or more"),
        ({"softcap": -1.0}, "softcap"),
        ({"reduction": "avg"}, "reduction"),
        ({"reduction": "sum", "num_items": 3}, "num_items"),
        ({"num_items": 0}, "num_items must be a positive number"),
        ({"num_items": float("nan")}, "num_items must be a positive number"),
        ({"num_items": (1, 2, 3)}, "num_items must be a positive number"),
        ({"num_items": torch.ones(2)}, "num_items must be a positive number"),
        ({"num_items": "3"}, "num_items must be a positive number"),
        ({"softcap": float("inf")}, "softcap must be positive and finite"),
        ({"teacher_weights": [float("nan")]}, "none negative"),
        ({"backend": "vulkan"}, "unknown"),
        ({"backend": "cuda"}, "use reference or cpu or triton"),
    ],
    ids=str,
)
def test_refusals(change, message):
    inputs = {
        "student_logits": torch.ones(4, 8),
        "teacher_logits": torch.ones(4, 8),
        "labels": torch.zeros(4, dtype=torch.long),
    }
    with pytest.raises(growkern.errors.GrowthError, match=message):
        kl_mlm_loss(**(inputs | change))


@pytest.mark.parametrize("wide", [torch.float32, torch.float64])
@pytest.mark.parametrize("half", [torch.float16, torch.bfloat16])
def test_the_reference_is_exact_for_two_dtypes(half, wide, device):
    """It takes the wider one for all: at a KL of 1e-5 a teacher in float32 would cost 1 %."""
    rng = torch.Generator(device).manual_seed(0)
    teacher = (2 * torch.randn(6, 300, generator=rng, device=device)).to(half)
    noise = torch.randn(6, 300, generator=rng, device=device, dtype=torch.float64)
    labels = torch.zeros(6, dtype=torch.long, device=device)
    student = (teacher.double() + 4e-3 * noise).to(wide)
    for one, other in ((student, teacher), (teacher, student)):
        options = {"alpha": 1.0, "return_parts": True, "backend": "reference"}
        _, found = growkern.kl_mlm_loss(one, other, labels, **options)
        _, truth = growkern.kl_mlm_loss(one.double(), other.double(), labels, **options)
        assert truth.kl < 3e-5 and relative_error(found.kl, truth.kl) <= 1e-6
