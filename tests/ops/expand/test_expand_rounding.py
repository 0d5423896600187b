"""Every backend rounds to the output dtype as PyTorch does, and keeps subnormal numbers."""

import itertools
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from growkern.ops.backend import native
from growkern.ops.backend.launch import HAS_TRITON
from growkern.ops.expand.call import DTYPES, ExpandCall, Routing
from growkern.ops.expand.expand_op import expand, expand_reference
from growkern.ops.expand.on_cpu import expand_on_cpu
from growkern.ops.expand.on_triton import expand_on_triton
from tests.ops.expand.test_expand import LIVE, backend_or_skip, copies_of

ROOT = Path(__file__).parents[3]
# in a process of its own, as the interpreter is on in this one
CONVERSIONS = """
import re, triton
from bench.launches.sources import TARGETS, all_cases, options_of, source_of
for case in all_cases():
    if case.name in ("expand AKI, noise bf16", "expand rows bf16", "expand AKI, routing bf16"):
        # an amplitude other than 1 multiplies and subtracts
        case = case._replace(constexprs=case.constexprs | {"LARGER": 1.25})
        # as with TRITON_DEBUG=1, which makes an integer trap that wraps around
        options = options_of(case) | {"debug": True}
        asm = triton.compile(source_of(case), TARGETS["sm_80"], options).asm
        print(*re.findall(r"(?:cvt|mul|add|sub|fma)\\.\\S*f(?:16|32)\\S*", asm["ptx"]))
        assert "overflow" not in asm["ttir"], case.name
"""

R, C, N = 7, 40, 120
COPIES = torch.arange(N) % C
HALVES = torch.tensor([1.0, -1.0]).repeat_interleave(N // 2)


def midpoints(case, out_dtype):
    """The case with weights next to the middle of two numbers of `out_dtype`.

    In float64 they are so near that float32 rounds them to the middle.
    """
    weight = case["weight"].double()
    unit = torch.finfo(out_dtype).eps
    middle = ((weight / unit).round() + 0.5) * unit
    near = middle * (1 + 2.0**-40 * weight.sign())
    return case | {"weight": torch.where(weight.abs() > 0.5, near, weight).to(case["weight"].dtype)}


SIZES, AMPLITUDES = (0.1, 0.5, 1.0), (0.0, 0.5, 1.0, 2.7, 3.0)
# all that a kernel tells apart: with 1, a copy has all or nothing
APART = (0.5,), (1.0, 2.7)


def widened(dtype, out_dtype, sizes=SIZES, amplitudes=AMPLITUDES):
    """Calls with equal copies, with noise of some sizes, and with routing to 3 copies."""
    rng = torch.Generator().manual_seed(0)
    weight = torch.randn(R, C, generator=rng, dtype=torch.float64).to(dtype)
    case = midpoints({"weight": weight, "cols": COPIES, "seed": 5}, out_dtype)
    scale = torch.rand(N, generator=rng, dtype=torch.float64) - 0.5
    for factors in ({}, {"col_scale": scale}):
        yield case | factors
        for size in sizes:
            yield case | factors | {"col_noise": size * HALVES}
        for amplitude in amplitudes:
            yield case | factors | {"routing": Routing(1, copies_of(COPIES), amplitude)}


def by_rows(case):
    """The transposed case."""
    names = {"cols": "rows", "col_scale": "row_scale", "col_noise": "row_noise"}
    turned = {names.get(name, name): x for name, x in case.items()}
    if "routing" in case:
        turned["routing"] = case["routing"]._replace(dim=0)
    return turned | {"weight": case["weight"].T}


def on_device(case, device):
    moved = {name: x.to(device) for name, x in case.items() if isinstance(x, torch.Tensor)}
    if "routing" in case:
        moved["routing"] = case["routing"]._replace(copies=case["routing"].copies.to(device))
    return case | moved


def assert_rounds_like_pytorch(fill, dtype, out_dtype, device="cpu", values=()):
    bits = {2: torch.int16, 4: torch.int32, 8: torch.int64}[out_dtype.itemsize]
    cases = (x for each in widened(dtype, out_dtype, *values) for x in (each, by_rows(each)))
    for case in (on_device(x, device) for x in cases):
        expected = expand_reference(
            ExpandCall(torch.empty(0, dtype=out_dtype, device=device), **case)
        )
        out = torch.empty_like(expected)
        fill(ExpandCall(out, **case))
        assert torch.equal(out.view(bits), expected.view(bits)), case.keys()


@pytest.mark.parametrize("isa", native.available_isas())
@pytest.mark.parametrize("dtype, out_dtype", list(itertools.product(DTYPES, DTYPES)))
def test_instruction_sets_round_every_pair_of_dtypes_like_pytorch(dtype, out_dtype, isa):
    assert_rounds_like_pytorch(lambda call: expand_on_cpu(call, isa=isa), dtype, out_dtype)


@pytest.mark.skipif(not HAS_TRITON, reason="Triton is not installed")
@pytest.mark.parametrize("out_dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("dtype", DTYPES)
def test_triton_rounds_to_16_bits_like_pytorch(dtype, out_dtype, device):
    values = APART if device == "cpu" else ()
    assert_rounds_like_pytorch(expand_on_triton, dtype, out_dtype, device, values)


def infinities(device):
    """Two rows of zeros, ones and infinities, with noise on either axis; every third size is 0."""
    inf = float("inf")
    weight = torch.tensor([0.0, 1.0, inf, -inf], device=device).repeat(2, 6)
    size = torch.tensor([0.0, 0.5, -0.5], device=device).repeat(8)
    yield {"weight": weight, "col_noise": size, "seed": 5}
    yield {"weight": weight, "row_noise": size[:2], "seed": 5}


@pytest.mark.filterwarnings("ignore:invalid value encountered")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", LIVE)
def test_infinities_become_nan_where_a_call_has_noise(name, dtype, device):
    name = backend_or_skip(name, device)
    for case in infinities(device):
        for out_dtype in DTYPES:
            given = case | {"weight": case["weight"].to(dtype)}
            result = expand(**given, out_dtype=out_dtype, backend=name)
            assert torch.equal(result.isnan(), case["weight"].isinf())
            assert not result.isinf().any()
    # without noise they stay
    assert torch.equal(expand(given["weight"], backend=name), given["weight"])


@pytest.mark.skipif(not HAS_TRITON, reason="Triton is not installed")
def test_compiled_kernels_round_to_nearest_and_flush_no_subnormals():
    """What the interpreter of the tests is made to do (`testbed/interpreter.py`)."""
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    run = subprocess.run(
        [sys.executable, "-c", CONVERSIONS],
        env=environment,
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    lines = run.stdout.splitlines()
    assert len(lines) == 3
    exact = {"cvt.f32.bf16", "cvt.f32.f16"}
    for line in lines:
        # PTX keeps subnormal numbers unless an instruction says .ftz
        found = set(line.split()) - exact
        assert any("bf16" in x for x in found) and all(".rn." in x for x in found), found
        assert not any(".ftz" in x for x in found), found
