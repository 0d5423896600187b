"""python -m bench.gpu: all a GPU has to show, on a bare machine, from the source tree.

Checks, benchmarks, training steps and tuning, in pieces of at most eight minutes. Every piece is
a process of its own with a time limit; one that is done for these sources on this GPU is not done
again. Results go to bench/results/<gpu>/<piece>.json, `python -m bench.report` makes tables and
pictures of them.

    python -m bench.gpu --list
    python -m bench.gpu --budget 540            # start nothing that cannot end in time
    python -m bench.gpu --only check_expand --only bench_expand
    python -m bench.gpu --dry-run               # no GPU: toy sizes, a minute of one core

Exit code 0: everything that ran is right; 1: a check failed or a piece did not end; 2: no GPU.
"""

import argparse
import contextlib
import json
import multiprocessing
import os
import signal
import subprocess
import sys
import tempfile
import time
import traceback
import zipfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from rich.console import Console

from bench import results
from bench.pieces import PIECES, Piece
from bench.recorder import Recorder, Skip

MARKS = {"ok": "[green]ok[/]", "skipped": "[yellow]skipped[/]", "done": "[dim]done before[/]"}
LOG_LINES = 12


# ------------------------------------------------------------------ one piece


def run_here(piece: Piece, path: Path, *, toy: bool) -> str:
    """Run a piece in this process and leave its document at `path`: its status."""
    recorder = Recorder(piece.name, path, toy=toy)
    try:
        piece.run(recorder)
    except Skip as reason:
        recorder.document |= {"status": "skipped", "reason": str(reason)}
    except Exception as error:
        traceback.print_exc()
        recorder.fail(f"{type(error).__name__}: {error}"[:2000])
    return recorder.finish()


# what every piece imports; not the library, whose kernels are interpreted or not from then on
PRELOADED = ["torch", "torch._dynamo", "triton", "bench.report"]


class _Forked:
    """A piece in a fork of a Python that has imported PyTorch already, to be used like Popen.

    For dry runs: imports were most of their time. On a GPU nothing may be shared.
    """

    def __init__(self, piece: Piece, path: Path, log: Path) -> None:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(PRELOADED)
        arguments = (piece.name, path, log)
        self._process = context.Process(target=_run_forked, args=arguments)
        self._process.start()
        self.pid: int = self._process.pid or 0

    def wait(self, timeout: float | None = None) -> None:
        self._process.join(timeout)
        if self._process.exitcode is None:
            raise subprocess.TimeoutExpired("a piece", timeout or 0)

    def poll(self) -> int | None:
        return self._process.exitcode

    @property
    def returncode(self) -> int | None:
        return self._process.exitcode


def _run_forked(name: str, path: Path, log: Path) -> None:
    os.setsid()
    os.chdir(results.ROOT)
    with log.open("w") as out:
        os.dup2(out.fileno(), 1)
        os.dup2(out.fileno(), 2)
    (piece,) = chosen([name])
    sys.exit(run_here(piece, path, toy=True) not in ("ok", "skipped"))


def _start(piece: Piece, path: Path, log: Path, env: dict[str, str], toy: bool) -> Any:
    command = [sys.executable, "-m", "bench.gpu", "--here", piece.name, "--document", str(path)]
    with log.open("w") as out:
        return subprocess.Popen(
            command + ["--toy"] * toy,
            cwd=results.ROOT,
            env=env,
            stdout=out,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            start_new_session=True,
        )


def run_apart(
    piece: Piece,
    path: Path,
    *,
    env: dict[str, str],
    toy: bool,
    limit_s: float,
    console: Console | None = None,
    forked: bool = False,
) -> dict[str, Any]:
    """Run a piece in a process of its own, and end that with all it started: its document."""
    path.parent.mkdir(parents=True, exist_ok=True)
    log, start = path.with_suffix(".log"), time.perf_counter()
    if forked and not piece.own_python:
        child: Any = _Forked(piece, path, log)
    else:
        child = _start(piece, path, log, env, toy)
    try:
        timed_out = _wait(child, piece, path, start + limit_s, console)
    finally:
        # what it has started (compilers, tests) is in its session
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child.pid, signal.SIGKILL)
        child.wait()
    document = results.read(path) or {"piece": piece.name, "rows": [], "failures": []}
    if document.get("status", "running") == "running":
        document["status"] = "timeout" if timed_out else "crashed"
        why = f"stopped after {limit_s:.0f} s" if timed_out else f"exit code {child.returncode}"
        document["failures"].append(why)
    if document["status"] not in ("ok", "skipped"):
        document["log"] = log.read_text(errors="replace").splitlines()[-60:]
    document["seconds"] = round(time.perf_counter() - start, 1)
    return document


def _wait(child: Any, piece: Piece, path: Path, end: float, console: Console | None) -> bool:
    """Wait for the child and show how far it is; True when its time was up first."""
    start = time.perf_counter()
    with console.status(piece.name) if console else contextlib.nullcontext() as status:
        while (now := time.perf_counter()) < end:
            try:
                child.wait(timeout=min(1.0, end - now))
                return False
            except subprocess.TimeoutExpired:
                if status:
                    rows = len(results.read(path).get("rows", ()))
                    status.update(f"{piece.name}: {now - start:.0f} s, {rows} rows  {piece.about}")
    return child.poll() is None


# ------------------------------------------------------------------ all pieces


def environment(args: argparse.Namespace, scratch: Path) -> dict[str, str]:
    """What the pieces find around them."""
    env = {**os.environ, "PYTHONUNBUFFERED": "1", "HF_HUB_OFFLINE": "1"}
    # kernels interpreted on a GPU machine would check and measure nothing
    env |= {"TRITON_INTERPRET": "0", "TOKENIZERS_PARALLELISM": "false"}
    if args.commit:
        env["GROWKERN_COMMIT"] = args.commit
    if args.dry_run:
        env |= {"TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": ""}
    if args.wheels:
        site = unpack_wheels(args.wheels, scratch / "site")
        env["PYTHONPATH"] = os.pathsep.join([str(site), os.environ.get("PYTHONPATH", "")])
    return env


def unpack_wheels(wheels: Path, site: Path) -> Path:
    """Unpacked rather than read in place: Triton needs the source files of its kernels."""
    for wheel in sorted(wheels.glob("*.whl")):
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(site)
    return site


def facts_of_this_machine(env: dict[str, str]) -> dict[str, Any]:
    """Asked in a child: this process never touches the GPU, so no piece can spoil it."""
    code = "import json; from bench.results import machine; print(json.dumps(machine()))"
    line = [sys.executable, "-c", code]
    done = subprocess.run(line, cwd=results.ROOT, env=env, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"the machine cannot be described:\n{done.stderr}")
    return json.loads(done.stdout.splitlines()[-1])


def chosen(names: list[str]) -> list[Piece]:
    known = [piece.name for piece in PIECES]
    if wrong := [name for name in names if name not in known]:
        raise SystemExit(f"no piece {wrong[0]!r}: there are {', '.join(known)}")
    return [piece for piece in PIECES if not names or piece.name in names]


def run_all(args: argparse.Namespace, scratch: Path, console: Console) -> int:
    env = environment(args, scratch)
    facts = facts_of_this_machine(env)
    if "gpu" not in facts and not args.dry_run:
        console.print("no GPU found by PyTorch; --dry-run takes the same path at toy sizes")
        return 2
    where = args.results or results.RESULTS / results.slug(facts)
    if args.dry_run:
        where = args.results or scratch / "results"
        # forks find it around them
        os.environ.update(env)
    console.print("  ".join(f"{key} {value}" for key, value in facts.items()), style="dim")
    end = time.perf_counter() + args.budget

    def one(piece: Piece) -> dict[str, Any]:
        kept = where / f"{piece.name}.json"
        if not args.again and results.same_run(results.read(kept), facts):
            return {"status": "done"}
        left = end - time.perf_counter()
        if left < min(piece.limit_s, args.shortest):
            return {"status": "skipped", "reason": f"{left:.0f} s of the budget are left"}
        return run_apart(
            piece,
            scratch / f"{piece.name}.json",
            env=env,
            toy=args.dry_run,
            limit_s=min(piece.limit_s, left),
            console=console if args.jobs == 1 else None,
            forked=args.dry_run,
        )

    failed, cpu_seconds = [], 0.0
    pieces = chosen(args.only)
    with ThreadPoolExecutor(args.jobs) as pool:
        for piece, document in zip(pieces, pool.map(one, pieces), strict=True):
            _report(piece, document, where / f"{piece.name}.json", console)
            cpu_seconds += document.get("CPU seconds", 0.0)
            if document["status"] not in MARKS:
                failed.append(piece.name)
    console.print(f"{cpu_seconds:.0f} s of CPU time", style="dim")
    if failed:
        console.print(f"[red]{len(failed)} not right:[/] {', '.join(failed)}")
    return int(bool(failed))


def _report(piece: Piece, document: dict[str, Any], path: Path, console: Console) -> None:
    status = document["status"]
    line = f"{MARKS.get(status, f'[red]{status}[/]')} {piece.name}"
    if "rows" not in document or status == "skipped":
        console.print(f"{line}  {document.get('reason', '')}")
        return
    kept = results.keep(path, document)
    line += f": {document['seconds']:.0f} s, {len(document['rows'])} rows"
    console.print(f"{line}  see {kept.name}" if kept != path else line)
    for failure in document["failures"][:10]:
        console.print(f"    {failure}", markup=False, highlight=False)
    for text in document.get("log", [])[-LOG_LINES:]:
        console.print(f"    | {text}", markup=False, highlight=False, style="dim")


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--list", action="store_true", help="the pieces, and stop")
    parser.add_argument("--only", action="append", default=[], metavar="NAME")
    parser.add_argument("--dry-run", action="store_true", help="on the CPU at toy sizes")
    parser.add_argument("--again", action="store_true", help="also what is done already")
    parser.add_argument("--jobs", type=int, default=1, help="at a time; more disturb the timings")
    parser.add_argument("--budget", type=float, default=7200.0, help="seconds for all pieces")
    parser.add_argument("--shortest", type=float, default=60.0, help="start nothing with less left")
    parser.add_argument("--wheels", type=Path, help="directory of wheels to unpack for the pieces")
    parser.add_argument("--results", type=Path, help="where to; default bench/results/<gpu>")
    parser.add_argument("--commit", help="of these sources, where there is no git")
    # how this command calls itself
    parser.add_argument("--here", metavar="NAME", help=argparse.SUPPRESS)
    parser.add_argument("--document", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--toy", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    console = Console(width=None if sys.stdout.isatty() else 160)
    if args.here:
        (piece,) = chosen([args.here])
        return int(run_here(piece, args.document, toy=args.toy) not in ("ok", "skipped"))
    if args.list:
        for piece in PIECES:
            console.print(f"{piece.name:<26}{piece.limit_s:>4} s  {piece.about}", highlight=False)
        return 0
    with tempfile.TemporaryDirectory(prefix="growkern-gpu-") as scratch:
        return run_all(args, Path(scratch), console)


if __name__ == "__main__":
    sys.exit(main())
