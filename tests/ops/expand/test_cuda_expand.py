"""`expand` in CUDA C++, its very source run on a CPU: bit for bit the reference."""

from types import SimpleNamespace

import pytest
import torch

from growkern.errors import GrowthError
from growkern.ops.expand import on_cuda, on_triton
from growkern.ops.expand.call import ExpandCall, check_expand
from growkern.ops.expand.expand_op import expand_reference
from growkern.ops.expand.on_cuda import launches_of
from testbed.cuda_emulator import emulate
from tests.ops.expand.test_expand import CASES, call_of, in_runs, layouts, make_case
from tests.ops.expand.test_expand_launches import Started
from tests.ops.expand.test_expand_rounding import infinities, midpoints

FP32, BF16, FP16, FP64 = torch.float32, torch.bfloat16, torch.float16, torch.float64
# of a block: the row and the one beside it in shared memory, or neither
STAGED, DIRECT = 48 << 10, 0


def run(call, limit=STAGED, eager=False):
    made = launches_of(call, limit=limit)
    assert made.args.staged == (limit == STAGED)
    for kernel, grid in made.steps:
        emulate(kernel, grid, made.args, eager=eager)
    return call.out


def assert_is_reference(case, dtype, out_dtype=None, **how):
    out_dtype = out_dtype or dtype
    expected = expand_reference(call_of(case, out_dtype))
    out = torch.full_like(expected, float("nan"))
    assert torch.equal(run(ExpandCall(out, **case), **how), expected), (case.keys(), dtype)


# the dtypes with what they are likely to meet; each pair of kinds is compiled once
KINDS = [(FP32, CASES), (BF16, [CASES[0], CASES[-1]]), (FP16, CASES[:1]), (FP64, CASES[-2:])]
KINDS = [(dtype, *case) for dtype, cases in KINDS for case in cases]
# one row; fewer output rows than sources; a source row of many; columns past what threads take
SIZES = [(1, 9, 3, 40), (19, 33, 7, 70), (5, 300, 40, 2100)]


@pytest.mark.parametrize("dtype, upper, noise", KINDS)
def test_is_the_reference_bit_for_bit(dtype, upper, noise):
    for size in SIZES:
        case = make_case(*size, dtype, "cpu", upper=upper, noise=noise)
        runs = in_runs(case)
        assert_is_reference(case, dtype)
        assert_is_reference(runs | {"row_scale": None, "col_scale": None}, dtype, limit=DIRECT)
        if upper in ("none", "cols") and not noise.startswith("row"):
            assert_is_reference(case | {"rows": None, "row_scale": None}, dtype)


@pytest.mark.parametrize("dtype, out_dtype", [(FP32, FP32), (BF16, BF16), (BF16, FP32)])
def test_runs_of_columns_are_read_as_one(dtype, out_dtype):
    """Tiles and halves whose runs begin where a pack does, and runs that end inside one."""
    for C, N in ((32, 96), (32, 90), (33, 99)):
        case = make_case(5, C, 7, N, dtype, "cpu")
        tiled, halves = torch.arange(N) % C, torch.arange(N) // 16 * 8 % C + torch.arange(N) % 16
        for cols in (tiled, halves % C):
            for limit in (STAGED, DIRECT):
                assert_is_reference(case | {"cols": cols}, dtype, out_dtype, limit=limit)


@pytest.mark.parametrize(
    "dtype, out_dtype, noise",
    [(FP32, BF16, "none"), (BF16, FP32, "none"), (FP64, FP16, "col"), (BF16, FP64, "row 1.5")],
)
def test_dtypes_in_and_out(dtype, out_dtype, noise):
    case = midpoints(make_case(9, 21, 20, 50, dtype, "cpu", noise=noise), out_dtype)
    assert_is_reference(case, dtype, out_dtype)


@pytest.mark.parametrize("layout", ["strided", "offset", "transposed"])
def test_any_strides_in_and_out(layout):
    case = make_case(19, 33, 41, 70, FP32, "cpu", upper="both", noise="col")
    expected = expand_reference(call_of(case, FP32))
    moved = {k: layouts(v)[layout] for k, v in case.items() if k in ("weight", "upper")}
    assert torch.equal(run(ExpandCall(torch.zeros(41, 70), **case | moved)), expected)
    out = layouts(torch.zeros_like(expected))[layout]
    around = out._base.clone() if out._base is not None else None
    assert torch.equal(run(ExpandCall(out, **case)), expected)
    if layout != "transposed":
        out.zero_()
        assert torch.equal(out._base, around), "wrote outside of out"


def test_the_order_of_threads_changes_nothing():
    case = make_case(5, 300, 40, 2100, FP32, "cpu", upper="both", noise="row")
    assert_is_reference(case, FP32, eager=True)


def test_identity_and_empty():
    W = torch.randn(6, 11)
    assert torch.equal(run(ExpandCall(torch.empty(6, 11), W)), W)
    none = torch.empty(0, dtype=torch.long)
    assert launches_of(ExpandCall(torch.empty(6, 0), W, cols=none)).steps[-1][1].blocks == 6


@pytest.mark.parametrize("noise", ["none", "col", "row", "col 1.0", "row 1.5"])
def test_what_a_call_starts_beside_its_kernel(noise, monkeypatch):
    """The lists of rows, and the hashes of lines. Nothing sorts."""
    launched = []
    monkeypatch.setattr(on_triton, "launch", lambda kernel, *_, **__: launched.append(kernel))
    monkeypatch.setattr(on_cuda, "_on_gpu", lambda call: True)
    case = make_case(19, 33, 41, 70, FP32, "cpu", noise=noise)
    call = ExpandCall(torch.empty(41, 70), **case)
    with Started() as started:
        made = launches_of(call)
    assert [kernel.name for kernel, _ in made.steps] == ["row_lists", "expand_rows"]
    assert started.names == ["full", "_to_copy"] and len(launched) == (noise != "none")


def test_infinities_become_nan_where_a_call_has_noise():
    for case in infinities("cpu"):
        expected = expand_reference(call_of(case, FP32))
        assert torch.equal(run(ExpandCall(torch.zeros(2, 24), **case)).isnan(), expected.isnan())


class OnGpu(torch.Tensor):
    is_cuda = True
    device = torch.device("cuda", 0)


@pytest.mark.parametrize("on_host", [True, False])
def test_the_weight_on_the_host_lives_until_the_kernel_has_ended(on_host, monkeypatch):
    events = []
    made = SimpleNamespace(steps=[(None, None)], args=None)
    stream = SimpleNamespace(synchronize=lambda: events.append("ended"))
    monkeypatch.setattr(on_cuda.nvrtc, "why_not", lambda: "")
    monkeypatch.setattr(on_cuda.nvrtc, "shared_limit", lambda device: STAGED)
    monkeypatch.setattr(on_cuda, "launches_of", lambda call, limit: made)
    monkeypatch.setattr(on_cuda.nvrtc, "launch", lambda *args: events.append("launched"))
    monkeypatch.setattr(torch.cuda, "current_stream", {OnGpu.device: stream}.__getitem__)
    weight, out = torch.ones(3, 4), torch.empty(3, 4).as_subclass(OnGpu)
    on_cuda.expand_on_cuda(ExpandCall(out, weight if on_host else weight.as_subclass(OnGpu)))
    assert events == (["launched", "ended"] if on_host else ["launched"])


@pytest.mark.parametrize("name", ["weight", "upper"])
def test_a_weight_on_the_host_has_contiguous_columns(name):
    """Otherwise the GPU would get the address of a copy that is not pinned."""

    def check(weight, upper):
        for x in (weight, upper):
            x.is_pinned = lambda: True
        out = torch.empty(weight.shape).as_subclass(OnGpu)
        call = ExpandCall(out, weight, upper)
        check_expand(call, None, reads_host=True)
        assert (launches_of(call._replace(out=torch.empty(weight.shape))).tensors[:2]) == (
            weight,
            upper,
        )

    def case(turned):
        return {"weight": torch.ones(3, 4), "upper": torch.ones(3, 4)} | {name: turned}

    with pytest.raises(GrowthError, match=rf"{name} is on the CPU and has strides \(1, 3\).*"):
        check(**case(torch.ones(4, 3).T))
    # rows may lie apart, and the stride of a single column counts for nothing
    check(**case(torch.ones(3, 9)[:, :4]))
    check(torch.ones(1, 3).T, torch.ones(3, 5)[:, ::5])


def test_a_vector_on_the_host_is_contiguous():
    weight = torch.ones(8)[::2]
    weight.is_pinned = lambda: True
    with pytest.raises(GrowthError, match=r"strides \(2,\).* use weight.contiguous\(\).pin_memory"):
        check_expand(ExpandCall(torch.empty(4).as_subclass(OnGpu), weight), None, reads_host=True)


def test_a_weight_on_the_host_must_be_pinned():
    out = torch.empty(3, 4).as_subclass(OnGpu)
    for pinned in (False, True):
        weight = torch.randn(3, 4)
        weight.is_pinned = lambda pinned=pinned: pinned
        call = ExpandCall(out, weight)
        if pinned:
            check_expand(call, None, reads_host=True)
        else:
            with pytest.raises(GrowthError, match=r"not pinned: use weight.pin_memory\(\)"):
                check_expand(call, None, reads_host=True)
        with pytest.raises(GrowthError, match="out is on cuda:0, but the weight is on cpu"):
            check_expand(call, None)
