"""A work list of tensors is what `expand` gives one by one."""

import pytest
import torch

from growkern.errors import GrowthError
from growkern.ops.backend.launch import HAS_TRITON
from growkern.ops.expand import many
from growkern.ops.expand.call import ExpandCall
from growkern.ops.expand.expand_op import expand
from growkern.ops.expand.hashes import line_keys
from growkern.ops.expand.many import _LineKeys, _Packed, expand_many, launch_kind
from tests.ops.expand.test_expand import layouts, make_case

pytestmark = pytest.mark.skipif(not HAS_TRITON, reason="Triton is not installed")
FP32, BF16, FP64 = torch.float32, torch.bfloat16, torch.float64


def make_calls(device):
    """Several kinds and sizes: identity axes, vectors, strided outputs, an empty one."""
    calls, expected = [], []

    def add(case, out_dtype=None, layout=None):
        whole = expand(**case, out_dtype=out_dtype, backend="triton")
        out = torch.zeros_like(whole)
        out = layouts(out)[layout] if layout else out
        calls.append(ExpandCall(out, **case))
        expected.append(whole)

    for seed, (upper, noise) in enumerate([("none", "none"), ("both", "col"), ("rows", "row")] * 2):
        case = make_case(19, 33, 41, 530, FP32, device, upper=upper, noise=noise, seed=seed)
        add(case | {"offsets": (3, 5)}, layout="offset" if seed > 2 else None)
    # rows of the output that can be written 16 bytes at a time
    for size in ((5, 30, 17, 528), (4, 20, 9, 1040)):
        add(make_case(*size, FP32, device, upper="both", noise="col"))
    for dtype in (FP32, BF16, FP64):
        add({"weight": torch.randn(9, 40, device=device).to(dtype)})
    case = make_case(7, 5, 9, 2051, BF16, device)
    add(case | {"rows": None, "row_scale": None})
    add(case, FP32)
    add({"weight": torch.randn(1, 30, device=device), "cols": torch.arange(77, device=device) % 30})
    add({"weight": torch.randn(3, 4, device=device), "rows": torch.empty(0, device=device).long()})
    return calls, expected


def test_many_at_once_are_the_same_bits(device):
    calls, expected = make_calls(device)
    # fp32 with none, col and row noise, and wide; bf16; bf16 to fp32; fp64; fp32 and bf16 unscaled
    assert expand_many(calls) == 9
    assert sum(launch_kind(call).is_wide for call in calls) == 2
    for call, whole in zip(calls, expected, strict=True):
        assert torch.equal(call.out, whole), launch_kind(call)


def test_weight_and_upper_of_different_strides(device):
    case = make_case(19, 33, 41, 528, FP32, device, upper="both", noise="row")
    expected = expand(**case, backend="reference")
    case["upper"] = case["upper"].T.contiguous().T
    call = ExpandCall(torch.zeros_like(expected), **case)
    expand_many([call])
    assert torch.equal(call.out, expected)


def test_nothing_to_do_and_other_devices(device):
    assert expand_many([]) == 0
    call = ExpandCall(torch.empty(2, 3, device="meta"), torch.empty(2, 3, device=device))
    with pytest.raises(GrowthError, match="one device"):
        expand_many([call])


def test_packed_vectors_begin_at_16_bytes():
    """The kernel is promised it, and no interpreter would notice."""
    for dtype in (torch.int64, FP32, FP64):
        packed = _Packed(dtype, torch.arange(3))
        places = [packed.add(torch.arange(n)) for n in (1, 4, 7, 2)]
        assert all(place * dtype.itemsize % 16 == 0 for place in (*places, packed.length))
        assert packed.on(torch.device("cpu"))[places[2] :][:7].tolist() == list(range(7))
    lines = _LineKeys()
    places = [lines.add(n, offset=n, seed=2**40 + n) for n in (1, 4, 7, 2)]
    assert all(place % 4 == 0 for place in places)
    key, mult = lines.on(torch.device("cpu"))
    for expected, found in zip(line_keys(7, 7, 2**40 + 7, key.device), (key, mult), strict=True):
        assert torch.equal(found[places[2] :][:7], expected)


def test_other_blocks_change_no_bit(device, monkeypatch):
    calls, expected = make_calls(device)
    asked, right, seen, block_of = [], many.launch, [], many.block_of

    def chosen(size):
        asked.append(size)
        return block_of(size) | {"BLOCK_M": 4, "BLOCK_N": 64}

    def launched(kernel, programs, like, *args, **constants):
        if kernel is many.expand_many_kernel:
            seen.append((constants["BLOCK_M"], constants["BLOCK_N"]))
        right(kernel, programs, like, *args, **constants)

    monkeypatch.setattr(many, "block_of", chosen)
    monkeypatch.setattr(many, "launch", launched)
    assert expand_many(calls) == len(asked) == 9
    # blocks are those of the widest result of a launch
    assert 2051 in asked
    assert set(seen) == {(4, 64)}
    for call, whole in zip(calls, expected, strict=True):
        assert torch.equal(call.out, whole), launch_kind(call)


def test_refuses_axes_that_kernels_cannot_count():
    weight, out = torch.empty(2**31, 1, device="meta"), torch.empty(3, 1, device="meta")
    rows = torch.empty(3, dtype=torch.int64, device="meta")
    with pytest.raises(GrowthError, match="an axis may have"):
        expand_many([ExpandCall(out, weight, rows=rows)])
