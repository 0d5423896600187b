"""The command for a GPU, on a CPU: it takes the same path, and what is wrong makes it fail."""

import os
import subprocess
import sys
import time
import zipfile
from pathlib import Path

import pytest
import torch
import transformers

from bench import gpu
from bench.on_gpu import (
    check_cuda,
    check_expand,
    check_loss,
    check_options,
    check_suite,
    pieces,
    processes,
    sanitize,
)
from bench.on_gpu.recorder import Recorder, Skip
from bench.shared import llama_growth, results
from growkern.ops.backend.launch import HAS_TRITON
from tests.ops import cuda_emulator

# masked lanes are inf - inf in NumPy, which says so; a kernel drops them
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning:triton.*")

ROOT = Path(__file__).parents[2]
needs_triton = pytest.mark.skipif(not HAS_TRITON, reason="Triton is not installed")
TOY_PIECES = {piece.name: piece for piece in pieces.PIECES}


def command(*args, broken="", tmp_path=None):
    """`python -m bench.gpu` with some lines run in every process before anything else."""
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
        if name == "sanitize" and document["status"] == "skipped":
            assert (
                document["reason"] == "compute-sanitizer is neither under CUDA_HOME nor on the PATH"
            )
            continue
        assert document["status"] == "ok" and document["rows"], name
        assert document["toy"] and document["machine"]["sources"] == results.source_digest()
        assert not document["failures"]


BROKEN = """
import os
if os.environ.get("TRITON_INTERPRET") == "1":
    from growkern.ops import expand
    right = expand.KERNELS["triton"]
    def wrong(out, *args):
        right(out, *args)
        out[-1, -1] *= 1.02
    expand.KERNELS["triton"] = wrong
"""


@needs_triton
def test_a_wrong_kernel_makes_the_command_fail(tmp_path):
    args = ("--dry-run", "--only", "check_expand", "--results", str(tmp_path / "results"))
    done = command(*args, broken=BROKEN, tmp_path=tmp_path)
    assert done.returncode == 1, done.stdout + done.stderr
    document = results.read(tmp_path / "results" / "check_expand.json")
    assert document["status"] == "failed" and document["failures"]
    assert "check_expand" in done.stdout and "allowed" in done.stdout


def test_without_a_gpu_it_says_so_and_unknown_pieces_are_named(capsys):
    if not torch.cuda.is_available():
        assert gpu.main(["--only", "ceilings"]) == 2
        assert "--dry-run" in capsys.readouterr().out
    with pytest.raises(SystemExit, match="no piece 'ceiling'"):
        gpu.main(["--dry-run", "--only", "ceiling"])


ENDS = {
    "crashed": "os.kill(os.getpid(), 11)",
    "timeout": "time.sleep(600)",
    "failed": "raise RuntimeError('no memory left')",
}


@pytest.mark.parametrize("status", ENDS)
def test_a_piece_that_breaks_keeps_its_rows(status, tmp_path):
    (tmp_path / "sitecustomize.py").write_text(
        "import os, time\n"
        "import bench.on_gpu.ceilings\n"
        "def run(recorder):\n"
        "    recorder.add({'ceiling': 'before'})\n"
        f"    {ENDS[status]}\n"
        "bench.on_gpu.ceilings.run = run\n"
    )
    env = {**os.environ, "PYTHONPATH": f"{tmp_path}{os.pathsep}{ROOT}"}
    piece, path = TOY_PIECES["ceilings"], tmp_path / "ceilings.json"
    limit_s = 12 if status == "timeout" else 100
    document = processes.run_apart(piece, path, env=env, toy=True, limit_s=limit_s)
    assert document["status"] == status
    assert document["rows"] == [{"ceiling": "before"}]
    why = {"crashed": "exit code -11", "timeout": "after 12 s", "failed": "no memory left"}
    assert why[status] in document["failures"][0]


STARTS_A_CHILD = """
import subprocess, sys, time
import bench.on_gpu.ceilings
def run(recorder):
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    recorder.add({"ceiling": "before", "child": child.pid, "own": os.getpid()})
    time.sleep(600)
bench.on_gpu.ceilings.run = run
"""


STARTED_ALL_THE_SAME = """
from bench import processes
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
        broken += STARTED_ALL_THE_SAME.replace("\n", "\n    ")
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
def test_a_second_run_goes_on_where_the_first_one_stopped(tmp_path):
    """A piece that dies is done again, one that is right is not; a file that is broken is."""
    out = tmp_path / "results"
    names = ("--only", "ceilings", "--only", "scaling")
    flag = f"FLAG = {str(tmp_path / 'flag')!r}\n"
    args = ("--dry-run", "--results", str(out), *names)
    first = command(*args, broken=flag + CRASHES_ONCE, tmp_path=tmp_path)
    assert first.returncode == 1 and "crashed ceilings" in first.stdout, first.stdout
    assert results.read(out / "ceilings.json")["rows"] == [{"ceiling": "before"}]
    assert results.read(out / "scaling.json")["status"] == "ok"
    second = command(*args, broken=flag + CRASHES_ONCE, tmp_path=tmp_path)
    assert second.returncode == 0 and "ok ceilings" in second.stdout, second.stdout
    assert "done before scaling" in second.stdout
    assert len(results.read(out / "ceilings.json")["rows"]) > 1
    (out / "scaling.json").write_text("{")
    third = command(*args)
    assert "done before ceilings" in third.stdout and "ok scaling" in third.stdout, third.stdout


# ------------------------------------------------------------------ the checks


@pytest.fixture
def recorder(tmp_path):
    return Recorder("test", tmp_path / "document.json", toy=True)


def expand_case(recorder, layout="strided"):
    rng = torch.Generator(recorder.device).manual_seed(0)
    case = check_expand.make_case((9, 7, 20, 33), torch.float32, rng, upper=True, noise="col")
    out = check_expand.in_nan((20, 33), torch.float32, rng, layout)
    check_expand.check_case(recorder, "case", case, out)
    return recorder.document["failures"]


def one_wrong(out, base):
    out[-1, -1] *= 1 + 1e-5


def one_missing(out, base):
    out[3, 4] = float("nan")


def one_outside(out, base):
    base.view(-1)[-1] = 0.0


@needs_triton
@pytest.mark.parametrize("harm", [None, one_wrong, one_missing, one_outside])
def test_check_of_expand_sees_every_kind_of_error(harm, recorder, monkeypatch):
    right = check_expand.expand

    def wrong(*args, out, **kwargs):
        right(*args, out=out, **kwargs)
        if harm is not None:
            harm(out, out._base)

    monkeypatch.setattr(check_expand, "expand", wrong)
    failures = expand_case(recorder)
    assert bool(failures) == (harm is not None), failures


def test_truth_of_expand_is_the_reference(device):
    """One truth is checked with the other: indexing in float64 and the op's definition."""
    rng = torch.Generator(device).manual_seed(0)
    for upper, noise in ((False, ""), (True, "col"), (True, "row")):
        case = check_expand.make_case((9, 7, 20, 33), torch.float64, rng, upper=upper, noise=noise)
        at = torch.tensor([0, 3, 19], device=device)
        truth = check_expand.truth_rows(case, at)
        reference = check_expand.expand(**case, backend="reference")[at]
        torch.testing.assert_close(truth, reference, rtol=1e-14, atol=0)


def wrong_gradient(loss, z):
    # a term that is 0 and whose derivative is not
    return loss + 0.02 * (z[-1, -1] - z[-1, -1].detach())


def wrong_sum(loss, z):
    return loss * 1.001


def unwritten_row(loss, z):
    return loss + float("nan") * (z[0] - z[0].detach()).sum()


@needs_triton
@pytest.mark.parametrize("harm", [None, wrong_gradient, wrong_sum, unwritten_row])
def test_check_of_the_loss_sees_every_kind_of_error(harm, recorder, monkeypatch):
    right = check_loss.kl_mlm_loss

    def wrong(z, *args, **kwargs):
        loss = right(z, *args, **kwargs)
        return loss if harm is None else harm(loss, z)

    monkeypatch.setattr(check_loss, "kl_mlm_loss", wrong)
    rng = torch.Generator(recorder.device).manual_seed(0)
    student, teacher = check_loss.make_logits(4, 50, torch.float32, rng)
    labels = check_loss.make_labels(4, 50, rng)
    check_loss.check_rows(recorder, "rows", student, teacher, labels)
    assert bool(recorder.document["failures"]) == (harm is not None)


@needs_triton
@pytest.mark.parametrize("option", ["label_smoothing", "z_loss", "divergence", "row_weights", None])
def test_check_of_the_options_sees_one_that_is_ignored(option, recorder, monkeypatch):
    right = check_options.kl_mlm_loss

    def wrong(*args, **options):
        options.pop(option, None)
        if option == "divergence":
            options.pop("beta", None)
        return right(*args, **options)

    monkeypatch.setattr(check_options, "kl_mlm_loss", wrong)
    check_options._rows(recorder)
    failures = recorder.document["failures"]
    assert bool(failures) == (option is not None)
    assert all(option in failure for failure in failures)


@needs_triton
def test_check_of_the_work_list_sees_a_tensor_that_is_left_out(recorder, monkeypatch):
    right = check_expand.expand_many
    monkeypatch.setattr(check_expand, "expand_many", lambda jobs: right(jobs[:-1]))
    check_expand._many(recorder)
    assert recorder.document["failures"]


@pytest.mark.parametrize("share", [1.0, 1.01])
def test_check_of_the_cuda_kernels_runs_their_source(share, recorder, monkeypatch):
    """The emulated kernel answers, and one that is told a wrong temperature fails."""
    if torch.cuda.is_available():
        pytest.skip("the kernels themselves run: check_suite and check_cuda")
    right, called = cuda_emulator.emulate, []

    def emulate(kernel, grid, args, device=None):
        called.append(kernel.name)
        if kernel.name == "kl_mlm_rows":
            args.inv_t *= share
        right(kernel, grid, args)

    monkeypatch.setattr(cuda_emulator, "emulate", emulate)
    monkeypatch.setattr(check_loss, "CHECKS", (check_loss._near,))
    check_cuda.run(recorder)
    assert set(called) == {"kl_mlm_rows", "expand_rows"}
    assert bool(recorder.document["failures"]) == (share != 1)


def test_nothing_recorded_is_a_failure_and_nan_is_no_error(recorder):
    recorder.check("case", float("nan"), 1.0)
    assert recorder.document["failures"] and not recorder.document["rows"][0]["ok"]
    empty = Recorder("empty", recorder.path, toy=True)
    assert empty.finish() == "failed"


def test_red_tests_are_failures(recorder, tmp_path, monkeypatch):
    (tmp_path / "tests" / "ops").mkdir(parents=True)
    (tmp_path / "tests" / "ops" / "test_expand.py").write_text(
        "def test_empty(): pass\ndef test_empty_red(): assert 1 == 2\n"
    )
    monkeypatch.setattr(check_suite, "ROOT", tmp_path)
    check_suite.run(recorder)
    (row,) = recorder.document["rows"]
    assert (row["passed"], row["failed"]) == (1, 1)
    assert "test_empty_red" in recorder.document["failures"][0]


@pytest.mark.parametrize("code", [0, sanitize.FOUND])
def test_what_the_sanitizer_finds_is_a_failure(code, recorder, tmp_path, monkeypatch):
    tool = tmp_path / "compute-sanitizer"
    # what the checks would leave behind, and the tool's verdict
    tool.write_text(
        f'#!/bin/sh\nfor last; do :; done\necho \'{{"status": "ok"}}\' > "$last"\nexit {code}\n'
    )
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    sanitize.run(recorder)
    assert len(recorder.document["rows"]) == len(sanitize.TOOLS) * len(sanitize.CHECKS)
    assert bool(recorder.document["failures"]) == (code != 0)
    monkeypatch.setenv("PATH", str(tmp_path / "nowhere"))
    with pytest.raises(Skip):
        sanitize.run(recorder)


def test_the_calls_of_a_growth_make_every_tensor_of_the_target():
    sizes, target = llama_growth.SIZES["toy"]
    follows = {"num_attention_heads": 6, "num_key_value_heads": 3, "intermediate_size": 30}
    config = transformers.LlamaConfig(**(sizes | target | follows))
    with torch.device("meta"):
        model = transformers.LlamaForCausalLM(config)
    expected = {k: tuple(v.shape) for k, v in model.state_dict().items() if k != "lm_head.weight"}
    for method in ("fpi", "aki"):
        calls = llama_growth.expand_calls("toy", method)
        made = {call.name: call.shape[-len(expected[call.name]) :] for call in calls}
        assert made == expected and len(calls) == len(expected)
        assert any(call.has_upper for call in calls) == (method == "aki")
        assert any("col_noise" in call.given for call in calls)


# ------------------------------------------------------------------ its results


ROW = {"provider": "ours"}


def document(**changes):
    facts = {"commit": "abc", "dirty": False, "sources": "1", "date": "d", "torch": "2"}
    facts |= {"triton": "3", "gpu": "NVIDIA H200"} | changes.pop("machine", {})
    return {"status": "ok", "machine": facts, "rows": [ROW]} | changes


# each is worse than the one before it, and nothing that comes later in a rank makes up for it
RANKS = {
    "best": document(rows=[ROW, ROW]),
    "fewer rows": document(),
    "failed": document(status="failed", rows=[ROW] * 9),
    "timeout": document(status="timeout", rows=[ROW] * 9),
    "no version": document(machine={"triton": None}, rows=[ROW] * 9),
    "no gpu": document(machine={"gpu": None, "python": "3"}, rows=[ROW] * 9),
    "said": document(machine={"dirty": None, "python": "3"}, rows=[ROW] * 9),
    "dirty": document(machine={"dirty": True, "python": "3"}, rows=[ROW] * 9),
    "no commit": document(machine={"commit": "unknown", "dirty": None}, rows=[ROW] * 9),
    "toy": document(toy=True, rows=[ROW] * 9),
}


def test_every_rule_of_worth():
    ranked = [results.rank(x) for x in RANKS.values()]
    assert ranked == sorted(ranked, reverse=True) and len(set(ranked)) == len(ranked)
    # what could not be asked counts for nothing, and is asked again once it can be
    unasked = document(rows=[ROW, {"provider": "theirs", "why not": "x is not installed: no x"}])
    assert results.rank(unasked) == results.rank(RANKS["fewer rows"])
    assert results.lacks_peers(unasked) and not results.lacks_peers(RANKS["best"])


@pytest.mark.parametrize("name", list(RANKS)[1:])
def test_worse_results_lie_beside_better_ones(name, tmp_path):
    path, worse, best = tmp_path / "piece.json", RANKS[name], RANKS["best"]
    assert results.keep(path, worse) == path, "the first of all is kept"
    assert results.keep(path, best) == path
    aside = results.keep(path, worse)
    assert aside != path and results.read(path) == best and results.read(aside) == worse
    newer = document(machine={"date": "e"}, rows=[ROW, ROW])
    assert results.keep(path, newer) == path and results.read(path) == newer
    assert not aside.exists(), "the fault it told of is mended"
    assert results.keep(path, best) == aside and results.read(path) == newer, "an older one"


def test_what_lies_aside_is_not_replaced_by_worse_of_the_same_sources(tmp_path):
    path = tmp_path / "piece.json"
    results.keep(path, RANKS["best"])
    aside = results.keep(path, RANKS["dirty"])
    results.keep(path, RANKS["no commit"])
    assert results.read(aside) == RANKS["dirty"]
    other = document(machine={"commit": "unknown", "dirty": None, "sources": "2"})
    results.keep(path, other)
    assert results.read(aside) == other


def test_a_machine_without_git_knows_what_it_has_done(tmp_path):
    """It cannot replace the committed result of older sources, and need not run for ever."""
    path, facts = tmp_path / "piece.json", document(machine={"sources": "2"})["machine"]
    results.keep(path, document())
    assert not results.is_done(path, facts)
    done = document(machine={"sources": "2", "commit": "unknown", "dirty": None})
    assert results.keep(path, done) == results.aside_of(path)
    assert results.is_done(path, facts) and results.is_done(path, document()["machine"])


def test_results_of_another_machine_are_taken_by_the_same_rule(tmp_path, monkeypatch):
    """What was taken without git from these very sources gets their commit."""
    monkeypatch.setattr(results, "git_facts", lambda: {"commit": "fff", "dirty": False})
    monkeypatch.setattr(results, "source_digest", lambda: "2")
    there, here = tmp_path / "there", tmp_path / "here"
    nowhere = {"commit": "unknown", "dirty": None, "date": "e"}
    ours = document(machine=nowhere | {"sources": "2"})
    results.write(there / "gpu" / "mine.aside.json", ours)
    results.write(there / "gpu" / "other.json", document(machine=nowhere | {"sources": "3"}))
    for name in ("mine", "other"):
        results.write(here / "gpu" / f"{name}.json", document())
    results.take(there, here)
    mine = results.read(here / "gpu" / "mine.json")
    assert mine["machine"] == ours["machine"] | {"commit": "fff", "dirty": False}
    assert results.read(here / "gpu" / "other.json") == document()
    assert results.read(here / "gpu" / "other.aside.json")["machine"]["sources"] == "3"


def test_a_piece_is_done_for_these_sources_on_this_gpu():
    facts = document()["machine"]
    assert results.same_run(document(), facts)
    assert not results.same_run(document(status="failed"), facts)
    for key in ("sources", "gpu", "torch", "triton"):
        assert not results.same_run(document(), facts | {key: "other"})


def test_done_pieces_are_skipped(tmp_path, monkeypatch, capsys):
    facts = results.machine()
    results.write(tmp_path / "ceilings.json", {"status": "ok", "machine": facts, "rows": [ROW]})
    monkeypatch.setattr(gpu, "facts_of_this_machine", lambda env: facts)
    monkeypatch.setattr(gpu, "run_apart", None)
    args = ["--dry-run", "--only", "ceilings", "--results", str(tmp_path)]
    assert gpu.main(args) == 0
    assert "done before" in capsys.readouterr().out
    # no time left: nothing is started, and that is no failure
    assert gpu.main([*args, "--again", "--budget", "3"]) == 0
    assert "of the budget" in capsys.readouterr().out


def test_wheels_are_unpacked_for_the_pieces(tmp_path):
    with zipfile.ZipFile(tmp_path / "peer-1-py3-none-any.whl", "w") as wheel:
        wheel.writestr("peer/__init__.py", "x = 1\n")
    site = gpu.unpack_wheels(tmp_path, tmp_path / "site")
    assert (site / "peer" / "__init__.py").is_file()
