"""The row kernel in CUDA C++, its very source run on a CPU, against the Triton kernel's truth.

Tests that need a compiler for GPUs are in test_cuda.py.
"""

import functools

import pytest
import torch

from bench.launches.cuda_emulator import emulate
from growkern.errors import GrowthError
from growkern.ops.loss.kl_mlm_loss import kl_mlm_loss, kl_mlm_rows_reference
from growkern.ops.loss.rows import on_cuda
from growkern.ops.loss.rows.on_cuda import cluster_size, rows_on_cuda
from growkern.ops.loss.rows.state import Maths, Rows, Steps, n_numbers, read_slices, terms
from tests.numerics import assert_no_worse_than_eager
from tests.ops.loss.loss_inputs import IGNORED, make_logits, relative_error

FP32, BF16, FP16 = torch.float32, torch.bfloat16, torch.float16
ONE_BLOCK = 227 << 10
HOPPER = ONE_BLOCK


@pytest.fixture(autouse=True)
def emulated(monkeypatch):
    """A device with clusters; `emulated.limit` is the shared memory of a block: rows that do not
    fit are shared."""

    class Device:
        limit = ONE_BLOCK
        eager = False

    def launch(*args):
        emulate(*args, eager=Device.eager)

    monkeypatch.setattr(on_cuda, "why_not", lambda: "")
    monkeypatch.setattr(on_cuda, "_too_old", lambda device: "")
    monkeypatch.setattr(on_cuda, "shared_limit", lambda device: Device.limit)
    monkeypatch.setattr(on_cuda, "launch", launch)
    monkeypatch.setattr(
        "growkern.ops.loss.kl_mlm_loss.choose_backend",
        lambda requested, *_, **__: requested or "reference",
    )
    return Device


def limit_for(blocks, V, sizes):
    """Shared memory in which two blocks of `blocks` fit, and no two of fewer."""
    limit = 2 * on_cuda.shared_bytes(V, blocks, sizes) + on_cuda.RESERVED_BYTES
    assert cluster_size(V, sizes, limit) == blocks
    return limit


def loss_and_grad(student, teachers, labels, backend="cuda", **options):
    student = student.detach().clone().requires_grad_()
    if "softcap" in options:
        options["teacher_softcap"] = options["softcap"]
    loss = kl_mlm_loss(student, teachers or None, labels, backend=backend, **options)
    (grad,) = torch.autograd.grad(loss.sum(), student)
    return loss.detach(), grad


def run_rows(rows, weights, dstudent=None, backwards=False):
    """Sums and gradient in one launch, as the linear loss asks for them: terms and gradient."""
    N = len(rows.labels_N)
    state_SN = torch.empty(n_numbers(len(rows.teachers_NV)), N)
    drows = torch.tensor(weights)[:, None].expand(-1, N)
    dstudent = torch.empty_like(rows.student_NV) if dstudent is None else dstudent
    rows_on_cuda(rows, state_SN, Steps(sums=True, grad=True), drows, dstudent)
    return terms(state_SN, rows.kind_N, rows.maths, rows.parts), dstudent


def truth(rows, weights):
    """`run_rows` from the reference in float64."""
    z = rows.student_NV.double()[:, : rows.vocab].detach().clone().requires_grad_()
    us = [u.double()[:, : rows.vocab] for u in rows.teachers_NV]
    expected = kl_mlm_rows_reference(z, us, rows.labels_N, rows.kind_N, rows.maths)
    loss = (torch.tensor(weights).double()[:, None] * expected[: 1 + len(us)]).sum()
    (grad,) = torch.autograd.grad(loss, z)
    return expected.detach(), grad


@functools.cache
def inputs(N, V, dtype, K=1):
    return make_logits(N, V, dtype, "cpu", K)


KI = {"alpha": 0.6, "temperature": 2.0, "softcap": 5.0}


@pytest.mark.parametrize(
    "N, V, dtype, blocks, options",
    [
        (1, 8, FP32, 1, {"alpha": 0.3}),
        (3, 1000, FP32, 1, {"alpha": 0.3}),
        (3, 1000, FP32, 1, {"alpha": 1.0, "temperature": 2.0}),
        (3, 1000, FP32, 2, {"alpha": 0.0}),
        (4, 2749, FP32, 2, KI),
        (3, 1002, BF16, 4, {"alpha": 0.3, "temperature": 3.0}),
        (3, 1001, FP16, 2, KI),
        # the last of 16 blocks have nothing to do
        (2, 70, FP32, 16, {"alpha": 0.3}),
    ],
)
def test_matches_float64(N, V, dtype, blocks, options, emulated):
    student, teachers, labels = inputs(N, V, dtype)
    emulated.limit = limit_for(blocks, V, [dtype.itemsize] * (1 + (options["alpha"] > 0)))
    in64 = (student.double(), [t.double() for t in teachers], labels)
    expected = loss_and_grad(*in64, backend="reference", **options)
    eager = loss_and_grad(student, teachers, labels, backend="reference", **options)
    actual = loss_and_grad(student, teachers, labels, **options)
    assert actual[0].dtype == FP32 and actual[1].dtype == dtype
    scale = in64[0].logsumexp(-1).abs().max().item() * options.get("temperature", 1.0) ** 2
    assert_no_worse_than_eager("loss", actual[0], eager[0], expected[0], scale=scale)
    assert_no_worse_than_eager("grad", actual[1], eager[1], expected[1], scale=1.0)


@pytest.mark.parametrize("V", [1000, 1002, 1003])
@pytest.mark.parametrize("blocks", [1, 4])
@pytest.mark.parametrize("dtype", [FP32, BF16])
def test_gradient_overwrites_the_logits(dtype, blocks, V, emulated):
    """In place, or narrower at the head of each row, where it reaches the next block's columns."""
    emulated.limit = limit_for(blocks, V, [4, 4])
    student, teachers, labels = inputs(4, V, FP32)
    kind = torch.tensor([3, 0, 2, 1], dtype=torch.int32)
    rows = Rows(student.clone(), teachers, labels.clamp(min=0), kind, V, Maths(2.0), False)
    expected = truth(rows, [0.7, 1.3])
    place = rows.student_NV.view(dtype)[:, :V]
    actual = run_rows(rows, [0.7, 1.3], place)
    # parts are not wanted: the rest of the terms is 0
    torch.testing.assert_close(actual[0][:2].double(), expected[0][:2], rtol=2e-6, atol=2e-6)
    assert relative_error(actual[1], expected[1]) <= (3e-6 if dtype == FP32 else 4e-3)
    assert (actual[1][1] == 0).all()


@pytest.mark.parametrize("eager", [False, True])
@pytest.mark.parametrize("blocks", [1, 4])
def test_gradient_of_sums_known_overwrites_the_logits(blocks, eager, emulated):
    """Backward on its own: a block that is ahead may not write what another has not read."""
    V = 500
    emulated.limit, emulated.eager = limit_for(blocks, V, [4, 4]), eager
    student, teachers, labels = inputs(2, V, FP32)
    labels, kind = labels.clamp(min=0), torch.full((2,), 3)
    rows = Rows(student.clone(), teachers, labels, kind, V, Maths(2.0), False)
    state_SN = torch.empty(n_numbers(1), 2)
    rows_on_cuda(rows, state_SN, Steps(sums=True))
    place = rows.student_NV.view(BF16)[:, :V]
    rows_on_cuda(rows, state_SN, Steps(grad=True), torch.ones(2, 2), place)
    expected = truth(rows._replace(student_NV=student), [1.0, 1.0])
    assert relative_error(place, expected[1]) < 4e-3


@pytest.mark.parametrize("blocks", [1, 2])
def test_every_option_at_once(blocks, emulated):
    """Two teachers, parts, smoothing, z-loss, caps, and rows of every kind; top-1 ties go first."""
    V = 2501
    emulated.limit = limit_for(blocks, V, [4, 4, 4])
    student, teachers, labels = make_logits(8, V, FP32, "cpu", 2)
    student[5, [17, 200]], teachers[1][5, [17, 290]] = 9.0, 9.0
    kind = torch.tensor([3, 0, 2, 1, 3, 3, 1, 2], dtype=torch.int32)
    labels = labels.clamp(min=0)
    maths = Maths(1.5, 30.0, 20.0, 0.0, 0.1, 1e-2)
    rows = Rows(student, teachers, labels, kind, V, maths, True)
    weights = [0.5, 0.3, 0.9]
    actual, expected = run_rows(rows, weights), truth(rows, weights)
    torch.testing.assert_close(actual[0].double(), expected[0], rtol=1e-5, atol=1e-5)
    assert actual[0][-1, 5] == 1
    assert relative_error(actual[1], expected[1]) < 3e-6


def test_top1_of_other_blocks_disagree(emulated):
    student, teacher = torch.zeros(2, 64), torch.zeros(2, 64)
    student[:, 3], teacher[0, 60], teacher[1, 3] = 5.0, 5.0, 5.0
    emulated.limit = limit_for(2, 64, [4, 4])
    rows = Rows(
        student, [teacher], torch.zeros(2).long(), torch.tensor([2, 2]).int(), 64, Maths(), True
    )
    assert run_rows(rows, [0.0, 1.0])[0][-1].tolist() == [0.0, 1.0]


def test_what_the_order_of_threads_may_not_change(emulated):
    """In step with late copies, or one block ahead with early ones: the same bits."""
    student, teachers, labels = inputs(3, 1003, FP32, 2)
    emulated.limit = limit_for(4, 1003, [4, 4, 4])
    rows = Rows(
        student, teachers, labels.clamp(min=0), torch.full((3,), 3).int(), 1003, Maths(2.0), True
    )
    first = run_rows(rows, [1.0, 0.5, 0.5])
    emulated.eager = True
    second = run_rows(rows, [1.0, 0.5, 0.5])
    assert torch.equal(first[0], second[0]) and torch.equal(first[1], second[1])


@pytest.mark.parametrize("drift", [0.01, 0.05, 0.2])
@pytest.mark.parametrize("V, blocks, temperature", [(1000, 1, 1.0), (20_000, 4, 2.0)])
def test_gradient_near_the_teacher_keeps_its_digits(V, blocks, temperature, drift, emulated):
    """Sums are good to 1e-7, which left alone is 1e-5 of the gradient at 1 % drift."""
    emulated.limit = limit_for(blocks, V, [4, 4])
    rng = torch.Generator().manual_seed(0)
    teacher = 3 * torch.randn(2, V, generator=rng)
    student = teacher + drift * torch.randn(teacher.shape, generator=rng)
    labels, options = torch.arange(2), {"alpha": 1.0, "temperature": temperature}
    in64 = (student.double(), [teacher.double()], labels)
    expected = loss_and_grad(*in64, "reference", **options)[1]
    frobenius = expected.norm()
    actual = loss_and_grad(student, [teacher], labels, **options)[1]
    assert (actual.double() - expected).norm() <= 1e-6 * frobenius
    # unlikely tokens, whose exp has the largest error: a plain difference is at 1e-6 / drift
    tail = expected.abs() < 1e-3 * expected.abs().max()
    assert relative_error(actual[tail], expected[tail]) <= 8e-7 / drift
    # sums and gradient in one launch; one teacher of two is near
    far = torch.randn(2, V, generator=rng)
    emulated.limit = limit_for(blocks, V, [4, 4, 4])
    kind = torch.tensor([2, 3]).int()
    rows = Rows(student, [far, teacher], labels, kind, V, Maths(temperature), False)
    actual = run_rows(rows, [0.0, 0.0, 1.0])[1]
    expected = truth(rows, [0.0, 0.0, 1.0])[1]
    assert (actual.double() - expected).norm() <= 1e-6 * expected.norm()


def test_label_term_has_no_cancellation():
    student = torch.zeros(1, 9)
    student[0, 4] = 20.0
    _, grad = loss_and_grad(student, [], torch.tensor([4]), alpha=0.0)
    rest = 8 * torch.tensor(-20.0, dtype=torch.float64).exp()
    assert grad[0, 4].item() == pytest.approx(-(rest / (1 + rest)).item(), rel=1e-5)


@pytest.mark.parametrize("temperature", [1.0, 2.0])
def test_extreme_logits_and_ruled_out_tokens(temperature, emulated):
    emulated.limit = limit_for(2, 33, [4, 4])
    student, teachers, labels = make_logits(4, 33, FP32, "cpu")
    # the first block sees nothing but ruled out tokens
    teachers[0][:, :24] = float("-inf")
    student[0, 3], teachers[0][0, 30], student[2, 7] = 1e4, -1e4, -1e4
    options = {"temperature": temperature}
    loss, grad = loss_and_grad(student, teachers, labels, **options)
    assert loss.isfinite() and grad.isfinite().all()
    in64 = (student.double(), [teachers[0].double()], labels)
    expected = loss_and_grad(*in64, "reference", **options)
    assert relative_error(grad, expected[1]) < 1e-6
    # both sides rule the tokens out
    student[:, :24] = float("-inf")
    loss, grad = loss_and_grad(student, teachers, labels.clamp(min=24), **options, alpha=1.0)
    assert loss.isfinite() and grad.isfinite().all() and (grad[:, :24] == 0).all()


def test_rows_that_do_not_count_are_not_read():
    student, teachers, labels = make_logits(4, 40, FP32, "cpu")
    broken = torch.full_like(student, float("nan"))
    loss, grad = loss_and_grad(broken, teachers, labels.fill_(IGNORED))
    assert loss.item() == 0 and (grad == 0).all()
    none, ones = torch.zeros(4), torch.zeros(4).long()
    loss, grad = loss_and_grad(broken, [broken], ones, row_weights=none)
    assert loss.item() == 0 and (grad == 0).all()
    loss, grad = loss_and_grad(student[:0], [teachers[0][:0]], labels[:0])
    assert loss.item() == 0 and grad.shape == (0, 40)
    # NaN logits of a row with a label give a NaN loss
    assert loss_and_grad(broken, teachers, torch.zeros(4).long())[0].isnan()


def test_padding_and_strides(emulated):
    student, teachers, labels = make_logits(4, 45, FP32, "cpu")
    labels = labels.clamp(max=36)
    plain = loss_and_grad(student[:, :37], [teachers[0][:, :37]], labels)
    emulated.limit = limit_for(2, 37, [4, 4])
    padded = loss_and_grad(
        student, [teachers[0][:, :39].t().contiguous().t()], labels, vocab_size=37
    )
    torch.testing.assert_close(padded[0], plain[0])
    torch.testing.assert_close(padded[1][:, :37], plain[1])
    assert (padded[1][:, 37:] == 0).all()


def test_slices_merge_into_the_whole():
    student, teachers, labels = inputs(4, 500, FP32)
    kind, maths = torch.full((4,), 3).int(), Maths(2.0)

    def slices():
        for a, b in ((0, 123), (123, 300), (300, 500)):
            yield Rows(
                student[:, a:b], [t[:, a:b] for t in teachers], labels - a, kind, b - a, maths, True
            )

    state_SN = torch.empty(n_numbers(1), 4)
    read_slices(rows_on_cuda, slices, "", state_SN)
    expected = kl_mlm_rows_reference(
        student.double(), [teachers[0].double()], labels, torch.where(labels < 0, 2, 3), maths
    )
    actual = terms(state_SN, torch.where(labels < 0, 2, 3), maths, True)
    torch.testing.assert_close(actual.double(), expected, rtol=1e-5, atol=1e-5)
    # the gradient of a slice needs the state of the whole row
    weights = torch.ones(2, 4)
    first = next(slices())._replace(kind_N=torch.where(labels < 0, 2, 3).int())
    part = torch.empty(4, 123)
    rows_on_cuda(first, state_SN, Steps(grad=True), weights, part)
    whole = Rows(student, teachers, labels, first.kind_N, 500, maths, True)
    assert relative_error(part, truth(whole, [1.0, 1.0])[1][:, :123]) < 3e-6


@pytest.mark.parametrize(
    "V, sizes, limit, blocks",
    [
        (30_522, [4, 4], HOPPER, 4),
        (128_256, [4, 4], HOPPER, 16),
        (128_256, [2, 2], HOPPER, 8),
        (262_144, [4, 4], HOPPER, 16),
        (262_144, [4, 4, 4], HOPPER, 16),
        (262_144, [4, 4, 4, 4], HOPPER, 0),
        (1000, [4], HOPPER, 1),
    ],
)
def test_cluster_sizes(V, sizes, limit, blocks):
    assert cluster_size(V, sizes, limit) == blocks


@pytest.mark.parametrize(
    "dtype, change, message",
    [
        (FP32, {"divergence": "reverse"}, "forward divergence only"),
        (torch.float64, {}, "float32, bfloat16 and float16"),
        (FP32, {"teachers": 5}, "no room for 50 columns of 5 teachers"),
        (FP32, {"other": BF16}, "teachers of one dtype"),
    ],
)
def test_refusals(dtype, change, message):
    student, teachers, labels = make_logits(2, 50, dtype, "cpu", change.pop("teachers", 2))
    teachers[0] = teachers[0].to(change.pop("other", dtype))
    with pytest.raises(GrowthError, match=message):
        loss_and_grad(student, teachers, labels, **change)
