"""`bench.gpu` needs only PyTorch, Triton and transformers, and names other missing packages."""

import importlib.metadata
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from bench.shared import results
from growkern.ops.backend.launch import HAS_TRITON

GIVEN = ("torch", "triton", "transformers")
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


def required(packages):
    """The packages and all their requirements, without extras: name -> distribution."""
    found, todo = {}, list(packages)
    while todo:
        name = re.sub(r"[-_.]+", "-", todo.pop()).lower()
        if name in found:
            continue
        try:
            found[name] = importlib.metadata.distribution(name)
        except importlib.metadata.PackageNotFoundError:
            continue
        for line in found[name].requires or ():
            if "extra ==" not in line:
                todo.append(re.match(r"[\w.-]+", line)[0])
    return found


def make_bare_python(directory: Path) -> Path:
    """Make a virtual environment that links to these packages, and return its interpreter."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", directory], check=True)
    (site,) = directory.glob("lib/python*/site-packages")
    for distribution in required(GIVEN).values():
        for top in {file.parts[0] for file in distribution.files or ()} - {"..", "__pycache__"}:
            place = site / top
            if not place.exists():
                place.symlink_to(distribution.locate_file(top))
    return directory / "bin" / "python"


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
