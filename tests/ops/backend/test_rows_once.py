"""Rows that are read once: beside float64 and beside the kernel that reads them twice.

The interpreter runs one program after another, so most tests launch the kernel twice. Those of
`_wait` launch it once, as a GPU does, and its programs run side by side.
"""

from types import SimpleNamespace

import pytest
import torch
from torch.nn.functional import one_hot

from growkern.ops.backend.launch import HAS_TRITON
from growkern.ops.loss.rows import once_on_triton
from growkern.ops.loss.rows.on_triton import rows_on_triton
from growkern.ops.loss.rows.options import Maths
from growkern.ops.loss.rows.state import Rows, Steps, n_numbers
from testbed.side_by_side import side_by_side

pytestmark = pytest.mark.skipif(not HAS_TRITON, reason="Triton is not installed")
BF16, V, N = torch.bfloat16, 1008, 7
BOTH_TERMS, LABEL = 3, 1


@pytest.fixture
def small(monkeypatch):
    """The kernel is on, and rows of V columns have four parts; its launches are counted."""
    monkeypatch.setenv(once_on_triton.VARIABLE, "1")
    monkeypatch.setattr(once_on_triton, "PART", 256)
    monkeypatch.setattr(once_on_triton, "LEAST_COLUMNS", V)
    monkeypatch.setattr(once_on_triton, "REFUSED", set())
    monkeypatch.setattr(once_on_triton, "_programs", lambda device, K: 12)
    launches, launch = [], once_on_triton.launch

    def launched(*arguments, **constants):
        launches.append(constants)
        launch(*arguments, **constants)

    monkeypatch.setattr(once_on_triton, "launch", launched)
    return launches


def make_rows(K, T, drift=0.05, device="cpu"):
    """Rows with and without a term; a part of one has no finite logit, and one row is NaN."""
    rng = torch.Generator().manual_seed(K)
    u = torch.randn(N, V, generator=rng) * 3
    s = u + drift * torch.randn(N, V, generator=rng)
    s[2, :256] = u[2, :256] = float("-inf")
    s[5] = float("nan")
    labels = torch.randint(V, (N,), generator=rng)
    both = BOTH_TERMS if K else LABEL
    kinds = torch.tensor([both, LABEL, both, both - 1 or LABEL, both, 0, LABEL], dtype=torch.int32)
    drows = (torch.rand(1 + K, 2 * N, generator=rng) / N).to(device)[:, :N]
    tensors = [x.to(device) for x in (s, u, labels, kinds)]
    s, u, labels, kinds = tensors
    return Rows(s, [u] * K, labels, kinds, V, Maths(T), False), drows


def gradient(rows, drows, over=False):
    """State and gradient, which may be in the memory of the logits."""
    state = torch.full((n_numbers(len(rows.teachers_NV)), N), float("nan"), device=drows.device)
    rows = rows._replace(student_NV=rows.student_NV.clone())
    grad = torch.full((N, V), 7.0, device=drows.device).to(BF16)
    grad = rows.student_NV.view(BF16)[:, :V] if over else grad
    rows_on_triton(rows, state, Steps(sums=True, grad=True), drows, grad)
    return state, grad.clone()


def truth(rows, drows):
    z, T, kinds = rows.student_NV.double(), rows.maths.temperature, rows.kind_N[:, None]
    label = one_hot(rows.labels_N, V)
    exact = torch.where(kinds & 1 > 0, drows[0].double()[:, None] * (z.softmax(-1) - label), 0)
    for u in rows.teachers_NV:
        apart = (z / T).softmax(-1) - (u.double() / T).softmax(-1)
        exact += torch.where(kinds & 2 > 0, drows[1].double()[:, None] * apart / T, 0)
    return exact


@pytest.mark.parametrize("over", [False, True], ids=["beside", "over the logits"])
@pytest.mark.parametrize("K, T", [(1, 2.0), (1, 1.0), (0, 1.0)])
def test_state_and_gradient_are_those_of_two_readings(K, T, over, small, device, monkeypatch):
    rows, drows = make_rows(K, T, device=device)
    state, grad = gradient(rows, drows, over)
    assert small and all(constants["launch_cooperative_grid"] for constants in small)
    monkeypatch.delenv(once_on_triton.VARIABLE)
    expected_state, expected = gradient(rows, drows)
    exact, live = truth(rows, drows), rows.kind_N > 0
    ours, theirs = ((x.double() - exact).norm() for x in (grad, expected))
    assert ours <= 1.05 * theirs and not grad[5].any()
    torch.testing.assert_close(state[:, live], expected_state[:, live], rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("drift", [0.01, 0.05, 0.2])
def test_the_gradient_is_as_exact_at_every_drift(drift, small, device, monkeypatch):
    rows, drows = make_rows(1, 1.0, drift, device)
    drows[0] = 0  # the KL term alone, which cancels
    exact = truth(rows, drows)
    _, grad = gradient(rows, drows)
    monkeypatch.delenv(once_on_triton.VARIABLE)
    _, before = gradient(rows, drows)
    assert (grad.double() - exact).norm() <= 1.05 * (before.double() - exact).norm()


@pytest.fixture
def new_memory_is_nan():
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(before)


def in_one_launch(rows, drows, patient, monkeypatch):
    """State and gradient as on a GPU, where programs wait, and the orders of atomic operations."""
    monkeypatch.setenv("TRITON_INTERPRET", "0")
    with side_by_side(patient) as orders:
        found = gradient(rows, drows)
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    return found, orders


def equal(found, expected):
    return all(
        torch.equal(x.nan_to_num(9), y.nan_to_num(9)) for x, y in zip(found, expected, strict=True)
    )


on_cpu = pytest.mark.skipif(torch.cuda.is_available(), reason="schedules an interpreter")


@on_cpu
@pytest.mark.parametrize("patient", [False, True], ids=["ahead", "in turns"])
@pytest.mark.parametrize("K, T", [(1, 2.0), (0, 1.0)])
def test_programs_wait_for_all_parts_of_a_row(K, T, patient, small, new_memory_is_nan, monkeypatch):
    """12 programs take 7 rows of four parts, so each program waits two or three times."""
    rows, drows = make_rows(K, T)
    expected = gradient(rows, drows)
    assert [constants["PHASE"] for constants in small] == [1, 2]
    found, orders = in_one_launch(rows, drows, patient, monkeypatch)
    assert small[-1]["PHASE"] == 0 and len(small) == 3 and small[-1]["launch_cooperative_grid"]
    assert equal(found, expected)
    # what a part stored is seen by whoever has seen its 1, on the whole device
    assert orders.count(("RELEASE", "GPU")) == 4 * N
    assert set(orders) == {("RELEASE", "GPU"), ("ACQUIRE", "GPU")}


def test_a_device_that_refuses_gets_the_other_kernel(small, device, monkeypatch):
    """A launch that is not cooperative could wait for ever, so there is none."""
    rows, drows = make_rows(1, 2.0, device=device)
    monkeypatch.delenv(once_on_triton.VARIABLE)
    expected = gradient(rows, drows)
    monkeypatch.setenv(once_on_triton.VARIABLE, "1")
    tries = []

    def refuse(*arguments, **constants):
        tries.append(constants["launch_cooperative_grid"])
        raise RuntimeError("Triton Error [CUDA]: too many blocks in cooperative launch")

    monkeypatch.setattr(once_on_triton, "launch", refuse)
    for _ in range(2):
        for found, wanted in zip(gradient(rows, drows), expected, strict=True):
            assert torch.equal(found.nan_to_num(9), wanted.nan_to_num(9))
    # it is asked once
    assert tries == [True]


def test_other_errors_are_not_a_refusal(small, device, monkeypatch):
    rows, drows = make_rows(1, 2.0, device=device)

    def fail(*_, **__):
        raise RuntimeError("an illegal memory access was encountered")

    monkeypatch.setattr(once_on_triton, "launch", fail)
    with pytest.raises(RuntimeError, match="illegal memory access"):
        gradient(rows, drows)


OTHERS = {
    "reverse": {"maths": Maths(beta=1.0)},
    "cap": {"maths": Maths(softcap=30.0)},
    "smoothing": {"maths": Maths(label_smoothing=0.1)},
    "z-loss": {"maths": Maths(z_loss=1e-4)},
    "parts": {"parts": True},
    "ragged": {"vocab": V - 1},
    "few columns": {"vocab": V - 16},
}


def test_programs_that_wait_for_each_other_are_no_more_than_fit(monkeypatch):
    """A launch has whole rows of programs, and none that would have to wait for room."""
    gpu, found, programs = torch.device("cuda", 0), {"capability": (9, 0)}, []
    properties = SimpleNamespace(multi_processor_count=115)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: found["capability"])
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    # a device runs both halves in one launch, unlike the interpreter
    monkeypatch.setenv("TRITON_INTERPRET", "0")
    of_gpu = once_on_triton._programs
    assert [of_gpu(gpu, K) for K in (0, 1)] == [3 * 115, 2 * 115]
    monkeypatch.setattr(once_on_triton, "_programs", lambda device, K: of_gpu(gpu, K))
    monkeypatch.setattr(once_on_triton, "PART", 256)
    monkeypatch.setattr(once_on_triton, "launch", lambda kernel, n, *_, **__: programs.append(n))

    def launched(rows):
        z, state = torch.empty(rows, V), torch.empty(n_numbers(1), rows)
        some = Rows(z, [z], z[:, 0].long(), z[:, 0].int(), V, Maths(1.0), False)
        return once_on_triton.read_rows_once(some, state, torch.empty(2, rows), z.to(BF16))

    # four parts of a row; of 230 programs that fit, two would have no row
    assert launched(200) and launched(7) and programs == [228, 28]
    assert of_gpu(torch.device("xpu", 0), 1) == 0
    for capability in ((8, 0), (8, 9), (10, 0), (12, 0)):
        found["capability"] = capability
        assert not launched(200)
    assert len(programs) == 2


@pytest.mark.parametrize("name", OTHERS)
def test_other_calls_take_the_other_kernel(name, small):
    rows, _ = make_rows(1, 1.0)
    steps, grad = Steps(sums=True, grad=True), torch.empty(N, V, dtype=BF16)
    assert once_on_triton.may_read_once(rows, steps, grad)
    assert not once_on_triton.may_read_once(rows, Steps(sums=True), grad)
    assert not once_on_triton.may_read_once(rows, steps, grad.float())
    assert not once_on_triton.may_read_once(rows._replace(**OTHERS[name]), steps, grad)


def test_it_is_off(small, device, monkeypatch):
    monkeypatch.delenv(once_on_triton.VARIABLE)
    gradient(*make_rows(1, 1.0, device=device))
    assert not small
