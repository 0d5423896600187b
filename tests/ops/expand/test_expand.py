"""`expand` against a reference written from its formulas, on every backend and dtype."""

import collections
import itertools
from fractions import Fraction

import pytest
import torch
from torch import library

from growkern.errors import GrowthError
from growkern.ops.backend import native
from growkern.ops.backend.choose import describe_backends
from growkern.ops.expand import expand_op as op_module
from growkern.ops.expand.call import DTYPES, ExpandCall, Routing
from growkern.ops.expand.expand_op import expand, expand_op, expand_out_op, expand_reference
from growkern.ops.expand.hashes import line_keys, signed
from growkern.ops.expand.limits import MOST_ENTRIES
from growkern.ops.expand.on_cpu import expand_on_cpu
from tests.shared.numerics import assert_no_worse_than_eager, assert_within_one_rounding

LIVE = [b.name for b in describe_backends() if b.live]
COMPILED = [name for name in LIVE if name != "reference"]


def backend_or_skip(name, device):
    if name == "cpu" and device != "cpu":
        pytest.skip("the compiled library works on the CPU")
    return name


def uneven(n, m, seed, device="cpu"):
    """m source indices of n: every one at least once where m allows it, some far more often."""
    rng = torch.Generator().manual_seed(seed)
    first = torch.randperm(n, generator=rng)[:m]
    rest = (torch.rand(max(0, m - n), generator=rng) ** 3 * n).long()
    return torch.cat([first, rest])[torch.randperm(m, generator=rng)].to(device)


def copies_of(index):
    """Number and count of every copy, (n, 2): those of index k are 0, 1, 2, ... in their order."""
    seen = collections.Counter()
    number = []
    for k in index.tolist():
        number.append(seen[k])
        seen[k] += 1
    return torch.tensor([[n, seen[k]] for n, k in zip(number, index.tolist(), strict=True)])


def make_case(R, C, M, N, dtype, device, *, upper="none", noise="none", scales=True, seed=0):
    """Arguments of `expand`. `upper` names the axes whose indices pass the end.

    `noise` is "row" or "col", or routing with an amplitude, such as "row 1.5".
    """
    rng = torch.Generator().manual_seed(seed)

    def rand(n):
        return (torch.rand(n, generator=rng) + 0.25).to(device)

    case = {
        "weight": torch.randn(R, C, generator=rng).to(device, dtype),
        "rows": uneven(2 * R if upper in ("rows", "both") else R, M, seed + 1, device),
        "cols": uneven(2 * C if upper in ("cols", "both") else C, N, seed + 2, device),
        "seed": 0x1234567_89ABCDEF,
    }
    if upper != "none":
        case["upper"] = torch.randn(R, C, generator=rng).to(device, dtype)
    if scales:
        case |= {"row_scale": rand(M), "col_scale": rand(N)}
    axis, _, amplitude = noise.partition(" ")
    if amplitude:
        copies = copies_of(case["cols" if axis == "col" else "rows"]).to(device)
        case["routing"] = Routing(int(axis == "col"), copies, float(amplitude))
    elif noise != "none":
        case[f"{noise}_noise"] = rand(M if noise == "row" else N) - 0.75
    return case


def mix64(x):
    """The integer mix of the keys in Python's own integers, reduced by hand."""
    x ^= x >> 16
    x = x * 0x7FEB352D & 0xFFFFFFFF
    x ^= x >> 15
    x = x * 0x846CA68B & 0xFFFFFFFF
    return x ^ (x >> 16)


def key_and_mult(seed, line):
    key = mix64((mix64((line & 0xFFFFFFFF) ^ (seed >> 32)) + seed) & 0xFFFFFFFF)
    return key, mix64((key + 0x9E3779B9) & 0xFFFFFFFF) | 1


def share(seed, line, src, copy, amplitude):
    """The share of a copy by exact arithmetic: which of C equal parts of 0 .. 2**32 - 1 is hit."""
    number, count = copy
    key, mult = key_and_mult(seed, line)
    p = int(Fraction((key + src * mult) % 2**32, 2**32) * count)
    q = (p + 1 + int(Fraction(mult, 2**32) * (count - 1))) % count
    if count == 1:
        return 1.0
    return {p: (1 + amplitude) / 2, q: (1 - amplitude) / 2}.get(number, 0.0)


def sign(seed, line, src):
    key, mult = key_and_mult(seed, line)
    return 1 if (key + src * mult) % 2**32 < 2**31 else -1


def by_elements(case):
    """The definition, one element at a time in Python floats (float64)."""
    W = case["weight"].double().cpu()
    R, C = W.shape
    U = case["upper"].double().cpu() if "upper" in case else W
    rows = case["rows"].tolist() if case.get("rows") is not None else range(R)
    cols = case["cols"].tolist() if case.get("cols") is not None else range(C)
    out = torch.empty(len(rows), len(cols), dtype=torch.float64)
    for i, r in enumerate(rows):
        for j, c in enumerate(cols):
            x = (W if r < R and c < C else U)[r % R, c % C].item()
            for name, at in (("row_scale", i), ("col_scale", j)):
                x *= case[name][at].item() if name in case else 1.0
            if "col_noise" in case:
                line = case.get("offsets", (0, 0))[0] + i
                x *= 1 + case["col_noise"][j].item() * sign(case["seed"], line, c)
            if "row_noise" in case:
                line = case.get("offsets", (0, 0))[1] + j
                x *= 1 + case["row_noise"][i].item() * sign(case["seed"], line, r)
            if "routing" in case:
                dim, copies, amplitude = case["routing"]
                line = case.get("offsets", (0, 0))[1 - dim] + (i, j)[1 - dim]
                x *= share(case["seed"], line, (r, c)[dim], copies[(i, j)[dim]].tolist(), amplitude)
            out[i, j] = x
    return out


def call_of(case, dtype, out=None):
    """The record of a case; without `out`, one for the reference, which uses only its dtype."""
    return ExpandCall(torch.empty(0, dtype=dtype) if out is None else out, **case)


CASES = [("none", "none"), ("rows", "none"), ("cols", "none"), ("both", "none")]
CASES += [("none", "row"), ("none", "col"), ("both", "row"), ("both", "col")]
CASES += [("none", "row 1"), ("both", "col 1"), ("none", "col 1.5"), ("both", "row 0.5")]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("upper, noise", CASES)
def test_reference_is_the_definition(upper, noise, dtype, device):
    """A narrower weight is scaled with the digits of the result, not with its own."""
    case = make_case(5, 7, 13, 17, dtype, device, upper=upper, noise=noise)
    case |= {"offsets": (3, 2**31 + 5)}
    actual = expand(**case, out_dtype=torch.float64, backend="reference")
    torch.testing.assert_close(actual.cpu(), by_elements(case), rtol=1e-14, atol=0)


@pytest.mark.parametrize("upper, noise", CASES)
@pytest.mark.parametrize("left_out", [(), ("rows",)])
def test_the_reference_works_in_blocks_of_rows(upper, noise, left_out, monkeypatch):
    case = make_case(13, 7, 13, 17, torch.float64, "cpu", upper=upper, noise=noise)
    case |= {"offsets": (3, 2**31 + 5), **dict.fromkeys(left_out)}
    whole = expand_reference(call_of(case, torch.float64))
    monkeypatch.setattr(op_module, "REFERENCE_ELEMENTS", 5 * 17)
    assert torch.equal(expand(**case, backend="reference"), whole)


def signs(seed, device):
    """The signs of 512 source indices on each of 512 lines, float64."""
    key, mult = line_keys(512, 0, seed, torch.device(device))
    one, src = torch.ones(512, device=device), torch.arange(512, device=device).int()
    return signed(one, key[:, None], mult[:, None], src).double()


def off_diagonal(x):
    return x[~torch.eye(len(x), dtype=torch.bool, device=x.device)]


def test_signs_are_balanced_and_independent(device):
    found = signs(7, device)
    assert torch.equal(found.abs(), torch.ones_like(found))
    # pairs of signs are independent: the mean of 2**18 has standard deviation 1 / 512
    assert abs(found.mean()) < 5 / 512
    # two source indices, over the lines
    assert off_diagonal(found.T @ found / 512).abs().max() < 6 / 512**0.5
    # two lines, over the source indices: for independent pairs the mean square is 1 / 512
    between = off_diagonal(found @ found.T / 512)
    assert 0.8 / 512 < between.square().mean() < 1.25 / 512
    # hardly any two lines have the same signs, or opposite ones, and nearly all have both
    assert (between.abs() == 1).double().mean() < 1e-3
    assert (found.mean(1).abs() < 1).double().mean() > 0.98
    assert abs((found * signs(8, device)).mean()) < 5 / 512


@pytest.mark.parametrize("axis", ["row", "col"])
@pytest.mark.parametrize("dtype, out", [(torch.float32, DTYPES[1]), (torch.float64, DTYPES[0])])
@pytest.mark.parametrize("name", LIVE)
def test_entries_without_noise_are_rounded_once(name, dtype, out, axis, device):
    """The middle one of three copies, and single ones, beside others that have noise."""
    name = backend_or_skip(name, device)
    case = make_case(21, 22, 33, 34, dtype, device)
    size = torch.tensor([0.5, 0.0, -0.5, -0.0], device=device).repeat(9)
    size = size[: 33 if axis == "row" else 34]
    noisy = expand(**case, **{f"{axis}_noise": size}, out_dtype=out, backend=name)
    plain = expand(**case, out_dtype=out, backend=name)
    fixed = (noisy == plain) if axis == "col" else (noisy == plain).T
    assert fixed[:, size == 0].all() and not fixed[:, size != 0].any()


@pytest.mark.parametrize("name", LIVE)
def test_weight_and_upper_of_different_strides(name, device):
    name = backend_or_skip(name, device)
    case = make_case(19, 33, 41, 70, torch.float32, device, upper="both", noise="col")
    expected = expand(**case, backend="reference")
    for turned in (("weight",), ("upper",), ("weight", "upper")):
        strided = case | {which: case[which].T.contiguous().T for which in turned}
        assert torch.equal(expand(**strided, backend=name), expected)


# sizes: below, at and past the blocks of the kernels (16 rows, 64 bytes, 256 columns)
SIZES = [(1, 1, 1, 1), (1, 9, 3, 40), (19, 33, 41, 70), (20, 300, 17, 530), (16, 64, 32, 128)]


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", COMPILED)
def test_backend_is_the_reference(name, dtype, size, device):
    name = backend_or_skip(name, device)
    for upper, noise in CASES:
        case = make_case(*size, dtype, device, upper=upper, noise=noise)
        expected = expand(**case, backend="reference")
        actual = expand(**case, backend=name)
        assert_within_one_rounding(f"{upper} {noise}", actual, expected)


def in_runs(case):
    """The same case with columns that run: a shifted tile, so that runs end inside blocks."""
    N, C = case["cols"].shape[0], case["weight"].shape[1]
    return case | {"cols": (torch.arange(N) + 37) % (2 * C if "upper" in case else C)}


# every path of csrc: runs and gathered, few and many source rows, in cache and (8 MiB on) past it
PATHS = [(3, 200, 9, 470, DTYPES[:3]), (37, 210, 45, 470, DTYPES[:3])]
PATHS += [(40, 300, 1030, 2051, DTYPES[:1])]


@pytest.mark.usefixtures("several_threads")
@pytest.mark.parametrize("R, C, M, N, dtypes", PATHS)
@pytest.mark.parametrize("isa", native.available_isas())
def test_instruction_sets_are_the_reference_bit_for_bit(isa, R, C, M, N, dtypes):
    for dtype, (upper, noise) in itertools.product(dtypes, (CASES[0], *CASES[6:])):
        case = make_case(R, C, M, N, dtype, "cpu", upper=upper, noise=noise)
        runs = in_runs(case)
        for variant in (case, runs, runs | {"row_scale": None, "col_scale": None}):
            expected = expand_reference(call_of(variant, dtype))
            # one element in: no line of the output starts at a multiple of 64 bytes
            out = torch.zeros(M, N + 1, dtype=dtype)[:, 1:]
            expand_on_cpu(ExpandCall(out, **variant), isa=isa)
            assert torch.equal(out, expected), (dtype, upper, noise)


@pytest.mark.parametrize("isa", native.available_isas())
def test_exponents_of_every_bfloat16_add_up(isa):
    """Scales of powers of 2 skip the product where numbers stay normal, and only there."""
    every = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
    W = every[~every.isnan()]
    # the numbers of one exponent and sign lie together, and zeros of both signs beside them
    W = torch.cat([W, W.new_zeros(-len(W) % 128)]).reshape(-1, 128)
    W = torch.cat([W, torch.tensor([0.0, -0.0]).to(W.dtype).expand(len(W), 2)], 1)
    M, N = W.shape
    thirds = torch.arange(max(W.shape)) % 3
    scales = [(1.0, 2.0 ** (thirds[:N] - 1)), (thirds[:M, None] + 1.0, 0.5)]
    for power in (-149, -126, -125, -7, -1, 0, 1, 30, 127):
        scales += [(1.0, 2.0**power), (2.0**power, 1.0)]
    for row, col in scales:
        row, col = (torch.as_tensor(x, dtype=torch.float32) for x in (row, col))
        factors = {
            "row_scale": None if (row == 1).all() else row.expand(M, 1)[:, 0].contiguous(),
            "col_scale": None if (col == 1).all() else col.expand(N).contiguous(),
        }
        out = torch.empty_like(W)
        expand_on_cpu(ExpandCall(out, W, **factors), isa=isa)
        truth = (W.float() * row * col).to(torch.bfloat16)
        assert torch.equal(out.view(torch.int16), truth.view(torch.int16)), (row, col)


@pytest.mark.parametrize("out_dtype", DTYPES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", LIVE)
def test_dtypes_in_and_out(name, dtype, out_dtype, device):
    name = backend_or_skip(name, device)
    case = make_case(9, 21, 20, 50, dtype, device)
    actual = expand(**case, out_dtype=out_dtype, backend=None if name == "cpu" else name)
    expected = expand(**case, out_dtype=out_dtype, backend="reference")
    assert actual.dtype == out_dtype
    assert_within_one_rounding("out", actual, expected)


def layouts(x):
    """The same values in four memory layouts."""
    wide = x.new_zeros(x.shape[0], 2 * x.shape[1])
    wide[:, ::2] = x
    tall = x.new_zeros(2 * x.shape[0], x.shape[1] + 3)
    tall[::2, 3:] = x
    transposed = x.T.contiguous().T
    return {"strided": wide[:, ::2], "offset": tall[::2, 3:], "transposed": transposed}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("layout", ["strided", "offset", "transposed"])
@pytest.mark.parametrize("name", LIVE)
def test_any_strides_in_and_out(name, layout, dtype, device):
    name = backend_or_skip(name, device)
    for upper, noise in (("both", "col"), ("none", "row"), ("none", "none"), ("both", "row 1")):
        case = make_case(19, 33, 41, 70, dtype, device, upper=upper, noise=noise)
        expected = expand(**case, backend="reference")
        moved = {k: layouts(v)[layout] for k, v in case.items() if k in ("weight", "upper")}
        actual = expand(**case | moved, backend=name)
        assert_within_one_rounding("in", actual, expected)
        out = layouts(torch.zeros_like(expected))[layout]
        around = out._base.clone() if out._base is not None else None
        assert expand(**case, out=out, backend=name) is out
        assert_within_one_rounding("out", out, expected)
        if layout != "transposed":
            out.zero_()
            assert torch.equal(out._base, around), "wrote outside of out"


@pytest.mark.parametrize("name", LIVE)
def test_identity_axes(name, device):
    name = backend_or_skip(name, device)
    case = make_case(19, 33, 41, 70, torch.float32, device)
    W, rows, cols = case["weight"], case["rows"], case["cols"]
    assert torch.equal(expand(W, backend=name), W)
    assert expand(W, backend=name).data_ptr() != W.data_ptr()
    assert torch.equal(expand(W, rows=rows, backend=name), W[rows])
    assert torch.equal(expand(W, cols=cols, backend=name), W[:, cols])
    noise = {"col_noise": torch.rand(33, device=device), "seed": 5}
    every = torch.arange(33, device=device)
    explicit = expand(W, rows=rows, cols=every, **noise, backend=name)
    assert torch.equal(expand(W, rows=rows, **noise, backend=name), explicit)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", LIVE)
def test_vectors(name, dtype, device):
    name = backend_or_skip(name, device)
    case = make_case(30, 30, 77, 77, dtype, device, upper="rows")
    vector = {"weight": case["weight"][:, 3], "upper": case["upper"][:, 4]}
    vector |= {"rows": case["rows"], "row_scale": case["row_scale"]}
    joined = torch.cat([vector["weight"], vector["upper"]]).double()
    truth = joined[case["rows"]] * case["row_scale"].double()
    actual = expand(**vector, backend=None if dtype == torch.float64 else name)
    assert_no_worse_than_eager("out", actual, truth.to(dtype), truth, scale=4.0)
    out = torch.zeros(77, device=device, dtype=dtype)
    expand(**vector, out=out, backend=name)
    assert torch.equal(out, actual)


@pytest.mark.parametrize("name", LIVE)
def test_empty(name, device):
    name = backend_or_skip(name, device)
    W, none = torch.randn(3, 4, device=device), torch.empty(0, dtype=torch.long, device=device)
    assert expand(W, rows=none, backend=name).shape == (0, 4)
    assert expand(W, cols=none, backend=name).shape == (3, 0)
    assert expand(W[:0], backend=name).shape == (0, 4)
    assert expand(W[0], rows=none, backend=name).shape == (0,)
    with pytest.raises(GrowthError, match="rows holds 0 to 0"):
        expand(W[:0].cpu(), rows=torch.zeros(1, dtype=torch.long), backend="reference")


@pytest.mark.parametrize("noise", ["row", "col", "row 1", "col 1", "col 2"])
@pytest.mark.parametrize("name", LIVE)
def test_shards_are_slices_of_the_whole(name, noise, device):
    name = backend_or_skip(name, device)
    case = make_case(19, 33, 41, 530, torch.bfloat16, device, upper="both", noise=noise)
    whole = expand(**case, backend=name)
    for i, j in ((slice(0, 7), slice(0, 530)), (slice(7, 41), slice(251, 400))):
        shard = {k: case[k][i] for k in case if k.startswith("row")}
        shard |= {k: case[k][j] for k in case if k.startswith("col")}
        shard |= {k: case[k] for k in ("weight", "upper", "seed")}
        if "routing" in case:
            routing = case["routing"]
            shard["routing"] = routing._replace(copies=routing.copies[(i, j)[routing.dim]])
        out = torch.zeros_like(whole)[i, j]
        expand(**shard, offsets=(i.start, j.start), out=out, backend=name)
        assert torch.equal(out, whole[i, j])


@pytest.mark.parametrize("axis", ["row", "col"])
@pytest.mark.parametrize("replicas", [2, 4])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", LIVE)
def test_opposite_noise_adds_up_bit_for_bit(name, dtype, replicas, axis, device):
    """In every dtype, the widest too: sums of what was rounded give the weight back."""
    name = backend_or_skip(name, device)
    case = make_case(40, 50, 40, 50, dtype, device, scales=False)
    n = 40 if axis == "row" else 50
    weights = torch.tensor({2: [0.5, -0.5], 4: [0.9, 0.3, -0.3, -0.9]}[replicas])
    share = torch.full((replicas * n,), 1 / replicas)
    case = {"weight": case["weight"], f"{axis}_scale": share.to(device), "seed": 3}
    case[f"{axis}s"] = torch.arange(replicas * n, device=device) % n
    case[f"{axis}_noise"] = weights.repeat_interleave(n).to(device)
    grown = expand(**case, backend=name).double()
    parts = (grown if axis == "row" else grown.T).unflatten(0, (replicas, n))
    weight = (case["weight"] if axis == "row" else case["weight"].T).double()
    # opposites first: float64 itself would round another order
    assert torch.equal((parts + parts.flip(0))[: replicas // 2].sum(0), weight)
    # and they differ
    assert ((parts[0] * replicas - weight).abs() > 0.01 * weight.abs()).double().mean() > 0.9


@pytest.mark.filterwarnings("ignore:overflow encountered")
@pytest.mark.parametrize("exponent", [0, 1, -3, -20, 20])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", LIVE)
def test_powers_of_two_round_only_where_they_must(name, dtype, exponent, device):
    """Zeros, subnormals, infinities and the edges of the range, bit for bit."""
    name = backend_or_skip(name, device)
    info = torch.finfo(dtype)
    small, big = info.smallest_normal, info.max
    least = small * info.eps
    values = [0.0, least, 3 * least, small - least, small, 1.0, 1 + info.eps, 3.1, big, big / 2]
    values = torch.tensor([*values, float("inf")], device=device, dtype=torch.float64)
    W = torch.cat([values, -values]).to(dtype)[None].repeat(20, 1)
    cols = uneven(W.shape[1], 70, 3, device)
    for scale in ({"row_scale": 20}, {"col_scale": 70}):
        scale = {k: torch.full((n,), 2.0**exponent, device=device) for k, n in scale.items()}
        actual = expand(W, cols=cols, **scale, backend=name)
        truth = (W[:, cols].double() * 2.0**exponent).to(dtype)
        integer = torch.int32 if dtype == torch.float32 else torch.int16
        assert torch.equal(actual.view(integer), truth.view(integer))
    W[:, 3] = float("nan")
    assert torch.equal(expand(W, cols=cols, backend=name).isnan(), W[:, cols].isnan())
    assert torch.equal(expand(W, cols=cols, **scale, backend=name).isnan(), W[:, cols].isnan())


# ------------------------------------------------------------- registration


@pytest.mark.parametrize("upper, noise", [("none", "none"), ("both", "col"), ("rows", "row")])
@pytest.mark.parametrize("name", ["reference", *COMPILED])
def test_opcheck(name, upper, noise, device):
    name = backend_or_skip(name, device)
    case = make_case(5, 7, 9, 12, torch.float32, device, upper=upper, noise=noise)
    out = torch.zeros(9, 12, device=device)
    library.opcheck(expand_out_op, (out, *ExpandCall(out, **case).inputs, name))
    case["weight"].requires_grad_()
    if "upper" in case:
        case["upper"].requires_grad_()
    library.opcheck(expand_op, (*ExpandCall(out, **case).inputs, torch.float32, name))


def test_the_reference_compiles_as_one_graph(device):
    """The record of the call must not break the graph."""
    case = make_case(9, 17, 30, 41, torch.float32, device, upper="both", noise="col")
    compiled = torch.compile(expand_reference, fullgraph=True, backend="aot_eager")
    call = call_of(case, torch.float32)
    assert torch.equal(compiled(call), expand_reference(call))


@pytest.mark.parametrize("upper, noise", [*CASES, ("identity", "none"), ("identity", "col")])
def test_gradcheck(upper, noise, device):
    case = make_case(4, 5, 7, 9, torch.float64, device, upper=upper, noise=noise)
    if upper == "identity":
        case.pop("rows"), case.pop("cols"), case.pop("row_scale"), case.pop("col_scale")
        case.pop("upper")
        if noise == "col":
            case["col_noise"] = case["col_noise"][:5]
    inputs = [case.pop(k).requires_grad_() for k in ("weight", "upper") if k in case]
    names = ("weight", "upper")[: len(inputs)]

    def run(*tensors):
        return expand(**dict(zip(names, tensors, strict=True)), **case)

    assert torch.autograd.gradcheck(run, inputs)
    assert torch.autograd.gradgradcheck(run, inputs)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gradient_is_the_references(dtype, device):
    case = make_case(9, 17, 30, 41, dtype, device, upper="both", noise="col")
    case["weight"].requires_grad_(), case["upper"].requires_grad_()
    dout = torch.randn(30, 41, device=device)
    leaves = (case["weight"], case["upper"])
    actual = torch.autograd.grad(expand(**case), leaves, dout.to(dtype))
    double = {k: x.double() if k not in ("rows", "cols", "seed") else x for k, x in case.items()}
    truth = expand_reference(call_of(double, torch.float64))
    truth = torch.autograd.grad(truth, leaves, dout.to(dtype).double())
    eager = expand_reference(call_of(case, dtype))
    eager = torch.autograd.grad(eager, leaves, dout.to(dtype))
    for grad in zip(("weight", "upper"), actual, eager, truth, strict=True):
        assert_no_worse_than_eager(*grad[:3], grad[3].double(), scale=8.0)


def test_backward_twice_is_the_same_twice(device):
    case = make_case(9, 17, 30, 41, torch.float32, device, upper="both", noise="col")
    case["weight"].requires_grad_()
    loss = expand(**case).square().sum()
    (first,) = torch.autograd.grad(loss, case["weight"], retain_graph=True)
    (second,) = torch.autograd.grad(loss, case["weight"])
    assert torch.equal(first, second)


@pytest.mark.parametrize("noise", ["none", "col"])
def test_compiles_as_one_graph(noise, device):
    case = make_case(9, 17, 30, 41, torch.float32, device, upper="both", noise=noise)
    weight = case.pop("weight").requires_grad_()

    def run(weight):
        return expand(weight * 2, **case).sin()

    compiled = torch.compile(run, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(weight), run(weight))
    grads = [torch.autograd.grad(f(weight).sum(), weight)[0] for f in (run, compiled)]
    torch.testing.assert_close(*grads)


def test_shapes_without_data():
    weight, rows = torch.empty(3, 4, device="meta"), torch.empty(7, dtype=torch.long, device="meta")
    result = expand(weight, rows=rows, out_dtype=torch.bfloat16)
    assert (result.shape, result.dtype, result.device.type) == ((7, 4), torch.bfloat16, "meta")


# ------------------------------------------------------------------ refusals

ROWS, ONES = torch.tensor([0, 1, 2, 0]), torch.ones(4)
LONG = MOST_ENTRIES + 1


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"weight": torch.ones(2, 2, 2)}, r"1 or 2 dimensions, got shape \(2, 2, 2\)"),
        ({"weight": torch.ones(3, 4).int()}, "weight must be one of .* got torch.int32"),
        ({"weight": torch.ones(3, 4).to_sparse()}, r"weight is sparse_coo.*weight\.to_dense\(\)"),
        ({"row_scale": ONES.to_sparse()}, "row_scale is sparse_coo"),
        ({"rows": ROWS.int()}, r"rows must be an int64 tensor, got torch.int32: use rows.long"),
        ({"rows": [0, 1]}, "rows must be a tensor, got list"),
        ({"row_scale": [1.0]}, "row_scale must be a tensor, got list"),
        ({"rows": ROWS[None]}, r"rows must be a vector of indices, got shape \(1, 4\)"),
        ({"rows": torch.tensor([0, 3])}, "rows holds 0 to 3, allowed are 0 to 2; .* need `upper`"),
        ({"cols": torch.tensor([-1, 3])}, "cols holds -1 to 3, allowed are 0 to 3"),
        ({"rows": torch.tensor([6]), "upper": torch.ones(3, 4)}, "rows holds 6 to 6, .* 0 to 5"),
        (
            {"upper": torch.ones(3, 5)},
            r"upper has shape torch.Size\(\[3, 5\]\), but the weight has",
        ),
        ({"upper": torch.ones(3, 4).half()}, "upper has dtype torch.float16, but the weight has"),
        ({"rows": ROWS, "row_scale": ONES[:3]}, r"row_scale must have shape \(4,\), got \(3,\)"),
        ({"row_scale": torch.ones(3).long()}, "row_scale must be a float tensor"),
        ({"row_scale": torch.ones(3).requires_grad_()}, "row_scale gets no gradient"),
        ({"row_scale": torch.ones(3, device="meta")}, "row_scale is on meta, but .* on cpu"),
        ({"row_noise": torch.ones(3), "col_noise": ONES}, "give one of"),
        ({"weight": ONES, "cols": ROWS}, "a 1-D weight takes rows and row_scale only"),
        ({"weight": ONES, "row_noise": ONES}, "a 1-D weight takes rows and row_scale only"),
        ({"seed": -1}, r"seed must be in \[0, 2\*\*63\), got -1"),
        ({"out_dtype": torch.int8}, "out_dtype must be one of"),
        ({"out": torch.ones(3, 5)}, r"out has shape \(3, 5\), but the result has shape \(3, 4\)"),
        ({"out": torch.ones(3, 4), "out_dtype": torch.half}, "out has dtype torch.float32, but"),
        ({"out": torch.ones(3, 1).expand(3, 4)}, "memory for every element"),
        ({"out": torch.ones(3, 4).requires_grad_()}, "out= has no gradient"),
        ({"backend": "gpu"}, "backend='gpu' is unknown: use one of reference, cpu, triton, cuda"),
        ({"backend": "cuda"}, "backend='cuda' cannot run here: no NVIDIA GPU"),
    ],
)
def test_refuses(changes, message):
    with pytest.raises(GrowthError, match=message):
        expand(**{"weight": torch.ones(3, 4), **changes})


@pytest.mark.parametrize("R, C, M, N", [(LONG, 1, 3, 1), (1, LONG, 1, 3), (3, 1, LONG, 1),
                                        (1, 3, 1, LONG)])  # fmt: skip
def test_refuses_axes_that_kernels_cannot_count(R, C, M, N):
    """Tensors without memory; one entry less is allowed."""
    for less in (0, 1):
        sizes = [n - less if n == LONG else n for n in (R, C, M, N)]
        weight = torch.empty(sizes[0], sizes[1], device="meta")
        rows, cols = (torch.empty(n, dtype=torch.int64, device="meta") for n in sizes[2:])
        if less:
            assert expand(weight, rows=rows, cols=cols).shape == tuple(sizes[2:])
        else:
            with pytest.raises(GrowthError, match=f"an axis may have {MOST_ENTRIES} entries"):
                expand(weight, rows=rows, cols=cols)


def test_refuses_a_vector_or_two_layers_that_kernels_cannot_count():
    with pytest.raises(GrowthError, match="an axis may have"):
        expand(torch.empty(2**31 + 16, device="meta"))
    half, rows = torch.empty(2**30, 1, device="meta"), torch.empty(3, dtype=torch.int64).to("meta")
    for weight, axis in ((half, "rows"), (half.T, "cols")):
        expand(weight, **{axis: rows})
        with pytest.raises(GrowthError, match=r"an axis may have .* Expand its parts"):
            expand(weight, upper=weight, **{axis: rows})


def test_refuses_to_overwrite_its_input():
    buffer = torch.ones(6, 4)
    with pytest.raises(GrowthError, match="out shares memory with weight"):
        expand(buffer[:4], out=buffer[2:])
    # side by side is fine
    expand(buffer[:3], out=buffer[3:])
