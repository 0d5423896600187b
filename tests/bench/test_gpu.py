"""`python -m bench.gpu` on a CPU: all pieces run at toy sizes, and errors make it fail."""

import os
import subprocess
import sys
import time
import zipfile
from pathlib import Path
from types import SimpleNamespace

import pytest

from bench import bench_topk_kl_mlm_loss, gpu
from bench.on_gpu import pieces, processes
from bench.shared import harness, results
from bench.shared.recorder import Recorder
from growkern.ops.backend.launch import HAS_TRITON
from tests.bench.documents import ROW

ROOT = Path(__file__).parents[2]
needs_triton = pytest.mark.skipif(not HAS_TRITON, reason="Triton is not installed")
TOY_PIECES = {piece.name: piece for piece in pieces.PIECES}


def command(*args, broken="", tmp_path=None):
    """Run `python -m bench.gpu`. Every process first runs the lines in `broken`."""
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    if broken:
        (tmp_path / "sitecustomize.py").write_text(broken)
        env["PYTHONPATH"] = str(tmp_path)
    line = [sys.executable, "-m", "bench.gpu", *args]
    return subprocess.run(line, cwd=ROOT, env=env, capture_output=True, text=True)


@needs_triton
def test_dry_run_takes_every_piece_to_its_end(tmp_path):
    done = command("--dry-run", "--jobs", "2", "--results", str(tmp_path))
    assert done.returncode == 0, done.stdout + done.stderr
    for name in TOY_PIECES:
        document = results.read(tmp_path / f"{name}.json")
        tool = {"sanitize": "compute-sanitizer", "counters": "ncu"}.get(name)
        if tool and document["status"] == "skipped":
            assert document["reason"] == f"{tool} is neither under CUDA_HOME nor on the PATH"
            continue
        assert document["status"] == "ok" and document["rows"], name
        assert document["toy"] and document["machine"]["sources"] == results.source_digest()
        assert not document["failures"]


BROKEN = """
import os
if os.environ.get("TRITON_INTERPRET") == "1":
    from growkern.ops.expand import op
    right = op.KERNELS["triton"]
    def wrong(call):
        right(call)
        call.out[-1, -1] *= 1.02
    op.KERNELS["triton"] = wrong
"""


@needs_triton
def test_a_wrong_kernel_makes_the_command_fail(tmp_path):
    args = ("--dry-run", "--only", "check_expand", "--results", str(tmp_path / "results"))
    done = command(*args, broken=BROKEN, tmp_path=tmp_path)
    assert done.returncode == 1, done.stdout + done.stderr
    document = results.read(tmp_path / "results" / "check_expand.json")
    assert document["status"] == "failed" and document["failures"]
    assert "check_expand" in done.stdout and "allowed" in done.stdout


def test_a_missing_gpu_and_unknown_pieces_are_named(capsys, monkeypatch):
    monkeypatch.setattr(gpu, "facts_of_this_machine", lambda env: {"python": "3"})
    assert gpu.main(["--only", "ceilings"]) == 2
    assert "--dry-run" in capsys.readouterr().out
    with pytest.raises(SystemExit, match="no piece 'ceiling'"):
        gpu.main(["--dry-run", "--only", "ceiling"])


ENDS = {
    "failed": ("raise RuntimeError('no memory left')", "no memory left"),
    "crashed": ("os.kill(os.getpid(), 11)", "exit code -11"),
    "timeout": ("time.sleep(600)", "stopped after"),
}


def test_a_piece_that_breaks_keeps_its_rows(tmp_path, monkeypatch):
    env = {**os.environ, "PYTHONPATH": f"{tmp_path}{os.pathsep}{ROOT}"}
    piece, limit_s = TOY_PIECES["ceilings"], 300.0

    def clock():
        """The limit is over as soon as the piece has its row, however slow the machine is."""
        has_row = bool(results.read(path).get("rows"))
        return time.perf_counter() + (limit_s if has_row and status == "timeout" else 0)

    monkeypatch.setattr(processes, "time", SimpleNamespace(perf_counter=clock))
    for status, (end, why) in ENDS.items():
        path = tmp_path / f"{status}.json"
        (tmp_path / "sitecustomize.py").write_text(
            "import os, time\n"
            "import bench.on_gpu.ceilings\n"
            "def run(recorder):\n"
            "    recorder.add({'ceiling': 'before'})\n"
            f"    {end}\n"
            "bench.on_gpu.ceilings.run = run\n"
        )
        document = processes.run_apart(piece, path, env=env, toy=True, limit_s=limit_s)
        assert document["status"] == status
        assert document["rows"] == [{"ceiling": "before"}]
        assert why in document["failures"][0]


def test_a_benchmark_that_breaks_keeps_the_rows_that_it_has_measured(tmp_path, monkeypatch):
    """Here the second loss of a shape fails, after the first one was measured."""
    steps = [{"wall s": 0.5}]

    def measure_once(step, repeats):
        return steps.pop() if steps else pytest.fail("no memory left")

    for name in ("collector", "observer", "compiler"):
        monkeypatch.setattr(harness, name, getattr(harness, name))
    for name in ("SHAPES", "KS"):
        monkeypatch.setattr(bench_topk_kl_mlm_loss, name, None)
    monkeypatch.setattr(sys, "argv", [])
    monkeypatch.setattr(bench_topk_kl_mlm_loss, "measure", measure_once)
    recorder = Recorder("topk", tmp_path / "topk.json", toy=True)
    with pytest.raises(pytest.fail.Exception):
        TOY_PIECES["bench_topk_kl_mlm_loss"].run(recorder)
    (row,) = results.read(recorder.path)["rows"]
    assert row["provider"] == "live teacher" and row["wall s"] == 0.5


STARTS_A_CHILD = """
import subprocess, sys, time
import bench.on_gpu.ceilings
def run(recorder):
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    recorder.add({"ceiling": "before", "child": child.pid, "own": os.getpid()})
    time.sleep(600)
bench.on_gpu.ceilings.run = run
"""


NEVER_FORKED = """
from bench.on_gpu import processes
processes._Forked = lambda *piece: processes._Started(*piece, dict(os.environ), True)
"""


def is_alive(pid):
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state != "Z"


@needs_triton
@pytest.mark.skipif(not Path("/proc").is_dir(), reason="reads /proc")
@pytest.mark.parametrize("forked", [False, True], ids=["started", "forked"])
def test_a_kill_leaves_no_child_behind_and_loses_no_row(forked, tmp_path):
    out = tmp_path / "results"
    broken = "import os\nif os.environ.get('TRITON_INTERPRET') == '1':\n"
    broken += STARTS_A_CHILD.replace("\n", "\n    ")
    if not forked:
        broken += NEVER_FORKED.replace("\n", "\n    ")
    (tmp_path / "sitecustomize.py").write_text(broken)
    env = {**os.environ, "PYTHONPATH": f"{tmp_path}{os.pathsep}{ROOT}", "TRITON_INTERPRET": "1"}
    line = [sys.executable, "-m", "bench.gpu", "--dry-run", "--only", "ceilings"]
    parent = subprocess.Popen([*line, "--results", str(out)], cwd=ROOT, env=env)
    rows, end = [], time.monotonic() + 120
    while not rows and time.monotonic() < end:
        time.sleep(0.1)
        rows = results.read(out / ".running" / "ceilings.json").get("rows", [])
    parent.kill()
    parent.wait()
    (row,) = rows
    while any(map(is_alive, (row["child"], row["own"]))) and time.monotonic() < end:
        time.sleep(0.1)
    assert not is_alive(row["own"]) and not is_alive(row["child"])
    processes.gather(out / ".running", out)
    kept = results.read(out / "ceilings.json")
    assert kept["rows"] == rows and kept["status"] == "crashed"
    assert "killed" in kept["failures"][0] and not list((out / ".running").glob("*.json"))


CRASHES_ONCE = """
import os
if os.environ.get("TRITON_INTERPRET") == "1":
    import bench.on_gpu.ceilings
    right = bench.on_gpu.ceilings.run
    def run(recorder):
        recorder.add({"ceiling": "before"})
        if not os.path.exists(FLAG):
            open(FLAG, "w").close()
            os.kill(os.getpid(), 11)
        right(recorder)
    bench.on_gpu.ceilings.run = run
"""


@needs_triton
def test_a_second_run_resumes_where_the_first_one_stopped(tmp_path):
    """Only pieces that crashed or whose file is broken run again."""
    out = tmp_path / "results"
    names = [word for name in ("ceilings", "bench_expand", "scaling") for word in ("--only", name)]
    broken = f"FLAG = {str(tmp_path / 'flag')!r}\n" + CRASHES_ONCE
    args = ("--dry-run", "--results", str(out), *names)
    first = command(*args, broken=broken, tmp_path=tmp_path)
    assert first.returncode == 1 and "crashed ceilings" in first.stdout, first.stdout
    assert results.read(out / "ceilings.json")["rows"] == [{"ceiling": "before"}]
    assert results.read(out / "scaling.json")["status"] == "ok"
    (out / "scaling.json").write_text("{")
    second = command(*args, broken=broken, tmp_path=tmp_path)
    assert second.returncode == 0 and "ok ceilings" in second.stdout, second.stdout
    assert "done before bench_expand" in second.stdout and "ok scaling" in second.stdout
    assert len(results.read(out / "ceilings.json")["rows"]) > 1


def test_done_pieces_are_skipped(tmp_path, monkeypatch, capsys):
    facts = results.machine()
    results.write(tmp_path / "ceilings.json", {"status": "ok", "machine": facts, "rows": [ROW]})
    monkeypatch.setattr(gpu, "facts_of_this_machine", lambda env: facts)
    monkeypatch.setattr(gpu, "run_apart", None)
    args = ["--dry-run", "--only", "ceilings", "--results", str(tmp_path)]
    assert gpu.main(args) == 0
    assert "done before" in capsys.readouterr().out
    # without time left no piece starts, and that is no failure
    assert gpu.main([*args, "--again", "--budget", "3"]) == 0
    assert "of the budget" in capsys.readouterr().out


def test_a_cache_is_filled_without_a_gpu_and_used_with_one(tmp_path, monkeypatch, capsys):
    filled, given = [], []
    monkeypatch.setattr(gpu.fill, "main", lambda argv: filled.append(argv) or 0)
    monkeypatch.setattr(gpu, "facts_of_this_machine", lambda env: given.append(env) or {})
    args = ["--cache", str(tmp_path), "--only", "ceilings", "--results", str(tmp_path / "results")]
    assert gpu.main(args) == 0 and filled == [[str(tmp_path)]]
    # files as Triton leaves them, from another directory
    group = tmp_path / "triton" / "ABC" / "__grp__kernel.json"
    group.parent.mkdir(parents=True)
    group.write_text('{"child_paths": {"kernel.cubin": "/gone/triton/ABC/kernel.cubin"}}')
    facts = {"gpu": "NVIDIA H200"}
    monkeypatch.setattr(gpu, "facts_of_this_machine", lambda env: given.append(env) or facts)
    monkeypatch.setattr(gpu, "run_apart", lambda piece, path, **rest: {"status": "skipped"})
    assert gpu.main(args) == 0 and len(filled) == 1
    assert str(group.parent / "kernel.cubin") in group.read_text()
    assert given[-1]["TRITON_CACHE_DIR"] == str(tmp_path / "triton")


def test_the_first_half_hour_measures_before_it_checks_everything():
    """Every launch once, the limits, the largest shape; then the checks of the main ops."""
    names = [piece.name for piece in pieces.PIECES]
    assert names[:6] == [
        *("smoke", "ceilings", "headline", "bench_expand", "check_loss", "check_cuda")
    ]
    assert sum(piece.limit_s for piece in pieces.PIECES[:6]) <= 1800
    assert names.index("bench_linear_bert") < names.index("check_suite")


def test_wheels_are_unpacked_for_the_pieces(tmp_path):
    with zipfile.ZipFile(tmp_path / "peer-1-py3-none-any.whl", "w") as wheel:
        wheel.writestr("peer/__init__.py", "x = 1\n")
    site = gpu.unpack_wheels(tmp_path, tmp_path / "site")
    assert (site / "peer" / "__init__.py").is_file()
