"""The loss with cached teachers against its definition in float64; its options and refusals."""

import pytest
import torch
from torch import library
from torch.nn import functional as F

import growkern
from growkern.ops.loss.linear.heads import HeadSettings, Sizes, anchor_of, as_arguments
from growkern.ops.loss.rows.state import Maths
from growkern.ops.loss.topk.topk_op import topk_kl_mlm_op
from growkern.ops.loss.topk_kl_mlm_loss import topk_kl_mlm_loss
from tests.ops.loss.loss_inputs import BACKENDS, IGNORED, check_compiled, relative_error
from tests.ops.loss.test_linear_kl_mlm_loss import NAMES, assert_same, drifted_heads, make_heads

PROVIDERS = BACKENDS[1:]  # what is tested against the reference


def topk_of(logits, k, temperature=2.0, dtype=None):
    """The teacher as it would be kept: ids in no order of size, log-probs of the whole softmax."""
    log_p = (logits.double() / temperature).log_softmax(-1)
    values, ids = log_p.topk(k, dim=-1)
    order = torch.randperm(k, generator=torch.Generator().manual_seed(1), device="cpu")
    return ids[:, order.to(ids.device)], values[:, order.to(ids.device)].to(dtype or logits.dtype)


def make_inputs(N, V, H, k, dtype, device, temperature=2.0, stored=None):
    """Student head, (ids, log-probs) of a teacher, labels of which some are among the k."""
    student, teachers, labels = make_heads(N, V, H, dtype, device)
    teacher = F.linear(*teachers[0])
    topk = topk_of(teacher, k, temperature, stored)
    if N:
        # the first label is among the k, the last one beside them
        labels[0] = topk[0][0, -1]
        outside = torch.ones(V, dtype=torch.bool, device=device).index_fill(0, topk[0][-1], False)
        labels[-1] = outside.long().argmax()
    return student, topk, labels


def make_teachers(N, V, H, ks, dtype, device, temperature=2.0):
    """Student head, [ids], [log-probs] of teachers with some tokens in common, labels."""
    student, (ids, logprobs), labels = make_inputs(N, V, H, ks[0], dtype, device, temperature)
    _, others, _ = make_heads(N, V, H, dtype, device, K=len(ks))
    kept = [topk_of(F.linear(*head), k, temperature) for head, k in zip(others, ks, strict=True)]
    kept[0] = (ids, logprobs)
    for own, _ in kept[1:]:
        # one token in common with the first, at another place
        shared = ids[:, 0].unsqueeze(1)
        own[:, -1:] = torch.where((own == shared).any(1, keepdim=True), own[:, -1:], shared)
    return student, [list(x) for x in zip(*kept, strict=True)], labels


def masses_of(pair, z, temperature, tail):
    """Two distributions over k tokens and all the rest, of one row in float64."""
    ids, p = pair[0].long(), pair[1].double().exp()
    q = (z / temperature).softmax(-1)
    beside = [v for v in range(len(q)) if v not in ids.tolist()]
    p_out, q_out = p, q[ids]
    if tail == "renormalise":
        return p / p.sum(), q_out
    if beside:
        p_out = torch.cat([p, 1 - p.sum()[None]])
        q_out = torch.cat([q_out, q[beside].sum()[None]])
    return p_out, q_out


def divergence_of(p, q, kind, beta):
    def kl(a, b):
        return (torch.xlogy(a, a) - torch.xlogy(a, b)).sum()

    if kind == "jsd":
        m = beta * p + (1 - beta) * q
        return beta * kl(p, m) + (1 - beta) * kl(q, m)
    # beside a renormalised teacher the tail is no bucket of its own
    return kl(q, p) if kind == "reverse" else (torch.xlogy(p, p) - p * q.log()).sum()


def truth_of(
    student, topk, labels, *, alpha, temperature=2.0, softcap=None, tail="bucket",
    divergence="forward", beta=0.5, label_smoothing=0.0, z_loss=0.0, teacher_weights=None,
):  # fmt: skip
    """The definition, row by row in float64, teacher by teacher."""
    pairs = list(zip(*topk, strict=True)) if isinstance(topk[0], list) else [topk]
    weights = teacher_weights or [1 / len(pairs)] * len(pairs)
    hidden, weight, bias = student
    z = F.linear(hidden.double(), weight.double(), bias.double())
    z = softcap * torch.tanh(z / softcap) if softcap else z
    rows = [i for i in range(len(labels)) if labels[i] != IGNORED]
    loss = z.new_zeros(())
    for i in rows:
        kl = 0
        for share, pair in zip(weights, pairs, strict=True):
            p, q = masses_of([x[i] for x in pair], z[i], temperature, tail)
            kl = kl + share * divergence_of(p, q, divergence, beta)
        mlm = F.cross_entropy(z[i], labels[i], label_smoothing=label_smoothing)
        mlm = mlm + z_loss * z[i].logsumexp(-1) ** 2
        loss = loss + ((1 - alpha) * mlm + alpha * temperature**2 * kl) / len(rows)
    return loss


def call(student, topk, labels, **options):
    hidden, weight, bias = student
    return topk_kl_mlm_loss(hidden, weight, *topk, labels, student_bias=bias, **options)


def loss_and_grads(student, topk, labels, function=call, **options):
    student = [x.detach().clone().requires_grad_() for x in student]
    loss = function(student, topk, labels, **options)
    # unequal weights per row with reduction="none"
    weights = torch.linspace(1, 2, loss.numel(), dtype=loss.dtype, device=loss.device)
    scalar = (loss * weights.view_as(loss)).sum()
    return loss.detach(), torch.autograd.grad(scalar, student)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    "k, options",
    [
        (1, {"alpha": 0.4, "temperature": 2.0}),
        (5, {"alpha": 0.4, "temperature": 2.0, "tail": "renormalise"}),
        (7, {"alpha": 1.0, "softcap": 4.0}),
        (41, {"alpha": 0.7, "temperature": 1.5}),
        (6, {"alpha": 0.3, "label_smoothing": 0.1, "z_loss": 0.01, "softcap": 4.0}),
        (6, {"alpha": 0.8, "divergence": "reverse", "temperature": 2.0}),
        (41, {"alpha": 0.8, "divergence": "reverse"}),
        (6, {"alpha": 0.8, "divergence": "jsd", "beta": 0.3, "label_smoothing": 0.2}),
        (41, {"alpha": 0.8, "divergence": "jsd", "softcap": 4.0}),
        ([4, 9], {"alpha": 0.7, "temperature": 1.5, "teacher_weights": [0.3, 0.7]}),
        ([4, 9], {"alpha": 0.7, "tail": "renormalise"}),
        ([1, 41, 5], {"alpha": 1.0, "divergence": "reverse", "softcap": 4.0}),
        ([5, 5], {"alpha": 0.5, "divergence": "jsd", "beta": 0.6, "z_loss": 0.1}),
    ],
    ids=str,
)
def test_is_the_definition(k, options, backend, device):
    make = make_teachers if isinstance(k, list) else make_inputs
    T = options.get("temperature", 2.0)
    student, topk, labels = make(9, 41, 12, k, torch.float64, device, T)
    expected = loss_and_grads(student, topk, labels, truth_of, **options)
    actual = loss_and_grads(student, topk, labels, backend=backend, **options)
    assert_same(actual, expected)
    # three rows a chunk: the sums run over several chunks, the last one ragged. Tiles: the same,
    # and the tokens lie in any of them
    for limits in ({"chunk_bytes": 3 * 41 * 8}, {"vocab_tile": 7}, {"vocab_tile": 40}):
        actual = loss_and_grads(student, topk, labels, backend=backend, **limits, **options)
        assert_same(actual, expected)


@pytest.mark.parametrize("backend", PROVIDERS)
def test_more_columns_than_a_block(backend, device):
    """The kernel's blocks are of 4096; one of them may be nothing but the teacher's tokens."""
    V, k = 4099, 5
    student, topk, labels = make_inputs(3, V, 8, k, torch.float64, device, 2.0)
    topk[0][2] = torch.arange(V - k, V)  # the ragged block loses 3 of 3
    options = {"alpha": 0.5, "temperature": 2.0}
    expected = loss_and_grads(student, topk, labels, backend="reference", **options)
    assert_same(loss_and_grads(student, topk, labels, backend=backend, **options), expected)


@pytest.mark.parametrize("stored", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("ids_dtype", [torch.int32, torch.int64], ids=str)
@pytest.mark.parametrize("backend", PROVIDERS)
def test_stored_dtypes(stored, ids_dtype, backend, device):
    """The stored, rounded log-probs define the loss, also where they do not add up to 1."""
    student, (ids, logprobs), labels = make_inputs(6, 33, 8, 20, torch.float32, device, 2.0, stored)
    options = {"alpha": 0.5, "temperature": 2.0}
    in64 = [x.double() for x in student]
    expected = loss_and_grads(in64, (ids, logprobs), labels, truth_of, **options)
    actual = loss_and_grads(student, (ids.to(ids_dtype), logprobs), labels, **options)
    torch.testing.assert_close(actual[0].double(), expected[0], rtol=1e-5, atol=1e-6)
    for name, a, e in zip(NAMES, actual[1], expected[1], strict=True):
        assert relative_error(a, e) <= 1e-5, name


CLOSE = [(drift, {}) for drift in (0.01, 0.05, 0.2)]
CLOSE += [(0.01, {"divergence": "reverse", "vocab_tile": 9000}), (0.01, {"divergence": "jsd"})]


@pytest.mark.parametrize("drift, options", CLOSE, ids=str)
@pytest.mark.parametrize("dtype, bar", [(torch.bfloat16, 5e-3), (torch.float32, 1e-5)], ids=str)
def test_gradients_beside_a_close_teacher(dtype, bar, drift, options, device):
    student, teacher, labels = drifted_heads(24, 32_000, drift, dtype, device)
    topk = topk_of(F.linear(*(x.double() for x in teacher)), 64, 2.0, torch.float32)
    options = {"alpha": 1.0, "temperature": 2.0, **options}
    in64 = [x.double() for x in student]
    _, truth = loss_and_grads(in64, topk, labels, backend="reference", **options)
    _, actual = loss_and_grads(student, topk, labels, **options)
    errors = {n: relative_error(a, t) for n, a, t in zip(NAMES, actual, truth, strict=True)}
    assert all(error <= bar for error in errors.values()), errors


@pytest.mark.parametrize("backend", BACKENDS)
def test_teachers_with_the_same_and_with_other_tokens(backend, device):
    """One teacher twice is that teacher; cut in two it has the other's tokens in its tail."""
    student, topk, labels = make_inputs(9, 41, 12, 6, torch.float64, device, 2.0)
    options = {"temperature": 2.0, "backend": backend, "return_parts": True}
    for kind in ("forward", "reverse", "jsd"):
        loss, parts = call(student, topk, labels, divergence=kind, **options)
        turned = [x.flip(1) for x in topk]
        twice = [list(pair) for pair in zip(topk, turned, strict=True)]
        again, parts_again = call(student, twice, labels, divergence=kind, **options)
        torch.testing.assert_close((again, *parts_again), (loss, *parts))
        halves = [[x[:, :2], x[:, 2:]] for x in topk]
        expected = [
            call(student, half, labels, divergence=kind, **options)[0]
            for half in zip(*halves, strict=True)
        ]
        both, _ = call(student, halves, labels, divergence=kind, **options)
        torch.testing.assert_close(both, sum(expected) / 2)


@pytest.mark.parametrize("backend", BACKENDS)
def test_the_reverse_of_a_rounded_tail(backend, device):
    """Half a float16 step is all that is known of the tail: it must not cost without limit."""
    student, _, labels = make_heads(2, 13, 8, torch.float64, device)
    labels[:] = torch.tensor([3, 8])
    ids = torch.tensor([[3, 0]] * 2, device=device)
    stored = torch.tensor([[-0.5, -0.9321]] * 2, dtype=torch.half, device=device)
    assert (stored.double().exp().sum(-1) >= 1).all()
    options = {"alpha": 1.0, "divergence": "reverse", "backend": backend, "temperature": 1.0}
    loss, grads = loss_and_grads(student, (ids, stored), labels, **options)
    p = stored.double().exp()
    p = p / p.sum(-1, keepdim=True)
    lost = -(p * p.log()).sum(-1) * torch.finfo(torch.half).eps / 2
    q = F.linear(*student).softmax(-1)
    q_kept = q.gather(1, ids)
    q_tail = q.scatter(1, ids, 0).sum(-1)
    kl = (q_kept * (q_kept / p).log()).sum(-1) + q_tail * (q_tail / lost).log()
    torch.testing.assert_close(loss, kl.mean())
    assert all(grad.isfinite().all() for grad in grads)
    # a token to which the teacher gives probability 0 costs infinitely much
    certain = torch.tensor([[0.0, float("-inf")]] * 2, device=device)
    assert call(student, (ids, certain), labels, **options) == float("inf")


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_tail_of_nothing(backend, device):
    """The k entries hold all the mass, exactly or but for rounding; others have none."""
    student, _, labels = make_heads(4, 13, 8, torch.float64, device)
    ids = torch.tensor([[3, 0, 7], [1, 2, 3], [12, 5, 0], [9, 4, 6]], device=device)
    p = [[0.5, 0.25, 0.25], [1, 0, 0], [0.3, 0.3, 0.4], [0.1, 0.2, 0.7]]
    p = torch.tensor(p, dtype=torch.float64)
    labels[:] = torch.tensor([3, 8, 5, 12])
    for stored in (torch.float64, torch.float32, torch.bfloat16):
        topk = (ids, p.to(device).log().to(stored))
        # rounded log-probs may sum to more than 1: the excess is divided out
        expected = loss_and_grads(student, topk, labels, truth_of, alpha=0.5, tail="renormalise")
        actual = loss_and_grads(student, topk, labels, alpha=0.5, backend=backend)
        tolerance = 1e-9 if stored == torch.float64 else 1e-2
        torch.testing.assert_close(actual[0], expected[0], rtol=tolerance, atol=0)
        for name, a, e in zip(NAMES, actual[1], expected[1], strict=True):
            assert relative_error(a, e) <= tolerance, (stored, name)


@pytest.mark.parametrize("backend", BACKENDS)
def test_tails_far_below_rounding(backend, device):
    """P of 1e-7 and Q of 1e-30: 1 - sum would be 0 or noise, and its logarithm NaN."""
    student, _, labels = make_heads(2, 13, 8, torch.float64, device)
    student = [student[0], student[1], student[2].clone()]
    student[2][[3, 0]] += 70.0
    labels[:] = torch.tensor([3, 8])
    p = torch.tensor([[0.75, 0.25 - 1e-7], [0.75, 0.25 - 1e-7]], dtype=torch.float64)
    topk = (torch.tensor([[3, 0], [0, 3]], device=device), p.log().to(device))
    expected = loss_and_grads(student, topk, labels, truth_of, alpha=0.5)
    actual = loss_and_grads(student, topk, labels, alpha=0.5, backend=backend)
    # the truth itself takes 1 - sum: 1e-16 of 1e-7
    assert_same(actual, expected, rtol=1e-7)
    narrow = [x.float() for x in student]
    loss, grads = loss_and_grads(narrow, topk, labels, alpha=0.5, backend=backend)
    torch.testing.assert_close(loss.double(), expected[0], rtol=1e-5, atol=0)
    assert all(relative_error(g, e) <= 1e-5 for g, e in zip(grads, expected[1], strict=True))


@pytest.mark.parametrize("backend", BACKENDS)
def test_rows_that_carry_no_kl_may_hold_anything(backend, device):
    student, topk, labels = make_inputs(9, 17, 8, 4, torch.float64, device)
    labels[4] = IGNORED
    mask = torch.arange(9, device=device) % 2 == 0
    options = {"kl_rows": mask, "temperature": 1.5, "return_parts": True, "backend": backend}
    (loss, parts) = call(student, topk, labels, **options)
    grads = loss_and_grads(student, topk, labels, kl_rows=mask, temperature=1.5, backend=backend)
    garbage = (topk[0].clone(), topk[1].clone())
    garbage[0][~mask], garbage[1][~mask] = 99, float("nan")
    again, parts_again = call(student, garbage, labels, **options)
    torch.testing.assert_close((loss, *parts), (again, *parts_again))
    options.pop("return_parts")
    assert_same(loss_and_grads(student, garbage, labels, **options), grads)
    # rows 0, 2, 4, 6, 8 carry the KL, row 4 nothing else; the truth takes rows one by one
    one = [(topk[0][i : i + 1], topk[1][i : i + 1]) for i in range(9)]
    labelled = [i for i in range(9) if labels[i] != IGNORED]

    def term(i, alpha, label):
        head = [student[0][i : i + 1], *student[1:]]
        return truth_of(head, one[i], label, alpha=alpha, temperature=1.5).item()

    mlm = sum(term(i, 0.0, labels[i : i + 1]) for i in labelled) / len(labelled)
    kl = sum(term(i, 1.0, labels.new_zeros(1)) for i in (0, 2, 4, 6, 8)) / 5
    assert abs(loss.item() - (0.5 * mlm + 0.5 * kl)) < 1e-12


def test_backends_it_has_not():
    with pytest.raises(growkern.GrowthError, match="'cuda' does not do this operation"):
        topk_kl_mlm_loss(**GOOD, backend="cuda")


def test_alpha_zero_reads_no_teacher(device):
    student, topk, labels = make_inputs(6, 17, 8, 4, torch.float32, device)
    plain = growkern.linear_kl_mlm_loss(
        *student[:2], None, None, labels, student_bias=student[2], alpha=0.0
    )
    assert call(student, (None, None), labels, alpha=0.0) == plain
    assert call(student, topk, labels, alpha=0.0) == plain
    torch.testing.assert_close(call(student, topk, labels, alpha=torch.tensor(0.0)), plain)


@pytest.mark.parametrize("backend", BACKENDS)
def test_padded_vocabulary_and_parts(backend, device):
    student, topk, labels = make_inputs(7, 17, 8, 5, torch.float64, device)
    wide = [F.pad(x, (0, 0, 0, 3) if x.ndim == 2 else (0, 3), value=9.0) for x in student[1:]]
    wide = [student[0], *wide]
    expected = loss_and_grads(student, topk, labels, backend=backend)
    actual = loss_and_grads(wide, topk, labels, vocab_size=17, backend=backend)
    assert_same((actual[0], [g[:17] if i else g for i, g in enumerate(actual[1])]), expected)
    assert all((grad[17:] == 0).all() for grad in actual[1][1:])
    loss, parts = call(wide, topk, labels, vocab_size=17, return_parts=True, backend=backend)
    torch.testing.assert_close(loss, 0.5 * parts.mlm + 0.5 * parts.kl)
    z = F.linear(*student)[labels != IGNORED]
    top = topk[0].gather(1, topk[1].argmax(-1, keepdim=True)).squeeze(1)[labels != IGNORED]
    log_q = z.log_softmax(-1)
    torch.testing.assert_close(parts.entropy, -(log_q.exp() * log_q).sum(-1).mean())
    torch.testing.assert_close(parts.top1_agreement, (z.argmax(-1) == top).double().mean())


@pytest.mark.parametrize("backend", PROVIDERS)
def test_top1_where_the_likeliest_token_stands(backend, device):
    """Among the k, beside them, and equal on both sides, where the smaller id counts."""
    hidden = torch.eye(4, device=device, dtype=torch.float64)
    logits = torch.tensor([[5.0, 1, 0, 0], [1, 5, 0, 0], [4, 1, 4, 0], [4, 4, 0, 0]])
    weight = logits.t().contiguous().to(hidden)
    ids = torch.tensor([[0, 2], [0, 2], [2, 3], [0, 3]], device=device)
    topk = (ids, torch.tensor([0.6, 0.3], device=device).log().expand(4, 2).contiguous())
    bias = torch.zeros(4, device=device, dtype=torch.float64)
    _, parts = call([hidden, weight, bias], topk, ids[:, 0], return_parts=True, backend=backend)
    # rows 0 and 3 agree, the second by its smaller id; the tops of rows 1 and 2 stand beside the k
    assert parts.top1_agreement.item() == 0.5
    # nothing is beside the k, and all logits lie below 0: only row 1 disagrees
    ids = torch.arange(4, device=device).expand(4, 4).contiguous()
    topk = (ids, torch.tensor([0.4, 0.3, 0.2, 0.1], device=device).log().expand(4, 4).contiguous())
    _, parts = call(
        [hidden, weight, bias - 10], topk, ids[:, 0], return_parts=True, backend=backend
    )
    assert parts.top1_agreement.item() == 0.75


@pytest.mark.parametrize("backend", PROVIDERS)
def test_non_contiguous_inputs(backend, device):
    student, topk, labels = make_inputs(6, 13, 8, 4, torch.float64, device)
    expected = loss_and_grads(student, topk, labels, backend="reference")
    turned = [student[0].t().contiguous().t(), student[1].t().contiguous().t(), student[2]]
    topk = [x.t().contiguous().t() for x in topk]
    assert_same(loss_and_grads(turned, topk, labels, backend=backend), expected)


@pytest.mark.parametrize("backend", PROVIDERS)
def test_extreme_logits(backend, device):
    student, topk, labels = make_inputs(4, 13, 8, 4, torch.float32, device)
    student[2][3], student[2][5] = 1e4, -1e4
    # ruled out by the teacher, and by the student too
    topk[1][:, 0], topk[0][2, 0] = float("-inf"), topk[0][0, 0]
    topk[0][:, 0] = torch.tensor([next(v for v in range(13) if v not in r) for r in topk[0][:, 1:]])
    student[2][topk[0][1, 0]] = float("-inf")
    labels[:] = topk[0][:, 1]
    loss, grads = loss_and_grads(student, topk, labels, backend=backend)
    assert loss.isfinite() and all(grad.isfinite().all() for grad in grads)


@pytest.mark.parametrize("backend", PROVIDERS)
@pytest.mark.parametrize(
    "options",
    [
        {"reduction": "mean"},
        {"reduction": "none", "softcap": 3.0, "label_smoothing": 0.1, "z_loss": 0.1},
        {"divergence": "jsd", "vocab_tile": 3},
    ],
    ids=str,
)
def test_gradcheck(options, backend, device):
    student, topk, labels = make_teachers(3, 7, 4, [3, 2], torch.float64, device)

    def loss(*head):
        return call(head, topk, labels, temperature=1.7, kl_rows="all", backend=backend, **options)

    fast = {"fast_mode": backend == "triton"}
    assert torch.autograd.gradcheck(loss, [x.requires_grad_() for x in student], **fast)


@pytest.mark.parametrize("backend", PROVIDERS)
@pytest.mark.parametrize("per_row", [False, True])
def test_opcheck(per_row, backend, device):
    student, topk, labels = make_teachers(4, 9, 8, [3, 4], torch.float32, device)
    student = [x.requires_grad_() for x in student]
    kind = torch.tensor([3, 0, 2, 1], dtype=torch.int32, device=device)
    weights = torch.rand(3, 4, device=device)
    sizes = Sizes(9, 9, total=9)
    settings = HeadSettings(
        sizes, Maths(2.0), True, per_row, [True] * 3, torch.float32, "", backend
    )
    rows = (labels.clamp(min=0), kind, weights)
    flat = [x for pair in zip(*topk, strict=True) for x in pair]
    inputs = (student, flat, *rows, anchor_of(student), *as_arguments(settings))
    library.opcheck(topk_kl_mlm_op, inputs)


def test_compiles_whole_and_once_for_every_alpha(device):
    others = {"divergence": "jsd", "label_smoothing": 0.1, "vocab_tile": 20}
    check_compiled(
        torch.compile(topk_kl_mlm_loss, fullgraph=True, backend="aot_eager"),
        lambda N: make_teachers(N, 33, 8, [4, 7], torch.float32, device),
        lambda compiled, z, topk, labels, a: compiled(
            *z[:2], *topk, labels, student_bias=z[2], alpha=torch.tensor(a, device=device), **others
        ),
        lambda z, topk, labels, a: loss_and_grads(z, topk, labels, alpha=a, **others),
        [(alpha, 6) for alpha in (0.0, 0.5, 1.0)],
    )


GOOD = {
    "student_hidden": torch.ones(4, 6),
    "student_weight": torch.ones(9, 6),
    "teacher_topk_ids": torch.tensor([[1, 8]] * 4),
    "teacher_topk_logprobs": torch.full((4, 2), -1.0),
    "labels": torch.zeros(4, dtype=torch.long),
}


@pytest.mark.parametrize(
    "change, message",
    [
        ({"teacher_topk_ids": None}, "need as many teacher_topk_ids, got 0"),
        ({"teacher_topk_ids": [torch.tensor([[1, 8]] * 4)] * 2}, "as many teacher_topk_ids, got 2"),
        ({"chunk_bytes": 1.5}, "chunk_bytes must be a positive integer, got 1.5"),
        ({"teacher_topk_logprobs": None}, "needs a teacher"),
        ({"teacher_topk_ids": torch.tensor([[1, 8]] * 3)}, "needs the rows"),
        ({"teacher_topk_ids": torch.tensor([[1]] * 4)}, "same k"),
        ({"teacher_topk_ids": torch.ones(4, 2)}, "int32 or int64"),
        ({"teacher_topk_logprobs": torch.ones(4, 2, dtype=torch.long)}, "must be float"),
        ({"teacher_topk_logprobs": GOOD["teacher_topk_logprobs"].clone().requires_grad_()}, "froz"),
        ({"teacher_topk_ids": torch.tensor([[1, 9]] * 4)}, "outside 0..8"),
        ({"teacher_topk_ids": torch.tensor([[1, -1]] * 4)}, "outside 0..8"),
        ({"teacher_topk_ids": torch.tensor([[-1, -1]] * 4)}, "leave it out of kl_rows"),
        ({"labels": torch.tensor([0, 1, 9, 2])}, "row 2 is 9, outside 0..8"),
        ({"teacher_topk_ids": torch.tensor([[1, 8], [8, 8], [0, 1], [0, 1]])}, "row 1 .*twice"),
        ({"teacher_topk_logprobs": torch.full((4, 2), -0.6)}, "sum to more than 1"),
        ({"teacher_topk_logprobs": torch.full((4, 2), 0.5)}, "sum to more than 1"),
        ({"teacher_topk_logprobs": torch.full((4, 2), float("nan"))}, "NaN"),
        (
            {"teacher_topk_logprobs": torch.full((4, 2), -torch.inf), "tail": "renormalise"},
            "nothing to renormalise",
        ),
        ({"tail": "drop"}, "tail must be"),
        ({"tail": "renormalise", "divergence": "reverse"}, "infinite with tail='renormalise'"),
        ({"teacher_weights": [0.5, 0.5]}, "teacher_weights must be 1 numbers"),
        ({"vocab_tile": 0}, "vocab_tile must be a positive"),
        ({"vocab_start": 3}, "vocab_start needs group="),
        (
            {
                "teacher_topk_ids": [torch.tensor([[1, 8]] * 4), torch.tensor([[1]] * 4)],
                "teacher_topk_logprobs": [torch.full((4, 2), -1.0), torch.full((4, 2), -1.0)],
            },
            r"teacher_topk_ids\[1\].*same k",
        ),
        ({"vocab_size": 8}, "outside 0..7"),
        ({"max_rows": 3}, "max_rows=3"),
    ],
    ids=str,
)
@pytest.mark.parametrize("backend", ["reference", "cpu"])
def test_refusals(change, message, backend):
    topk_kl_mlm_loss(**GOOD, backend=backend)
    if "max_rows" in change and backend == "reference":
        return
    with pytest.raises(growkern.errors.GrowthError, match=message):
        topk_kl_mlm_loss(**(GOOD | change), backend=backend)


def test_rounding_is_no_refusal():
    """bfloat16 log-probs of a flat teacher may sum to 1.02: that is not a mistake."""
    logits = torch.zeros(1, 4000, dtype=torch.float64) + 0.1 * torch.randn(4000)
    ids, logprobs = topk_of(logits, 4000, 1.0, torch.bfloat16)
    student = [torch.randn(1, 4), torch.randn(4000, 4), torch.zeros(4000)]
    assert call(student, (ids, logprobs), torch.tensor([3])).isfinite()


@pytest.mark.parametrize("stored", [torch.float16, torch.float32, torch.float64])
@pytest.mark.parametrize("offset", [-500.0, 0.0, 800.0])
def test_computing_in_float32_is_no_refusal(offset, stored):
    """Their sum is off by the rounding of a logit, and the largest k hold all but 1e-7 of it."""
    generator = torch.Generator().manual_seed(0)
    z = 12 * torch.randn(64, 500, generator=generator) + offset
    plain = z - z.logsumexp(-1, keepdim=True)
    above = plain.double().exp().sum(-1) - 1
    student = [torch.randn(64, 4), torch.randn(500, 4), torch.zeros(500)]
    labels = torch.zeros(64, dtype=torch.long)
    for logprobs in (plain, z.log_softmax(-1)):
        for k in (64, 500):
            best = logprobs.topk(k)
            topk = (best.indices, best.values.to(stored))
            assert call(student, topk, labels).isfinite()
    assert above.abs().max() > 1e-7 * (1 + abs(offset) / 10)


def test_what_rounding_cannot_explain_is_refused():
    student = [torch.randn(1, 4), torch.randn(9, 4), torch.zeros(9)]
    for total in (1.0002, 1.01):
        logprobs = torch.full((1, 2), total / 2, dtype=torch.float64).log()
        with pytest.raises(growkern.errors.GrowthError, match="sum to more than 1"):
            call(student, (torch.tensor([[1, 8]]), logprobs), torch.tensor([3]))


@pytest.mark.parametrize("backend", PROVIDERS)
def test_a_student_that_rules_out_the_tail(backend, device):
    """Q = 0 beside P = 0: nothing is learnt there, and nothing is 0 / 0."""
    student, topk, labels = make_inputs(1, 13, 8, 4, torch.float64, device)
    outside = torch.ones(13, dtype=torch.bool).index_fill(0, topk[0][0].cpu(), False)
    student[2][outside] = float("-inf")
    labels[:] = topk[0][0, 1]
    inside = [student[0], *(x[~outside] for x in student[1:])]
    places = (~outside).long().cumsum(0) - 1
    small = (places[topk[0]], topk[1]), places[labels]
    options = {"tail": "renormalise", "temperature": 1.5, "backend": backend}
    loss, (dX, dW, db) = loss_and_grads(student, topk, labels, **options)
    expected = loss_and_grads(inside, *small, **options)
    assert_same((loss, (dX, dW[~outside], db[~outside])), expected)
    assert (dW[outside] == 0).all() and (db[outside] == 0).all()
