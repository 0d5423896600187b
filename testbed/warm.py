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
def _server(preload: str) -> subprocess.Popen:
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    if preload:
        # its tests look at all that is written to stderr
        environment |= {"LD_PRELOAD": preload, "PYTHONWARNINGS": "ignore"}
    server = subprocess.Popen(
        [sys.executable, "-m", __name__], cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        text=True, start_new_session=True, env=environment,
    )  # fmt: skip
    atexit.register(_end, server)
    return server


def _end(server: subprocess.Popen) -> None:
    server.stdin.close()
    server.wait()


def run(
    module: str, *arguments: object, limit_s: float = 600, preload: object = ""
) -> subprocess.CompletedProcess:
    """Run a module as the main one, in a fork of the server.

    Args:
        module: its name.
        arguments: of its command line.
        limit_s: time limit in seconds.
        preload: a library that the server loads before all others. Such a server is another one.

    Returns:
        The exit code, and all that it wrote.

    Raises:
        AssertionError: it took longer.
    """
    command, server = [module, *map(str, arguments)], _server(str(preload))
    with tempfile.TemporaryDirectory(prefix="growkern-warm-") as folder:
        environment = {**os.environ, "OMP_NUM_THREADS": "1", NOTE: f"{folder}/modules"}
        environment |= {"LD_PRELOAD": str(preload)} if preload else {}
        files = [f"{folder}/stdout", f"{folder}/stderr"]
        request = [command, os.getcwd(), environment, files]
        print(json.dumps(request), file=server.stdin, flush=True)
        child = int(server.stdout.readline())
        in_time = select.select([server.stdout], [], [], limit_s)[0]
        if not in_time:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(child, signal.SIGKILL)
        code = int(server.stdout.readline())
        said = [Path(file).read_text() for file in files]
    if not in_time:
        raise AssertionError(f"{module} did not end in {limit_s} s: {said[1][-4000:]}")
    return subprocess.CompletedProcess(command, code, *said)


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


def _begin(command: list[str], where: str, environment: dict[str, str], files: list[str]) -> int:
    """The process of a fork that runs a module."""
    for file in files:
        Path(file).touch()
    child = os.fork()
    if child:
        return child
    code = 1
    try:
        os.setsid()
        os.chdir(where)
        os.environ.clear()
        os.environ.update(environment)
        null = os.open(os.devnull, os.O_RDONLY)
        outputs = [os.open(file, os.O_WRONLY | os.O_APPEND) for file in files]
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
    # as `tests/conftest.py` does for its process; what is preloaded may have to see syncs
    if "LD_PRELOAD" not in os.environ:
        os.fsync = os.fstat
    gc.set_threshold(10_000, 20, 20)
    for line in requests:
        command, where, environment, files = json.loads(line)
        child = _begin(command, where, environment, files)
        print(child, file=answers, flush=True)
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        _import_noted(environment[NOTE])
        print(code, file=answers, flush=True)


if __name__ == "__main__":
    # what an import prints must not be taken for an answer
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    _serve(sys.stdin, answers)
