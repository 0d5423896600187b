"""The compiled matrix products against PyTorch's, for every shape of tile and type."""

import pytest
import torch

from growkern.ops.backend import native
from growkern.ops.loss.linear.gemm import AVX512, gemm_on_cpu, has_bfloat16, multiplies
from tests.ops.loss.loss_inputs import relative_error

pytestmark = pytest.mark.usefixtures("several_threads")
F32, F64, BF16, F16 = torch.float32, torch.float64, torch.bfloat16, torch.float16

# one of everything; past a tile of 8 x 48 or 4 x 32, a line of 16, 128 or 256 packed steps, a block
# of 192 x 384 or 256 x 192
SIZES = [
    (1, 1, 1),
    (7, 50, 3),
    (8, 48, 256),
    (33, 97, 259),
    (201, 400, 517),
    (5, 3, 600),
    (261, 17, 9),
]


def both_layouts(rows, columns, dtype, rng):
    x = torch.randn(rows, columns, generator=rng).to(dtype)
    return x, x.t().contiguous().t()


@pytest.mark.skipif(not multiplies(F16, F32), reason="the processor has no AVX-512")
@pytest.mark.parametrize("M, N, K", SIZES)
@pytest.mark.parametrize(
    "a_dtype, b_dtype, dtype, bar, wide",
    [
        (BF16, BF16, F32, 2e-6, True),
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
def test_factors_that_are_strided_both_ways_are_copied():
    a, b = torch.randn(6, 10)[::2, ::2], torch.randn(10, 6)[::2, ::2]
    out = torch.empty(3, 3, dtype=F64)
    gemm_on_cpu(a, b, out)
    torch.testing.assert_close(out, a.double() @ b.double(), rtol=1e-14, atol=1e-14)


def test_only_what_is_narrower_than_the_sum_is_taken():
    here = AVX512 in native.available_isas()
    assert multiplies(BF16, F32) == multiplies(F32, F64) == here
    assert not multiplies(F32, F32) and not multiplies(F64, F64) and not multiplies(F32, BF16)
    assert not has_bfloat16() or here
