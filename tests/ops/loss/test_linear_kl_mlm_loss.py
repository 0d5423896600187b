"""The linear loss against PyTorch on whole logits in float64: chunks, options, refusals."""

import itertools
from unittest import mock

import pytest
import torch
from torch import library
from torch.nn import functional as F

import growkern
from growkern.ops.backend import native
from growkern.ops.loss.linear import linear_op
from growkern.ops.loss.linear.gemm import chunk_size
from growkern.ops.loss.linear.heads import HeadSettings, Sizes, as_arguments, check_logits_dtype
from growkern.ops.loss.linear.linear_op import linear_kl_mlm_backward_op, linear_kl_mlm_op
from growkern.ops.loss.linear_kl_mlm_loss import linear_kl_mlm_loss
from growkern.ops.loss.rows.state import Maths
from tests.ops.loss import loss_inputs
from tests.ops.loss.loss_inputs import BACKENDS, check_compiled, relative_error, truth_of

PROVIDERS = BACKENDS[1:]  # what is tested against the reference
NAMES = ("dX", "dW", "db")


def make_heads(N, V, H, dtype, device, K=1, seed=0):
    """Student (hidden, weight, bias), K narrower teachers of other widths, labels."""
    rng = torch.Generator(device).manual_seed(seed)

    def head(width):
        shapes = [(N, width), (V, width), (V,)]
        return [torch.randn(s, generator=rng, device=device, dtype=torch.float64) for s in shapes]

    heads = [[x.to(dtype) for x in head(width)] for width in (H, *range(H // 2, H // 2 + K))]
    return heads[0], heads[1:], loss_inputs.make_labels(N, V, rng)


def drifted_heads(N, V, drift, dtype, device, seed=0):
    """A student that is its teacher widened 128 -> 192, then moved by `drift` of its size."""
    rng = torch.Generator().manual_seed(seed)
    teacher_hidden = torch.randn(N, 128, generator=rng)
    teacher_weight = 0.3 * torch.randn(V, 128, generator=rng)
    columns = torch.cat([torch.arange(128), torch.randint(128, (64,), generator=rng)])
    hidden, weight = teacher_hidden[:, columns], teacher_weight[:, columns]
    weight = weight / columns.bincount()[columns]
    moved = [x + drift * x.std() * torch.randn(x.shape, generator=rng) for x in (hidden, weight)]
    bias = drift * torch.randn(V, generator=rng)
    teacher = (teacher_hidden, teacher_weight)
    labels = torch.randint(V, (N,), generator=rng)
    student, teacher = ([x.to(device, dtype) for x in xs] for xs in ((*moved, bias), teacher))
    return student, teacher, labels.to(device)


def call(student, teachers, labels, **options):
    options.setdefault("alpha", 0.5 if teachers else 0.0)
    hidden, weight, bias = student
    return linear_kl_mlm_loss(
        hidden,
        weight,
        [t[0] for t in teachers],
        [t[1] for t in teachers],
        labels,
        student_bias=bias,
        teacher_bias=[t[2] for t in teachers] if teachers and len(teachers[0]) > 2 else None,
        **options,
    )


def loss_and_grads(student, teachers, labels, **options):
    student = [x.detach().clone().requires_grad_() for x in student]
    loss = call(student, teachers, labels, **options)
    # unequal weights per row with reduction="none"
    weights = torch.linspace(1, 2, loss.numel(), dtype=loss.dtype, device=loss.device)
    scalar = (loss * weights.view_as(loss)).sum()
    return loss.detach(), torch.autograd.grad(scalar, student)


def assert_same(actual, expected, rtol=1e-9):
    torch.testing.assert_close(actual[0], expected[0], rtol=rtol, atol=1e-12)
    for name, a, e in zip(NAMES, actual[1], expected[1], strict=True):
        torch.testing.assert_close(a, e, rtol=rtol, atol=1e-10, msg=lambda m, n=name: f"{n}: {m}")


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    "K, options",
    [
        (0, {"alpha": 0.0}),
        (1, {"alpha": 0.4, "temperature": 2.0}),
        (1, {"alpha": 1.0, "softcap": 4.0}),
        (2, {"alpha": 0.7, "temperature": 1.5}),
    ],
    ids=str,
)
def test_is_what_torch_computes(K, options, backend, device):
    student, teachers, labels = make_heads(9, 41, 12, torch.float64, device, K)
    student = [x.requires_grad_() for x in student]
    truth = truth_of(F.linear(*student), [F.linear(*t) for t in teachers], labels, **options)
    truth = (truth.detach(), torch.autograd.grad(truth, student))
    if "softcap" in options:
        options = options | {"teacher_softcap": options["softcap"]}
    actual = loss_and_grads(student, teachers, labels, backend=backend, **options)
    assert_same(actual, truth)
    # three rows a chunk: the sums run over several chunks, the last one ragged
    chunk_bytes = 3 * 41 * 8 * (K + 1)
    actual = loss_and_grads(
        student, teachers, labels, backend=backend, chunk_bytes=chunk_bytes, **options
    )
    assert_same(actual, truth)


# with labels too, their gradient would hide an error of the divergence's
@pytest.mark.parametrize(
    "dtype, bar, alpha, drift",
    [
        *itertools.product([torch.bfloat16], [5e-3], [1.0], [0.01, 0.05, 0.2]),
        (torch.bfloat16, 5e-3, 0.5, 0.05),
        *itertools.product([torch.float32], [1e-5], [1.0], [0.01, 0.05, 0.2]),
        (torch.float32, 1e-5, 0.5, 0.05),
    ],
    ids=str,
)
def test_gradients_beside_a_close_teacher(dtype, bar, alpha, drift, device):
    student, teacher, labels = drifted_heads(64, 32_000, drift, dtype, device)
    in64 = [[x.double() for x in xs] for xs in (student, teacher)]
    options = {"alpha": alpha, "temperature": 2.0}
    _, truth = loss_and_grads(in64[0], [in64[1]], labels, backend="reference", **options)
    if device == "cuda" and dtype == torch.float32:
        options["logits_dtype"] = torch.float64  # not the default there
    loss, actual = loss_and_grads(student, [teacher], labels, **options)
    assert loss.dtype == torch.float32 and all(a.dtype == dtype for a in actual)
    errors = {n: relative_error(a, t) for n, a, t in zip(NAMES, actual, truth, strict=True)}
    assert all(error <= bar for error in errors.values()), errors


@pytest.mark.skipif("cpu" not in BACKENDS, reason="the compiled library works on a CPU")
@pytest.mark.parametrize("compiled", [True, False])
@pytest.mark.parametrize("N", [1, 33])
@pytest.mark.parametrize("options", [{}, {"softcap": 5.0}, {"vocab_tile": 300}], ids=str)
@pytest.mark.parametrize(
    "dtype, bar",
    [(torch.bfloat16, 5e-3), (torch.float16, 1e-3), (torch.float32, 2e-6), (torch.float64, 1e-13)],
    ids=str,
)
def test_narrow_heads_on_a_cpu(dtype, bar, options, N, compiled, monkeypatch):
    """With the compiled GEMM and rows and without; no size is a multiple of anything."""
    if not compiled:
        monkeypatch.setattr(native, "loaded", lambda: None)
    student, teachers, labels = make_heads(N, 1021, 35, dtype, "cpu", K=2)
    options = options | {"temperature": 1.5, "kl_rows": "all"}
    in64 = [[x.double() for x in head] for head in (student, *teachers)]
    loss, truth = loss_and_grads(in64[0], in64[1:], labels, backend="reference", **options)
    # columns of the weight that lie apart, and several chunks
    turned = [[h[0], h[1].t().contiguous().t(), h[2]] for h in (student, *teachers)]
    for heads in ([student, *teachers], turned):
        found, actual = loss_and_grads(heads[0], heads[1:], labels, chunk_bytes=200_000, **options)
        torch.testing.assert_close(found.double(), loss, rtol=1e-6, atol=1e-6)
        errors = {n: relative_error(a, e) for n, a, e in zip(NAMES, actual, truth, strict=True)}
        assert all(error <= bar for error in errors.values()), errors


@pytest.mark.skipif("cpu" not in BACKENDS, reason="the compiled library works on a CPU")
@pytest.mark.parametrize("dtype, bar", [(torch.bfloat16, 5e-3), (torch.float32, 1e-5)], ids=str)
def test_gradients_beside_a_close_teacher_without_the_library(dtype, bar, monkeypatch):
    monkeypatch.setattr(native, "loaded", lambda: None)
    test_gradients_beside_a_close_teacher(dtype, bar, 1.0, 0.01, "cpu")


@pytest.mark.parametrize("backend", BACKENDS)
def test_logits_dtype_is_where_the_digits_are(backend, device):
    student, teacher, labels = drifted_heads(8, 3000, 0.01, torch.float32, device)
    in64 = [[x.double() for x in xs] for xs in (student, teacher)]
    _, truth = loss_and_grads(in64[0], [in64[1]], labels, backend="reference", alpha=1.0)

    def worst(dtype):
        options = {"alpha": 1.0, "logits_dtype": dtype, "backend": backend, "chunk_bytes": 96_000}
        _, grads = loss_and_grads(student, [teacher], labels, **options)
        return max(relative_error(a, t) for a, t in zip(grads, truth, strict=True))

    # what the float32 GEMMs of dX and dW leave
    assert worst(torch.float64) <= 2e-6 < 1e-5 < worst(torch.float32)
    if device == "cpu":
        assert worst(None) <= 1e-5


@pytest.mark.parametrize("backend", PROVIDERS)
def test_float64_logits_of_narrow_heads(backend, device):
    """The gradient of the logits is rounded from float64 to 16 bits."""
    student, teacher, labels = drifted_heads(8, 300, 0.2, torch.bfloat16, device)
    in64 = [[x.double() for x in xs] for xs in (student, teacher)]
    _, truth = loss_and_grads(in64[0], [in64[1]], labels, backend="reference", alpha=1.0)
    options = {"alpha": 1.0, "logits_dtype": torch.float64, "backend": backend}
    _, grads = loss_and_grads(student, [teacher], labels, **options)
    # Triton's interpreter cuts digits off where a GPU rounds: twice the error
    assert max(relative_error(a, t) for a, t in zip(grads, truth, strict=True)) <= 2**-7


@pytest.mark.skipif(torch.cuda.is_available(), reason="of a CPU")
def test_float32_logits_miss_the_bar_at_a_small_drift():
    """docs/losses.md says by how much."""

    def errors(drift):
        student, teacher, labels = drifted_heads(96, 2003, drift, torch.float32, "cpu")
        in64 = [[x.double() for x in xs] for xs in (student, teacher)]
        _, truth = loss_and_grads(in64[0], [in64[1]], labels, backend="reference", alpha=1.0)
        options = {"alpha": 1.0, "logits_dtype": torch.float32}
        _, actual = loss_and_grads(student, [teacher], labels, **options)
        return [relative_error(a, t) for a, t in zip(actual[1:], truth[1:], strict=True)]

    assert 1e-5 < max(errors(0.01)) <= 1e-4
    assert max(errors(0.1)) <= 1e-5


@pytest.mark.parametrize("where, dtype", [("cpu", torch.float64), ("meta", torch.float32)])
def test_float64_logits_are_the_default_on_a_cpu_alone(where, dtype):
    x = torch.empty(2, 2, device=where)
    assert check_logits_dtype(None, x) == dtype
    assert check_logits_dtype(torch.float64, x) == torch.float64
    assert check_logits_dtype(None, x, has_teacher=False) == torch.float32
    assert check_logits_dtype(None, x.bfloat16()) == torch.float32


@pytest.mark.parametrize("backend", PROVIDERS)
def test_frozen_parts_cost_no_gemm(backend, device):
    student, teachers, labels = make_heads(6, 17, 8, torch.float64, device)
    expected = loss_and_grads(student, teachers, labels, backend="reference")[1]
    for trained in [(0,), (1,), (2,), (0, 2)]:
        inputs = [x.detach().clone().requires_grad_(i in trained) for i, x in enumerate(student)]
        loss = call(inputs, teachers, labels, backend=backend)
        sizes = [saved.numel() for saved in loss.grad_fn.saved_tensors[1:]]
        assert [size > 0 for size in sizes] == [i in trained for i in range(3)]
        grads = torch.autograd.grad(loss, [inputs[i] for i in trained])
        for i, grad in zip(trained, grads, strict=True):
            torch.testing.assert_close(grad, expected[i])
    with torch.no_grad():
        assert not call(student, teachers, labels, backend=backend).requires_grad


def test_alpha_zero_runs_no_teacher_gemm(device):
    student, teachers, labels = make_heads(6, 17, 8, torch.float32, device)
    for alpha, gemms in ((0.0, 1), (0.5, 2), (torch.tensor(0.0), 2)):
        with mock.patch.object(linear_op, "project", wraps=linear_op.project) as project:
            call(student, teachers, labels, alpha=alpha)
        assert project.call_count == gemms


@pytest.mark.parametrize("backend", BACKENDS)
def test_padded_vocabularies_and_parts(backend, device):
    student, teachers, labels = make_heads(7, 20, 8, torch.float64, device)
    labels = labels.clamp(max=16)
    short = [[x[:17] if i else x for i, x in enumerate(head)] for head in (student, *teachers)]
    wide = [[x[:18] if i else x for i, x in enumerate(teachers[0])]]
    expected = loss_and_grads(short[0], short[1:], labels, backend=backend)
    actual = loss_and_grads(student, wide, labels, vocab_size=17, backend=backend)
    assert_same((actual[0], [g[:17] if i else g for i, g in enumerate(actual[1])]), expected)
    assert all((grad[17:] == 0).all() for grad in actual[1][1:])
    loss, parts = call(student, wide, labels, vocab_size=17, return_parts=True, backend=backend)
    logits = [F.linear(*head) for head in short]
    _, expected_parts = growkern.kl_mlm_loss(
        logits[0], logits[1], labels, return_parts=True, backend="reference"
    )
    torch.testing.assert_close(loss, 0.5 * parts.mlm + 0.5 * parts.kl)
    for part, expected_part in zip(parts, expected_parts, strict=True):
        torch.testing.assert_close(part, expected_part)


@pytest.mark.parametrize("backend", PROVIDERS)
def test_non_contiguous_inputs(backend, device):
    student, teachers, labels = make_heads(6, 13, 8, torch.float64, device)
    expected = loss_and_grads(student, teachers, labels, backend="reference")
    turned = [
        [h[0].t().contiguous().t(), h[1].t().contiguous().t(), h[2]] for h in (student, *teachers)
    ]
    assert_same(loss_and_grads(turned[0], turned[1:], labels, backend=backend), expected)


# a column is of a matrix with three
LAYOUTS = {
    "strided": lambda x: x.repeat_interleave(2)[::2],
    "column": lambda x: torch.stack([x + 1, x, x - 1], 1)[:, 1],
    "expanded": lambda x: x[:1].expand(len(x)),
}


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("whose", ["student", "teacher", "both"])
def test_biases_of_any_layout(whose, layout, backend, device):
    """The row kernels add a bias to the logits as they read them."""
    student, (teacher,), labels = make_heads(9, 41, 12, torch.float64, device)
    changed = {"student": [student], "teacher": [teacher], "both": [student, teacher]}[whose]
    for head in changed:
        head[2] = LAYOUTS[layout](head[2])
        assert not head[2].is_contiguous()
    given = [x.requires_grad_() for x in student]
    truth = truth_of(F.linear(*given), [F.linear(*teacher)], labels, alpha=0.5)
    truth = (truth.detach(), torch.autograd.grad(truth, given))
    loss = call(given, [teacher], labels, backend=backend)
    assert_same((loss.detach(), torch.autograd.grad(loss, given)), truth)


@pytest.mark.parametrize("backend", PROVIDERS)
@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_gradcheck(reduction, backend, device):
    student, teachers, labels = make_heads(3, 7, 4, torch.float64, device, K=2)

    def loss(*head):
        return call(
            head, teachers, labels, temperature=1.7, kl_rows="all", reduction=reduction,
            teacher_weights=[0.2, 0.8], backend=backend,
        )  # fmt: skip

    fast = {"fast_mode": backend == "triton"}
    assert torch.autograd.gradcheck(loss, [x.requires_grad_() for x in student], **fast)


@pytest.mark.parametrize("backend", PROVIDERS)
@pytest.mark.parametrize("per_row, dtype", [(False, torch.float32), (True, torch.float64)])
def test_opcheck(per_row, dtype, backend, device):
    student, teachers, labels = make_heads(4, 9, 8, torch.float32, device)
    student = [x.requires_grad_() for x in student]
    labels.clamp_(min=0)
    kind = torch.tensor([3, 0, 2, 1], dtype=torch.int32, device=device)
    weights = torch.rand(2, 4, device=device)
    anchor = torch.zeros(0, device=device, requires_grad=True)
    sizes = Sizes(vocab=9, columns=9)
    settings = HeadSettings(sizes, Maths(2.0), False, per_row, [True] * 3, dtype, "", backend)
    inputs = (student, teachers[0], labels, kind, weights, anchor, *as_arguments(settings))
    library.opcheck(linear_kl_mlm_op, inputs)
    grads = [torch.randn(3, 4, device=device), torch.randn(4, device=device)]
    by_triton = backend == "triton"
    inputs = (torch.tensor(2.0, device=device), grads, anchor.detach(), torch.float16, by_triton)
    library.opcheck(linear_kl_mlm_backward_op, inputs)


def test_compiles_whole_and_once_for_every_alpha_and_size(device, backend="aot_eager"):
    def step(hidden, weight, bias, teacher, labels, rate, t):
        # the schedule inside the compiled step
        alpha = (rate * (1 - t / 10)).clamp(min=0)
        return linear_kl_mlm_loss(
            hidden, weight, *teacher[:2], labels, student_bias=bias, teacher_bias=teacher[2],
            alpha=alpha,
        )  # fmt: skip

    rate = torch.tensor(0.9, device=device)
    check_compiled(
        torch.compile(step, fullgraph=True, backend=backend, dynamic=True),
        lambda N: make_heads(N, 33, 8, torch.float32, device),
        lambda c, z, ts, labels, t: c(*z, ts[0], labels, rate, torch.tensor(t, device=device)),
        lambda z, ts, labels, t: loss_and_grads(z, ts, labels, alpha=0.9 * (1 - t / 10)),
    )


def test_chunks_follow_the_memory_and_the_rows():
    def size(rows, widths, element=4, **limits):
        sizes = Sizes(32_000, 32_000, **limits)
        return chunk_size(rows, widths, torch.zeros(1, 768), element, sizes)

    assert size(1000, [768, 512], chunk_bytes=100 * 32_000 * 8) == (100, 0)
    # equal chunks, not one ragged end
    assert size(101, [768, 512], chunk_bytes=100 * 32_000 * 8) == (51, 0)
    assert size(7, [768, 512]) == (7, 0)
    # a wider teacher's GEMMs hide the accumulation of dW sooner
    alone, wide = (size(100_000, heads)[0] for heads in ([768], [768, 4096]))
    assert wide < alone
    # the rows are those of dW, whatever a logit's size; what holds logits counts their bytes
    assert size(100_000, [768], 8)[0] == alone
    assert size(1000, [768, 512], 8, chunk_bytes=100 * 32_000 * 16) == (100, 0)
    # no room for enough whole rows: tiles of the vocabulary, never more than there is room for
    rows, columns = size(1000, [768, 512], chunk_bytes=1 << 20)
    assert rows >= 32 and 0 < columns < 32_000 and rows * columns * 8 <= 1 << 20
    assert size(3, [768], chunk_bytes=3 * 32_000 * 4) == (3, 0)


@pytest.mark.parametrize(
    "change, message",
    [
        ({"student_weight": torch.ones(9, 5)}, "student: hidden"),
        ({"teacher_weight": torch.ones(9, 5)}, r"teacher\[0\]: hidden"),
        ({"teacher_weight": None}, r"teacher\[0\]"),
        ({"teacher_weight": torch.ones(9, 3).requires_grad_()}, "frozen"),
        ({"teacher_hidden": torch.ones(3, 3)}, "same rows"),
        ({"teacher_hidden": [torch.ones(4, 3)] * 2}, "2 teacher_hidden need 2"),
        ({"teacher_hidden": None, "teacher_weight": None}, "needs a teacher"),
        ({"teacher_weight": torch.ones(8, 3)}, "vocab_size=8"),
        ({"student_bias": torch.ones(8)}, "bias"),
        ({"student_bias": torch.ones(9).double()}, "share a dtype"),
        ({"chunk_bytes": 0}, "chunk_bytes"),
        ({"max_rows": 3}, "max_rows=3"),
        ({"logits_dtype": torch.bfloat16}, "logits_dtype must be"),
        ({"backend": "cuda"}, "use reference or cpu or triton"),
    ],
    ids=str,
)
def test_refusals(change, message):
    inputs = {
        "student_hidden": torch.ones(4, 6),
        "student_weight": torch.ones(9, 6),
        "teacher_hidden": torch.ones(4, 3),
        "teacher_weight": torch.ones(9, 3),
        "labels": torch.zeros(4, dtype=torch.long),
    }
    with pytest.raises(growkern.errors.GrowthError, match=message):
        linear_kl_mlm_loss(**(inputs | change))
