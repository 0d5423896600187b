"""Where sizes, values and surroundings are at their limits."""

import math

import pytest
import torch
from torch import library
from torch.utils.checkpoint import checkpoint

import growkern
from growkern.ops.loss.linear import linear_op
from growkern.ops.loss.rows.inputs import checked_labels
from tests.ops.loss.loss_inputs import BACKENDS, DOORS, IGNORED, call, make_logits
from tests.ops.loss.test_linear_kl_mlm_loss import assert_same, loss_and_grads, make_heads
from tests.ops.loss.test_topk_kl_mlm_loss import make_inputs

PROVIDERS = BACKENDS[1:]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("divergence", ["forward", "reverse", "jsd"])
@pytest.mark.parametrize("padding", [0, 7])
def test_nothing_to_learn_from_oneself(padding, divergence, backend, device):
    """The teacher is the student, its head padded to another size with whatever is there."""
    student, _, labels = make_heads(6, 301, 16, torch.float32, device)
    weight = torch.cat([student[1], torch.full((padding, 16), 9.0, device=device)])
    bias = torch.cat([student[2], torch.full((padding,), 1e4, device=device)])
    loss, grads = loss_and_grads(
        student, [[student[0], weight, bias]], labels, alpha=1.0, divergence=divergence,
        vocab_size=301, backend=backend,
    )  # fmt: skip
    assert abs(loss.item()) <= 1e-6
    assert all(g.isfinite().all() and g.abs().max() <= 2e-6 for g in grads)


@pytest.mark.parametrize("backend", PROVIDERS)
@pytest.mark.parametrize("divergence", ["forward", "jsd"])
def test_large_logits_and_tokens_that_are_ruled_out(divergence, backend, device):
    """Scores of +-1e4 and, in the teacher, -inf; also with the label in another tile."""
    student, teachers, labels = make_heads(5, 33, 8, torch.float64, device)
    student[2][3], teachers[0][2][4] = 1e4, -1e4
    # far below 0, where a tile without a finite logit must not pass for one of maximum 0
    teachers[0][2] -= 2000
    teachers[0][2][6:9] = float("-inf")
    options = {"alpha": 0.5, "divergence": divergence, "backend": backend}
    whole = loss_and_grads(student, teachers, labels, **options)
    assert whole[0].isfinite() and all(g.isfinite().all() for g in whole[1])
    # one of these tiles holds nothing the teacher allows
    assert_same(loss_and_grads(student, teachers, labels, vocab_tile=3, **options), whole)


@pytest.mark.parametrize("backend", PROVIDERS)
def test_columns_ruled_out_before_logits_far_below_0(backend, device):
    """A run of -inf longer than a block: it must not pass for a maximum of 0."""
    teacher, student = (3 * torch.randn(2, 3, 9000, device=device) - 1000).unbind()
    student[:, :8500], teacher[:, :8500] = float("-inf"), float("-inf")
    labels = torch.tensor([8600, 8999, -100], device=device)
    losses = [
        growkern.kl_mlm_loss(
            student.to(dtype), teacher.to(dtype), labels, kl_rows="all", backend=choice
        )
        for dtype, choice in ((torch.float32, backend), (torch.float64, "reference"))
    ]
    torch.testing.assert_close(losses[0].double(), losses[1], rtol=1e-5, atol=0)


@pytest.mark.parametrize("backend", PROVIDERS)
def test_rows_more_than_two_to_the_31_elements_apart(backend, tmp_path, device):
    """Offsets in int64: the logits lie in a sparse file, 2**30 elements from row to row."""
    if device != "cpu":
        pytest.skip("a GPU cannot map a sparse file")
    student, teachers, labels = make_logits(3, 9, torch.bfloat16, device)
    apart = 1 << 30
    path = tmp_path / "logits"
    with path.open("wb") as file:
        file.truncate(2 * (3 * apart + 64))
    far = torch.from_file(str(path), shared=True, size=3 * apart + 64, dtype=torch.bfloat16)
    views = [far.as_strided((3, 9), (apart, 1), offset) for offset in (0, 32)]
    for view, logits in zip(views, (student, teachers[0]), strict=True):
        view.copy_(logits)
    grads = []
    for z, u in ((student, teachers[0]), views):
        z = z.detach().requires_grad_()
        loss = growkern.kl_mlm_loss(z, u, labels, kl_rows="all", backend=backend)
        grads += torch.autograd.grad(loss, z)
    assert torch.equal(*grads)


@pytest.mark.parametrize("door", DOORS)
@pytest.mark.parametrize("backend", BACKENDS)
def test_a_global_count_of_nothing(backend, door, device):
    """A batch of which no row has a label: its count is 0, its teacher's rows are whatever."""
    student, teachers, labels = make_heads(6, 33, 8, torch.float32, device)
    teachers[0][0].fill_(float("nan"))
    student = [x.requires_grad_() for x in student]
    none = torch.full_like(labels, -100)
    for count in (torch.tensor(0, device=device), (torch.tensor(0, device=device),) * 2):
        options = {"num_items": count, "backend": backend}
        loss = call(door, student, teachers[0], none, **options)
        grads = torch.autograd.grad(loss, student)
        assert loss.item() == 0 and all((g == 0).all() for g in grads)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("divergence", ["forward", "reverse", "jsd"])
def test_a_teacher_that_weighs_nothing_brings_nothing_in(divergence, backend, device):
    """A rate on the device reaches 0: an infinite or undefined term is then no part of the loss."""
    student, teachers, labels = make_logits(6, 33, torch.float32, device, seed=3)
    teachers[0][:, 0], teachers[0][2] = float("-inf"), float("nan")
    options = {"divergence": divergence, "backend": backend}
    z = student.requires_grad_()
    loss = growkern.kl_mlm_loss(z, teachers[0], labels, alpha=torch.tensor(0.0), **options)
    expected = torch.nn.functional.cross_entropy(z, labels)
    torch.testing.assert_close(loss, expected)
    actual, truth = (torch.autograd.grad(x, z)[0] for x in (loss, expected))
    torch.testing.assert_close(actual, truth, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("divergence", ["forward", "reverse", "jsd"])
def test_tokens_that_both_rule_out(divergence, backend, device):
    """As if those columns were not there."""
    student, teachers, labels = make_logits(6, 33, torch.float64, device, seed=4)
    labels = labels.clamp(max=20)
    z, u = student.clone(), teachers[0].clone()
    z[:, 25:30] = u[:, 25:30] = float("-inf")
    kept = [i for i in range(33) if not 25 <= i < 30]
    options = {"alpha": 0.7, "temperature": 1.5, "divergence": divergence}
    z.requires_grad_()
    loss = growkern.kl_mlm_loss(z, u, labels, backend=backend, **options)
    (actual,) = torch.autograd.grad(loss, z)
    z_kept = student[:, kept].requires_grad_()
    expected = growkern.kl_mlm_loss(
        z_kept, teachers[0][:, kept], labels, backend="reference", **options
    )
    (truth,) = torch.autograd.grad(expected, z_kept)
    torch.testing.assert_close(loss, expected)
    torch.testing.assert_close(actual[:, kept], truth)
    assert (actual[:, 25:30] == 0).all()


@pytest.mark.parametrize("backend", PROVIDERS)
def test_under_gradient_checkpointing(backend, device):
    student, teachers, labels = make_heads(6, 17, 8, torch.float64, device)

    def step(hidden, weight, bias):
        return growkern.linear_kl_mlm_loss(
            hidden.tanh(), weight, *teachers[0][:2], labels, student_bias=bias, backend=backend
        )

    results = []
    for run in (step, lambda *x: checkpoint(step, *x, use_reentrant=False)):
        inputs = [x.detach().clone().requires_grad_() for x in student]
        loss = run(*inputs)
        results.append((loss.detach(), torch.autograd.grad(loss, inputs)))
    assert_same(*results)


def test_labels_that_count_lie_inside_the_vocabulary(device):
    """Also in a compiled graph; but nobody asks where no label is read."""
    student, teachers, labels = make_logits(6, 33, torch.float32, device)
    labels[3] = 33
    loss = torch.compile(growkern.kl_mlm_loss, fullgraph=True, backend="aot_eager")
    if device == "cpu":
        for op in (growkern.kl_mlm_loss, loss):
            with pytest.raises(growkern.GrowthError, match=r"row 3 is 33, outside 0\.\.32"):
                op(student, teachers, labels)
    assert growkern.kl_mlm_loss(student, teachers, labels, alpha=1.0).isfinite()
    labels[1::3] = 33
    assert growkern.kl_mlm_loss(student, teachers, labels, ignore_index=33).isfinite()


def test_opcheck_of_the_labels(device):
    labels, kind = torch.tensor([0, 8, -100], device=device), torch.tensor([1, 3, 2], device=device)
    library.opcheck(checked_labels, (labels, kind, 9, ""))


@pytest.mark.parametrize("door", DOORS)
@pytest.mark.parametrize("shape", [(3, 2), (6,), (2, 3, 1)], ids=str)
def test_a_mask_of_another_shape_is_refused(shape, door):
    """Its rows would be in another order."""
    student, teachers, labels = make_heads(6, 33, 8, torch.float64, "cpu")
    heads = [(head[0].view(2, 3, -1), *head[1:]) for head in (student, teachers[0])]
    labels, mask = labels.view(2, 3), torch.tensor([[True, False, True], [False, True, True]])
    loss = call(door, *heads, labels, kl_rows=mask, alpha=1.0, reduction="none")
    assert torch.equal(loss > 0, mask)
    with pytest.raises(growkern.GrowthError, match=r"of the labels' shape \(2, 3\), got"):
        call(door, *heads, labels, kl_rows=mask.reshape(shape))


@pytest.mark.parametrize("door", DOORS)
@pytest.mark.parametrize("backend", BACKENDS)
def test_a_count_is_a_number_in_any_shape(backend, door, device):
    student, teachers, labels = make_heads(6, 33, 8, torch.float64, device)
    heads, options = (
        (student, teachers[0]),
        {"alpha": 0.3, "backend": backend, "return_parts": True},
    )
    expected, _ = call(door, *heads, labels, num_items=(7, 5), **options)
    for shape in ((), (1,), (1, 1), (1, 1, 1)):
        counts = [torch.full(shape, n, device=device) for n in (7, 5)]
        loss, _ = call(door, *heads, labels, num_items=counts, **options)
        assert loss.shape == () and torch.equal(loss, expected)
        loss, _ = call(door, *heads, labels, num_items=counts[0], **options)
        assert torch.equal(loss, call(door, *heads, labels, num_items=7, **options)[0])


@pytest.mark.parametrize("door", DOORS)
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("divergence", ["forward", "reverse", "jsd"])
def test_an_infinite_term_without_a_weight_costs_nothing(divergence, backend, door, device):
    student, teachers, _ = make_heads(6, 33, 8, torch.float64, device)
    teacher, labels = teachers[0], torch.arange(1, 7, device=device)
    options = {"divergence": divergence, "backend": backend}

    def loss_and_grads_of(**more):
        leaves = [x.detach().clone().requires_grad_() for x in student]
        loss = call(door, leaves, teacher, labels, **options | more)
        loss = loss[0] if isinstance(loss, tuple) else loss
        return loss.detach(), torch.autograd.grad(loss.sum(), leaves)

    # both rule out the label of row 2, so its label term is infinite and its KL is not
    student[2][3] = teacher[2][3] = float("-inf")
    expected = loss_and_grads_of(alpha=1.0)
    assert expected[0].isfinite()
    one = torch.tensor(1.0, dtype=torch.float64, device=device)
    for more in ({"alpha": 1.0, "return_parts": True}, {"alpha": one}):
        assert_same(loss_and_grads_of(**more), expected)
    rows, _ = loss_and_grads_of(alpha=one, reduction="none")
    assert rows.isfinite().all()

    # every KL is infinite, except JSD's
    (teacher if divergence == "reverse" else student)[2][20] = float("-inf")
    none = torch.zeros(6, dtype=torch.float64, device=device)
    for reduction in ("mean", "sum", "none"):
        loss, grads = loss_and_grads_of(row_weights=none, reduction=reduction, return_parts=True)
        assert (loss == 0).all() and all((g == 0).all() for g in grads)


# rows of weight 0
N, V, GONE = 7, 37, (0, 3)


def broken_rows(door, value, device):
    """A loss of the student's tensors, what it trains, and the labels; some rows are broken."""
    gone = torch.tensor(GONE, device=device)
    if door == "logits":
        student, teachers, labels = make_logits(N, V, torch.float64, device)
        student, loss_of, beside = [student], growkern.kl_mlm_loss, [teachers]
        broken = [student[0], teachers[0]]
    elif door == "hidden":
        student, (teacher,), labels = make_heads(N, V, 8, torch.float64, device)
        loss_of, beside, broken = growkern.linear_kl_mlm_loss, teacher[:2], [student[0], teacher[0]]
    else:
        student, beside, labels = make_inputs(N, V, 8, 4, torch.float64, device)
        loss_of, broken = growkern.topk_kl_mlm_loss, [student[0], beside[1]]
        beside[0][gone] = V + 5
    for x in broken:
        x[gone] = value
    student = [x.requires_grad_() for x in student]
    bias = {"student_bias": student[2]} if len(student) == 3 else {}

    def call(labels, **options):
        return loss_of(*student[:2], *beside, labels, **bias, **options)

    return call, student, labels


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("divergence", ["forward", "reverse", "jsd"])
@pytest.mark.parametrize("door", DOORS)
@pytest.mark.parametrize("backend", BACKENDS)
def test_a_row_of_weight_0_is_as_absent_as_one_without_a_label(
    backend, door, divergence, value, device, monkeypatch
):
    call, student, labels = broken_rows(door, value, device)
    labels[list(GONE)] = V + 9
    weights = torch.tensor([0.5, 1, 2, 1, 1, 3, 1], dtype=torch.float64, device=device)
    options = {"divergence": divergence, "backend": backend, "return_parts": True}
    options |= {"temperature": 2.0, "label_smoothing": 0.1, "z_loss": 0.01}
    count = int((labels != IGNORED).sum())
    masked = labels.clone()
    masked[list(GONE)] = IGNORED
    expected, parts = call(masked, row_weights=weights, num_items=count, **options)
    truth = torch.autograd.grad(expected, student)
    assert expected.isfinite() and expected > 0 and all(x.isfinite().all() for x in truth)

    weights[list(GONE)] = 0
    for asks in (True, False):
        # the second time as on a GPU, which takes all rows through the products
        monkeypatch.setattr(linear_op, "may_ask", lambda device, asks=asks: asks)
        actual, found = call(labels, row_weights=weights, **options)
        torch.testing.assert_close(actual, expected)
        torch.testing.assert_close(found, parts)
        for one, other in zip(torch.autograd.grad(actual, student), truth, strict=True):
            torch.testing.assert_close(one, other)
        rows, _ = call(labels, row_weights=weights, reduction="none", **options)
        assert (rows[list(GONE)] == 0).all() and rows.isfinite().all()


@pytest.mark.parametrize("door", DOORS)
@pytest.mark.parametrize("backend", BACKENDS)
def test_every_row_of_weight_0(backend, door, device):
    call, student, labels = broken_rows(door, math.nan, device)
    none = torch.zeros(N, dtype=torch.float64, device=device)
    for x in student[:1]:
        x.data.fill_(math.nan)
    loss = call(labels, row_weights=none, backend=backend)
    assert loss == 0 and all((x == 0).all() for x in torch.autograd.grad(loss, student))
