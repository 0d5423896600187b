"""The rows of the compiled library, on every instruction set, against float64."""

from unittest import mock

import pytest
import torch
from growkern.ops.loss.rows.on_cpu_compiled import library_takes, rows_in_library

from growkern.ops.backend import native
from growkern.ops.loss.kl_mlm_loss import kl_mlm_rows_reference
from growkern.ops.loss.rows import on_cpu as cpu_module
from growkern.ops.loss.rows.on_cpu import rows_on_cpu
from growkern.ops.loss.rows.state import Maths, Rows, Steps, n_numbers, terms
from tests.ops.loss_inputs import make_logits, relative_error

ONCE = Steps(sums=True, grad=True)
MATHS = [
    Maths(),
    Maths(temperature=2.0),
    Maths(temperature=0.7, label_smoothing=0.1, z_loss=1e-2),
]


def make_rows(N, V, K, maths, dtype, parts=False):
    student, teachers, labels = make_logits(N, V, dtype, "cpu", K)
    # labels that count and are here, or not here; then rows of one term, of both and of none
    labels = labels.clamp(min=0)
    labels[2::5] = V + 3
    kind = torch.tensor([3, 3, 3, 1, 2, 0, 3])[torch.arange(N) % 7].int()
    return Rows(student, teachers, labels, kind if K else kind & 1, V, maths, parts)


def run(rows, isa, grad_dtype=None, in_place=False, steps=ONCE, state=None):
    N, V, K = *rows.student_NV.shape, len(rows.teachers_NV)
    dtype = rows.student_NV.dtype
    rows = rows._replace(student_NV=rows.student_NV.clone())
    state = rows.student_NV.new_empty(n_numbers(K), N).zero_() if state is None else state
    state[3] = state[3] if not steps.sums else float("-inf")
    grad = torch.full((N, V), torch.nan, dtype=grad_dtype or dtype)
    if in_place:
        grad = rows.student_NV.view(grad.dtype)[:, :V]
    drows = torch.linspace(0.5, 2, (1 + K) * N, dtype=dtype).view(1 + K, N)
    assert library_takes(rows, state, steps, grad)
    rows_in_library(rows, state, steps, drows, grad if steps.grad else None, isa)
    return state, grad


def truth_of(rows):
    z = rows.student_NV.double().requires_grad_()
    us = [x.double() for x in rows.teachers_NV]
    # a label of another slice has no logit here: its row has the KL alone, and all of q
    N, K = len(z), len(us)
    here = rows.labels_N < rows.vocab
    labels, kind = rows.labels_N.where(here, 0), rows.kind_N.where(here, rows.kind_N & 2)
    found = kl_mlm_rows_reference(z, us, labels, kind, rows.maths)
    drows = torch.linspace(0.5, 2, (1 + K) * N, dtype=rows.student_NV.dtype).view(1 + K, N)
    total = (drows.double() * found[: 1 + K]).sum()
    away = (~here & ((rows.kind_N & 1) > 0)).double() * drows[0].double()
    lse, maths = z.logsumexp(-1), rows.maths
    smooth = maths.label_smoothing * z.mean(-1)
    total = total + (away * (lse - smooth + maths.z_loss * lse.square())).sum()
    return found.detach(), torch.autograd.grad(total, z)[0]


@pytest.mark.parametrize("isa", native.available_isas())
@pytest.mark.parametrize("maths", MATHS, ids=str)
@pytest.mark.parametrize("N, V, K", [(7, 1300, 1), (14, 513, 2), (3, 40, 0), (1, 1, 1)])
@pytest.mark.parametrize("dtype, bar", [(torch.float32, 1e-6), (torch.float64, 1e-14)], ids=str)
def test_is_the_reference(dtype, bar, N, V, K, maths, isa):
    rows = make_rows(N, V, K, maths, dtype, parts=True)
    expected, truth = truth_of(rows)
    state, grad = run(rows, isa)
    assert (grad[rows.kind_N == 0] == 0).all()
    # a single column: its gradient is a difference of equal numbers
    assert (grad - truth).norm() <= bar * max(truth.norm().item(), 1)
    found = terms(state, rows.kind_N, maths, True).double()
    here = (rows.labels_N < V) | (rows.kind_N & 1 == 0)
    torch.testing.assert_close(found[:, here], expected[:, here], rtol=4 * bar, atol=4 * bar)
    # sums in one call, the gradient in the next
    state, _ = run(rows, isa, steps=Steps(sums=True))
    _, again = run(rows, isa, steps=Steps(grad=True), state=state)
    assert torch.equal(again, grad)


@pytest.mark.parametrize("isa", [*native.available_isas(), "pytorch"])
def test_the_sum_at_the_temperature_needs_no_teacher(isa):
    """The top-k loss reads its tail without one."""
    rows = make_rows(7, 600, 0, Maths(2.0), torch.float64)
    state = rows.student_NV.new_empty(n_numbers(0), 7)
    if isa == "pytorch":
        with mock.patch.object(cpu_module, "library_takes", lambda *_: False):
            rows_on_cpu(rows, state, Steps(sums=True))
    else:
        state, _ = run(rows, isa, steps=Steps(sums=True))
    z = rows.student_NV
    expected = ((z - z.amax(-1, keepdim=True)) / 2).exp().sum(-1)
    live = rows.kind_N > 0
    torch.testing.assert_close(state[2, live], expected[live])


@pytest.mark.parametrize("isa", native.available_isas())
@pytest.mark.parametrize(
    "dtype, narrow, bar",
    [(torch.float32, torch.bfloat16, 2.5e-3), (torch.float64, torch.float32, 1e-7)],
    ids=str,
)
def test_a_narrow_gradient_overwrites_the_logits(dtype, narrow, bar, isa):
    rows = make_rows(7, 1300, 1, Maths(2.0), dtype)
    _, truth = truth_of(rows)
    _, grad = run(rows, isa, narrow, in_place=True)
    assert relative_error(grad, truth) <= bar


@pytest.mark.parametrize("isa", native.available_isas())
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_infinite_and_missing_numbers(dtype, isa):
    rows = make_rows(3, 600, 1, Maths(), dtype)
    student, teacher = rows.student_NV, rows.teachers_NV[0]
    rows.labels_N[:] = 3
    # a token neither can say; one far below the others; a row spoilt by a NaN
    student[0, 5] = teacher[0, 5] = float("-inf")
    student[0, 7], teacher[0, 9] = -1e4, -1e4
    student[2, 599] = torch.nan
    state, grad = run(rows, isa)
    assert grad[:2].isfinite().all() and grad[0, 5] == 0
    assert grad[2].isnan().any()
    found = terms(state, rows.kind_N, rows.maths, False)
    assert found[:, :2].isfinite().all() and found[0, 2].isnan()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("isa", native.available_isas())
def test_exponentials_keep_their_digits(dtype, isa):
    """Two columns: d_T is 1 + exp(x), a gradient of both signs, over the whole range of x."""
    x = -torch.cat([torch.linspace(0, 40, 4001), torch.linspace(40, 800, 500)]).to(dtype)
    logits = torch.stack([torch.zeros_like(x), x], 1)
    rows = Rows(logits, [], torch.zeros(len(x)).long(), torch.ones(len(x)).int(), 2, Maths(), False)
    _, grad = run(rows._replace(kind_N=torch.ones(len(x)).int()), isa)
    weights = torch.linspace(0.5, 2, len(x), dtype=dtype).double()
    expected = weights * x.double().sigmoid()
    eps = torch.finfo(dtype).eps
    torch.testing.assert_close(grad[:, 1].double(), expected, rtol=4 * eps, atol=1e-37)


def test_what_the_library_has_no_code_for_is_pytorch():
    for maths in (Maths(softcap=3.0), Maths(teacher_softcap=3.0), Maths(beta=1.0)):
        rows = make_rows(3, 40, 1, maths, torch.float32)
        state = torch.empty(n_numbers(1), 3)
        assert not library_takes(rows, state, ONCE, torch.empty(3, 40))
    rows = make_rows(3, 40, 1, Maths(), torch.float32)
    assert not library_takes(rows, state, ONCE, torch.empty(3, 40, dtype=torch.float16))
    rows = rows._replace(student_NV=rows.student_NV.t().contiguous().t())
    assert not library_takes(rows, state, ONCE, torch.empty(3, 40))
    # and gives the same numbers
    rows_on_cpu(rows, state, Steps(sums=True))
    if native.loaded() is not None:
        expected, _ = run(rows._replace(student_NV=rows.student_NV.contiguous()), 0)
        torch.testing.assert_close(state, expected, rtol=1e-5, atol=1e-5)
