"""`bench.gpu` needs only PyTorch, Triton and transformers, and names other missing packages."""

import os
import subprocess

import pytest

from bench.shared import results
from growkern.ops.backend.launch import HAS_TRITON
from tests.bench.bare import make_bare_python

MISSING = ("xxhash", "accelerate", "pytest", "hypothesis", "matplotlib", "liger_kernel")
# One piece of each kind: a check in a child that imports growth, a benchmark, one with a Python of
# its own, and one for each package that can be missing. The modules of all others are imported.
PIECES = {
    "fsdp_growth": "ok",
    "bench_expand": "ok",
    "aot": "ok",
    "check_suite": "skipped: needs pytest, hypothesis",
    "trainer_step": "skipped: needs accelerate",
    "bench_grow_checkpoint": "skipped: needs xxhash",
}


IMPORT_ALL = """
import importlib
from bench.on_gpu.pieces import PIECES
for piece in PIECES:
    if not piece.needs:
        importlib.import_module(f"bench.{piece.module}")
"""


@pytest.mark.skipif(not HAS_TRITON, reason="Triton is not installed")
def test_a_bare_machine_runs_what_it_can_and_says_why_not(tmp_path):
    python = make_bare_python(tmp_path / "python")
    keep = ("PATH", "LANG", "LD_LIBRARY_PATH", "TRITON_CACHE_DIR")
    env = {name: os.environ[name] for name in keep if name in os.environ}
    env |= {"HOME": str(tmp_path), "OMP_NUM_THREADS": "1"}
    look = f"import importlib.util as u; print([n for n in {MISSING} if u.find_spec(n)])"
    found = subprocess.run([python, "-c", look], env=env, capture_output=True, text=True)
    assert found.stdout.strip() == "[]", "packages that should be missing are installed"
    line = [python, "-c", IMPORT_ALL]
    done = subprocess.run(line, cwd=results.ROOT, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    line = [python, "-m", "bench.gpu", "--dry-run", "--results", tmp_path / "results"]
    line += [word for name in PIECES for word in ("--only", name)]
    done = subprocess.run(line, cwd=results.ROOT, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    for name, expected in PIECES.items():
        document = results.read(tmp_path / "results" / f"{name}.json")
        words = document["status"] + f": {document.get('reason')}" * ("reason" in document)
        assert words == expected, name
