"""The compiled matrix products against PyTorch's, for every shape of tile and type.

Also the memory between them: dz of many chunks makes one product, and logits lie in dW's memory.
"""

import pytest
import torch

from growkern.ops.backend import native
from growkern.ops.loss.linear import heads as heads_module, linear_op
from growkern.ops.loss.linear.gemm import AVX512, _tiles, gemm_on_cpu, has_bfloat16, multiplies
from growkern.ops.loss.linear_kl_mlm_loss import linear_kl_mlm_loss
from tests.ops.loss.loss_inputs import relative_error

pytestmark = pytest.mark.usefixtures("several_threads")
F32, F64, BF16, F16 = torch.float32, torch.float64, torch.bfloat16, torch.float16

# one of everything; past a tile of 8 x 48 or 2 x 64, a line of 16, 128 or 256 packed steps, a block
# of 192 x 384 or 256 x 192. Then columns that are not packed: part of a tile, of a line and of a
# block of 256 x 96; more rows than are packed at a time; columns too long for that
SIZES = [
    (1, 1, 1), (7, 50, 3), (8, 48, 256), (33, 97, 259), (201, 400, 517),
    (5, 3, 600), (261, 17, 9), (70, 103, 130), (300, 7, 34), (19, 200, 600), (80, 30, 9000),
]  # fmt: skip


def both_layouts(rows, columns, dtype, rng):
    x = torch.randn(rows, columns, generator=rng).to(dtype)
    return x, x.t().contiguous().t()


@pytest.mark.skipif(not multiplies(F16, F32), reason="the processor has no AVX-512")
@pytest.mark.parametrize("M, N, K", SIZES)
@pytest.mark.parametrize(
    "a_dtype, b_dtype, dtype, bar, wide",
    [
        (BF16, BF16, F32, 2e-6, True),
        (F32, F32, F32, 4e-6, True),
        (F16, F16, F32, 2e-6, True),
        (F32, F16, F32, 2e-6, True),
        (F32, F32, F64, 1e-14, True),
        (F32, F32, F64, 6e-8, False),
        (BF16, BF16, F64, 1e-14, False),
    ],
    ids=str,
)
def test_is_the_product_in_float64(a_dtype, b_dtype, dtype, bar, wide, M, N, K):
    rng = torch.Generator().manual_seed(0)
    # what is not part of the output must not be written
    place = torch.full((M + 1, N + 5), 7.0, dtype=dtype)
    for a in both_layouts(M, K, a_dtype, rng):
        for b in both_layouts(K, N, b_dtype, rng):
            truth = a.double() @ b.double()
            for add in (False, True):
                out = place[:M, 2 : N + 2].fill_(torch.nan if not add else 7.0)
                gemm_on_cpu(a, b, out, add=add, wide_products=wide)
                assert relative_error(out, truth + 7.0 * add) <= bar
                assert (place[M] == 7).all() and (place[:, [0, 1, -3, -2, -1]] == 7).all()


@pytest.mark.skipif(not multiplies(F16, F32), reason="the processor has no AVX-512")
@pytest.mark.parametrize("least", [-1.0, 0.0])
def test_float32_products_lose_no_more_in_a_long_sum(least):
    """Errors are those of sums of 4 products, at any depth. With `least` 0 all have one sign."""
    rng = torch.Generator().manual_seed(0)
    a = torch.empty(16, 8193).uniform_(least, 1, generator=rng)
    b = torch.empty(8193, 40).uniform_(least, 1, generator=rng)
    out = torch.empty(16, 40, dtype=F64)
    gemm_on_cpu(a, b, out, wide_products=False)
    assert relative_error(out, a.double() @ b.double()) <= 5e-8


@pytest.mark.skipif(not multiplies(F16, F32), reason="the processor has no AVX-512")
def test_float32_sums_beside_a_head_that_is_not_packed_are_added_up_in_parts():
    """A single chain of 1536 float32 additions has an error of 7e-7."""
    rng = torch.Generator().manual_seed(0)
    a, b = torch.randn(64, 1536, generator=rng), torch.randn(96, 1536, generator=rng)
    out = torch.empty(64, 96)
    gemm_on_cpu(a, b.t(), out)
    assert relative_error(out, a.double() @ b.t().double()) <= 2.5e-7


@pytest.mark.skipif(not multiplies(F16, F32), reason="the processor has no AVX-512")
def test_factors_that_are_strided_both_ways_are_copied():
    a, b = torch.randn(6, 10)[::2, ::2], torch.randn(10, 6)[::2, ::2]
    out = torch.empty(3, 3, dtype=F64)
    gemm_on_cpu(a, b, out)
    torch.testing.assert_close(out, a.double() @ b.double(), rtol=1e-14, atol=1e-14)


def test_only_factors_up_to_float32_and_sums_from_float32_on_are_taken():
    here = AVX512 in native.available_isas()
    assert multiplies(BF16, F32) == multiplies(F32, F64) == multiplies(F32, F32) == here
    assert not multiplies(F64, F64) and not multiplies(F32, BF16)
    assert not has_bfloat16() or here


@pytest.fixture
def places(monkeypatch):
    """Whether the logits of each call lay in dW; chunks have multiples of 4 rows."""
    noted, make = [], linear_op.logit_memory

    def memory_of(*arguments):
        memory, free = make(*arguments), arguments[-1]
        noted.append(free is not None and memory[0].data_ptr() == free.data_ptr())
        return memory

    monkeypatch.setattr(linear_op, "logit_memory", memory_of)
    monkeypatch.setattr(heads_module, "ROWS_OF_CPU_CHUNK", 4)
    monkeypatch.setattr(heads_module, "LEAST_HELD", 40)
    return noted


def gradients(dtype, rows, width=32, V=60):
    """Gradients of hidden states and head in `dtype`, and in float64 by the reference."""
    rng = torch.Generator().manual_seed(3)
    student, teacher = (
        [torch.randn(n, width, generator=rng).to(dtype) for n in (rows, V)] for _ in range(2)
    )
    labels = torch.randint(V, (rows,), generator=rng)
    labels[::5] = -100
    given = [x.requires_grad_() for x in student]
    actual = torch.autograd.grad(linear_kl_mlm_loss(*given, *teacher, labels), given)
    wide = [x.detach().double().requires_grad_() for x in student]
    beside = [x.double() for x in teacher]
    loss = linear_kl_mlm_loss(*wide, *beside, labels, backend="reference")
    return actual, torch.autograd.grad(loss, wide)


# ------------------------------------------------------- logits in the memory of dW


@pytest.mark.parametrize(
    "dtype, most", [(torch.bfloat16, 5e-3), (torch.float32, 1e-5), (torch.float64, 1e-11)]
)
def test_logits_in_the_memory_of_dw_leave_the_gradients_right(dtype, most, places):
    if dtype == torch.bfloat16 and not has_bfloat16():
        pytest.skip("this processor does not multiply bfloat16")
    actual, truth = gradients(dtype, 45)
    assert places[0]
    for x, exact in zip(actual, truth, strict=True):
        assert relative_error(x, exact) <= most


@pytest.mark.parametrize("held", [1 << 30, 2 * 60 * 30], ids=["one product", "in parts"])
def test_many_rows_in_bfloat16(held, places, monkeypatch):
    """Parts of 24 or fewer rows add to float32 sums of dW, which leave no room for logits."""
    if not has_bfloat16():
        pytest.skip("this processor does not multiply bfloat16")
    monkeypatch.setattr(heads_module, "LEAST_HELD", 1)
    monkeypatch.setattr(heads_module, "HELD_BYTES", held)
    actual, truth = gradients(torch.bfloat16, 100, width=64)
    assert places[0] == (held == 1 << 30)
    for x, exact in zip(actual, truth, strict=True):
        assert relative_error(x, exact) <= 5e-3


@pytest.mark.parametrize("rows, width", [(45, 8), (100, 32)], ids=["narrow head", "many rows"])
def test_logits_that_do_not_fit_are_beside_dw(rows, width, places):
    actual, truth = gradients(torch.float32, rows, width)
    assert not places[0]
    for x, exact in zip(actual, truth, strict=True):
        assert relative_error(x, exact) <= 1e-5


@pytest.mark.parametrize("N, share", [(256, 1), (2048, 8), (16_384, 8)])
def test_held_rows_stay_within_the_bound(N, share, V=30_522, H=768):
    """bfloat16 beside plain PyTorch, which holds 36 bytes per logit: see `held_rows`."""
    chunk, held = heads_module.held_rows_on_cpu(N, (H * 2 - 1) // (2 * 4), 2, V)
    logits = 2 * 4 * chunk * V
    apart = logits if held < N or logits > 2 * V * H else 0
    wide_dw = 0 if held >= N else 4 * V * H
    assert 2 * V * H + 2 * held * V + apart + wide_dw <= 36 * N * V / share


def test_a_head_without_columns_has_no_tiles():
    """A rank may have no part of a vocabulary; some processors convert heads in tiles."""
    assert list(_tiles(torch.empty(0, 8), torch.float64)) == []
