"""The library that fails file operations, compiled once."""

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from testbed import warm
from tests.faults.walk import EVERY
from tests.shared import walks

COMPILER = shutil.which("cc")
FLAGS = ("-shared", "-fPIC", "-O1", "-Wall", "-D_LARGEFILE64_SOURCE", "-fno-builtin")


@pytest.fixture(scope="session")
def shim(tmp_path_factory):
    if not sys.platform.startswith("linux") or COMPILER is None:
        pytest.skip("file operations are failed by a C library, on Linux")
    library = tmp_path_factory.mktemp("shim") / "shim.so"
    source = Path(__file__).with_name("shim.c")
    subprocess.run([COMPILER, *FLAGS, "-o", library, source, "-ldl"], check=True)
    return library


@pytest.fixture(scope="module")
def preloaded(shim):
    """Runs a module of the tests in a new folder, with the library before all others.

    With ``--walks`` above 1 its walk skips no operation.
    """
    # in memory where there is such a place: a walk syncs thousands of times
    memory = Path("/dev/shm")
    place = memory if os.access(memory, os.W_OK) else None

    def run(module, *arguments):
        with tempfile.TemporaryDirectory(dir=place) as folder:
            words = (folder, *arguments, *[EVERY] * (walks.times > 1))
            done = warm.run(module, *words, limit_s=3000, preload=shim)
        assert done.returncode == 0, done.stderr
        return done

    return run
