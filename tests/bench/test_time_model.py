"""The model of the loss's time and memory counts what the sweep does."""

import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from bench.shared import results, time_model
from bench.shared.loss_measure import plain
from growkern.ops.loss.linear import gemm
from growkern.ops.loss.linear import op as linear_op
from growkern.ops.loss.linear.heads import Head, Settings, Sizes
from growkern.ops.loss.rows.op import ROW_FUNCTIONS
from growkern.ops.loss.rows.state import Maths, RowInputs


def test_the_model_of_time_counts_the_passes():
    """By hand: one product sums dW, of one chunk or of several, or two products do."""
    N, V, H, H_t = 256, 1024, 64, 32
    one = time_model.estimate((N, V, H, H_t))
    assert one.chunks == one.products == 1
    assert one.gemms == pytest.approx(
        2 * N * V * (3 * H + H_t) / time_model.DTYPES["bfloat16"].flops
    )
    moved = N * V * (4 + 18)
    assert sum(one.passes.values()) * time_model.BANDWIDTH == pytest.approx(moved)
    assert one.extra_bytes == 8 * N * V + 2 * V * H
    biased = time_model.estimate((N, V, H, H_t), bias=True)
    assert (biased.seconds - one.seconds) * time_model.BANDWIDTH == pytest.approx(2 * N * V)
    some = time_model.estimate((2048, V, H, H_t))
    assert (some.chunks, some.products, some.passes["sums of dW"]) == (8, 1, 0)
    # more rows than 1 GiB of dz
    two = time_model.estimate((1 << 20, V, H, H_t))
    assert two.products == 2
    assert two.passes["sums of dW"] * time_model.BANDWIDTH == pytest.approx(16 * V * H)


@pytest.mark.parametrize("row_kernel", time_model.ROW_KERNELS)
@pytest.mark.parametrize("size, name", [(2, "bf16"), (4, "fp32")])
def test_the_model_of_time_counts_the_bytes_of_the_machine_code(row_kernel, size, name):
    prefix = "" if row_kernel == "Triton" else f"{row_kernel} "
    kernel = f"{prefix}kl_mlm rows linear, {name} gradient"
    (counted,) = {
        row["bytes per element"]
        for row in results.read(results.RESULTS / "aot.json")["rows"]
        if (row["kernel"], row["arch"]) == (kernel, "sm_90")
    }
    assert time_model.ROW_KERNELS[row_kernel][size] + size == counted


@pytest.mark.parametrize("dtype, most", [("float32", 0.01), ("tf32", 0.05)])
def test_the_model_of_time_counts_the_products_of_float32_heads(dtype, most):
    """1 GiB of dz is held. The first product writes dW, and each other reads and writes it."""
    N, V, H, H_t = time_model.SHAPES[0]
    one = time_model.estimate((N, V, H, H_t), dtype=dtype)
    assert (one.chunks, one.products) == (32, 4)
    moved = one.passes["sums of dW"] * time_model.BANDWIDTH
    assert moved == pytest.approx(8 * V * H * 3)
    assert one.passes["row kernel, Triton"] * time_model.BANDWIDTH == pytest.approx(28 * N * V)
    assert one.passes["sums of dW"] <= most * one.gemms


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
    settings = Settings(sizes, Maths(), False, False, want, torch.float32, "", "triton")
    with MostMemory([x for head in heads for x in head]) as found:
        _, _, *grads = linear_op.cleared_outputs(heads[0], rows.weights, False, want)
        linear_op.sweep(heads, rows, settings, [*grads[:2], None])
    return found.peak


@pytest.mark.parametrize("shape", [*time_model.SHAPES, (40_000, 30_522, 768, 512)])
@pytest.mark.parametrize(
    "name, precision", [("bfloat16", "highest"), ("float32", "highest"), ("tf32", "high")]
)
def test_the_model_counts_the_memory_that_the_sweep_takes(shape, name, precision, monkeypatch):
    """Besides it there are only hidden states of the rows and their gradient."""
    N, _, H, H_t = shape
    expected = time_model.estimate(shape, dtype=name).extra_bytes
    monkeypatch.setattr(torch, "get_float32_matmul_precision", lambda: precision)
    dtype = torch.bfloat16 if name == "bfloat16" else torch.float32
    actual = memory_of_a_sweep(*shape, monkeypatch, dtype)
    assert expected <= actual <= 1.02 * expected + 8 * N * (H + H_t)


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
    sizes = (128_256, 4096, 2048)

    def ratio(rows, **limits):
        return memory_of_a_sweep(rows, *sizes, monkeypatch, **limits) / memory_of_plain(
            rows, *sizes
        )

    assert ratio(256) <= 1
    assert 0.165 <= ratio(2048) < 0.175
    # the docstring of `linear_kl_mlm_loss`
    assert ratio(2048, vocab_tile=1024) <= 1 / 8
    assert ratio(2048, chunk_bytes=64 << 20) > ratio(2048)
    assert ratio(4096) <= 1 / 8
