"""Rows in float32 with sums in float64 (`csrc/cpu/kl_mlm_narrow.h`), against float64."""

import pytest
import torch

from growkern.ops.backend import native
from growkern.ops.loss.rows.on_cpu import is_narrow
from growkern.ops.loss.rows.state import KL_ROW, MLM_ROW, Maths, Rows, Steps, terms
from tests.ops.loss.loss_inputs import relative_error
from tests.ops.loss.test_kl_mlm_cpu import run, truth_of

pytestmark = pytest.mark.usefixtures("several_threads")
BF16, F32, F64 = torch.bfloat16, torch.float32, torch.float64


@pytest.mark.parametrize("isa", native.available_isas())
@pytest.mark.parametrize("logits", [F32, F64], ids=str)
@pytest.mark.parametrize("maximum", [0.0, 13.7, -3.3])
@pytest.mark.parametrize("temperature, bar", [(1.0, 1.1), (2.0, 1.1), (0.7, 1.25)])
def test_exp_is_good_to_one_ulp(temperature, bar, maximum, logits, isa):
    """Two columns: without its label, the sum of a row is a single exponential.

    1 / 0.7 is no float32 number, and rounding it costs a part of an ulp.
    """
    rng = torch.Generator().manual_seed(0)
    x = torch.cat([90 * torch.rand(200_000, generator=rng), torch.logspace(-12, 2, 20_000)])
    z = torch.stack([torch.full_like(x, maximum), maximum - x], 1)
    none = torch.zeros(len(x)).long()
    rows = Rows(z.to(logits), [], none, none.int() + MLM_ROW, 2, Maths(temperature), False)
    # the gradient's dtype says that float64 logits need no float64 result
    state, _ = run(rows, isa, F64, F32, steps=Steps(sums=True, grad=True))
    found = state[1] if temperature == 1 else state[2] - 1
    truth = ((z[:, 1].double() - z[:, 0].double()) / temperature).exp()
    # smaller results are 0, or lose their digits as 1 is subtracted
    kept = truth > (2e-38 if temperature == 1 else 1e-8)
    ulp = torch.ldexp(torch.ones_like(truth), torch.frexp(truth).exponent - 24)
    assert ((found - truth).abs() <= bar * ulp)[kept].all()
    assert (found[~kept] <= truth[~kept] * (1 + 1e-6)).all() or temperature != 1


@pytest.mark.parametrize("isa", native.available_isas())
@pytest.mark.parametrize("logits", [F32, F64], ids=str)
@pytest.mark.parametrize("temperature, bar", [(1.0, 1.5e-7), (2.0, 1.5e-7), (0.7, 2e-7)])
@pytest.mark.parametrize("drift, offset", [(1e-3, 0), (0.05, 0), (1.0, 0), (0.05, 40.0)])
def test_the_gradient_keeps_its_digits_at_every_drift(drift, offset, temperature, bar, logits, isa):
    """Also where all of the student's logits lie above the teacher's."""
    rng = torch.Generator().manual_seed(0)
    teacher = 3 * torch.randn(6, 5000, generator=rng, dtype=F64)
    student = teacher + drift * torch.randn(teacher.shape, generator=rng, dtype=F64)
    if offset:  # numbers whose difference is exact in float32
        student, teacher = ((x * 256).round() / 256 for x in (student, teacher))
    student, teacher = (student + offset).to(F32), teacher.to(F32)
    # the maxima move: the largest numbers come last, and the first columns are ruled out
    order = teacher[0].argsort()
    student, teacher = student[:, order].to(logits), teacher[:, order].to(logits)
    student[1, :700], teacher[1, :700] = -torch.inf, -torch.inf
    kind = torch.full((6,), KL_ROW).int()
    rows = Rows(student, [teacher], torch.zeros(6).long(), kind, 5000, Maths(temperature), True)
    state, grad = run(rows, isa, F64, F32)
    expected, truth = truth_of(rows)
    assert relative_error(grad, truth) <= bar
    found = terms(state, kind, rows.maths, True)
    # a divergence is the difference of sums that are good to 1e-8
    torch.testing.assert_close(found, expected, rtol=3 * bar, atol=2e-8)


@pytest.mark.parametrize("isa", native.available_isas())
def test_a_student_far_from_its_teacher(isa):
    """Where q / p overflows, and where q or p is 0."""
    rng = torch.Generator().manual_seed(0)
    teacher, student = (60 * torch.randn(8, 3000, generator=rng) for _ in range(2))
    kind = torch.full((8,), KL_ROW | MLM_ROW).int()
    rows = Rows(student, [teacher], torch.arange(8), kind, 3000, Maths(), False)
    state, grad = run(rows, isa, F64)
    expected, truth = truth_of(rows)
    assert relative_error(grad, truth) <= 3e-7
    torch.testing.assert_close(
        terms(state, kind, rows.maths, False)[:2], expected[:2], rtol=1e-6, atol=0
    )


def test_only_uncapped_rows_of_the_forward_kl_are_narrow():
    assert is_narrow(Maths(2.0, label_smoothing=0.1, z_loss=1e-3), F32) and is_narrow(Maths(), BF16)
    assert not is_narrow(Maths(), F64)
    for other in ({"softcap": 5.0}, {"teacher_softcap": 5.0}, {"beta": 1.0}, {"beta": 0.5}):
        assert not is_narrow(Maths(**other), F32)
