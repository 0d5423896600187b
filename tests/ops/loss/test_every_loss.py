"""What all three losses promise alike, by whichever door a student and its teacher come in."""

from unittest import mock

import pytest
import torch

import growkern
from growkern.ops.loss.linear import linear_op
from tests.ops.loss.loss_inputs import BACKENDS, DOORS, IGNORED, call, relative_error
from tests.ops.loss.test_linear_kl_mlm_loss import NAMES, assert_same, drifted_heads, make_heads

PROVIDERS = BACKENDS[1:]  # what is tested against the reference
# those that multiply heads themselves
LINEAR = DOORS[1:]


def loss_and_grads(door, student, teacher, labels, **options):
    """The loss, and the gradients of (hidden, weight, bias), by unequal weights of rows."""
    student = [x.detach().clone().requires_grad_() for x in student]
    loss = call(door, student, teacher, labels, **options)
    weights = torch.linspace(1, 2, loss.numel(), dtype=loss.dtype, device=loss.device)
    return loss.detach(), torch.autograd.grad((loss * weights.view_as(loss)).sum(), student)


def in_float64(*heads):
    return [[x.double() for x in head] for head in heads]


@pytest.mark.parametrize("door", DOORS)
@pytest.mark.parametrize("backend", BACKENDS)
def test_micro_batches_add_up(backend, door, device):
    """Unequal numbers of labels, and one micro-batch without any."""
    student, (teacher,), labels = make_heads(20, 13, 8, torch.float64, device)
    labels[:5] = IGNORED
    options = {"kl_rows": "all", "backend": backend}
    whole = loss_and_grads(door, student, teacher, labels, **options)
    options["num_items"] = ((labels != IGNORED).sum(), torch.tensor(20.0, device=device))
    total, grads = 0.0, []
    for a, b in [(0, 5), (5, 6), (6, 8), (8, 20)]:
        heads = [[head[0][a:b], *head[1:]] for head in (student, teacher)]
        loss, grad = loss_and_grads(door, *heads, labels[a:b], **options)
        total, grads = total + loss, [*grads, grad]
    dX, dW, db = zip(*grads, strict=True)
    assert_same((total, (torch.cat(dX), sum(dW), sum(db))), whole, rtol=1e-6)


@pytest.mark.parametrize("door", DOORS)
@pytest.mark.parametrize("backend", BACKENDS)
def test_reductions_and_leading_dimensions(backend, door, device):
    student, (teacher,), labels = make_heads(6, 13, 8, torch.float64, device)
    heads = [[head[0].view(2, 3, -1), *head[1:]] for head in (student, teacher)]
    shaped, options = (door, *heads, labels.view(2, 3)), {"temperature": 2.0}
    rows = loss_and_grads(*shaped, reduction="none", backend=backend, **options)
    flat = (door, student, teacher, labels)
    expected = loss_and_grads(*flat, reduction="none", backend="reference", **options)
    assert rows[0].shape == (2, 3) and rows[1][0].shape == (2, 3, 8)
    assert (rows[0][shaped[3] == IGNORED] == 0).all()
    assert_same((rows[0].view(6), (rows[1][0].view(6, 8), *rows[1][1:])), expected)
    total = call(*shaped, reduction="sum", backend=backend, **options)
    torch.testing.assert_close(rows[0].sum(), total)
    mean = call(*shaped, backend=backend, **options)
    torch.testing.assert_close(total / (labels != IGNORED).sum(), mean)


@pytest.mark.parametrize("door", LINEAR)
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("N", [0, 1, 5])
def test_nothing_to_learn_from(N, backend, door, device):
    student, (teacher,), labels = make_heads(N, 13, 8, torch.float32, device)
    given = (door, student, teacher, labels.fill_(IGNORED))
    loss, grads = loss_and_grads(*given, backend=backend)
    assert loss.item() == 0 and all((grad == 0).all() for grad in grads)
    if N == 1:
        labels.fill_(2)
        loss, grads = loss_and_grads(*given, backend=backend)
        assert loss.item() > 0 and all(grad.isfinite().all() for grad in grads)


@pytest.mark.parametrize("door", LINEAR)
@pytest.mark.parametrize("backend", PROVIDERS)
def test_rows_of_neither_mask_reach_no_gemm(backend, door, device):
    student, (teacher,), labels = make_heads(12, 17, 8, torch.float64, device)
    labels[:] = IGNORED
    labels[2], labels[7] = 3, 5
    expected = loss_and_grads(door, student, teacher, labels, backend="reference")
    broken = [x.clone() for x in student]
    broken[0][labels == IGNORED] = float("nan")
    with mock.patch.object(linear_op, "project", wraps=linear_op.project) as project:
        actual = loss_and_grads(door, broken, teacher, labels, backend=backend)
    assert_same(actual, expected)
    assert (actual[1][0][labels == IGNORED] == 0).all()
    if device == "cpu":
        # the student's rows, and those of a teacher that runs
        rows = [c.args[0].shape[0] for c in project.call_args_list]
        assert rows == ([2, 2] if door == "hidden" else [2])


@pytest.mark.parametrize("door", LINEAR)
@pytest.mark.parametrize("backend", PROVIDERS)
def test_compaction_without_asking_how_many(backend, door, device):
    """The path a GPU takes: places by prefix sum, unused ones read and write a spare row."""
    student, (teacher,), labels = make_heads(12, 17, 8, torch.float64, device)
    # what every column loses to smoothing is 0 / 0 in an unused place
    given, options = (door, student, teacher, labels), {"label_smoothing": 0.1}
    expected = loss_and_grads(*given, backend="reference", **options)
    options |= {"backend": backend, "chunk_bytes": 1400}
    with mock.patch.object(linear_op, "may_ask", lambda device: False):
        for max_rows in (None, 12, 8):
            assert_same(loss_and_grads(*given, max_rows=max_rows, **options), expected)
        # on a GPU an assertion ends the whole process
        if device == "cpu":
            with pytest.raises(RuntimeError, match="max_rows"):
                loss_and_grads(*given, max_rows=3, **options)


@pytest.mark.parametrize("door", LINEAR)
@pytest.mark.parametrize("dtype, bar", [(torch.bfloat16, 5e-3), (torch.float16, 1e-3)], ids=str)
def test_narrow_gradients_written_over_the_logits(dtype, bar, door, device):
    """The Triton kernel rounds dlogits once, in place; k more than one block's threads."""
    *heads, labels = drifted_heads(6, 9000, 0.01, dtype, device)
    # at 2 some gradients of float16 lie under its floor
    options = {"alpha": 1.0, "temperature": 1.0, "k": 300}
    truth = loss_and_grads(door, *in_float64(*heads), labels, **options)[1]
    actual = loss_and_grads(door, *heads, labels, backend="triton", **options)[1]
    errors = {n: relative_error(a, t) for n, a, t in zip(NAMES, actual, truth, strict=True)}
    assert all(error <= bar for error in errors.values()), errors


@pytest.mark.parametrize("door", LINEAR)
@pytest.mark.parametrize("backend", PROVIDERS)
def test_float16_with_a_loss_scaler(backend, door, device):
    """Row weights of 1e-5: dlogits lie under float16's floor until the scaler's 2^15 comes in."""
    *heads, labels = drifted_heads(8, 500, 0.05, torch.float16, device)
    options = {"alpha": 1.0, "num_items": 1e5, "k": 32}
    truth = loss_and_grads(door, *in_float64(*heads), labels, backend="reference", **options)[1]
    inputs = [x.clone().requires_grad_() for x in heads[0]]
    loss = call(door, inputs, heads[1], labels, backend=backend, **options)
    actual = torch.autograd.grad(2.0**15 * loss, inputs)
    for name, a, t in zip(NAMES, actual, truth, strict=True):
        assert a.dtype == torch.float16 and relative_error(a, 2.0**15 * t) <= 2e-3, name


@pytest.mark.parametrize("door", LINEAR)
@pytest.mark.parametrize("backend", PROVIDERS)
def test_autocast(backend, door, device):
    student, (teacher,), labels = make_heads(6, 33, 8, torch.float32, device)
    low = [[x.bfloat16() for x in head] for head in (student, teacher)]
    expected = loss_and_grads(door, *low, labels, backend=backend)
    # tokens that are kept were rounded before
    teacher = teacher if door == "hidden" else low[1]
    with torch.autocast(device, dtype=torch.bfloat16):
        actual = loss_and_grads(door, student, teacher, labels, backend=backend)
    assert actual[0] == expected[0]
    for a, e in zip(actual[1], expected[1], strict=True):
        assert a.dtype == torch.float32 and torch.equal(a, e.float())


@pytest.mark.parametrize("door", DOORS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("backend", PROVIDERS)
def test_backward_twice_is_the_same_twice(backend, dtype, door, device):
    """Also by a factor that bfloat16 would round: one of the two works in place."""
    student, (teacher,), labels = make_heads(4, 9, 8, dtype, device)
    student = [x.requires_grad_() for x in student]
    kept = [x.clone() for x in (*student, *teacher)]
    loss = call(door, student, teacher, labels, backend=backend) / 3
    first = torch.autograd.grad(loss, student, retain_graph=True)
    second = torch.autograd.grad(loss, student)
    assert all(map(torch.equal, first, second))
    assert all(map(torch.equal, kept, (*student, *teacher)))


@pytest.mark.parametrize("door", DOORS)
@pytest.mark.parametrize("reduction", ["mean", "none"])
@pytest.mark.parametrize("backend", PROVIDERS)
def test_second_derivative_is_refused(backend, reduction, door, device):
    student, (teacher,), labels = make_heads(4, 9, 8, torch.float64, device)
    options = {"backend": backend, "reduction": reduction}
    expected = loss_and_grads(door, student, teacher, labels, **options)[1]
    for i in range(3):
        inputs = [x.detach().clone().requires_grad_(j == i) for j, x in enumerate(student)]
        loss = call(door, inputs, teacher, labels, **options)
        scalar = (loss * torch.linspace(1, 2, loss.numel(), device=device).view_as(loss)).sum()
        (grad,) = torch.autograd.grad(scalar, inputs[i], create_graph=True)
        torch.testing.assert_close(grad.detach(), expected[i])
        with pytest.raises(growkern.GrowthError, match="once"):
            torch.autograd.grad(grad.square().sum(), inputs[i])
