"""`python -m bench.gpu` on a CPU: all pieces run at toy sizes, and errors make it fail."""

import importlib.metadata
import os
import re
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest

from bench.on_gpu import pieces
from bench.shared import results
from growkern.ops.backend.launch import HAS_TRITON

ROOT = Path(__file__).parents[2]
needs_triton = pytest.mark.skipif(not HAS_TRITON, reason="Triton is not installed")
# of three that differ by their seed, dry runs have the first
DRY = [x.name for x in pieces.PIECES if x.name not in ("gpt_110m_2", "gpt_110m_3")]
GIVEN = ("torch", "triton", "transformers")
MISSING = ("xxhash", "accelerate", "pytest", "hypothesis", "matplotlib", "liger_kernel")


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


CRASHES = """
import os
if os.environ.get("TRITON_INTERPRET") == "1":
    import bench.launches.versions
    def run(recorder):
        recorder.add({"ceiling": "before"})
        os.kill(os.getpid(), 11)
    bench.launches.versions.run = run
"""


@pytest.fixture(scope="module")
def dry_runs(tmp_path_factory):
    """Two dry runs of all pieces into one directory, and the documents after each.

    The first one has a Python with only what a GPU machine must have, and a piece that crashes.
    Before the second one, a file is damaged.
    """
    folder = tmp_path_factory.mktemp("dry")
    out, archive = folder / "results", folder / "out" / "results.tgz"
    (folder / "broken").mkdir()
    (folder / "broken" / "sitecustomize.py").write_text(CRASHES)
    python = make_bare_python(folder / "python")
    kept = ("PATH", "LANG", "LD_LIBRARY_PATH", "TRITON_CACHE_DIR")
    env = {name: os.environ[name] for name in kept if name in os.environ}
    env |= {"HOME": str(folder), "OMP_NUM_THREADS": "1"}
    look = f"import importlib.util as u; print([n for n in {MISSING} if u.find_spec(n)])"
    found = subprocess.run([python, "-c", look], env=env, capture_output=True, text=True)
    assert found.stdout.strip() == "[]", "packages that should be missing are installed"
    line = ["-m", "bench.gpu", "--dry-run", "--jobs", "2"]
    line += ["--results", str(out), "--archive", str(archive)]
    line += [f"--only={name}" for name in DRY]
    env["PYTHONPATH"] = f"{folder / 'broken'}{os.pathsep}{ROOT}"
    bare = subprocess.run([python, *line], cwd=ROOT, env=env, capture_output=True, text=True)
    before = {name: results.read(out / f"{name}.json") for name in DRY}
    (out / "rows.json").write_text("{")
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    line = [sys.executable, *line]
    again = subprocess.run(line, cwd=ROOT, env=env, capture_output=True, text=True)
    after = {name: results.read(out / f"{name}.json") for name in DRY}
    return bare, before, again, after, archive


@needs_triton
def test_a_bare_machine_runs_all_but_what_crashes(dry_runs):
    """A crash loses no row, and makes the command fail."""
    done, documents, *_ = dry_runs
    assert done.returncode == 1 and "crashed versions" in done.stdout, done.stdout + done.stderr
    for name, made in documents.items():
        if name == "versions":
            assert made["rows"] == [{"ceiling": "before"}]
        else:
            assert made["status"] == "ok", (name, made)


@needs_triton
def test_a_second_dry_run_takes_every_piece_to_its_end(dry_runs):
    """Only pieces that crashed or whose file is broken run again."""
    _, _, done, documents, archive = dry_runs
    assert done.returncode == 0, done.stdout + done.stderr
    for name in ("versions", "rows"):
        assert f"ok {name}: " in done.stdout
    assert done.stdout.count("done before") == len(DRY) - 2
    with tarfile.open(archive) as packed:
        assert {f"results/{name}.json" for name in DRY} <= set(packed.getnames())
    for name, made in documents.items():
        assert made["status"] == "ok" and made["rows"], name
        assert made["toy"] and made["machine"]["sources"] == results.source_digest()
        assert not made["failures"]
