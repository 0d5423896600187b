"""Damaged files: refused in one line, or right.

`python -m tests.fuzz.fuzz DIRECTORY --cases 2000` takes more of them.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.fuzz import readers
from tests.fuzz.fuzz import problem
from tests.shared import walks

ROOT = Path(__file__).parents[2]
CORPUS = Path(__file__).with_name("corpus")
CASES = 150


def test_what_is_damaged_is_refused_or_right(tmp_path):
    cases, seed = str(CASES * walks.times), str(walks.start or 0)
    command = [sys.executable, "-m", "tests.fuzz.fuzz", str(tmp_path), "--cases", cases]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [*command, "--seed", seed], cwd=ROOT, env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("readers") / "files"
    readers.prepare(folder)
    return folder


@pytest.mark.parametrize("name", readers.READERS)
def test_files_that_guided_fuzzing_kept_are_refused_or_read(folder, name):
    """Between them they reach every part of a reader that `guided.py` has reached."""
    reader = readers.READERS[name]
    file = folder / reader.file
    valid = file.read_bytes()
    reader.read(folder)
    kept = sorted((CORPUS / name).iterdir())
    assert kept
    try:
        for case in kept:
            file.write_bytes(case.read_bytes())
            assert problem(lambda: reader.read(folder)) is None, case.name
    finally:
        file.write_bytes(valid)
