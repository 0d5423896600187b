"""Modules in a fork of a Python that has imported PyTorch and transformers.

A new Python imports them for several seconds of processor time. Here one process, the server, does
nothing but import. Each call of `run` is a fork of it: ``python -m MODULE ARGUMENT...``, with the
environment of the caller. When a fork ends, the server imports the modules that the fork had to
import, for the next one. The server ends with the process that started it.
"""

import atexit
import contextlib
import functools
import gc
import importlib
import json
import os
import runpy
import select
import signal
import subprocess
import sys
import tempfile
import traceback
import warnings
from pathlib import Path
from typing import IO

ROOT = Path(__file__).parents[1]
# names the file to which a fork writes the modules that it has imported
NOTE = "GROWKERN_TEST_MODULES"


@functools.cache
def _server() -> subprocess.Popen:
    server = subprocess.Popen(
        [sys.executable, "-m", __name__], cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        text=True, start_new_session=True, env={**os.environ, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    atexit.register(_end, server)
    return server


def _end(server: subprocess.Popen) -> None:
    server.stdin.close()
    server.wait()


def run(module: str, *arguments: object, limit_s: float = 600) -> subprocess.CompletedProcess:
    """Run a module as the main one, in a fork of the server.

    Args:
        module: its name.
        arguments: of its command line.
        limit_s: time limit in seconds.

    Returns:
        The exit code, and all that it wrote.

    Raises:
        AssertionError: it took longer, or the server broke.
    """
    command, server = [module, *map(str, arguments)], _server()
    with tempfile.TemporaryDirectory(prefix="growkern-warm-") as folder:
        environment = {**os.environ, "OMP_NUM_THREADS": "1", NOTE: f"{folder}/modules"}
        files = [f"{folder}/stdout", f"{folder}/stderr"]
        print(json.dumps([command, environment, files]), file=server.stdin, flush=True)
        answered, _, _ = select.select([server.stdout], [], [], limit_s)
        answer = server.stdout.readline() if answered else ""
        said = [Path(file).read_text() if os.path.exists(file) else "" for file in files]
    if not answer:
        _server.cache_clear()
        with contextlib.suppress(ProcessLookupError):
            os.killpg(server.pid, signal.SIGKILL)
        atexit.unregister(_end)
        server.wait()
        raise AssertionError(f"{module} did not end in {limit_s} s: {said[1][-4000:]}")
    return subprocess.CompletedProcess(command, int(answer), *said)


def note_modules() -> None:
    """Tell the server, if there is one, the modules that this process has imported."""
    if NOTE in os.environ:
        Path(os.environ[NOTE]).write_text(json.dumps(sorted(sys.modules)))


def _exit_code(command: list[str]) -> int:
    """Run a module in this process."""
    sys.argv = command
    # an earlier fork may have imported it under its own name
    sys.modules.pop(command[0], None)
    try:
        runpy.run_module(command[0], run_name="__main__", alter_sys=True)
    except SystemExit as end:
        if end.code is None or isinstance(end.code, int):
            return end.code or 0
        print(end.code, file=sys.stderr)
        return 1
    except BaseException:
        traceback.print_exc()
        return 1
    return 0


def _fork(command: list[str], environment: dict[str, str], files: list[str]) -> int:
    """The exit code of a fork that runs a module; negative: of the signal that ended it."""
    child = os.fork()
    if child:
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    code = 1
    try:
        os.environ.clear()
        os.environ.update(environment)
        null = os.open(os.devnull, os.O_RDONLY)
        outputs = [os.open(file, os.O_WRONLY | os.O_CREAT | os.O_APPEND) for file in files]
        for target, source in enumerate([null, *outputs]):
            os.dup2(source, target)
        code = _exit_code(command)
        if not os.path.exists(environment[NOTE]):
            note_modules()
        sys.stdout.flush()
        sys.stderr.flush()
    finally:
        os._exit(code)


def _import_noted(note: str) -> None:
    if not os.path.exists(note):
        return
    for name in json.loads(Path(note).read_text()):
        if name not in sys.modules:
            with contextlib.suppress(Exception), warnings.catch_warnings():
                warnings.simplefilter("ignore")
                importlib.import_module(name)
    gc.freeze()


def _serve(requests: IO[str], answers: IO[str]) -> None:
    import torch

    torch.set_num_threads(1)
    for line in requests:
        command, environment, files = json.loads(line)
        code = _fork(command, environment, files)
        _import_noted(environment[NOTE])
        print(code, file=answers, flush=True)


if __name__ == "__main__":
    # what an import prints must not be taken for an answer
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    _serve(sys.stdin, answers)
