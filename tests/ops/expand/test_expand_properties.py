"""Properties of `expand` for random shapes, maps, dtypes and strides."""

import torch
from hypothesis import given, strategies as st

from growkern.ops.expand.call import DTYPES
from growkern.ops.expand.expand_op import expand, folded
from tests.ops.expand.test_expand import LIVE
from tests.shared.walks import walk

BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
MOST_COPIES = 4
LAYOUTS = ("contiguous", "transposed", "strided", "offset", "expanded")


def with_layout(x, layout):
    """The values of a vector or matrix, elsewhere; "expanded" repeats its first row."""
    if layout == "transposed" and x.ndim == 2:
        return x.T.contiguous().T
    if layout == "strided":
        wide = x.new_zeros(*x.shape[:-1], 3 * x.shape[-1])
        wide[..., 1::3] = x
        return wide[..., 1::3]
    if layout == "offset":
        long = x.new_zeros(x.shape[0] + 2, *[n + 5 for n in x.shape[1:]])
        inner = long[1:-1] if x.ndim == 1 else long[1:-1, 5:]
        return inner.copy_(x)
    if layout == "expanded":
        return x[:1].expand(x.shape)
    return x


@st.composite
def axes(draw, n):
    """A map in which all of n entries occur, and shares of each that are powers of 2 and sum to 1.

    A product with them rounds nothing, so that what is folded back is the source bit for bit.
    """
    counts = draw(st.lists(st.integers(1, MOST_COPIES), min_size=n, max_size=n))
    index = [i for i, count in enumerate(counts) for _ in range(count)]
    share = [2.0 ** -min(k + 1, count - 1) for count in counts for k in range(count)]
    order = draw(st.permutations(range(len(index))))
    scale_dtype = draw(st.sampled_from([torch.float32, torch.float64]))
    return torch.tensor(index)[order], torch.tensor(share, dtype=scale_dtype)[order]


@st.composite
def weights(draw, ndim=None):
    """A vector or matrix of any dtype and layout, numbers far from subnormal ones."""
    ndim = ndim or draw(st.integers(1, 2))
    # now and then past the widest vector and block of a kernel
    sizes = st.integers(1, 9) | st.sampled_from([33, 65])
    shape = draw(st.lists(sizes, min_size=ndim, max_size=ndim))
    rng = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    sign = 2.0 * torch.randint(2, shape, generator=rng) - 1
    values = sign * (torch.rand(shape, generator=rng) + 0.25)
    return with_layout(values.to(draw(st.sampled_from(DTYPES))), draw(st.sampled_from(LAYOUTS)))


def fold(grown, maps, shape):
    """The adjoint: sums over the copies of each entry, exact in float64."""
    matrix = grown.double().reshape(grown.shape[0], -1)
    for dim, (index, n) in enumerate(zip(maps, shape, strict=True)):
        matrix = folded(matrix, dim, index, n)
    return matrix.reshape(shape)


@walk(40)
@given(data=st.data(), name=st.sampled_from(LIVE))
def test_folded_back_it_is_the_source(data, name):
    weight = data.draw(weights())
    drawn = [data.draw(axes(n)) for n in weight.shape]
    named = dict(zip(("rows", "cols"), (index for index, _ in drawn), strict=False))
    named |= dict(zip(("row_scale", "col_scale"), (scale for _, scale in drawn), strict=False))
    shape = tuple(len(index) for index, _ in drawn)
    out = with_layout(
        torch.zeros(shape, dtype=weight.dtype), data.draw(st.sampled_from(LAYOUTS[:4]))
    )
    grown = data.draw(st.sampled_from([None, out]))
    grown = expand(weight, **named, out=grown, backend=name)
    assert grown.shape == shape and grown.dtype == weight.dtype
    assert torch.equal(fold(grown, [index for index, _ in drawn], weight.shape), weight.double())


@walk(50)
@given(data=st.data(), dtype=st.sampled_from(DTYPES))
def test_copies_are_copies_of_bits(data, dtype):
    """Without a scale nothing is converted: not a NaN loses its payload, of any dtype."""
    if "cpu" not in LIVE:
        return
    R, C = data.draw(st.integers(1, 5)), data.draw(st.integers(1, 130))
    rng = torch.Generator().manual_seed(data.draw(st.integers(0, 2**31)))
    raw = torch.randint(0, 256, (R, C * dtype.itemsize), generator=rng, dtype=torch.uint8)
    bits = BITS[dtype.itemsize]
    # structured and arbitrary: whole runs of columns, and one by one
    tiled = torch.arange(data.draw(st.integers(1, 300))) % C
    cols = data.draw(st.sampled_from([tiled, tiled[torch.randperm(len(tiled), generator=rng)]]))
    weight = with_layout(raw.view(dtype), data.draw(st.sampled_from(LAYOUTS)))
    grown = expand(weight, rows=torch.arange(2 * R) % R, cols=cols, backend="cpu")
    expected = weight.contiguous().view(bits)[torch.arange(2 * R) % R][:, cols]
    assert torch.equal(grown.view(bits), expected)
