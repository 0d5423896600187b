import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from growkern.ops._launch import HAS_TRITON

ROOT = Path(__file__).parents[2]


@pytest.mark.skipif(not HAS_TRITON, reason="Triton is not installed")
def test_every_kernel_compiles_and_fits_in_registers(tmp_path):
    """In a process of its own: here the kernels may be interpreted ones."""
    out = tmp_path / "aot.json"
    env = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    env |= {"TRITON_CACHE_DIR": str(tmp_path / "cache")}
    command = [sys.executable, "-m", "bench.aot", "--json", str(out)]
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    rows = json.loads(out.read_text())["rows"]
    assert {row["sm"] for row in rows} == {80, 90, 100}
    assert {row["kernel"].split()[0] for row in rows} >= {"expand", "kl_mlm"}
    for row in rows:
        assert row["registers"] <= 255 and row["spilled_bytes"] == 0, row
