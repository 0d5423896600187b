"""What a call of `expand` starts on a GPU beside its kernel, counted without one."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from growkern.ops.backend import custom_ops
from growkern.ops.backend.launch import HAS_TRITON
from growkern.ops.expand import expand_op, many, on_triton
from growkern.ops.expand.call import ExpandCall, Routing
from growkern.ops.expand.expand_op import expand
from growkern.ops.expand.hashes import line_keys
from tests.ops.expand.test_expand import make_case

pytestmark = pytest.mark.skipif(not HAS_TRITON, reason="Triton is not installed")
FP32, BF16, FP16, FP64 = torch.float32, torch.bfloat16, torch.float16, torch.float64
# they reserve memory or look at it in another way, and start nothing
VIEWS = {"empty", "empty_like", "new_empty", "detach", "unbind", "select", "slice", "view", "alias"}


class Started(TorchDispatchMode):
    """The names of the PyTorch operations that would start a kernel."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        name = function.overloadpacket.__name__
        # a conversion that changes nothing hands the tensor back
        if name not in VIEWS and not any(result is x for x in args):
            self.names.append(name)
        return result


@pytest.fixture
def launched(monkeypatch):
    """The kernels that were launched; none of them runs."""
    kernels = []
    for module in (many, on_triton):
        monkeypatch.setattr(module, "launch", lambda kernel, *_, **__: kernels.append(kernel))
    return kernels


@pytest.mark.parametrize("noise", ["none", "col", "row", "col 1.0", "row 1.5"])
@pytest.mark.parametrize("dtype", [FP32, BF16])
def test_one_launch_makes_all_that_a_hash_needs(launched, dtype, noise, monkeypatch):
    case = make_case(19, 33, 41, 70, dtype, "cpu", noise=noise)
    # the mode that counts is not there without the test, and a GPU's indices are not checked
    monkeypatch.setattr(custom_ops, "is_plain_call", lambda arguments: True)
    monkeypatch.setattr(expand_op, "check_ranges", lambda call: None)
    with Started() as started:
        expand(**case, backend="triton")
    lines = [on_triton.lines_kernel] * (noise != "none")
    assert launched == [*lines, on_triton.expand_kernel]
    # 42 before
    assert started.names == []


def test_a_work_list_makes_the_hashes_of_all_its_calls_in_one_launch(launched):
    calls = [
        ExpandCall(torch.empty(41, 528), **make_case(19, 33, 41, 528, FP32, "cpu", noise=noise))
        for noise in ["col 1.0"] * 9
    ]
    assert many.expand_many(calls) == 1
    assert launched == [on_triton.lines_kernel, many.expand_many_kernel]
    keys = many._LineKeys()
    keys.add(40, 0, 3)
    keys.add(40, 1, 3)
    with Started() as started:
        keys.on(torch.device("cpu"))
    assert started.names == [] and launched[2:] == [on_triton.lines_kernel]


@pytest.mark.parametrize("n, offset, seed", [(1000, 0, 3), (77, 2**31 - 40, 2**62 + 12345)])
def test_the_lines_of_a_gpu_are_those_of_a_cpu(device, n, offset, seed):
    """Also where seeds and positions pass 2**31, and where lines fill no whole program."""
    copies = torch.stack([torch.arange(300) % 7, torch.full((300,), 7)], 1).to(device)
    routing = Routing(1, copies)
    call = ExpandCall(
        torch.empty(n, 300, device=device), torch.empty(1, 1, device=device),
        routing=routing, seed=seed, offsets=(offset, 0),
    )  # fmt: skip
    packed, *lines = on_triton.lines_of_call(call)
    assert torch.equal(packed, routing.packed)
    list_of_lines = many._LineKeys()
    list_of_lines.add(5, 1, 1)
    at = list_of_lines.add(n, offset, seed)
    both = zip(lines, list_of_lines.on(torch.device(device)), strict=True)
    for expected, (one, all_of) in zip(
        line_keys(n, offset, seed, torch.device(device)), both, strict=True
    ):
        assert torch.equal(one, expected) and torch.equal(all_of[at : at + n], expected)


@pytest.mark.parametrize("noise", ["none", "col", "row", "col 1.0", "row 1.5"])
@pytest.mark.parametrize("dtype, out_dtype", [(BF16, BF16), (FP16, FP64), (FP32, FP32)])
def test_gathers_through_shared_memory_change_no_bit(dtype, out_dtype, noise, device, monkeypatch):
    """Ragged sizes: the last row has no neighbour, and the columns fill no power of 2."""
    case = make_case(19, 33, 41, 530, dtype, device, noise=noise)
    case["weight"][3, 5], case["weight"][4, 6] = float("inf"), -0.0
    seen, launch = [], on_triton.launch

    def launched(kernel, *arguments, **constants):
        seen.append(constants.get("WHOLE"))
        launch(kernel, *arguments, **constants)

    monkeypatch.setattr(on_triton, "launch", launched)
    shared = expand(**case, out_dtype=out_dtype, backend="triton")
    monkeypatch.setattr(on_triton, "MOST_WHOLE", 32)
    memory = expand(**case, out_dtype=out_dtype, backend="triton")
    assert [x for x in seen if x is not None] == [64, 0]
    assert torch.equal(shared.view(torch.uint8), memory.view(torch.uint8))
