"""The calls of a padded hidden state on the CPU: random signs, and routing with a scale."""

from itertools import product

import pytest
import torch

from growkern.ops.backend import native
from growkern.ops.expand.call import DTYPES, ExpandCall, Routing
from growkern.ops.expand.expand_op import expand_reference
from growkern.ops.expand.on_cpu import expand_on_cpu
from tests.ops.expand.test_expand import copies_of

BITS = {2: torch.int16, 4: torch.int32, 8: torch.int64}
ISAS = native.available_isas()


def assert_same_bits(case, *outs):
    """`case` written to each of `outs` has the bits of the reference; NaN may have any."""
    expected = expand_reference(ExpandCall(torch.empty(0, dtype=outs[0].dtype), **case))
    bits = BITS[expected.dtype.itemsize]
    # the reference takes far longer than what it is compared with
    for out, isa in product(outs, ISAS):
        expand_on_cpu(ExpandCall(out.zero_(), **case), isa=isa)
        differ = out.contiguous().view(bits) != expected.view(bits)
        assert not differ.any() or (out.isnan() & expected.isnan())[differ].all(), isa


def maps(kind, R, C, M, N):
    if kind == "tiled":
        return torch.arange(M) % R, torch.arange(N) % C
    rng = torch.Generator().manual_seed(0)
    return torch.randint(R, (M,), generator=rng), torch.randint(C, (N,), generator=rng)


def large_case(kind, what, dtype):
    """A call with more than 8 MiB of results, past the caches; their columns' count is odd."""
    rng = torch.Generator().manual_seed(1)
    R, C, M = 67, 701, 400
    N = (9 << 20) // (M * dtype.itemsize) | 1
    acc = torch.float64 if dtype == torch.float64 else torch.float32
    rows, cols = maps(kind, R, C, M, N)
    weight = torch.randn(R, C, generator=rng, dtype=torch.float64).to(dtype)
    case = {"weight": weight, "rows": rows, "cols": cols, "seed": 5}
    if "routing" in what:
        axis = int("columns" in what)
        case["routing"] = Routing(axis, copies_of((rows, cols)[axis]))
        # copies of a row have one scale, or every row has its own
        scale = (torch.rand(M, generator=rng) + 0.5).to(acc)
        case["row_scale"] = scale[rows] if "alike" in what else scale
        return case
    case["col_scale"] = torch.full((N,), 2**-8, dtype=acc)
    size = torch.full((N,), 256.0, dtype=acc)
    if what == "signs":
        return case | {"col_noise": size}
    if what == "signs of rows":
        return case | {"row_noise": size[:M]}
    # sizes of both signs and of 0
    uneven = torch.rand(N, generator=rng).to(acc) - 0.5
    return case | {"col_noise": torch.where(uneven.abs() < 0.1, 0, uneven)}


WHATS = ["signs", "signs of rows", "noise", "routing of columns, alike", "routing of columns"]
WHATS += ["routing of rows, alike"]


@pytest.mark.usefixtures("several_threads")
@pytest.mark.parametrize("what", WHATS)
@pytest.mark.parametrize("kind", ["tiled", "arbitrary"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_large_outputs_have_the_bits_of_the_reference(dtype, kind, what):
    case = large_case(kind, what, dtype)
    M, N = len(case["rows"]), len(case["cols"])
    # lines begin at the same place in all rows, or not; the columns beside must stay as they are
    wholes = [torch.zeros(M, width, dtype=dtype) for width in (N + 1, -(-(N + 1) // 32) * 32)]
    assert_same_bits(case, *(whole[:, 1 : N + 1] for whole in wholes))
    for whole in wholes:
        assert not whole[:, 0].any() and not whole[:, N + 1 :].any()


FACTORS = [(2**-8, 256.0), (2**-8, -256.0), (-(2**-8), 256.0), (0.011, 256.0), (1.0, 0.5)]
# results of 0, no noise, products beyond float32, and a scale for which 1 and 1.5 round alike
FACTORS += [(1.0, 1.0), (1.0, 0.0), (2.0**100, 256.0), (2.0**-120, 256.0), (1.003, 1.0)]


@pytest.mark.parametrize("scale, size", FACTORS)
def test_signs_of_every_bfloat16(scale, size):
    """Integers stand for products and roundings where numbers stay normal, and only there."""
    W = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
    # the numbers of one exponent and sign lie together; an odd count of columns
    W = torch.cat([W.reshape(-1, 128), W[: 1 << 9, None].expand(-1, 1)], 1)
    rows, (M, N) = torch.arange(4 * len(W)) % len(W), (4 * len(W), W.shape[1])
    case = {"weight": W, "rows": rows, "seed": 5, "col_scale": torch.full((N,), scale)}
    for noise in ({"col_noise": torch.full((N,), size)}, {"row_noise": torch.full((M,), size)}):
        assert_same_bits(case | noise, torch.empty(M, N, dtype=W.dtype))


@pytest.mark.parametrize("scale", [2**0.5, -0.3, 2.0**-130, float("inf"), float("nan")])
def test_scales_of_rows_round_every_bfloat16(scale):
    W = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
    W = torch.cat([W.reshape(-1, 128), W[: 1 << 9, None].expand(-1, 1)], 1)
    cols = torch.arange(2 * W.shape[1]) % W.shape[1]
    case = {"weight": W, "cols": cols, "row_scale": torch.full((len(W),), scale)}
    for routing in ({}, {"routing": Routing(1, copies_of(cols)), "seed": 5}):
        assert_same_bits(case | routing, torch.empty(len(W), len(cols), dtype=W.dtype))


def test_columns_of_another_scale_or_sign_are_no_part_of_a_run():
    """One column in the middle of a run differs from all others."""
    rng = torch.Generator().manual_seed(2)
    W = torch.randn(1100, 2048, generator=rng).bfloat16()
    for name, other in (("col_scale", 2**-7), ("col_noise", 0.5), ("col_noise", -256.0)):
        case = {"weight": W, "rows": torch.arange(2200) % 1100, "seed": 5}
        case |= {"col_scale": torch.full((2048,), 2**-8), "col_noise": torch.full((2048,), 256.0)}
        case[name][1000] = other
        assert_same_bits(case, torch.empty(2200, 2048, dtype=W.dtype))
