"""Modules in a fork of the process that runs the tests.

A new Python imports PyTorch and transformers for ten seconds of processor time. The tests have
imported them before the first one runs. There `start` forks the server, which does nothing but
wait. Each call of `run` is a fork of it: ``python -m MODULE ARGUMENT...``, with the environment of
the caller. When a fork ends, the server imports the modules that the fork had to import, for the
next one. The server ends with the process that started it.
"""

import atexit
import contextlib
import faulthandler
import functools
import gc
import importlib
import json
import logging
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
from typing import IO, NamedTuple

# names the file to which a fork writes the modules that it has imported
NOTE = "GROWKERN_TEST_MODULES"
# more than a process of the tests has open
MOST_FILES = 1024


class _Server(NamedTuple):
    pid: int
    requests: IO[str]
    answers: IO[str]


@functools.cache
def start() -> _Server:
    """Fork the server off. What this process imports or sets later is not in it."""
    reads, asks = os.pipe()
    answers, says = os.pipe()
    sys.stdout.flush()
    sys.stderr.flush()
    if not (pid := os.fork()):
        try:
            _leave(reads, says)
            _serve(os.fdopen(reads), os.fdopen(says, "w"))
        finally:
            os._exit(0)
    os.close(reads)
    os.close(says)
    server = _Server(pid, os.fdopen(asks, "w"), os.fdopen(answers))
    atexit.register(_end, server)
    return server


def _end(server: _Server) -> None:
    server.requests.close()
    os.waitpid(server.pid, 0)


def run(module: str, *arguments: object, limit_s: float = 600) -> subprocess.CompletedProcess:
    """Run a module as the main one, in a fork of the server.

    Args:
        module: its name.
        arguments: of its command line.
        limit_s: time limit in seconds.

    Returns:
        The exit code, and all that it wrote.

    Raises:
        AssertionError: it took longer.
    """
    command, server = [module, *map(str, arguments)], start()
    with tempfile.TemporaryDirectory(prefix="growkern-warm-") as folder:
        environment = {**os.environ, "OMP_NUM_THREADS": "1", NOTE: f"{folder}/modules"}
        files = [f"{folder}/stdout", f"{folder}/stderr"]
        request = [command, os.getcwd(), environment, files]
        print(json.dumps(request), file=server.requests, flush=True)
        child = int(server.answers.readline())
        in_time = select.select([server.answers], [], [], limit_s)[0]
        if not in_time:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(child, signal.SIGKILL)
        code = int(server.answers.readline())
        said = [Path(file).read_text() for file in files]
    if not in_time:
        raise AssertionError(f"{module} did not end in {limit_s} s: {said[1][-4000:]}")
    return subprocess.CompletedProcess(command, code, *said)


def note_modules() -> None:
    """Tell the server, if there is one, the modules that this process has imported."""
    if NOTE in os.environ:
        Path(os.environ[NOTE]).write_text(json.dumps(sorted(sys.modules)))


def _leave(*kept: int) -> None:
    """Give up the files, the messages and the signals of the process that a fork comes from."""
    os.setsid()
    faulthandler.disable()
    null = os.open(os.devnull, os.O_RDWR)
    for file in set(range(MOST_FILES)) - {null, *kept}:
        # closed, its number would be given to another file, while an object still writes there
        with contextlib.suppress(OSError):
            os.fstat(file)
            os.dup2(null, file)
    sys.stdout = os.fdopen(1, "w", closefd=False)
    sys.stderr = os.fdopen(2, "w", 1, closefd=False)
    # pytest takes warnings, logs and the source of tests for itself
    importlib.reload(warnings)
    sys.meta_path[:] = [x for x in sys.meta_path if not type(x).__module__.startswith("_pytest")]
    logging.getLogger().handlers.clear()
    for reference in logging._handlerList:  # type: ignore[attr-defined]
        handler = reference()
        if type(handler) is logging.StreamHandler:
            handler.setStream(sys.stderr)
    signal.signal(signal.SIGINT, signal.default_int_handler)


def _exit_code(command: list[str]) -> int:
    """Run a module in this process."""
    sys.argv = command
    # an earlier fork, or the tests, may have imported it under its own name
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
        for target, file in enumerate(files, 1):
            os.dup2(os.open(file, os.O_WRONLY | os.O_APPEND), target)
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
    # else every later fork would write what an import printed
    sys.stdout.flush()
    gc.freeze()


def _serve(requests: IO[str], answers: IO[str]) -> None:
    import torch

    torch.set_num_threads(1)
    for line in requests:
        command, where, environment, files = json.loads(line)
        child = _begin(command, where, environment, files)
        print(child, file=answers, flush=True)
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        _import_noted(environment[NOTE])
        print(code, file=answers, flush=True)
