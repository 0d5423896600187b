"""Runs each piece of `bench.gpu` in a process that ends when `bench.gpu` ends.

The process writes its document after every row, so that no row is lost when it crashes. Documents
and logs are packed into an archive, again and again.
"""

import contextlib
import io
import json
import math
import multiprocessing
import os
import signal
import subprocess
import sys
import tarfile
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from rich.console import Console

from bench.on_gpu.pieces import Piece, chosen
from bench.shared import results
from bench.shared.recorder import Recorder, Skip
from testbed import interpreter


def run_here(piece: Piece, path: Path, *, toy: bool, limit_s: float = math.inf) -> str:
    """Run a piece in this process, write its document to `path`, and return its status."""
    recorder = Recorder(piece.name, path, toy=toy, limit_s=limit_s)
    try:
        interpreter.allow_new_numpy()
        interpreter.convert_as_gpus()
        piece.run(recorder)
    except Skip as reason:
        recorder.document |= {"status": "skipped", "reason": str(reason)}
    except Exception as error:
        traceback.print_exc()
        recorder.fail(f"{type(error).__name__}: {error}"[:2000])
    return recorder.finish()


def die_when(ended: Callable[[], Any]) -> None:
    """Kill this process and its session as soon as `ended` returns.

    prctl(PR_SET_PDEATHSIG) would kill only this process. The compilers and tests that it started
    would continue.
    """

    def wait() -> None:
        ended()
        os.killpg(0, signal.SIGKILL)

    threading.Thread(target=wait, daemon=True).start()


def die_with_writer(descriptor: int) -> None:
    """Kill this process when the parent ends: only the parent holds the other end of the pipe."""
    os.set_inheritable(descriptor, False)
    die_when(lambda: os.read(descriptor, 1))


# ------------------------------------------------------------------- starting

# Modules that every piece imports. The library is not among them: importing it decides whether its
# kernels are interpreted.
PRELOADED = ["torch", "torch._dynamo", "triton", "bench.shared.harness"]
PRELOADED += ["transformers.models.llama.modeling_llama", "transformers.trainer"]


class _Forked:
    """A piece in a fork of a Python that has already imported PyTorch. Used like Popen.

    It is for dry runs, which otherwise spend most of their time on imports. On a GPU pieces must
    not share anything.
    """

    def __init__(self, piece: Piece, path: Path, log: Path, limit_s: float) -> None:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(PRELOADED)
        arguments = (piece.name, path, log, limit_s)
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


def _run_forked(name: str, path: Path, log: Path, limit_s: float) -> None:
    os.setsid()
    parent = multiprocessing.parent_process()
    assert parent is not None
    die_when(parent.join)
    os.chdir(results.ROOT)
    with log.open("w") as out:
        os.dup2(out.fileno(), 1)
        os.dup2(out.fileno(), 2)
    (piece,) = chosen([name])
    interpreter.make_quick()
    sys.exit(run_here(piece, path, toy=True, limit_s=limit_s) not in ("ok", "skipped"))


class _Started(subprocess.Popen):
    """A piece in a new Python. It gets the reading end of a pipe that closes when we end."""

    def __init__(
        self, piece: Piece, path: Path, log: Path, limit_s: float, env: dict[str, str], toy: bool
    ) -> None:
        theirs, self._ours = os.pipe()
        command = [sys.executable, "-m", "bench.gpu", "--here", piece.name, "--document", str(path)]
        command += ["--alive", str(theirs), "--limit", str(limit_s)]
        with log.open("w") as out:
            super().__init__(
                command + ["--toy"] * toy,
                cwd=results.ROOT,
                env=env,
                stdout=out,
                stderr=subprocess.STDOUT,
                stdin=subprocess.DEVNULL,
                pass_fds=(theirs,),
                start_new_session=True,
            )
        os.close(theirs)

    def close(self) -> None:
        os.close(self._ours)


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
    """Run a piece in a process of its own, then kill whatever it left running.

    Args:
        path: where it writes its document; its log lies beside it.
        forked: fork it from a Python that has imported PyTorch.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    log, start = path.with_suffix(".log"), time.perf_counter()
    path.unlink(missing_ok=True)
    if forked:
        child: Any = _Forked(piece, path, log, limit_s)
    else:
        child = _Started(piece, path, log, limit_s, env, toy)
    try:
        timed_out = _wait(child, piece, path, start + limit_s, console)
    finally:
        # compilers and tests that it started are in its session
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child.pid, signal.SIGKILL)
        # a process that hangs in the GPU's driver may never end
        with contextlib.suppress(subprocess.TimeoutExpired):
            child.wait(timeout=10)
        if isinstance(child, _Started):
            child.close()
    why = f"stopped after {limit_s:.0f} s" if timed_out else f"exit code {child.returncode}"
    document = ended(path, piece.name, "timeout" if timed_out else "crashed", why)
    document["seconds"] = round(time.perf_counter() - start, 1)
    return document


def ended(path: Path, name: str, status: str, why: str) -> dict[str, Any]:
    """The document of a process that has ended. `status` and `why` apply if it did not finish."""
    document = results.read(path) or {"piece": name, "rows": [], "failures": []}
    if document.get("status", "running") == "running":
        document["rows"] += document.pop("unfinished", [])
        document["status"] = status
        document["failures"].append(why)
    if document["status"] not in ("ok", "skipped"):
        with contextlib.suppress(OSError):
            text = path.with_suffix(".log").read_text(errors="replace")
            # a result is for everybody: where the sources lay on that machine is nobody's business
            document["log"] = text.replace(f"{results.ROOT}/", "").splitlines()[-60:]
    return document


def gather(running: Path, where: Path) -> None:
    """Save the documents that a killed run left in the directory `running`."""
    for path in sorted(running.glob("*.json")):
        document = ended(path, path.stem, "crashed", "killed together with `bench.gpu`")
        if document["rows"] or document["failures"]:
            results.keep(where / path.name, document)
        path.unlink()


# --------------------------------------------------------------------- packing

# where a directory of results keeps what its pieces are writing
RUNNING = ".running"
# seconds between two packings while a piece runs
PACK_EVERY = 15.0
# of each log the end is packed, so that the archive stays below a few megabytes
LOG_BYTES = 1 << 16


def pack(where: Path, archive: Path) -> None:
    """Pack the documents and the ends of the logs of a directory of results, of running pieces too.

    The archive holds <name of the directory>/<piece>.json, as `bench.report --take` wants it. It is
    replaced completely or not at all, because the machine may stop at any time.
    """
    documents = {path.name: results.read(path) for path in where.glob("*.json")}
    for path in (where / RUNNING).glob("*.json"):
        document = ended(path, path.stem, "crashed", "was running when it was packed")
        name = results.aside_of(path).name if path.name in documents else path.name
        documents |= {name: document} if document.get("machine") else {}
    texts = {name: json.dumps(x, indent=1).encode() for name, x in documents.items()}
    for path in (where / RUNNING).glob("*.log"):
        with contextlib.suppress(OSError), path.open("rb") as log:
            log.seek(max(0, path.stat().st_size - LOG_BYTES))
            texts[path.name] = log.read(LOG_BYTES)
    archive.parent.mkdir(parents=True, exist_ok=True)
    part = archive.with_name(f".{archive.name}.part")
    with tarfile.open(part, "w:gz") as tar:
        for name, text in sorted(texts.items()):
            member = tarfile.TarInfo(f"{where.name}/{name}")
            member.size, member.mtime = len(text), int(time.time())
            tar.addfile(member, io.BytesIO(text))
    part.replace(archive)


@contextlib.contextmanager
def packed(where: Path, archive: Path | None, console: Console) -> Iterator[Callable[[], bool]]:
    """Pack every PACK_EVERY seconds and at the end. A packing that fails is tried again then.

    Yields:
        A function that packs at once. It returns False if that failed.
    """
    if archive is None:
        yield lambda: True
        return
    lock, over = threading.Lock(), threading.Event()

    def now() -> bool:
        try:
            with lock:
                pack(where, archive)
            return True
        # the results lie in `where`, too, so that no failure here may end the visit
        except Exception as error:
            why = " ".join(f"{archive} was not packed: {type(error).__name__}: {error}".split())
            console.print(why, markup=False, highlight=False, soft_wrap=True)
            return False

    def again() -> None:
        while not over.wait(PACK_EVERY):
            now()

    thread = threading.Thread(target=again, daemon=True)
    thread.start()
    try:
        yield now
    finally:
        over.set()
        thread.join()
        now()


def _wait(child: Any, piece: Piece, path: Path, end: float, console: Console | None) -> bool:
    """Wait for the child and show its progress. Returns True if its time ran out."""
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
