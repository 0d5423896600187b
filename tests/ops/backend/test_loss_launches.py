"""What one call of the linear loss starts on a GPU, and calls from Python, counted without one.

A GPU waits for the host where the operations are many and small, so none may be added unseen.
"""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import growkern
from bench.shared.time_model import LAUNCHES
from growkern.ops.backend import custom_ops
from growkern.ops.backend.launch import HAS_TRITON
from growkern.ops.loss.linear import gemm, linear_op
from growkern.ops.loss.rows import on_triton
from growkern.ops.loss.rows.options import Maths
from growkern.ops.loss.rows.state import Rows, Steps, n_numbers

pytestmark = pytest.mark.skipif(not HAS_TRITON, reason="Triton is not installed")
V, H, ROWS_OF_CHUNK = 640, 64, 256
# they start nothing; a copy that one of the last three makes has a name of its own
VIEWS = {"view", "slice", "as_strided", "new_empty", "empty_like", "unsqueeze", "detach"}
VIEWS |= {"reshape", "t", "to", "contiguous", "scalar_tensor", "unbind"}


class Counted(TorchDispatchMode):
    """Appends the name of every operation to a list."""

    def __init__(self, names):
        super().__init__()
        self.names = names

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.names.append(function.overloadpacket.__name__)
        return function(*args, **(kwargs or {}))


@pytest.fixture
def call(monkeypatch):
    """Calls the loss for a number of chunks: the names of what was called, in their order."""
    names = []

    def kernel(name):
        return lambda *_, **__: names.append(name)

    # the mode that counts is not there without the test
    for module in (custom_ops, linear_op):
        monkeypatch.setattr(module, "is_plain_call", lambda arguments: True)
    monkeypatch.setattr(linear_op, "may_ask", lambda device: False)
    monkeypatch.setattr(linear_op, "project", kernel("PRODUCT"))
    monkeypatch.setattr(gemm, "_add_product", kernel("PRODUCT"))
    for module in (gemm, linear_op):
        monkeypatch.setattr(module, "gemm_dtype", lambda x: x.dtype)
    monkeypatch.setattr(linear_op, "launch", kernel("SCALE"))
    monkeypatch.setattr(on_triton, "launch", kernel("ROWS"))

    def called(chunks, teacher=True, **options):
        rows = chunks * ROWS_OF_CHUNK
        names.clear()
        x, w, u, v = (torch.randn(n, H).bfloat16() for n in (rows, V, rows, V))
        labels, beside = torch.arange(rows) % V, (u, v) if teacher else (None, None)
        options |= {} if teacher else {"alpha": 0.0}
        with Counted(names):
            growkern.linear_kl_mlm_loss(
                x.requires_grad_(), w.requires_grad_(), *beside, labels, backend="triton",
                logits_dtype=torch.float32, **options,
            )  # fmt: skip
        return list(names)

    return called


def small(names):
    """Those that start a kernel of PyTorch's."""
    return [x for x in names if x.islower() and x not in VIEWS and not x.startswith("linear_kl")]


@pytest.mark.parametrize(
    "teacher, each, own", [(True, 10, LAUNCHES), (False, 8, (21, 17))], ids=["KL", "labels"]
)
def test_operations_do_not_grow_in_number(call, teacher, each, own):
    """The first products wait for none: counts and weights of rows follow them."""
    few, many = (call(chunks, teacher) for chunks in (8, 11))
    # two products make dX and dW of all chunks
    for names, chunks in ((few, 8), (many, 11)):
        assert names.count("ROWS") == chunks
        assert names.count("PRODUCT") == (1 + teacher) * chunks + 2
    first, last = many.index("PRODUCT"), len(many) - many[::-1].index("PRODUCT")
    rows = many.index("ROWS")
    assert many[first : first + 1 + teacher] == ["PRODUCT"] * (1 + teacher)
    assert small(many[:first]) == []
    # exact numbers, as the model of the loss's time counts with them
    assert (len(small(many[first:rows])), len(small(many[last:]))) == own
    # of a chunk: views and memory, and no kernel beside the products and that of the rows
    assert small(many[rows:last]) == []
    others = [sum(x not in ("ROWS", "PRODUCT") for x in names) for names in (few, many)]
    assert (others[1] - others[0]) / 3 <= each


def test_row_weights_of_a_chunk_are_read_where_they_are(device):
    """Some columns of those of the batch have another stride between terms: the kernel gets it."""
    rng = torch.Generator().manual_seed(0)
    student, teacher = (torch.randn(4, 33, generator=rng).to(device) for _ in range(2))
    weights = torch.rand(2, 10, generator=rng).to(device)[:, 3:7]
    labels = torch.zeros(4, dtype=torch.int64, device=device)
    kinds = torch.full((4,), 3, dtype=torch.int32, device=device)
    rows = Rows(student, [teacher], labels, kinds, 33, Maths(2.0), False)
    steps = Steps(sums=True, grad=True)
    found = []
    for drows in (weights, weights.contiguous()):
        state, grad = student.new_empty(n_numbers(1), 4), torch.empty_like(student)
        on_triton.rows_on_triton(rows, state, steps, drows, grad)
        found.append(grad)
    assert torch.equal(*found) and found[0].abs().min() > 0
