"""Routing in `expand`: copies add up to the weight bit for bit, and the hash chooses fairly."""

from itertools import product

import pytest
import torch

from growkern.errors import GrowthError
from growkern.ops.backend import native
from growkern.ops.expand.call import DTYPES, ExpandCall, Routing
from growkern.ops.expand.expand_op import expand, expand_reference, folded
from growkern.ops.expand.hashes import chosen, line_keys
from growkern.ops.expand.limits import MOST_COPIES
from growkern.ops.expand.on_cpu import expand_on_cpu
from tests.ops.expand.test_expand import LIVE, backend_or_skip, copies_of, uneven

F32, F64 = torch.float32, torch.float64


@pytest.mark.parametrize("axis", ["row", "col"])
@pytest.mark.parametrize("amplitude", [0.3, 1.0, 1.5, 2.0, 3.0])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", LIVE)
def test_routed_copies_add_up_bit_for_bit(name, dtype, amplitude, axis, device):
    """For every number of copies, evenly or not, down to the smallest weights."""
    name = backend_or_skip(name, device)
    W = torch.randn(24, 31, generator=torch.Generator().manual_seed(0)).to(device, dtype)
    least = torch.finfo(dtype).smallest_normal * torch.finfo(dtype).eps
    for column, smallest in enumerate(
        (0.3 * torch.finfo(dtype).smallest_normal, least, -3 * least)
    ):
        W[:, 3 + column] = smallest
    maps = [torch.arange(62) % 31, torch.arange(93) % 31, torch.arange(155) // 5]
    maps.append(uneven(31, 80, 1))
    if name == "triton" and device == "cpu":
        # interpreted kernels take long: each map on one axis
        maps = maps[axis == "row" :: 2]
    for index in maps:
        routing = Routing(1, copies_of(index).to(device), amplitude)
        case = {"weight": W, "cols": index.to(device), "routing": routing, "seed": 3}
        if axis == "row":
            case = {"weight": W.T, "rows": case["cols"], "routing": routing._replace(dim=0)}
        grown = expand(**case, backend=name)
        grown = (grown if axis == "col" else grown.T).double()
        assert torch.equal(folded(grown, 1, index.to(device), 31), W.double())
        used = (grown != 0).double()
        most = folded(used, 1, index.to(device), 31).max()
        assert most == (1 if amplitude == 1 else 2)


def test_every_copy_is_chosen_as_often_and_independently(device):
    n = 4096
    for count in (2, 3, 5, 64):
        key, mult = line_keys(n, 0, 7, torch.device(device))
        src = torch.arange(40, device=device).repeat_interleave(count)
        copies = copies_of(src.cpu()).to(device)
        first, second = (x.double() for x in chosen(key[:, None], mult[:, None], src.int(), copies))
        for hits in (first, second):
            assert torch.equal(hits.unflatten(1, (40, count)).sum(2), torch.ones_like(hits[:, :40]))
            # every copy gets a binomial number of n lines
            deviation = (n * (1 / count) * (1 - 1 / count)) ** 0.5
            assert (hits.sum(0) - n / count).abs().max() < 5 * deviation
        assert not (first * second).any()
        # the choices for two source indices have nothing in common; the correlation of rare hits
        # is not normally distributed
        others = torch.corrcoef(first[:, ::count].T).fill_diagonal_(0)
        assert others.abs().max() < 6 / n**0.5 or count > 5


@pytest.mark.parametrize("name", LIVE)
def test_routing_keeps_infinities_and_only_copies(name, device):
    """With amplitude 1 nothing is computed: an infinity stays in one copy, the others are 0."""
    name = backend_or_skip(name, device)
    W = torch.tensor([[float("inf"), -1.0, 3.0]], device=device).repeat(40, 1)
    index = torch.tensor([0, 0, 1, 2, 2, 2])
    case = {"weight": W, "cols": index.to(device)}
    grown = expand(**case, routing=Routing(1, copies_of(index).to(device)), backend=name)
    assert torch.equal(grown[:, :2].sum(1), W[:, 0]) and not grown.isnan().any()
    for amplitude in (0.5, 2.0):
        routing = Routing(1, copies_of(index).to(device), amplitude)
        assert torch.equal(expand(**case, routing=routing, backend=name)[:, 2], W[:, 1])


@pytest.mark.parametrize(
    "routing, message",
    [
        (Routing(2, torch.zeros(4, 2).long()), "dim"),
        (Routing(1, torch.zeros(4, 2)), "int64"),
        (Routing(1, torch.zeros(3, 2).long()), "shape"),
        (Routing(1, torch.zeros(4, 2).long()), "count - 1"),
        (Routing(1, torch.tensor([[0, MOST_COPIES + 1]] * 4)), "counts up to"),
        (Routing(1, torch.tensor([[0, 1]] * 4), 3.5), "amplitude"),
        (Routing(1, torch.tensor([[0, 1]] * 4), float("nan")), "amplitude"),
    ],
)
def test_wrong_routing_is_refused(routing, message):
    W = torch.randn(3, 4)
    with pytest.raises(GrowthError, match=message):
        expand(W, routing=routing)


def test_routing_needs_a_matrix_and_no_noise():
    only = torch.tensor([[0, 1]] * 4)
    with pytest.raises(GrowthError, match="no routing"):
        expand(torch.randn(4), routing=Routing(0, only))
    with pytest.raises(GrowthError, match="give one of"):
        expand(torch.randn(3, 4), routing=Routing(1, only), col_noise=torch.zeros(4))


@pytest.mark.usefixtures("several_threads")
@pytest.mark.parametrize("axis, scaled", [(0, False), (1, False), (1, True)])
@pytest.mark.parametrize("dtype", DTYPES)
def test_instruction_sets_route_large_outputs_past_the_caches(dtype, axis, scaled):
    """Bit for bit, at arbitrary maps; rows begin at any place of a line, or all at the same."""
    rng = torch.Generator().manual_seed(0)
    R, C, M = 67, 701, 800
    W = torch.randn(R, C, generator=rng, dtype=torch.float64).to(dtype)
    size = (9 << 20) // (M * dtype.itemsize)  # past 8 MiB; then rows of whole lines
    for N in (size | 1, -(-size // 32) * 32):
        maps = [torch.randint(n, (m,), generator=rng) for n, m in ((R, M), (C, N))]
        case = {"weight": W, "rows": maps[0], "cols": maps[1], "seed": 5}
        case["routing"] = Routing(axis, copies_of(maps[axis]))
        if scaled:
            case["col_scale"] = torch.rand(N, generator=rng).to(
                torch.float64 if dtype == F64 else F32
            )
        expected = expand_reference(ExpandCall(torch.empty(0, dtype=dtype), **case))
        for offset, isa in product((0, 1), native.available_isas()):
            out = torch.zeros(M, N + offset, dtype=dtype)[:, offset:]
            expand_on_cpu(ExpandCall(out, **case), isa=isa)
            assert torch.equal(out, expected), isa
