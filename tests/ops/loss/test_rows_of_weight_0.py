"""A row of weight 0 is as absent as one without a label: it may hold NaN, infinities, wrong ids."""

import math

import pytest
import torch

import growkern
from growkern.ops.loss.linear import op as op_module
from tests.ops.loss.loss_inputs import BACKENDS, IGNORED, make_logits
from tests.ops.loss.test_linear_kl_mlm_loss import make_heads
from tests.ops.loss.test_topk_kl_mlm_loss import make_inputs

N, V, GONE = 7, 37, (0, 3)


def given(door, value, device):
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
@pytest.mark.parametrize("door", ["logits", "hidden", "top k"])
@pytest.mark.parametrize("backend", BACKENDS)
def test_as_if_it_had_no_label(backend, door, divergence, value, device, monkeypatch):
    call, student, labels = given(door, value, device)
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
        monkeypatch.setattr(op_module, "may_ask", lambda device, asks=asks: asks)
        actual, found = call(labels, row_weights=weights, **options)
        torch.testing.assert_close(actual, expected)
        torch.testing.assert_close(found, parts)
        for one, other in zip(torch.autograd.grad(actual, student), truth, strict=True):
            torch.testing.assert_close(one, other)
        rows, _ = call(labels, row_weights=weights, reduction="none", **options)
        assert (rows[list(GONE)] == 0).all() and rows.isfinite().all()


@pytest.mark.parametrize("door", ["logits", "hidden", "top k"])
@pytest.mark.parametrize("backend", BACKENDS)
def test_every_row(backend, door, device):
    call, student, labels = given(door, math.nan, device)
    none = torch.zeros(N, dtype=torch.float64, device=device)
    for x in student[:1]:
        x.data.fill_(math.nan)
    loss = call(labels, row_weights=none, backend=backend)
    assert loss == 0 and all((x == 0).all() for x in torch.autograd.grad(loss, student))
