"""The losses on several processes: columns spread over them, or rows."""

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

import growkern
from testbed.forked_ranks import on_ranks
from tests.ops.loss.loss_inputs import IGNORED, make_logits
from tests.ops.loss.test_linear_kl_mlm_loss import make_heads

V, REAL = 41, 40  # the last column is padding
# one rank of the four has no column at all
BOUNDS = {2: (0, 25, V), 4: (0, 10, 10, 30, V)}
CASES = [
    {"alpha": 0.4, "temperature": 2.0},
    {"alpha": 1.0, "softcap": 4.0, "teacher_softcap": 4.0},
    {"alpha": 0.4, "label_smoothing": 0.1, "z_loss": 0.01, "chunk_bytes": 2000},
    {"alpha": 0.4, "divergence": "reverse", "vocab_tile": 7},
    {"alpha": 0.4, "divergence": "jsd", "beta": 0.3, "temperature": 1.5, "kl_rows": "all"},
    {"alpha": 0.4, "reduction": "none"},
    # the last rank holds no token that the teacher knows
    {"alpha": 0.4, "temperature": 2.0, "teacher_vocab_size": 24},
]
TOPK_CASES = [
    {"temperature": 2.0},
    {"softcap": 4.0, "label_smoothing": 0.1, "z_loss": 0.01, "kl_rows": "all"},
    {"divergence": "reverse", "vocab_tile": 7, "label_smoothing": 0.1},
    {"temperature": 2.0, "teacher_vocab_size": 24},
    {"divergence": "jsd", "beta": 0.3, "temperature": 1.5, "chunk_bytes": 900},
    {"tail": "renormalise", "reduction": "none"},
]

LOGITS_CASES = [
    {},
    {"divergence": "jsd"},
    {"divergence": "reverse", "temperature": 2.0},
    {"teacher_vocab_size": 24},
]


def linear(student, teacher, labels, **options):
    """Loss, gradients and, but for single rows, the parts."""
    inputs = [x.detach().clone().requires_grad_() for x in student]
    parts = ()
    loss = growkern.linear_kl_mlm_loss(
        *inputs[:2], *teacher[:2], labels, student_bias=inputs[2], teacher_bias=teacher[2],
        return_parts=True, **options,
    )  # fmt: skip
    loss, parts = loss
    weights = torch.linspace(1, 2, loss.numel(), dtype=loss.dtype).view_as(loss)
    return loss.detach(), torch.autograd.grad((loss * weights).sum(), inputs), parts


def kept_of(teachers, known=REAL):
    """Ids all over the known columns, some of both teachers, and their log-probs."""
    logits = [torch.nn.functional.linear(*head)[:, :known] for head in teachers]
    tops = [z.log_softmax(-1).topk(k) for z, k in zip(logits, (5, 17), strict=True)]
    return [top.indices for top in tops], [top.values for top in tops]


def topk(student, kept, labels, **options):
    """As `linear`."""
    inputs = [x.detach().clone().requires_grad_() for x in student]
    loss, parts = growkern.topk_kl_mlm_loss(
        *inputs[:2], *kept, labels, student_bias=inputs[2], return_parts=True, **options
    )
    weights = torch.linspace(1, 2, loss.numel(), dtype=loss.dtype).view_as(loss)
    return loss.detach(), torch.autograd.grad((loss * weights).sum(), inputs), parts


def check_tokens(rank, group):
    """`check_columns` for cached teachers, whose tokens lie on any rank."""
    start, stop = BOUNDS[group.size()][rank : rank + 2]
    student, teachers, labels = make_heads(12, V, 8, torch.float64, "cpu", K=2)
    labels.clamp_(max=REAL - 1)
    mine = [student[0], student[1][start:stop], student[2][start:stop]]
    where = {"group": group, "vocab_start": start, "vocab_size": REAL}
    for options in TOPK_CASES:
        kept = kept_of(teachers, options.get("teacher_vocab_size", REAL))
        whole = topk(student, kept, labels, vocab_size=REAL, **options)
        actual = topk(mine, kept, labels, **where, **options)
        torch.testing.assert_close(actual[0], whole[0], rtol=1e-10, atol=1e-12)
        torch.testing.assert_close(actual[2], whole[2])
        expected = [whole[1][0], *(g[start:stop] for g in whole[1][1:])]
        for a, e in zip(actual[1], expected, strict=True):
            torch.testing.assert_close(a, e, rtol=1e-9, atol=1e-12)
    kept[0][0][0, 0] = REAL
    with pytest.raises(growkern.errors.GrowthError, match=f"outside 0..{REAL - 1}"):
        topk(mine, kept, labels, **where)


def check_columns(rank, group):
    """Every rank gets the whole loss, the whole dX, and its slice of the other gradients."""
    size = group.size()
    start, stop = BOUNDS[size][rank : rank + 2]
    student, (teacher,), labels = make_heads(12, V, 8, torch.float64, "cpu")
    labels.clamp_(max=REAL - 1)
    slices = [[h[0], h[1][start:stop], h[2][start:stop]] for h in (student, teacher)]
    where = {"group": group, "vocab_start": start, "vocab_size": REAL}
    for options in CASES:
        whole = linear(student, teacher, labels, vocab_size=REAL, **options)
        mine = linear(*slices, labels, **where, **options)
        torch.testing.assert_close(mine[0], whole[0], rtol=1e-10, atol=1e-12)
        torch.testing.assert_close(mine[2], whole[2])
        expected = [whole[1][0], *(g[start:stop] for g in whole[1][1:])]
        for a, e in zip(mine[1], expected, strict=True):
            torch.testing.assert_close(a, e, rtol=1e-9, atol=1e-12)

    z, (u,), labels = make_logits(7, V, torch.float64, "cpu")
    labels.clamp_(max=REAL - 1)
    for options in LOGITS_CASES:
        whole_z, my_z = z.clone().requires_grad_(), z[:, start:stop].clone().requires_grad_()
        whole = growkern.kl_mlm_loss(whole_z, u, labels, vocab_size=REAL, **options)
        mine = growkern.kl_mlm_loss(my_z, u[:, start:stop], labels, **where, **options)
        torch.testing.assert_close(mine, whole)
        (expected,) = torch.autograd.grad(whole, whole_z)
        (actual,) = torch.autograd.grad(mine, my_z)
        torch.testing.assert_close(actual, expected[:, start:stop], rtol=1e-9, atol=1e-13)


def check_traffic(group):
    """The data that crosses the network: a check of the labels, 14 numbers per row, and dX.

    Of cached teachers 8 numbers per row and the logits of their tokens. The ranks' parts of dX are
    added up before they are rounded to bfloat16.
    """
    sent, dtypes = [], []
    gather, add_up = dist.all_gather, dist.all_reduce
    student, teachers, labels = make_heads(12, V, 8, torch.float64, "cpu", K=2)
    start, stop = BOUNDS[4][dist.get_rank() : dist.get_rank() + 2]
    slices = [[h[0], h[1][start:stop], h[2][start:stop]] for h in (student, teachers[0])]
    where = {"group": group, "vocab_start": start, "vocab_size": V}
    try:
        dist.all_gather = lambda out, x, **k: (sent.append(x.shape), gather(out, x, **k))
        dist.all_reduce = lambda x, **k: (
            sent.append(x.shape),
            dtypes.append(x.dtype),
            add_up(x, **k),
        )
        linear(*slices, labels, **where)
        topk(slices[0], kept_of(teachers), labels, **where)
        whole = list(sent)
        narrow = [[x.bfloat16() for x in head] for head in slices]
        _, (dx, *_), _ = linear(*narrow, labels, **where)
    finally:
        dist.all_gather, dist.all_reduce = gather, add_up
    live = int((labels != IGNORED).sum())
    expected = [(2,), (14, live), (live, 8)]
    assert whole == [*expected, (2,), (8, live), (live, 5 + 17), (live, 8)], sent
    assert (sent[-1], dtypes[-1], dx.dtype) == ((live, 8), torch.float32, torch.bfloat16)


def check_dtensors():
    mesh = init_device_mesh("cpu", (4,))
    student, (teacher, other), labels = make_heads(12, V, 8, torch.float64, "cpu", K=2)
    whole, kept = linear(student, teacher, labels), kept_of([teacher, other])
    whole_topk = topk(student, kept, labels)

    def cut(head):
        placements = (Replicate(), Shard(0), Shard(0))
        return [distribute_tensor(x, mesh, [p]) for x, p in zip(head, placements, strict=True)]

    for cut_up, known in (
        (linear(cut(student), cut(teacher), labels), whole),
        (linear(cut(student), teacher, labels), whole),  # every rank has the teacher's
        (topk(cut(student), kept, labels), whole_topk),
    ):
        torch.testing.assert_close(cut_up[0], known[0])
        for actual, expected in zip(cut_up[1], known[1], strict=True):
            torch.testing.assert_close(actual.full_tensor(), expected)
    # a whole student, beside teachers in parts: by columns, by rows, and on part of the ranks
    placements = (Replicate(), Shard(1), Replicate())
    parts = [distribute_tensor(x, mesh, [p]) for x, p in zip(teacher, placements, strict=True)]
    pairs = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tensor"))["tensor"]
    halves = [teacher[0], *(distribute_tensor(x, pairs, [Shard(0)]) for x in teacher[1:])]
    for split in (cut(teacher), parts, halves):
        beside = linear(student, split, labels)
        torch.testing.assert_close(beside[0], whole[0])
        for actual, expected in zip(beside[1], whole[1], strict=True):
            torch.testing.assert_close(actual, expected)
    with pytest.raises(growkern.errors.GrowthError, match="neither group nor"):
        linear(cut(student), cut(teacher), labels, group=mesh.get_group(), vocab_start=0)
    wrong = [cut(student)[0], distribute_tensor(student[1], mesh, [Shard(1)]), cut(student)[2]]
    with pytest.raises(growkern.errors.GrowthError, match=r"must be Shard\(0\)"):
        linear(wrong, cut(teacher), labels)


def check_rows(rank, group):
    """Data parallel: global counts, gradients added up, are those of the big batch."""
    student, (teacher,), labels = make_heads(20, 13, 8, torch.float64, "cpu")
    labels[5:9] = IGNORED
    whole = linear(student, teacher, labels)
    here = slice(0, 7) if rank == 0 else slice(7, 20)
    count = (labels[here] != IGNORED).sum()
    dist.all_reduce(count, group=group)
    part = [[h[0][here], *h[1:]] for h in (student, teacher)]
    loss, (dx, *by_column), _ = linear(*part, labels[here], num_items=count)
    torch.testing.assert_close(dx, whole[1][0][here], rtol=1e-6, atol=1e-12)
    for x, expected in zip([loss, *by_column], [whole[0], *whole[1][1:]], strict=True):
        dist.all_reduce(x, group=group)
        torch.testing.assert_close(x, expected, rtol=1e-6, atol=1e-12)


class Head(torch.nn.Module):
    """A head whose forward is the loss, so that FSDP gathers what it reads."""

    def __init__(self, weight, bias):
        super().__init__()
        self.weight, self.bias = torch.nn.Parameter(weight), torch.nn.Parameter(bias)

    def forward(self, hidden, teacher, labels, **options):
        return growkern.linear_kl_mlm_loss(
            hidden, self.weight, *teacher[:2], labels, student_bias=self.bias,
            teacher_bias=teacher[2], **options,
        )  # fmt: skip


def check_fsdp(rank):
    """FSDP2 gives every rank its own rows: right from inside a forward, refused from outside."""
    student, (teacher,), labels = make_heads(20, 13, 8, torch.float64, "cpu")
    _, (_, *expected), _ = linear(student, teacher, labels)
    mesh = init_device_mesh("cpu", (4,))
    head = fully_shard(Head(*student[1:]), mesh=mesh)
    here = slice(0, 8) if rank == 0 else slice(4 + 4 * rank, 8 + 4 * rank)
    part = [student[0][here], [teacher[0][here], *teacher[1:]], labels[here]]
    # FSDP divides the sum of all ranks' gradients by their number
    count = (labels != IGNORED).sum() / 4
    head(*part, num_items=count).backward()
    for parameter, grad in zip((head.weight, head.bias), expected, strict=True):
        torch.testing.assert_close(parameter.grad.full_tensor(), grad, rtol=1e-6, atol=1e-12)
    head.reshard()
    weights = [distribute_tensor(x, mesh, [Shard(0)]) for x in teacher[1:]]
    for cut in (part[0], student[0][:4]):
        given = labels[here] if cut is part[0] else labels[rank : rank + 4]
        with pytest.raises(growkern.errors.GrowthError, match="ranks of the group have different"):
            growkern.linear_kl_mlm_loss(
                cut, head.weight, teacher[0][: len(cut)], weights[0], given,
                student_bias=head.bias, teacher_bias=weights[1],
            )  # fmt: skip


def main(folder):
    """The checks of each of four ranks; run by `testbed.forked_ranks`."""
    rank = dist.get_rank()
    pair = [dist.new_group([0, 1]), dist.new_group([2, 3])][rank // 2]
    check_columns(rank, dist.group.WORLD)
    check_columns(rank % 2, pair)
    check_tokens(rank, dist.group.WORLD)
    check_tokens(rank % 2, pair)
    check_rows(rank % 2, pair)
    check_traffic(dist.group.WORLD)
    check_dtensors()
    check_fsdp(rank)


def test_four_processes(tmp_path):
    on_ranks(4, __name__, tmp_path)


@pytest.mark.parametrize(
    "change, message",
    [
        ({}, "vocab_start="),
        ({"vocab_start": 0}, "vocab_size="),
        ({"vocab_start": -1, "vocab_size": 8}, "0 or more"),
        ({"vocab_start": 0, "vocab_size": 20}, "cut all heads at the same columns"),
        ({"vocab_start": 0, "vocab_size": 8, "backend": "reference"}, "takes no group"),
    ],
    ids=str,
)
def test_refusals(change, message):
    class Group:
        group_name = "columns"

        def size(self):
            return 2

    labels = torch.zeros(4, dtype=torch.long)
    with pytest.raises(growkern.errors.GrowthError, match=message):
        growkern.kl_mlm_loss(torch.ones(4, 8), torch.ones(4, 9), labels, group=Group(), **change)
