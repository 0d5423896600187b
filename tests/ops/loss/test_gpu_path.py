"""The steps that only a GPU takes, without one: by fake tensors, or with the CPU made to do so."""

import importlib
import math
import pkgutil
import re

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import growkern.ops
from bench.launches import aot_cases
from bench.shared.loss_measure import plain
from growkern import Routing, expand, kl_mlm_loss, linear_kl_mlm_loss, topk_kl_mlm_loss
from growkern.ops.adamw.factors import Factors, StatePart, UpdateRule
from growkern.ops.adamw.on_triton import adamw_step_on_triton
from growkern.ops.backend.launch import HAS_TRITON
from growkern.ops.expand import many
from growkern.ops.expand.call import ExpandCall
from growkern.ops.expand.on_triton import expand_on_triton
from growkern.ops.loss.linear import gemm, heads as heads_module, linear_op
from growkern.ops.loss.linear.heads import Head, HeadSettings, Sizes, held_rows
from growkern.ops.loss.rows import once_on_triton
from growkern.ops.loss.rows.inputs import row_kinds, term_weights
from growkern.ops.loss.rows.on_triton import rows_on_triton
from growkern.ops.loss.rows.options import LossCall, check_options
from growkern.ops.loss.rows.rows_op import ROW_FUNCTIONS
from growkern.ops.loss.rows.state import Maths, RowInputs, Rows, Steps, n_numbers
from growkern.ops.loss.topk.tail_on_triton import tail_gradient_on_triton
from tests.ops.loss.loss_inputs import relative_error

needs_triton = pytest.mark.skipif(not HAS_TRITON, reason="Triton is not installed")

# ------------------------------------------------------------------ unused places


def heads_with_nan(N, V, H, H_t):
    """Heads of a student and a teacher; the hidden states of the last row are NaN."""
    student, teacher = ([torch.randn(N, n), torch.randn(V, n)] for n in (H, H_t))
    student[0][-1] = teacher[0][-1] = math.nan
    return [x.requires_grad_() for x in student], teacher


def teacher_of(kind, N, V, teacher):
    if kind == "linear":
        return linear_kl_mlm_loss, teacher
    ids = torch.rand(N, V).topk(5).indices
    log_p = torch.full((N, 5), math.log(0.15))
    log_p[-1] = math.nan
    ids[-1] = V + 7
    return topk_kl_mlm_loss, [ids, log_p]


@pytest.mark.parametrize("kind", ["linear", "top-k"])
@pytest.mark.parametrize("limits", [{}, {"max_rows": 14}, {"vocab_tile": 10}])
def test_an_unlabelled_last_row_may_be_nan(kind, limits, monkeypatch):
    """Places that no row needs must not bring its NaN into the gradient of the weight."""
    N, V = 24, 31
    student, teacher = heads_with_nan(N, V, 8, 6)
    labels = torch.randint(V, (N,))
    labels[9:] = -100
    loss_of, beside = teacher_of(kind, N, V, teacher)
    found = []
    for asks in (True, False):
        monkeypatch.setattr(linear_op, "may_ask", lambda device, asks=asks: asks)
        loss = loss_of(*student, *beside, labels, temperature=2.0, backend="cpu", **limits)
        found.append((loss, *torch.autograd.grad(loss, student)))
    for exact, actual in zip(*found, strict=True):
        assert actual.isfinite().all()
        torch.testing.assert_close(actual, exact)


@pytest.mark.parametrize("limits, rows", [({}, 80), ({"max_rows": 12}, 12)])
def test_a_gpu_multiplies_max_rows_or_all_of_them(limits, rows, monkeypatch):
    """12 of 80 rows have a label; docs/losses.md says what the others cost. A CPU counts them."""
    project, seen = linear_op.project, []

    def counted(x, *rest):
        seen.append(len(x))
        project(x, *rest)

    monkeypatch.setattr(linear_op, "project", counted)
    student, teacher = ([torch.randn(n, H) for n in (80, 31)] for H in (8, 6))
    labels = torch.full((80,), -100)
    labels[::7] = 3
    found = []
    for asks in (True, False):
        monkeypatch.setattr(linear_op, "may_ask", lambda device, asks=asks: asks)
        seen.clear()
        loss = linear_kl_mlm_loss(*student, *teacher, labels, backend="cpu", **limits)
        found.append((sum(seen), loss))
    # of the student and of the teacher
    assert [n for n, _ in found] == [2 * 12, 2 * rows]
    torch.testing.assert_close(*(loss for _, loss in found))


# ----------------------------------------------------------------------- launches


def kernels():
    """Every kernel that has ahead-of-time cases: (module, name of the kernel there)."""
    found = set()
    modules = [
        importlib.import_module(m.name)
        for m in pkgutil.walk_packages(growkern.ops.__path__, "growkern.ops.")
    ]
    cases = aot_cases.listed()
    for module in modules:
        for name, value in vars(module).items():
            if any(value is case.kernel for case in cases) and "launch" in vars(module):
                found.add((module, name))
    return found


def launches_on(device):
    """One call of every function that launches a Triton kernel."""

    def made(*shape, dtype=torch.float32):
        return torch.empty(shape, dtype=dtype, device=device)

    index = torch.int64
    labels, kind = made(4, dtype=index), made(4, dtype=torch.int32)
    rows = Rows(made(4, 33), [made(4, 33)], labels, kind, 33, Maths(2.0), False)
    steps = Steps(sums=True, grad=True)
    rows_on_triton(rows, made(n_numbers(1), 4), steps, made(2, 4), made(4, 33))
    once_on_triton.read_rows_once(rows, made(n_numbers(1), 4), made(2, 4), made(4, 33))
    tail_gradient_on_triton(rows._replace(teachers_NV=[]), made(5, 4), made(4, 33))
    vectors = ((made(4, 1), made(1, 6)),) * 2
    adamw_step_on_triton(
        StatePart(*[made(4, 6)] * 4), Factors(*vectors, vectors[0]), 1.0, UpdateRule(*[0.5] * 7)
    )
    maps = {"rows": made(8, dtype=index), "cols": made(6, dtype=index)}
    call = ExpandCall(made(8, 6), made(5, 4), **maps, col_noise=made(6))
    expand_on_triton(call)
    many.expand_many([call])
    linear_op.scale_in_place(made(6), made(), by_triton=True)


@needs_triton
@pytest.mark.filterwarnings("ignore:Accessing the data pointer of FakeTensor")
def test_every_kernel_is_launched_on_the_device_of_its_tensors(monkeypatch, current_device):
    """Triton takes the current device: with tensors on another one that is the wrong memory."""
    current, seen = current_device, {}

    def recorder(name):
        class Kernel:
            def __getitem__(self, grid):
                return lambda *args, **constants: seen.setdefault(name, []).append(current.index)

        return Kernel()

    expected = kernels()
    for module, name in expected:
        monkeypatch.setattr(module, name, recorder(name))
    monkeypatch.setattr(torch.Tensor, "data_ptr", lambda x: 64)
    monkeypatch.setattr(once_on_triton, "_programs", lambda device, K: 2)
    with FakeTensorMode():
        launches_on("cuda:1")
    # a work list and a single call both make hashes of lines
    assert {name: set(found) for name, found in seen.items()} == {name: {1} for _, name in expected}
    assert current.index == 0


# ----------------------------------------------------------------- matrix products


def wide_product(a, b, total=0):
    return (total + a.double() @ b.double()).to(torch.float32)


def products(monkeypatch, *, mm, addmm):
    """Gives the CPU the products of a GPU; without `mm` or `addmm` they raise. Records them."""
    called, real = [], {"mm": torch.mm, "addmm": torch.addmm}

    def replaced(name, allowed):
        def product(*factors, out_dtype=None, out=None, beta=1):
            if out_dtype is None:
                options = {} if name == "mm" else {"beta": beta}
                return real[name](*factors, out=out, **options)
            called.append(name)
            if not allowed:
                raise RuntimeError("self and mat2 must have the same dtype")
            *total, a, b = factors
            made = wide_product(a, b, total[0].double() if total and beta else 0)
            return made if out is None else out.copy_(made)

        return product

    monkeypatch.setattr(torch, "mm", replaced("mm", mm))
    monkeypatch.setattr(torch, "addmm", replaced("addmm", addmm))
    monkeypatch.setattr(gemm, "multiplies", lambda factor, total: False)
    for probe in (gemm.multiplies_wide, gemm.adds_wide):
        probe.cache_clear()
    return called


@pytest.fixture
def fresh_probes():
    yield
    for probe in (gemm.multiplies_wide, gemm.adds_wide):
        probe.cache_clear()


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 MiB."),
        RuntimeError("CUDA error: out of memory"),
        RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
        RuntimeError("CUDA error: CUBLAS_STATUS_NOT_INITIALIZED when calling `cublasCreate(h)`"),
        RuntimeError("HIP error: HIPBLAS_STATUS_ALLOC_FAILED when calling `hipblasCreate(handle)`"),
    ],
    ids=lambda error: str(error)[:40],
)
def test_a_product_without_memory_is_tried_again(error, monkeypatch, fresh_probes):
    """Else a process that began beside a full GPU would compute in float32 for ever."""

    def full(*factors, **options):
        raise error

    products(monkeypatch, mm=True, addmm=True)
    device = torch.device("cpu")
    with monkeypatch.context() as patch:
        for name in ("mm", "addmm"):
            patch.setattr(torch, name, full)
        for probe in (gemm.multiplies_wide, gemm.adds_wide):
            with pytest.raises(RuntimeError, match=re.escape(str(error))):
                probe(device, torch.bfloat16)
    assert gemm.multiplies_wide(device, torch.bfloat16) and gemm.adds_wide(device, torch.bfloat16)


def test_a_product_that_the_library_refuses_is_not_tried_again(monkeypatch, fresh_probes):
    called = products(monkeypatch, mm=True, addmm=True)
    error = RuntimeError("CUDA error: CUBLAS_STATUS_NOT_SUPPORTED when calling `cublasGemmEx(...)`")

    def refused(*factors, **options):
        called.append("refused")
        raise error

    monkeypatch.setattr(torch, "mm", refused)
    tries = [gemm.multiplies_wide(torch.device("cpu"), torch.float16) for _ in range(2)]
    assert (tries, called) == ([False] * 2, ["refused"])


@pytest.mark.parametrize("has", [(True, True), (True, False), (False, False)])
def test_products_are_right_whatever_pytorch_offers(has, monkeypatch, fresh_probes):
    """mm and addmm with out_dtype: recent PyTorch, PyTorch 2.9, and a device that has neither."""
    called = products(monkeypatch, mm=has[0], addmm=has[1])
    monkeypatch.setattr(gemm, "GPU_TILE_BYTES", 200)
    x, w = torch.randn(12, 8).bfloat16(), torch.randn(20, 8).bfloat16()
    dtype = torch.bfloat16 if has[0] else torch.float32
    dz, bias = torch.randn(12, 20).to(dtype), torch.randn(20).bfloat16()
    z = torch.full((12, 20), math.nan)
    gemm.project(x, w, bias, z)
    torch.testing.assert_close(z, wide_product(x, w.t(), bias.double()))
    dx, dw = torch.ones(12, 8), torch.full((20, 8), math.nan)
    gemm.add_dx(dz, w, dx)
    torch.testing.assert_close(dx, wide_product(dz, w, 1))
    gemm.add_dw(dz, x, dw, fresh=True)
    gemm.add_dw(dz, x, dw, fresh=False)
    torch.testing.assert_close(dw, 2 * wide_product(dz.t(), x))
    # each product is tried once
    assert not has[1] or called.count("addmm") == 4
    assert has[1] or called.count("addmm") <= 1
    assert has[0] or called == ["mm"]


def count_products(monkeypatch):
    """The matrix products of dX and dW: (rows, whether it starts the sums, dtype of the sums)."""
    seen, add = [], gemm._add_product

    def counted(a, b, out, *, fresh=False):
        seen.append((*out.shape, fresh, out.dtype))
        add(a, b, out, fresh=fresh)

    monkeypatch.setattr(gemm, "_add_product", counted)
    return seen


@pytest.mark.parametrize("kind", ["linear", "top-k"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize(
    "held, H", [(1 << 30, 6), (3 * 2 * 64 * 8, 6), (1 << 30, 32)], ids=["all", "in parts", "wide"]
)
def test_one_product_sums_dw_of_many_chunks(kind, dtype, held, H, monkeypatch, fresh_probes):
    """dz of all rows is held: dW and dX are written once, rounded once and never read again.

    Too many rows to hold are taken in parts of 24, whose sums are float32. With width 32 the logits
    lie in the memory of dW, if one product writes it. In float32 there are always parts.
    """
    N, V = 70, 60
    products(monkeypatch, mm=True, addmm=True)
    for module in (gemm, linear_op):
        monkeypatch.setattr(module, "gemm_dtype", lambda x: x.dtype)
    monkeypatch.setattr(linear_op, "may_ask", lambda device: False)
    sizes = {"LEAST_HELD": 16, "HELD_BYTES": held, "ROWS_OF_TILES": 4}
    for name, value in sizes.items():
        monkeypatch.setattr(heads_module, name, value)
    seen, places, make = count_products(monkeypatch), [], linear_op.logit_memory

    def noted(*arguments):
        memory, free = make(*arguments), arguments[-1]
        places.append(free is not None and memory[0].data_ptr() == free.data_ptr())
        return memory

    monkeypatch.setattr(linear_op, "logit_memory", noted)
    student, teacher = heads_with_nan(N, V, H, 5)
    student = [x.detach().to(dtype).requires_grad_() for x in student]
    loss_of, beside = teacher_of(kind, N, V, [x.to(dtype) for x in teacher])
    labels = torch.randint(V, (N,))
    labels[::5] = labels[-1] = -100
    loss = loss_of(*student, *beside, labels, temperature=2.0, backend="cpu")
    actual = torch.autograd.grad(1024 * loss, student)
    own = torch.float32 if dtype == torch.float16 else dtype
    assert places == [H == 32 and own == torch.bfloat16]
    if held == 1 << 30 and dtype != torch.float32:
        assert seen == [(N, H, True, own), (V, H, True, own)]
    else:
        narrow = dtype == torch.float32 and H == 6
        parts = [16, 16, 16, 16, 6] if narrow else [24, 24, 22]
        assert [size for size, *_ in seen] == [size for part in parts for size in (part, V)]
        assert [fresh for size, _, fresh, _ in seen if size == V] == [
            index == 0 for index in range(len(parts))
        ]
        assert {dtype for size, *_, dtype in seen if size == V} == {torch.float32}
    wide = [x.detach().double().requires_grad_() for x in student]
    kept = [x if kind == "top-k" else x.double() for x in beside]
    live = labels != -100
    truth = loss_of(
        wide[0][live], wide[1], *[x[live] if len(x) == N else x for x in kept], labels[live],
        temperature=2.0, backend="reference",
    )  # fmt: skip
    for x, exact in zip(actual, torch.autograd.grad(1024 * truth, wide), strict=True):
        assert relative_error(x, exact) <= (1e-5 if dtype == torch.float32 else 5e-3)


@pytest.mark.parametrize("works", [True, False])
def test_a_gpu_without_narrow_products_gets_float32_ones(works, monkeypatch):
    monkeypatch.setattr(gemm, "multiplies_wide", lambda device, factor: works)
    with FakeTensorMode():
        x = torch.empty(2, 2, dtype=torch.bfloat16, device="cuda")
        assert gemm.gemm_dtype(x) == (torch.bfloat16 if works else torch.float32)
        assert gemm.gemm_dtype(x.float()) == torch.float32


@pytest.mark.parametrize("precision, least, most", [("highest", 160, 180), ("high", 1000, 1300)])
def test_chunks_of_float32_heads_fit_the_products(precision, least, most):
    """TF32 products are over six times as fast, so a chunk needs as many times the rows.

    Else reading and writing dW for each chunk would take longer than a tenth of the products.
    """
    before = torch.get_float32_matmul_precision()
    try:
        torch.set_float32_matmul_precision(precision)
        with FakeTensorMode():
            x, sizes = torch.empty(1, 4096, device="cuda"), Sizes(128_256, 128_256)
            rows, tile = gemm.chunk_size(8192, [4096, 2048], x, 4, sizes)
    finally:
        torch.set_float32_matmul_precision(before)
    assert least <= rows <= most and tile == 0


# ----------------------------------------------------------- nothing asks the host


class NothingWaits(TorchDispatchMode):
    """Refuses everything that waits for a GPU or cannot be captured in a CUDA graph."""

    WAITS = ("_local_scalar_dense", "nonzero", "item", "is_nonzero", "equal", "masked_select")

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.name().removeprefix("aten::").split(".")[0]
        assert name not in self.WAITS, f"{name} waits for the GPU"
        if name == "addmm" and kwargs.get("out") is not None:
            return kwargs["out"]  # PyTorch has no fake of addmm(out_dtype=)
        made = func(*args, **(kwargs or {}))
        tensors = [x for x in (*args, made) if isinstance(x, torch.Tensor)]
        if name in ("_to_copy", "copy_"):
            devices = {x.device.type for x in tensors}
            assert len(devices) == 1, f"{name} between {devices}"
        return made


def kinds_and_weights(labels, alpha, **rest):
    call = LossCall(alpha=alpha, temperature=2.0, return_parts=True, **rest)
    options = check_options(call, 1, labels)
    kind = row_kinds(labels, "labels", -100, options)
    return kind, term_weights(kind, options, torch.float32)


@pytest.mark.parametrize("where", ["cpu", "meta"])
@pytest.mark.parametrize("kind", ["ready", "linear", "top-k"])
def test_a_call_of_a_loss_asks_the_gpu_nothing(kind, where, monkeypatch):
    """From the public function to the op, whose inside is the next test."""
    monkeypatch.setattr(torch, "is_autocast_enabled", lambda device: False)
    N, V = 6, 11

    def made(*shape, dtype=torch.bfloat16, device="meta"):
        return torch.empty(shape, dtype=dtype, device=device)

    # a build of PyTorch without CUDA cannot slice fake CUDA tensors
    with NothingWaits():
        alpha, labels = made(dtype=torch.float32, device=where), made(N, dtype=torch.int64)
        weights = made(N, dtype=torch.float32)
        options = {"alpha": alpha, "row_weights": weights, "temperature": 2.0}
        if kind == "ready":
            logits = made(N, V, dtype=torch.float32)
            loss = kl_mlm_loss(logits, [logits], labels, **options)
        elif kind == "linear":
            teacher = made(N, 4), made(V, 4)
            loss = linear_kl_mlm_loss(made(N, 8), made(V, 8), *teacher, labels, **options)
        else:
            listed = made(N, 3, dtype=torch.int64), made(N, 3, dtype=torch.float32)
            loss = topk_kl_mlm_loss(made(N, 8), made(V, 8), *listed, labels, **options)
    assert loss.shape == () and loss.device.type == "meta"


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("limits", [{}, {"max_rows": 32}, {"vocab_tile": 20}])
@pytest.mark.parametrize("beta", [0.0, 0.5])
def test_a_step_of_the_linear_loss_can_be_captured(beta, dtype, limits, monkeypatch):
    """The whole sweep without memory: no question to the device, no copy from the host."""
    N, V, H, H_t = 64, 101, 32, 16
    logits = torch.float64 if dtype == torch.float32 else torch.float32
    monkeypatch.setitem(ROW_FUNCTIONS, "triton", lambda *args: None)
    monkeypatch.setattr(gemm, "multiplies_wide", lambda device, factor: True)
    monkeypatch.setattr(gemm, "adds_wide", lambda device, factor: True)

    def made(*shape):
        # a build of PyTorch without CUDA cannot slice fake CUDA tensors
        return torch.empty(shape, dtype=dtype, device="meta")

    heads = [Head(made(N, n), made(V, n), made(V)) for n in (H, H_t)]
    maths = Maths(2.0, beta=beta, label_smoothing=0.1)
    settings = HeadSettings(
        Sizes(V, V, **limits), maths, True, False, [True] * 3, logits, "", "triton"
    )
    with NothingWaits():
        labels = torch.empty(N, dtype=torch.int64, device="meta")
        rows = RowInputs(labels, *kinds_and_weights(labels, torch.empty(())))
        _, _, *grads = linear_op.empty_outputs(heads[0], rows.weights, False, [True] * 3)
        linear_op.sweep(heads, rows, settings, grads)
    assert [x.dtype for x in grads] == [torch.float32 if dtype == torch.float16 else dtype] * 3


# ------------------------------------------------------------------------- memory


@pytest.mark.parametrize("kind", ["linear", "top-k"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("limits", [{}, {"vocab_tile": 20}, {"chunk_bytes": 10_000}], ids=str)
@pytest.mark.parametrize("width", [8, 128])
def test_rows_of_logits_and_their_gradient_are_aligned(width, kind, dtype, limits, monkeypatch):
    """On a GPU a GEMM takes slow paths for rows of 30522 or 50257 numbers, packed tight.

    In bfloat16 and the larger width the logits of both heads lie in dW, and dz beside it.
    """
    N, V = 24, 101
    monkeypatch.setattr(linear_op, "may_ask", lambda device: False)
    run, starts, places = ROW_FUNCTIONS["cpu"], [], []

    def seen(rows, state, steps, drows=None, dstudent=None):
        tensors = [rows.student_NV, *rows.teachers_NV, *([] if dstudent is None else [dstudent])]
        starts.extend(x.stride(0) * x.element_size() for x in tensors)
        places.extend(x.data_ptr() for x in tensors)
        run(rows, state, steps, drows, dstudent)

    monkeypatch.setitem(ROW_FUNCTIONS, "cpu", seen)
    student, teacher = ([torch.randn(n, H).to(dtype) for n in (N, V)] for H in (width, 6))
    given = [x.requires_grad_() for x in student]
    loss_of, beside = teacher_of(kind, N, V, teacher)
    labels = torch.randint(V, (N,))
    labels[-1] = -100
    loss = loss_of(*given, *beside, labels, backend="cpu", **limits)
    torch.autograd.grad(loss, given)
    assert starts and all(start % 128 == 0 for start in starts), starts
    # PyTorch's memory on a CPU begins at multiples of 64
    assert all(place % 64 == 0 for place in places), places


# ------------------------------------------------------------------------ biases

WHOLE = (Steps(sums=True, grad=True),)
APART = (Steps(sums=True), Steps(grad=True))


def results(rows, steps):
    """State and gradient after the steps."""
    N, K = len(rows.labels_N), len(rows.teachers_NV)
    state, drows = torch.zeros(n_numbers(K), N), torch.linspace(0.5, 1.5, (1 + K) * N)
    grad = torch.full((N, rows.vocab), float("nan"))
    for step in steps:
        rows_on_triton(rows, state, step, drows.view(1 + K, N), grad)
    return state, grad


@needs_triton
@pytest.mark.parametrize("steps", [WHOLE, APART], ids=["together", "apart"])
@pytest.mark.parametrize("has", [(True, True, True), (True, False, True), (False, True, False)])
@pytest.mark.parametrize("V, cap", [(301, 0.0), (64, 20.0)])
def test_a_bias_is_added_to_each_logit(steps, has, V, cap):
    N, dtypes = 4, (torch.bfloat16, torch.float32, torch.bfloat16)
    logits = [3 * torch.randn(N, V) for _ in has]
    biases = [torch.randn(V).to(t) if own else None for own, t in zip(has, dtypes, strict=True)]
    labels, kind = torch.tensor([0, V - 1, 5, 7]), torch.tensor([3, 3, 1, 0]).int()
    rows = Rows(logits[0], logits[1:], labels, kind, V, Maths(2.0, cap, cap, 0, 0.1), True)
    actual = results(rows._replace(biases=biases), steps)
    added = [z if b is None else z + b.float() for z, b in zip(logits, biases, strict=True)]
    expected = results(rows._replace(student_NV=added[0], teachers_NV=added[1:]), steps)
    # a bias of 16 bits changes which columns a thread reads, and so the order of the sums
    for x, y in zip(actual, expected, strict=True):
        torch.testing.assert_close(x, y, rtol=1e-6, atol=1e-6)


# ---------------------------------------------------------------- incoming scalar


def made_in_forward(loss):
    """The gradients that the forward pass saved."""
    _, *grads = loss.grad_fn.saved_tensors
    return grads


@pytest.mark.parametrize("by", ["cpu", "triton"])
@pytest.mark.parametrize("factor", [1.0, 0.375])
def test_the_last_backward_copies_no_gradient(by, factor):
    """It gets the memory that forward filled; a factor that is not 1 is multiplied in place."""
    if by == "triton" and not HAS_TRITON:
        pytest.skip("Triton is not installed")
    student, teacher = heads_with_nan(5, 33, 8, 6)
    labels = torch.tensor([3, 1, -100, 32, -100])

    def loss():
        return linear_kl_mlm_loss(*student, *teacher, labels, backend=by)

    first = loss()
    expected = torch.autograd.grad(first, student, retain_graph=True)
    kept = made_in_forward(first)
    for x, saved in zip(expected, kept, strict=False):
        # whoever keeps the graph gets a copy
        assert x.data_ptr() != saved.data_ptr()
    again = torch.autograd.grad(first * 1, student, retain_graph=True)
    last = loss()
    places = [x.data_ptr() for x in made_in_forward(last)]
    (factor * last).backward()
    for x, where, exact, same in zip(student, places, expected, again, strict=False):
        assert x.grad.data_ptr() == where
        torch.testing.assert_close(x.grad, factor * exact, rtol=1e-6, atol=0)
        torch.testing.assert_close(same, exact, rtol=0, atol=0)


@needs_triton
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("n", [1, 1024, 3000])
def test_scaling_rounds_once(dtype, n, monkeypatch):
    monkeypatch.setattr(linear_op, "MOST_PROGRAMS", 2)
    x = torch.randn(n).to(dtype)
    for factor in (torch.tensor(1 / 3), torch.tensor(1.0)):
        actual = x.clone()
        linear_op.scale_in_place(actual, factor, by_triton=True)
        exact = x.double() * factor.double()
        step = torch.finfo(dtype).eps if dtype == torch.bfloat16 else 1e-7
        assert ((actual.double() - exact).abs() <= step * exact.abs()).all()


# ------------------------------------------------------------------ memory

WIDEST = (8192, 128_256, 4096, 2048)


class MostMemory(TorchDispatchMode):
    """The most memory that tensors take at a time beside `given`, in bytes; "meta" counts."""

    def __init__(self, given):
        super().__init__()
        self.live, self.peak = {}, 0
        self.given = [StorageWeakRef(x.untyped_storage()) for x in given]

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func.name().startswith(("aten::addmm", "aten::mm")) and "out" in kwargs:
            made = kwargs["out"]  # PyTorch has no fake of products with an out_dtype
        else:
            made = func(*args, **kwargs)
        for x in tree_leaves(made):
            if isinstance(x, torch.Tensor):
                storage = x.untyped_storage()
                ref = StorageWeakRef(storage)
                self.live[ref] = 0 if ref in self.given else storage.nbytes()
        self.live = {ref: n for ref, n in self.live.items() if not ref.expired()}
        self.peak = max(self.peak, sum(self.live.values()))
        return made


def memory_of_a_sweep(N, V, H, H_t, monkeypatch, dtype=torch.bfloat16, **limits):
    """The most bytes that the GPU path takes beside its inputs."""
    # of a GPU: tensors without memory have a device of their own
    for size in (2, 4):
        monkeypatch.setitem(gemm.BALANCE, ("meta", size), gemm.BALANCE["cuda", size])
    monkeypatch.setitem(ROW_FUNCTIONS, "triton", lambda *args: None)
    monkeypatch.setattr(linear_op, "may_ask", lambda device: False)
    monkeypatch.setattr(gemm, "multiplies_wide", lambda device, factor: True)
    monkeypatch.setattr(gemm, "adds_wide", lambda device, factor: True)

    def made(*shape, dtype=dtype):
        return torch.empty(shape, dtype=dtype, device="meta")

    heads = [Head(made(N, width), made(V, width), made(0)) for width in (H, H_t)]
    labels, kind = made(N, dtype=torch.int64), made(N, dtype=torch.int32)
    rows = RowInputs(labels, kind, made(2, N, dtype=torch.float32))
    want = [True, True, False]
    sizes = Sizes(V, V, **limits)
    settings = HeadSettings(sizes, Maths(), False, False, want, torch.float32, "", "triton")
    with MostMemory([x for head in heads for x in head]) as found:
        _, _, *grads = linear_op.empty_outputs(heads[0], rows.weights, False, want)
        linear_op.sweep(heads, rows, settings, [*grads[:2], None])
    return found.peak


def memory_by_hand(N, V, H, H_t, size):
    """The logits of a chunk, dz and dW. The logits lie in dW if one product writes it."""
    chunk, held = held_rows(N, [H, H_t], size, V + -V % 64)
    products = -(-N // (held or N))
    logits = 8 * chunk * V
    # several products of narrow factors add up in float32
    dw = (6 if products > 1 and size == 2 else size) * V * H
    in_dw = products == 1 and logits <= dw
    dz = size * V * (min(held, N) or (N if in_dw else 0))
    return dz + dw + (0 if in_dw else logits)


@pytest.mark.parametrize(
    "shape", [WIDEST, (256, *WIDEST[1:]), (9830, 30_522, 768, 512), (40_000, 30_522, 768, 512)]
)
@pytest.mark.parametrize(
    "dtype, precision",
    [(torch.bfloat16, "highest"), (torch.float32, "highest"), (torch.float32, "high")],
)
def test_the_sweep_takes_the_memory_that_was_planned(shape, dtype, precision, monkeypatch):
    """Besides it there are only hidden states of the rows and their gradient.

    Plain PyTorch holds 36 bytes per logit: its eager loss, traced without memory.
    """
    N, V, H, H_t = shape
    expected = memory_by_hand(*shape, dtype.itemsize)
    monkeypatch.setattr(torch, "get_float32_matmul_precision", lambda: precision)
    actual = memory_of_a_sweep(*shape, monkeypatch, dtype)
    assert expected <= actual <= 1.02 * expected + 8 * N * (H + H_t)
    # of fewer rows plain PyTorch holds little beside dW
    assert expected <= 36 * N * V / 8 or N <= 256


def memory_of_plain(N, V, H, H_t):
    def made(*shape):
        return torch.empty(shape, dtype=torch.bfloat16, device="meta")

    student, teacher = ([made(N, width), made(V, width)] for width in (H, H_t))
    for x in student:
        x.requires_grad_()
    labels = torch.empty(N, dtype=torch.int64, device="meta")
    with MostMemory([*student, *teacher]) as found:
        plain(student, teacher, labels, 0.5).backward()
    return found.peak


def test_memory_of_the_widest_head_beside_plain(monkeypatch):
    """dW is all that plain holds for 228 rows. Beside it there is dz, 2 of its 36 bytes."""

    def ratio(rows, **limits):
        ours = memory_of_a_sweep(rows, *WIDEST[1:], monkeypatch, **limits)
        return ours / memory_of_plain(rows, *WIDEST[1:])

    assert ratio(256) <= 1
    assert 0.165 <= ratio(2048) < 0.175
    # the docstring of `linear_kl_mlm_loss`
    assert ratio(2048, vocab_tile=1024) <= 1 / 8
    assert ratio(2048, chunk_bytes=64 << 20) > ratio(2048)
    assert ratio(4096) <= 1 / 8


@pytest.mark.parametrize("how", ["plain", "noise", "routing"])
def test_expand_asks_the_gpu_nothing_in_either_pass(how, monkeypatch):
    monkeypatch.setattr("growkern.ops.expand.on_triton.launch", lambda *args, **constants: None)

    def made(*shape, dtype=torch.bfloat16):
        return torch.empty(shape, dtype=dtype, device="meta")

    with NothingWaits():
        weight, cols = made(8, 16).requires_grad_(), made(20, dtype=torch.int64)
        options = {"rows": made(12, dtype=torch.int64), "cols": cols}
        options["row_scale"] = made(12, dtype=torch.float32)
        if how == "noise":
            options["row_noise"] = made(12, dtype=torch.float32)
        if how == "routing":
            options["routing"] = Routing(1, made(20, 2, dtype=torch.int64))
        out = expand(weight, **options, backend="triton")
        (grad,) = torch.autograd.grad(out, weight, out)
        # the inside of the op, which a tensor without memory does not enter
        expand_on_triton(ExpandCall(made(12, 20), weight.detach(), **options))
    assert grad.shape == (8, 16) and grad.device.type == "meta"


def test_a_step_of_adamw_asks_the_gpu_nothing(monkeypatch):
    monkeypatch.setattr("growkern.ops.adamw.on_triton.launch", lambda *args, **constants: None)

    def made(*shape):
        return torch.empty(shape, device="meta")

    with NothingWaits():
        part = StatePart(*(made(8, 16) for _ in range(4)))
        factors = Factors(*((made(8, 1), made(16)) for _ in range(3)))
        rule = UpdateRule(1e-2, 0.9, 0.99, 1e-3, 0.1, False, 3.0)
        adamw_step_on_triton(part, factors, 0.3, rule)
