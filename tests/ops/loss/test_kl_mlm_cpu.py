"""The rows of the compiled library, on every instruction set, against float64."""

import math
from unittest import mock

import pytest
import torch

import growkern
from growkern.ops.backend import native
from growkern.ops.loss import kl_mlm_loss as door
from growkern.ops.loss.kl_mlm_loss import kl_mlm_rows_reference
from growkern.ops.loss.rows.on_cpu import is_narrow, rows_on_cpu, tail_gradient_on_cpu
from growkern.ops.loss.rows.state import KL_ROW, MLM_ROW, Maths, Rows, Steps, n_numbers, terms
from growkern.ops.loss.topk.buckets import TailFactors
from tests.ops.loss.loss_inputs import DOORS, call, make_logits, relative_error
from tests.ops.loss.test_linear_kl_mlm_loss import make_heads

pytestmark = pytest.mark.usefixtures("several_threads")
F16, BF16, F32, F64 = torch.float16, torch.bfloat16, torch.float32, torch.float64
ALL_STEPS = Steps(sums=True, diverge=True, grad=True)
MATHS = [
    Maths(),
    Maths(temperature=2.0),
    Maths(temperature=4.0),
    Maths(temperature=0.7, label_smoothing=0.1, z_loss=1e-2),
    Maths(softcap=2.0, label_smoothing=0.1),
    Maths(temperature=2.0, softcap=4.0, teacher_softcap=3.0),
    Maths(beta=1.0),
    Maths(temperature=2.0, beta=0.5),
    Maths(temperature=1.5, softcap=5.0, teacher_softcap=4.0, beta=0.1, z_loss=1e-2),
    Maths(beta=1e-3),
]


def make_rows(N, V, K, maths, dtype, parts=False):
    student, teachers, labels = make_logits(N, V, dtype, "cpu", K)
    # labels that count and are here, or not here; then rows of one term, of both and of none
    labels = labels.clamp(min=0)
    labels[2::5] = V + 3
    kind = torch.tensor([3, 3, 3, 1, 2, 0, 3])[torch.arange(N) % 7].int()
    return Rows(student, teachers, labels, kind if K else kind & MLM_ROW, V, maths, parts)


def run(rows, isa, dtype=None, grad_dtype=None, in_place=False, steps=ALL_STEPS, state=None):
    """State and gradient; the sums are in `dtype`."""
    N, V, K = *rows.student_NV.shape, len(rows.teachers_NV)
    dtype = dtype or rows.student_NV.dtype
    rows = rows._replace(student_NV=rows.student_NV.clone())
    if state is None:
        state = torch.full((n_numbers(K), N), math.nan, dtype=dtype)
    grad = torch.full((N, V), torch.nan, dtype=grad_dtype or rows.student_NV.dtype)
    if in_place:
        grad = rows.student_NV.view(grad.dtype)[:, :V]
    drows = weights_of(rows).to(dtype)
    rows_on_cpu(rows, state, steps, drows, grad if steps.grad else None, isa)
    return state, grad


def weights_of(rows):
    """The gradient of the terms, (1 + K, N); one KL term has the weight 0."""
    size = (1 + len(rows.teachers_NV), len(rows.student_NV))
    weights = torch.linspace(0.5, 2, math.prod(size)).view(size)
    weights[1:, 6:7] = 0
    return weights


def truth_of(rows):
    z = rows.student_NV.double().requires_grad_()
    us = [x.double() for x in rows.teachers_NV]
    # a label of another slice has no logit here: its row has the KL alone, and all of q
    here = rows.labels_N < rows.vocab
    labels = rows.labels_N.where(here, 0)
    kind = rows.kind_N.where(here, rows.kind_N & KL_ROW)
    found = kl_mlm_rows_reference(z, us, labels, kind, rows.maths)
    drows, maths = weights_of(rows).double(), rows.maths
    total = (drows * found[: 1 + len(us)]).sum()
    away = (~here & ((rows.kind_N & MLM_ROW) > 0)).double() * drows[0]
    capped = maths.softcap * (z / maths.softcap).tanh() if maths.softcap else z
    lse, smooth = capped.logsumexp(-1), maths.label_smoothing * capped.mean(-1)
    total = total + (away * (lse - smooth + maths.z_loss * lse.square())).sum()
    return found.detach(), torch.autograd.grad(total, z)[0]


@pytest.mark.parametrize("isa", native.available_isas())
@pytest.mark.parametrize("maths", MATHS, ids=str)
@pytest.mark.parametrize("N, V, K", [(7, 1300, 1), (14, 513, 2), (3, 40, 0), (1, 1, 1)])
@pytest.mark.parametrize("dtype, bar", [(F32, 1e-6), (F64, 1e-14)], ids=str)
def test_is_the_reference(dtype, bar, N, V, K, maths, isa):
    rows = make_rows(N, V, K, maths, dtype, parts=True)
    expected, truth = truth_of(rows)
    state, grad = run(rows, isa)
    assert (grad[rows.kind_N == 0] == 0).all()
    # a single column: its gradient is a difference of equal numbers
    assert (grad - truth).norm() <= bar * max(truth.norm().item(), 1)
    found = terms(state, rows.kind_N, maths, True).double()
    here = (rows.labels_N < V) | (rows.kind_N & MLM_ROW == 0)
    torch.testing.assert_close(found[:, here], expected[:, here], rtol=4 * bar, atol=4 * bar)
    # sums in one call, centre and spread in the next, then the gradient
    state, _ = run(rows, isa, steps=Steps(sums=True))
    run(rows, isa, steps=Steps(diverge=True), state=state)
    _, again = run(rows, isa, steps=Steps(grad=True), state=state)
    assert torch.equal(again, grad)


@pytest.mark.parametrize("isa", native.available_isas())
@pytest.mark.parametrize("maths", [MATHS[1], MATHS[8]], ids=str)
@pytest.mark.parametrize(
    "student, teacher, sums, bar",
    [
        (F16, F16, F32, 6e-4),
        (BF16, F32, F32, 5e-3),
        (F32, BF16, F32, 2e-6),
        (F32, F32, F64, 1e-7),
        (F32, F16, F64, 1e-7),
        (F64, BF16, F64, 1e-14),
        (BF16, F64, F64, 5e-3),
    ],
    ids=str,
)
def test_converts_logits_of_any_float_type(student, teacher, sums, bar, maths, isa):
    """The gradient has the student's type; what is left over is its rounding."""
    rows = make_rows(7, 1300, 2, maths, F64)
    # the last column apart: the rows of a transposed tensor are contiguous first
    teachers = [x.to(teacher).t().contiguous().t() for x in rows.teachers_NV]
    rows = rows._replace(student_NV=rows.student_NV.to(student), teachers_NV=teachers)
    _, truth = truth_of(rows)
    _, grad = run(rows, isa, dtype=sums)
    assert relative_error(grad, truth) <= bar
    # the same numbers, given in the type of the sums
    wide = rows._replace(
        student_NV=rows.student_NV.to(sums), teachers_NV=[x.to(sums) for x in teachers]
    )
    _, same = run(wide, isa, grad_dtype=student)
    # a narrow row subtracts float64 logits in float64, and float32 ones with a remainder
    is_other = sums == F64 != teacher and is_narrow(maths, student)
    assert relative_error(same, truth) <= bar if is_other else torch.equal(grad, same)


def test_every_thread_has_its_own_scratch_memory():
    rows = make_rows(3000, 300, 2, MATHS[8], F16)
    alone = run(rows, None, dtype=F32)
    threads = torch.get_num_threads()
    torch.set_num_threads(4)
    try:
        together = run(rows, None, dtype=F32)
    finally:
        torch.set_num_threads(threads)
    assert all(torch.equal(a, b) for a, b in zip(alone, together, strict=True))


@pytest.mark.parametrize("isa", native.available_isas())
def test_the_sum_at_the_temperature_needs_no_teacher(isa):
    """The top-k loss reads its tail without one."""
    rows = make_rows(7, 600, 0, Maths(2.0), F64)
    state, _ = run(rows, isa, steps=Steps(sums=True))
    z = rows.student_NV
    expected = ((z - z.amax(-1, keepdim=True)) / 2).exp().sum(-1)
    live = rows.kind_N > 0
    torch.testing.assert_close(state[2, live], expected[live])


@pytest.mark.parametrize("isa", native.available_isas())
@pytest.mark.parametrize("maths", [Maths(), Maths(2.0, softcap=9.0, label_smoothing=0.1)], ids=str)
@pytest.mark.parametrize("dtype, bar", [(F32, 1e-6), (F64, 1e-14)], ids=str)
def test_gradient_of_a_tail(dtype, bar, maths, isa):
    rows = make_rows(7, 1300, 0, maths, dtype)
    rows = rows._replace(kind_N=torch.tensor([1, 3, 2, 0, 1, 1, 1]).int())
    factors = TailFactors(*torch.rand(5, 7, dtype=dtype))
    grad = torch.full((7, 1300), math.nan, dtype=dtype)
    tail_gradient_on_cpu(rows, torch.stack(factors), grad, isa)
    z = rows.student_NV.double()
    m, softmax, softmax_t, at_label, everywhere = (x.double()[:, None] for x in factors)
    expected = softmax * (z - m).exp()
    for row, label in enumerate(rows.labels_N):
        if rows.kind_N[row] & MLM_ROW and label < 1300:
            expected[row, label] = at_label[row, 0]
    expected += softmax_t * ((z - m) / maths.temperature).exp() - everywhere
    if maths.softcap:
        expected *= 1 - (z / maths.softcap).square()
    expected[rows.kind_N == 0] = 0
    assert relative_error(grad, expected) <= bar


@pytest.mark.parametrize("isa", native.available_isas())
@pytest.mark.parametrize("maths", [Maths(2.0), MATHS[8]], ids=str)
@pytest.mark.parametrize(
    "dtype, narrow, bar", [(F32, BF16, 2.5e-3), (F64, F32, 1e-7), (F64, BF16, 2.5e-3)], ids=str
)
def test_a_narrow_gradient_overwrites_the_logits(dtype, narrow, bar, maths, isa):
    rows = make_rows(7, 1300, 1, maths, dtype)
    _, truth = truth_of(rows)
    _, grad = run(rows, isa, None, narrow, in_place=True)
    assert relative_error(grad, truth) <= bar


@pytest.mark.parametrize("isa", native.available_isas())
@pytest.mark.parametrize("beta", [0.0, 0.5])
@pytest.mark.parametrize("dtype", [F32, F64], ids=str)
def test_infinite_and_missing_numbers(dtype, beta, isa):
    rows = make_rows(3, 600, 1, Maths(beta=beta), dtype)
    student, teacher = rows.student_NV, rows.teachers_NV[0]
    rows.labels_N[:] = 3
    # a token neither can say, or only one of the two; one far below the others; a NaN in a row
    student[0, 5] = teacher[0, 5] = teacher[1, 6] = float("-inf")
    student[0, 7], teacher[0, 9] = -1e4, -1e4
    if beta:
        student[1, 8] = float("-inf")
    student[2, 599] = torch.nan
    state, grad = run(rows, isa)
    assert grad[:2].isfinite().all() and grad[0, 5] == 0
    assert grad[2].isnan().any()
    found = terms(state, rows.kind_N, rows.maths, False)
    assert found[:, :2].isfinite().all() and found[0, 2].isnan() and found[1, 2].isnan()
    _, truth = truth_of(rows._replace(kind_N=torch.tensor([3, 3, 0]).int()))
    assert relative_error(grad[:2], truth[:2]) <= (1e-6 if dtype == F32 else 1e-13)


def test_rows_without_a_term_are_not_read():
    rows = make_rows(7, 600, 1, MATHS[8], F16)
    rows.student_NV[5] = rows.teachers_NV[0][5] = torch.nan
    rows.teachers_NV[0][3] = torch.nan  # has the MLM term only
    rows.teachers_NV[0][6] = torch.nan  # the KL term has the weight 0
    state, grad = run(rows, None, dtype=F32)
    assert grad.isfinite().all() and state[:, 5].tolist() == [0, 0, 0, -math.inf, *[0] * 10]
    assert terms(state, rows.kind_N, rows.maths, False).isfinite()[:, [0, 1, 3, 4, 5]].all()


@pytest.mark.parametrize("dtype", [F32, F64], ids=str)
@pytest.mark.parametrize("isa", native.available_isas())
def test_exponentials_keep_their_digits(dtype, isa):
    """Two columns: d_T is 1 + exp(x), a gradient of both signs, over the whole range of x."""
    x = -torch.cat([torch.linspace(0, 40, 4001), torch.linspace(40, 800, 500)]).to(dtype)
    logits = torch.stack([torch.zeros_like(x), x], 1)
    rows = Rows(logits, [], torch.zeros(len(x)).long(), torch.ones(len(x)).int(), 2, Maths(), False)
    _, grad = run(rows, isa)
    expected = weights_of(rows)[0].double() * x.double().sigmoid()
    eps = torch.finfo(dtype).eps
    torch.testing.assert_close(grad[:, 1].double(), expected, rtol=4 * eps, atol=1e-37)


@pytest.mark.parametrize("dtype", [F32, F64], ids=str)
@pytest.mark.parametrize("isa", native.available_isas())
def test_tanh_keeps_its_digits(dtype, isa):
    """The label's logit is capped, from the smallest numbers to the limit."""
    x = torch.cat([torch.logspace(-30, 2, 3000, dtype=F64), torch.tensor([0.0, 1e4])])
    x = torch.cat([x, -x]).to(dtype)
    logits, none = torch.stack([x, x], 1), torch.zeros(len(x)).long()
    rows = Rows(logits, [], none, none.int() + MLM_ROW, 2, Maths(softcap=3.0), False)
    state, _ = run(rows, isa, steps=Steps(sums=True))
    expected = 3 * (x.double() / 3).tanh()
    torch.testing.assert_close(
        state[3].double(), expected, rtol=6 * torch.finfo(dtype).eps, atol=1e-37
    )


@pytest.mark.parametrize("dtype", [F32, F64], ids=str)
@pytest.mark.parametrize("isa", native.available_isas())
@pytest.mark.parametrize("beta", [0.5, 0.05, 0.98])
def test_a_small_divergence_keeps_its_digits(beta, isa, dtype):
    """Two columns with p = 1/2 and log(q / p) of about r / 2, where (8) has a closed form."""
    r = torch.logspace(-6, 0, 300, dtype=dtype)
    none = torch.zeros(len(r)).long()
    z, u = torch.stack([r, 0 * r], 1), torch.zeros(len(r), 2, dtype=dtype)
    rows = Rows(z, [u], none, none.int() + KL_ROW, 2, Maths(beta=beta), False)
    _, grad = run(rows, isa)
    r = r.double()
    # -log(q / m) = log(1 + beta (p / q - 1))
    ratios = (beta * r.expm1() / 2).log1p() - (beta * (-r).expm1() / 2).log1p()
    truth = (1 - beta) * r.sigmoid() * (-r).sigmoid() * ratios * weights_of(rows)[1]
    # where q < p, log(q / m) of about beta r is a difference of numbers of about r
    bar = (10 + 2 / beta) * torch.finfo(dtype).eps
    torch.testing.assert_close(grad[:, 0].double(), truth, rtol=bar, atol=0)
    torch.testing.assert_close(grad[:, 1].double(), -truth, rtol=bar, atol=0)


# -------------------------------------------------- float32 with float64 sums


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
@pytest.mark.parametrize("temperature", [1.0, 2.0, 4.0])
@pytest.mark.parametrize("logits", [F32, F64], ids=str)
def test_a_student_near_its_teacher_in_some_columns(logits, temperature, isa):
    """Blocks of columns are computed in two ways. So are calls for a slice of the columns."""
    rng = torch.Generator().manual_seed(0)
    teacher = 3 * torch.randn(7, 2600, generator=rng)
    student = teacher + 0.1 * torch.randn(7, 2600, generator=rng)
    student[1, 700], teacher[2, 1100], student[3, :900] = 60.0, 50.0, -40.0
    student[4, 1500:], teacher[5, :512] = -torch.inf, -torch.inf
    kind = torch.tensor([3, 3, 3, 3, 1, 3, 2]).int()
    labels = torch.tensor([5, 600, 1100, 2599, 0, 1200, 9])
    maths = Maths(temperature)
    student, teacher = student.to(logits), teacher.to(logits)
    rows = Rows(student, [teacher], labels, kind, 2600, maths, True)
    expected, truth = truth_of(rows)
    state, grad = run(rows, isa, F64, F32)
    finite = torch.isfinite(truth).all(1)
    assert finite.sum() >= 6
    assert relative_error(grad[finite], truth[finite]) <= 3e-7
    found = terms(state, kind, maths, True)
    torch.testing.assert_close(found[:, :4], expected[:, :4], rtol=1e-6, atol=1e-7)
    pieces = []
    for columns in (slice(0, 1000), slice(1000, 2600)):
        part = rows._replace(
            student_NV=student[:, columns].contiguous(),
            teachers_NV=[teacher[:, columns].contiguous()],
            labels_N=labels - columns.start,
            vocab=columns.stop - columns.start,
        )
        _, piece = run(part, isa, F64, F32, steps=Steps(grad=True), state=state.clone())
        pieces.append(piece)
    sliced = torch.cat(pieces, 1)
    assert relative_error(sliced[finite], truth[finite]) <= 3e-7


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


# ------------------------------------------------------------- without the library


@pytest.fixture
def no_library():
    with mock.patch.object(native, "_load", lambda: (None, "built without it")):
        yield


@pytest.mark.parametrize("name", DOORS)
def test_the_reference_stands_in_block_by_block(name, no_library, monkeypatch):
    """The same loss and gradients as from all rows at once."""
    student, teachers, labels = make_heads(10, 33, 8, F32, "cpu")
    options = {"temperature": 2.0, "return_parts": True, "kl_rows": "all"}

    def loss_and_grads(size):
        monkeypatch.setattr(door, "REFERENCE_ELEMENTS", size)
        given = [x.detach().clone().requires_grad_() for x in student]
        loss, parts = call(name, given, teachers[0], labels, k=4, **options)
        grads = torch.autograd.grad(loss, given)
        return loss.detach(), *parts, *grads

    rows = []
    with mock.patch.object(
        door, "kl_mlm_rows_reference", wraps=door.kl_mlm_rows_reference
    ) as reference:
        whole = loss_and_grads(1 << 20)
        pieces = loss_and_grads(3 * 33)
        rows = [call.args[0].shape[0] for call in reference.call_args_list]
    if name == "logits":
        # backward computes each block again
        assert rows[:5] == [10, 3, 3, 3, 1]
    torch.testing.assert_close(pieces, whole)


def test_no_library_no_cpu_backend(no_library):
    student, teachers, labels = make_logits(4, 9, F32, "cpu")
    with pytest.raises(growkern.GrowthError, match="cannot run here: built without it"):
        growkern.kl_mlm_loss(student, teachers, labels, backend="cpu")
    compiled = torch.compile(growkern.kl_mlm_loss, fullgraph=True, backend="aot_eager")
    torch._dynamo.reset()
    torch.testing.assert_close(
        compiled(student, teachers[0], labels), growkern.kl_mlm_loss(student, teachers[0], labels)
    )
