"""The machine code of the Triton kernels rounds to nearest; only Triton's interpreter truncates."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from growkern.ops.backend.launch import HAS_TRITON

ROOT = Path(__file__).parents[3]
# in a process of its own, as the interpreter is on in this one
CONVERSIONS = """
import re, triton
from bench.launches.sources import TARGETS, all_cases, source_of
for case in all_cases():
    if case.name in ("expand AKI, noise bf16", "expand rows bf16"):
        options = {"num_warps": case.num_warps, "enable_fp_fusion": False}
        ptx = triton.compile(source_of(case), TARGETS["sm_80"], options).asm["ptx"]
        print(*re.findall(r"cvt\\.\\S*bf16\\S*\\.f32", ptx))
"""


@pytest.mark.skipif(not HAS_TRITON, reason="Triton is not installed")
def test_compiled_kernels_round_bfloat16_to_nearest():
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
    assert len(lines) == 2
    for line in lines:
        found = set(line.split())
        assert found and all(re.fullmatch(r"cvt\.rn\.bf16(x2)?\.f32", x) for x in found), found
