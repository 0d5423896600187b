"""`python -m bench.gpu` on a CPU: all pieces run at toy sizes, and errors make it fail."""

import importlib.metadata
import json
import os
import random
import re
import subprocess
import sys
import tarfile
import time
import zipfile
from pathlib import Path
from types import SimpleNamespace

import pytest

from bench import gpu
from bench.on_gpu import pieces, processes
from bench.shared import results
from growkern.ops.backend.launch import HAS_TRITON
from tests.bench.documents import ROW, document

ROOT = Path(__file__).parents[2]
needs_triton = pytest.mark.skipif(not HAS_TRITON, reason="Triton is not installed")
TOY_PIECES = {piece.name: piece for piece in pieces.PIECES}
# of three that differ by their seed, dry runs have the first
DRY = [name for name in TOY_PIECES if name not in ("gpt_110m_2", "gpt_110m_3")]


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


ENDS = {
    "failed": ("raise RuntimeError('no memory left')", "no memory left"),
    "crashed": ("os.kill(os.getpid(), 11)", "exit code -11"),
    "timeout": ("time.sleep(600)", "stopped after"),
}


def test_a_piece_that_breaks_keeps_its_rows(tmp_path, monkeypatch):
    env = {**os.environ, "PYTHONPATH": f"{tmp_path}{os.pathsep}{ROOT}"}
    piece, limit_s = TOY_PIECES["versions"], 300.0

    def clock():
        """The limit is over as soon as the piece has its row, however slow the machine is."""
        has_row = bool(results.read(path).get("rows"))
        return time.perf_counter() + (limit_s if has_row and status == "timeout" else 0)

    monkeypatch.setattr(processes, "time", SimpleNamespace(perf_counter=clock))
    for status, (end, why) in ENDS.items():
        path = tmp_path / f"{status}.json"
        (tmp_path / "sitecustomize.py").write_text(
            "import os, time\n"
            "import bench.launches.versions\n"
            "def run(recorder):\n"
            "    recorder.add({'ceiling': 'before'})\n"
            f"    {end}\n"
            "bench.launches.versions.run = run\n"
        )
        document = processes.run_apart(piece, path, env=env, toy=True, limit_s=limit_s)
        assert document["status"] == status
        assert document["rows"] == [{"ceiling": "before"}]
        assert why in document["failures"][0]


STARTS_A_CHILD = """
import subprocess, sys, time
import bench.launches.versions
def run(recorder):
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    recorder.add({"ceiling": "before", "child": child.pid, "own": os.getpid()})
    time.sleep(600)
bench.launches.versions.run = run
"""


PACKS_OFTEN = """
from bench.on_gpu import processes
processes.PACK_EVERY = 0.05
"""


NEVER_FORKED = """
from bench.on_gpu import processes
processes._Forked = lambda *piece: processes._Started(*piece, dict(os.environ), True)
"""


def rows_of(archive, name):
    """The rows of a document in an archive, which is complete from its first moment on."""
    if not archive.is_file():
        return []
    with tarfile.open(archive) as packed:
        if name not in packed.getnames():
            return []
        return json.load(packed.extractfile(name))["rows"]


def is_alive(pid):
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state != "Z"


@needs_triton
@pytest.mark.skipif(not Path("/proc").is_dir(), reason="reads /proc")
def test_a_kill_leaves_no_child_behind_and_loses_no_row(tmp_path):
    """The rows are in the archive, too. `run_gpu.sh` starts the command here."""
    out, archive = tmp_path / "results", tmp_path / "out" / "results.tgz"
    broken = "import os\nif os.environ.get('TRITON_INTERPRET') == '1':\n"
    broken += (STARTS_A_CHILD + PACKS_OFTEN + NEVER_FORKED).replace("\n", "\n    ")
    (tmp_path / "sitecustomize.py").write_text(broken)
    env = {**os.environ, "PYTHONPATH": f"{tmp_path}{os.pathsep}{ROOT}", "TRITON_INTERPRET": "1"}
    line = ["bash", ROOT / "bench" / "run_gpu.sh", archive.parent, "500", "--dry-run"]
    line += ["--only", "versions", "--results", out]
    parent = subprocess.Popen(line, cwd=tmp_path, env=env | {"PYTHON": sys.executable})
    rows, end = [], time.monotonic() + 300
    while not rows and time.monotonic() < end:
        time.sleep(0.1)
        rows = rows_of(archive, "results/versions.json")
    parent.kill()
    parent.wait()
    assert rows_of(archive, "results/versions.json") == rows
    (row,) = rows
    end = time.monotonic() + 120
    while any(map(is_alive, (row["child"], row["own"]))) and time.monotonic() < end:
        time.sleep(0.1)
    assert not is_alive(row["own"]) and not is_alive(row["child"])
    processes.gather(out / ".running", out)
    kept = results.read(out / "versions.json")
    assert kept["rows"] == rows and kept["status"] == "crashed"
    assert "killed" in kept["failures"][0] and not list((out / ".running").glob("*.json"))


def test_done_pieces_are_skipped(tmp_path, monkeypatch, capsys):
    facts = results.machine()
    # nor does a piece run again for a library that was missing: it may never be there
    rows = [ROW, {"provider": "theirs", "why not": "x is not installed: no module x"}]
    results.write(tmp_path / "versions.json", {"status": "ok", "machine": facts, "rows": rows})
    monkeypatch.setattr(gpu, "facts_of_this_machine", lambda env: facts)
    monkeypatch.setattr(gpu, "environment", lambda args, scratch: {})
    monkeypatch.setattr(gpu, "run_apart", None)
    args = ["--dry-run", "--only", "versions", "--results", str(tmp_path)]
    assert gpu.main(args) == 0
    assert "done before" in capsys.readouterr().out
    # without time left no piece starts, and that is no failure if others are done
    late = [*args, "--only", "rows", "--budget", "3"]
    assert gpu.main(late) == 0
    assert "of the budget" in capsys.readouterr().out
    assert gpu.main([*late, "--again"]) == 1
    assert capsys.readouterr().out.splitlines()[-1] == "nothing ran"


# What nine minutes yield, in the order of their worth: where the time goes, whether the newest
# kernels are right and how fast they are, and what a training step gains.
NINE_MINUTES = (
    *("versions", "timeline", "check_lines", "check_gathers", "check_once", "rows", "gathers"),
    *("headline_alone", "check_loss", "bench_expand", "train_llama"),
)


def test_a_piece_that_overruns_gives_way_to_the_next(tmp_path, monkeypatch):
    """Each piece gets its own limit, in this order. The last one gets what is left."""
    given = {}

    def run(piece, path, *, limit_s, **rest):
        given[piece.name] = limit_s
        clock[0] += limit_s
        return {"status": "timeout", "rows": [ROW], "failures": ["late"], "seconds": limit_s}

    clock = [0.0]
    monkeypatch.setattr(gpu, "environment", lambda args, scratch: {})
    monkeypatch.setattr(gpu, "time", SimpleNamespace(perf_counter=lambda: clock[0]))
    monkeypatch.setattr(gpu, "facts_of_this_machine", lambda env: {"gpu": "NVIDIA H200"})
    monkeypatch.setattr(gpu, "run_apart", run)
    args = ["--results", str(tmp_path), "--budget", "490"]
    assert gpu.main([*args, "--archive", str(tmp_path / "out" / "results.tgz")]) == 1
    limits = [(name, TOY_PIECES[name].limit_s) for name in NINE_MINUTES]
    spent = sum(limit for _, limit in limits)
    # `run_gpu.sh` names 470 seconds for them
    assert spent < 470 and list(given.items()) == [*limits, ("launches", 490 - spent)]
    with tarfile.open(tmp_path / "out" / "results.tgz") as archive:
        assert len(archive.getnames()) == len(given)


def visit(tmp_path, monkeypatch, run, archive):
    monkeypatch.setattr(gpu, "environment", lambda args, scratch: {})
    monkeypatch.setattr(gpu, "facts_of_this_machine", lambda env: {"gpu": "NVIDIA H200"})
    monkeypatch.setattr(gpu, "run_apart", run)
    args = ["--only", "versions", "--only", "smoke", "--results", str(tmp_path / "results")]
    return gpu.main([*args, "--archive", str(archive)])


@pytest.mark.parametrize("full", ["archive, at first", "archive", "documents"])
def test_a_disk_that_is_full_ends_no_visit(full, tmp_path, monkeypatch, capsys):
    archive, ran, said = tmp_path / "results.tgz", [], []
    add, write, struck = tarfile.TarFile.addfile, results.write, []

    def fail(call, *args):
        if struck:
            raise OSError(28, "No space left\non device")
        return call(*args)

    def run(piece, path, **rest):
        done = {"piece": piece.name, "rows": [ROW], "failures": [], "machine": {"gpu": "x"}}
        # as the process of a piece does
        write(path, done | {"status": "running"})
        struck[:] = [] if ran and full == "archive, at first" else [True]
        ran.append(piece.name)
        end = time.monotonic() + 60
        while "archive" in full and struck and time.monotonic() < end:
            said.append(capsys.readouterr().out)
            # the thread that packs says so again and again
            if "".join(said).count("not packed") > 1 + len(ran):
                break
            time.sleep(0.01)
        return done | {"status": "ok", "seconds": 1}

    monkeypatch.setattr(processes, "PACK_EVERY", 0.05)
    if full == "documents":
        monkeypatch.setattr(results, "write", lambda *args: fail(write, *args))
    else:
        monkeypatch.setattr(tarfile.TarFile, "addfile", lambda *args: fail(add, *args))
    code = visit(tmp_path, monkeypatch, run, archive)
    assert ran == ["versions", "smoke"] and code == (full != "archive, at first")
    said.append(capsys.readouterr().out)
    wrong = [line for line in "".join(said).splitlines() if "No space" in line]
    assert wrong and all("No space left on device" in line for line in wrong)
    struck.clear()
    processes.pack(tmp_path / "results", archive)
    for name in ran:
        assert rows_of(archive, f"results/{name}.json") == [ROW]


def test_a_packer_that_is_killed_leaves_the_former_archive(tmp_path, monkeypatch):
    where, archive = tmp_path / "nvidia-h200", tmp_path / "out" / "results.tgz"
    running = {"status": "running", "machine": {"gpu": "x"}, "rows": [ROW], "failures": []}
    results.write(where / "versions.json", {"status": "ok"} | document())
    results.write(where / processes.RUNNING / "headline.json", running)
    log = where / processes.RUNNING / "headline.log"
    log.write_bytes(random.Random(0).randbytes(1 << 20) + b"the end")
    processes.pack(where, archive)
    whole = archive.read_bytes()
    assert len(whole) < 2 * processes.LOG_BYTES
    (where / "versions.json").unlink()

    def killed(*member):
        raise KeyboardInterrupt

    monkeypatch.setattr(tarfile.TarFile, "addfile", killed)
    with pytest.raises(KeyboardInterrupt):
        processes.pack(where, archive)
    assert archive.read_bytes() == whole
    home = tmp_path / "there"
    with tarfile.open(archive) as packed:
        packed.extractall(home, filter="data")
    assert (home / where.name / "headline.log").read_bytes().endswith(b"the end")
    taken = results.take(home, tmp_path / "results")
    statuses = {path.stem: results.read(path)["status"] for path in taken}
    assert statuses == {"versions": "ok", "headline": "crashed"}


def test_wheels_are_unpacked_for_the_pieces(tmp_path):
    with zipfile.ZipFile(tmp_path / "peer-1-py3-none-any.whl", "w") as wheel:
        wheel.writestr("peer/__init__.py", "x = 1\n")
    site = gpu.unpack_wheels(tmp_path, tmp_path / "site")
    assert (site / "peer" / "__init__.py").is_file()


def test_the_log_of_a_piece_names_files_as_the_checkout_does(tmp_path):
    """A result is committed: it does not say where the sources lay on that machine."""
    (tmp_path / "x.log").write_text(f"{results.ROOT}/bench/aot.py:73: UserWarning\n")
    document = processes.ended(tmp_path / "x.json", "x", "crashed", "exit code 1")
    assert document["log"] == ["bench/aot.py:73: UserWarning"]
